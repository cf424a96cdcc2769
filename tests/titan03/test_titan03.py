"""The adapter for TorchTitan 0.3: what an override and a converter convert, and what they leave as it was; a block
compiled whole, as its trainer compiles it, whose MoE layer dispatches its own tokens."""

import copy
import inspect
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.varlen import AuxRequest
from torchtitan.components.metrics import WandBLogger
from torchtitan.config.override import OverrideConfig, apply_overrides, derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models import deepseek_v3
from torchtitan.models.common.attention import VarlenMetadata
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.trainer import Trainer

from scripts.bench.problems import relative_rms
from titan_mxfp8 import mxfp8_grouped_mm, mxfp8_linear
from titan_mxfp8.modules import ConvertedModule
from titan_mxfp8.moe import choose
from titan_mxfp8.titan.dispatch import DispatchingLayers
from titan_mxfp8.titan03 import MXFP8Experts, MXFP8Linears, config_registry, convert, moe
from titan_mxfp8.titan03.convert import trainer_config
from titan_mxfp8.titan03.moe import MXFP8RoutedExperts
from titan_mxfp8.workarounds.torchtitan03 import varlen_attn_on_cpu

EXPERTS, LINEARS = "titan_mxfp8.titan03.experts", "titan_mxfp8.titan03.linears"
# Model, expert modules, linears that are converted.
MODELS = {"deepseek_v3": (1, 14), "qwen3": (2, 4), "gpt_oss": (2, 4), "llama3": (0, 10)}


def config(model: str, *imports: str | tuple[str, dict]) -> Trainer.Config:
    """A debug model's config after the overrides, as the trainer applies them."""
    config = getattr(config_registry, f"debug_{model}")()
    config.model_spec.model.update_from_config(config=config)
    apply_overrides(OverrideConfig(imports=list(imports)), config)
    return config


def build(config: Trainer.Config) -> nn.Module:
    with torch.device("meta"):
        return config.model_spec.model.build()


def converted(model: nn.Module) -> dict[str, ConvertedModule]:
    return {name: module for name, module in model.named_modules() if isinstance(module, ConvertedModule)}


@pytest.mark.parametrize("name", MODELS)
def test_overrides_convert_and_leave_parameters_as_they_are(name: str) -> None:
    experts, linears = MODELS[name]
    imports = [EXPERTS] * (experts > 0) + [LINEARS]
    plain, model = build(config(name)), build(config(name, *imports))
    model.verify_module_protocol()
    found = converted(model).values()
    assert sum(isinstance(module, GroupedExperts) for module in found) == experts
    assert sum(isinstance(module, nn.Linear) for module in found) == linears
    before, after = dict(plain.named_parameters()), dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(type(after[key]) is nn.Parameter and after[key].shape == before[key].shape for key in before)
    for module in found:  # TorchTitan shards inputs by the names of arguments
        forwards = type(module).forward, module.mxfp8_converted_from.forward
        assert len({tuple(inspect.signature(forward).parameters) for forward in forwards}) == 1
    assert [type(module) for module in copy.deepcopy(model).modules()] == [type(module) for module in model.modules()]


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_experts_compute_in_mxfp8(name: str) -> None:
    """TorchTitan's own forward, with our product in the place of ``torch._grouped_mm``: all bits and gradients."""
    model = build(config(name, (EXPERTS, {"recipe": "mxfp8_2d"})))
    module = next(iter(converted(model).values())).to_empty(device="cpu")
    for param in module.parameters():
        nn.init.normal_(param, std=0.05)
    plain = copy.deepcopy(module)
    plain.__class__ = module.mxfp8_converted_from
    products = []

    def grouped_mm(*, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        products.append(mxfp8_grouped_mm(A, B_t, offs, recipe="mxfp8_2d"))
        return products[-1]

    plain._grouped_mm = grouped_mm
    counts = torch.tensor([5, 0, 1, 20, 7, 0, 3, 28])
    x = torch.randn(64, next(module.parameters()).shape[-1]).bfloat16()
    results = []
    for experts in (module, plain):
        own_x = x.clone().requires_grad_()
        y = experts(own_x, counts)
        y.sum().backward()
        results.append([y, own_x.grad, *(param.grad for param in experts.parameters())])
    assert len(products) == (2 if name == "gpt_oss" else 3)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_each_tensor_parallel_rank_adds_its_share_of_a_bias() -> None:
    """TorchTitan adds up the ranks' outputs of gpt_oss's wo itself."""
    module = converted(build(config("gpt_oss", LINEARS)))["layers.0.attention.wo"].to_empty(device="cpu")
    nn.init.normal_(module.weight)
    nn.init.normal_(module.bias)
    x = torch.randn(8, module.in_features).bfloat16()
    module.tp_degree = 4
    wanted = mxfp8_linear(x, module.weight, module.bias / 4)
    assert torch.equal(module(x), wanted)
    assert not torch.equal(wanted, mxfp8_linear(x, module.weight, module.bias))


def test_converters_do_what_overrides_do() -> None:
    converters = [MXFP8Experts.Config(recipe="mxfp8_2d"), MXFP8Linears.Config(filter_fqns=["attention", "lm_head"])]
    spec = deepseek_v3.model_registry("debugmodel", attn_backend="varlen", converters=converters)
    spec.model.layers = spec.model.layers[:2]
    with torch.device("meta"):
        model = spec.model.build()
    kwargs = {"filter_fqns": "attention,lm_head"}  # as a string, too
    same = build(config("deepseek_v3", (EXPERTS, {"recipe": "mxfp8_2d"}), (LINEARS, kwargs)))
    recipes = [{name: module.mxfp8.recipe.name for name, module in converted(m).items()} for m in (model, same)]
    assert recipes[0] == recipes[1]
    assert "layers.0.feed_forward.w1" in recipes[0] and "layers.0.attention.wo" not in recipes[0]
    assert set(recipes[0].values()) == {"mxfp8", "mxfp8_2d"}
    saved = spec.model.to_dict()["mxfp8"]
    assert saved["experts"]["recipe"] == "mxfp8_2d" and saved["experts"]["fqns"] == ("experts",)
    assert saved["linears"]["filter_fqns"] == ["attention", "lm_head"]


def test_a_config_says_what_each_of_two_converters_of_linears_converts() -> None:
    exact = MXFP8Linears.Config(recipe="mxfp8_2d", filter_fqns=["attention", "lm_head", "router.gate"])
    spec = deepseek_v3.model_registry("debugmodel", converters=[exact, MXFP8Linears.Config(recipe="mxfp8")])
    with torch.device("meta"):
        recipes = {name: module.mxfp8.recipe.name for name, module in converted(spec.model.build()).items()}
    assert recipes["layers.0.feed_forward.w1"] == "mxfp8_2d" and recipes["layers.0.attention.wo"] == "mxfp8"
    saved = copy.deepcopy(spec.model).to_dict()["mxfp8"]
    assert {name: each["recipe"] for name, each in saved.items()} == {"linears": "mxfp8_2d", "linears_2": "mxfp8"}


def test_experts_are_converted_once() -> None:
    spec = deepseek_v3.model_registry("debugmodel", converters=[MXFP8Linears.Config(), MXFP8Experts.Config()])
    with pytest.raises(ValueError, match="this model's experts have a converter or an override already"):
        MXFP8Experts.Config(fqns=["layers.1."], recipe="mxfp8_2d").build().convert(spec.model)


def test_a_converted_model_is_pickled_with_its_config(tmp_path: Path) -> None:
    """To a process that knows nothing of us yet."""
    model = build(config("deepseek_v3", (EXPERTS, {"dispatch": "off"}), LINEARS))
    torch.save(model, tmp_path / "model")
    code = """if True:
        import sys, torch
        model = torch.load(sys.argv[1], weights_only=False)
        for each in model, model.config.build():
            print(*(cls.__name__ for cls in sorted({type(part) for part in each.modules()}, key=repr)))
    """
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "model"], capture_output=True, text=True)
    wanted = " ".join(cls.__name__ for cls in sorted({type(part) for part in model.modules()}, key=repr))
    assert done.stdout.splitlines() == [wanted] * 2, done.stderr
    assert copy.deepcopy(model.config).to_dict() == model.config.to_dict()


@pytest.mark.parametrize(
    ("model", "target", "kwargs", "says"),
    [
        ("llama3", EXPERTS, {}, "no expert module matches fqns ['experts']"),
        ("deepseek_v3", EXPERTS, {"fqns": "layers.7"}, "layers.1.moe.routed_experts.inner_experts (GroupedExperts)"),
        ("deepseek_v3", LINEARS, {"backend": "hopper"}, "backend 'hopper' needs an NVIDIA GPU of SM90"),
    ],
)
def test_what_cannot_be_converted_raises(model: str, target: str, kwargs: dict, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        build(config(model, (target, kwargs)))


@pytest.mark.parametrize(
    ("target", "kwargs", "says"),
    [
        (EXPERTS, {"recipe": "mxfp9"}, "unknown recipe 'mxfp9'"),
        (EXPERTS, {"health_every": -1}, "health_every is a number of steps, or 0 for never, got -1"),
        (EXPERTS, {"requantize_input": "false"}, "requantize_input = 'false': it must be true or false"),
        (LINEARS, {"dispatch": "off"}, "linears has no dispatch: its fields are"),
        (EXPERTS, {"dispatch_rows": "all"}, "dispatch_rows is one of counted, bounded, worst_case, or a factor"),
        (EXPERTS, {"quantize_weights_once": "no"}, "weights_once = 'no': it must be one of 'off', 'on', 'auto'"),
        (EXPERTS, {"recipe": "bf16", "dispatch": "off"}, "without it, leave the experts out"),
        (LINEARS, {"recipe": "bf16"}, "leave the linears out"),
    ],
)
def test_fields_that_make_no_sense_raise_before_the_model_is_built(target: str, kwargs: dict, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        config("deepseek_v3", (target, kwargs))


class Gated(FeedForward):
    """Somebody's override of a part."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass


@override(target=FeedForward.Config)
def gated(config: FeedForward.Config) -> FeedForward.Config:
    return derive(config, Gated.Config)


def test_other_overrides_work_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = f"{gated.__module__}.gated"
    model = build(config("deepseek_v3", theirs, LINEARS))
    assert isinstance(model.layers["0"].feed_forward, Gated)
    assert "layers.0.feed_forward.w1" in converted(model)
    module = import_module("torchtitan.config.override")
    monkeypatch.setattr(module, "_collect_claims", inspect.unwrap(module._collect_claims))
    with pytest.raises(ValueError, match="an ancestor of"):
        config("deepseek_v3", theirs, LINEARS)


def test_selective_checkpointing_saves_the_products() -> None:
    ours = {torch.ops.titan_mxfp8.gemm_m_grouped.default, torch.ops.titan_mxfp8.experts_forward.default}
    assert ours <= SelectiveAC(SelectiveAC.Config()).get_save_ops()


def test_wandb_logs_offline_where_it_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = []

    def init(**kwargs: object) -> None:
        if os.environ["WANDB_MODE"] == "online":
            raise ConnectionError("no network")
        started.append(kwargs["config"])

    for name in ("WANDB_INIT_TIMEOUT", "WANDB_FINISH_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WANDB_MODE", "online")
    setup = SimpleNamespace(settings=SimpleNamespace(mode="online"))
    fake = SimpleNamespace(init=init, teardown=lambda: None, setup=lambda: setup)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    WandBLogger(str(tmp_path), config_dict={"a": 1})
    assert started == [{"a": 1}] and os.environ["WANDB_MODE"] == "offline"


@pytest.mark.parametrize("window", [(-1, 0), (3, 0), (-1, -1)])
@pytest.mark.parametrize("shared", [1, 2])
def test_attention_on_cpus(window: tuple[int, int], shared: int) -> None:
    """Two documents of 5 and 11 tokens, 4 heads, values longer than queries."""
    q, k, v = (torch.randn(16, heads, size) for heads, size in ((4, 8), (4 // shared, 8), (4 // shared, 12)))
    cu = torch.tensor([0, 5, 16], dtype=torch.int32)
    y, sums = varlen_attn_on_cpu(
        q, k, v, cu, cu, 11, 11, window_size=window, scale=0.3, enable_gqa=shared > 1, return_aux=AuxRequest(lse=True)
    )
    row, column = torch.arange(16)[:, None], torch.arange(16)
    mask = (row < 5) == (column < 5)
    if window[1] == 0:
        mask &= row >= column
    if window[0] >= 0:
        mask &= row - column <= window[0]
    heads = [x.transpose(0, 1) for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.3, enable_gqa=shared > 1).transpose(0, 1)
    torch.testing.assert_close(y, wanted)
    scores = heads[0] @ heads[1].repeat_interleave(shared, dim=0).mT * 0.3
    torch.testing.assert_close(sums, scores.masked_fill(~mask, -torch.inf).logsumexp(-1))


@pytest.mark.parametrize("rows", ["counted", "bounded"])
def test_in_compiled_blocks_torchtitan_dispatches_counted_rows(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among several ranks; Dynamo does not follow how many land here."""
    layer = build(config("deepseek_v3", (EXPERTS, {"dispatch_rows": rows}))).layers["1"].moe.routed_experts
    layer.token_dispatcher.ep_mesh = SimpleNamespace(get_group=lambda: "group")
    calls = []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(RoutedExperts, "forward", lambda *_: calls.append("TorchTitan's"))

    def ours(_: object, x: torch.Tensor, *rest: object) -> torch.Tensor:
        calls.append(rest)
        return x

    monkeypatch.setattr(type(layer.inner_experts), "mxfp8_moe", ours)
    layer.inner_experts.to_empty(device="cpu")
    layer.mxfp8_layers = replace(layer.mxfp8_layers, max_tokens=640)
    MXFP8RoutedExperts.forward(layer, *[torch.zeros(1, 4, 4)] * 3, None)
    if rows == "counted":
        assert calls == ["TorchTitan's"]
    else:
        assert calls[0][3:] == ("group", ("auto", "bounded", 640, None, None))


@pytest.mark.parametrize("way", ["override", "converter"])
def test_layers_know_the_sizes_of_the_config_and_connect(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they reserve and refuse by them: tests/test_plugin_moe.py."""
    options, changed = {"dispatch": "symmetric", "dispatch_rows": "worst_case"}, config("qwen3")
    changed.training.local_batch_size, changed.training.seq_len = 3, 128
    changed.activation_checkpoint = None
    if way == "override":
        apply_overrides(OverrideConfig(imports=[(EXPERTS, options)]), changed)
    else:
        MXFP8Experts.Config(**options).build().convert(changed.model_spec.model)
    with trainer_config(changed):
        layer = build(changed).layers["1"].moe.routed_experts
    experts, dim, hidden = layer.inner_experts.w2_EDF.shape
    sizes = {"transport": "symmetric", "rows": "worst_case", "count": 2, "kept": 2, "max_tokens": 3 * 128}
    sizes |= {"top_k": layer.token_dispatcher.top_k, "experts": experts, "dim": dim, "hidden": hidden}
    assert {name: getattr(layer.mxfp8_layers, name) for name in sizes} == sizes
    connected = []
    monkeypatch.setattr(DispatchingLayers, "connect", lambda *given: connected.append(given) or "connected")
    monkeypatch.setattr(RoutedExperts, "parallelize", lambda *_: None)
    monkeypatch.setattr(moe.utils, "get_local_device", lambda: "device")
    layer.token_dispatcher.ep_mesh = SimpleNamespace(get_group=lambda: "group")
    layer.parallelize(SimpleNamespace(tp=1))
    assert connected == [(layer.mxfp8_layers, "group", "device")]
    changed.compile.enable = True
    with trainer_config(changed), torch._dynamo.config.patch(recompile_limit=8):
        assert build(changed).layers["1"].moe.routed_experts.mxfp8_layers.max_tokens == 3 * 128
        assert torch._dynamo.config.recompile_limit > 8
    assert build(changed).layers["1"].moe.routed_experts.mxfp8_layers.max_tokens is None, "no trainer"


def test_a_trainers_config_is_known_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(Trainer, "init_distributed", lambda self: seen.append(convert._trainer_config.get()) or 1 / 0)
    monkeypatch.setattr(moe.utils.device_module, "set_device", lambda device: None, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    wanted = config("deepseek_v3")
    with pytest.raises(ZeroDivisionError):
        Trainer(wanted)
    assert seen == [wanted] and convert._trainer_config.get() is None


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_layers_that_dispatch_their_own_tokens(name: str) -> None:
    """The control multiplies bf16 values, as TorchTitan's unconverted layer does."""
    models = [build(config(name)), build(config(name, (EXPERTS, {"recipe": "bf16"})))]
    layers = [model.layers["1"].moe.routed_experts.to_empty(device="cpu") for model in models]
    assert [type(layer) for layer in layers] == [RoutedExperts, MXFP8RoutedExperts]
    slots, features = layers[0].token_dispatcher.top_k, models[0].config.dim
    for param, copied in zip(*(layer.parameters() for layer in layers), strict=True):
        nn.init.normal_(param, std=0.05)
        copied.data.copy_(param.data)
    x, gradient = (torch.randn(2, 48, features).bfloat16() for _ in range(2))
    scores, ids = torch.rand(2, 48, 8).softmax(-1).topk(slots)
    counts = torch.bincount(ids.flatten(), minlength=8)
    results = []
    for layer in layers:
        own_x, own_scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
        y = layer(own_x, own_scores, ids, counts)
        y.backward(gradient)
        parameters = (param.grad for param in layer.parameters())
        results.append([result.float() for result in (y, own_x.grad, own_scores.grad, *parameters)])
    errors = [relative_rms(ours, theirs) for theirs, ours in zip(*results, strict=True)]
    print(errors)
    assert max(errors) < 0.01


LENGTH = 48


def moe_block(rows: str) -> nn.Module:
    """The second block of the debug model of deepseek_v3."""
    block = build(config("deepseek_v3", (EXPERTS, {"dispatch_rows": rows}))).layers["1"].to_empty(device="cpu")
    for name, param in block.named_parameters():
        nn.init.ones_(param) if "norm" in name else nn.init.normal_(param, std=0.05)
    for buffer in block.buffers():
        buffer.zero_()
    return block


def step(block: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, all gradients, and how many tokens each expert got."""
    x, starts = x.clone().requires_grad_(), torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32)
    y = block(x, VarlenMetadata(starts, starts, LENGTH, LENGTH), torch.arange(LENGTH).repeat(2, 1))
    y.backward(dy)
    tokens = block.moe.tokens_per_expert_E.clone()
    results = {"y": y.detach(), "x": x.grad, "tokens": tokens} | {n: p.grad for n, p in block.named_parameters()}
    block.zero_grad()
    return results


def test_a_whole_block_is_one_graph_that_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever experts its tokens go to, and whatever a bound of rows grows to; with all bits of the eager block, where
    TorchTitan's dispatch has others."""
    monkeypatch.setattr(choose("auto", None, torch.device("cpu"))[0].shared.wanted, "raises", False)
    torch._dynamo.reset()
    eager = moe_block("bounded")
    block, compiler = copy.deepcopy(eager), CompileCounterWithBackend("aot_eager")
    block.compile(backend=compiler, fullgraph=True)
    features = len(eager.ffn_norm.weight)
    layers = replace(eager.moe.routed_experts.mxfp8_layers, rows="0.3", max_tokens=2 * LENGTH)
    eager.moe.routed_experts.mxfp8_layers = block.moe.routed_experts.mxfp8_layers = layers
    for call, rows in enumerate(("0.3", "0.3", "0.6", "worst_case")):
        layers.set_rows(rows)
        x, dy = torch.randn(2, 2, LENGTH, features)
        if call:
            x[1] = x[1, :1]  # half of the tokens are alike
        with torch._dynamo.config.patch(error_on_recompile=call > 0):
            expected, actual = step(eager, x, dy), step(block, x, dy)
        for name, value in expected.items():
            assert torch.equal(actual[name], value), (call, name)
    assert compiler.frame_count == 1
