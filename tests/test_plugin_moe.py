"""TorchTitan's MoE layers that dispatch their own tokens, against TorchTitan's own, on CPU; experts out of FSDP against
experts in it, and which of them are."""

import copy
import math
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import processes
import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import ROOT, build, dims_of, run_step
from test_models import AC_MODES, COMPILE, Decomposed, cpu_only, tokens
from test_plugin import DISPATCH, EXPERTS, GROUPED, RECIPE, ROWS, parse
from tiers import daily
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.models.gpt_oss.model.args import GptOssModelArgs
from torchtitan.models.gpt_oss.model.moe import GptOssMoE
from torchtitan.models.moe.moe import MoE, MoEArgs

from scripts.bench.problems import relative_rms
from titan_mxfp8.moe import choose
from titan_mxfp8.moe.collective import Collective
from titan_mxfp8.moe.transport import Local
from titan_mxfp8.ops import observe
from titan_mxfp8.plugin import moe as plugin
from titan_mxfp8.plugin.converters import GroupedMMConverter
from titan_mxfp8.recipe import BF16
from titan_mxfp8.titan.dispatch import DispatchingLayers, most_tokens
from titan_mxfp8.titan.fsdp import shard, why_fsdp
from titan_mxfp8.tools.dry_run import dry_run, parse_config

CONVERT, NO_AC = EXPERTS, "--activation_checkpoint.mode=none"
CHOOSE = "titan_mxfp8.titan.dispatch.choose"
D, H, E = 64, 96, 8
# What differs between the models: when scores are applied, how many experts a token has, what the router does.
scored_after = partial(MoEArgs, num_experts=E, num_shared_experts=0, score_before_experts=False)
SOFTMAX, GROUPS = {"score_func": "softmax"}, {"num_expert_groups": 4, "num_limited_groups": 2}
LAYERS = {
    "llama4": MoEArgs(num_experts=E, top_k=1, score_before_experts=True),
    "deepseek_v3": scored_after(top_k=3, num_shared_experts=2, route_norm=True, route_scale=2.5, **SOFTMAX, **GROUPS),
    "qwen3": scored_after(top_k=4, route_norm=True, load_balance_coeff=None),
    "gpt_oss": scored_after(top_k=2, gate_bias=True, **SOFTMAX),
    "gpt_oss, clamped": scored_after(top_k=2),
    "forced balance": MoEArgs(num_experts=E, top_k=2, score_before_experts=True, _debug_force_load_balance=True),
}


def layer(model: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    if model.startswith("gpt_oss"):
        limit = 0.6 if "clamped" in model else 7.0  # which no activation reaches
        made = GptOssMoE(GptOssModelArgs(moe_args=LAYERS[model], swiglu_limit=limit), D, H)
    else:
        made = MoE(LAYERS[model], D, H)
    with torch.no_grad():
        made.init_weights(0.15, torch.device("cpu"))
        if made.expert_bias is not None:
            made.expert_bias += torch.linspace(-0.1, 0.1, E)
    return made.to(dtype)


def convert(made: nn.Module, *flags: str, dims: ParallelDims | None = None) -> nn.Module:
    """A copy of the layer, converted."""
    holder = nn.ModuleDict({"moe": copy.deepcopy(made)})
    GroupedMMConverter(parse(CONVERT, *flags), dims).convert(holder)
    return holder["moe"]


def run(made: nn.Module, dtype: torch.dtype = torch.float32, length: int = 17) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    x, dy = (torch.randn(3, length, D).to(torch.bfloat16).to(dtype) for _ in range(2))
    y = made(x.requires_grad_())
    y.backward(dy)
    grads = {name: param.grad for name, param in made.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "tokens_per_expert": made.tokens_per_expert.clone()} | grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", LAYERS)
def test_a_layer_gives_what_torchtitans_gives(model: str, dtype: torch.dtype) -> None:
    plain = layer(model, dtype)
    ours = convert(plain, f"{DISPATCH}=auto", f"{RECIPE}={BF16.name}")
    assert isinstance(ours, type(plain)) and ours.state_dict().keys() == plain.state_dict().keys()
    expected, actual = run(plain, dtype), run(ours, dtype)
    assert actual.keys() == expected.keys() and ours.tokens_per_expert.sum() == 51 * LAYERS[model].top_k
    assert torch.equal(actual.pop("tokens_per_expert"), expected["tokens_per_expert"])
    if plain.expert_bias is not None:
        assert torch.equal(ours.expert_bias, plain.expert_bias)
    errors = {name: relative_rms(value, expected[name]) for name, value in actual.items()}
    print(model, dtype, errors)
    # TorchTitan's experts are bf16, and what it adds up is. Clamped: where bf16 rounds across the limit, the gradient
    # is all or nothing.
    assert max(errors.values()) < (0.1 if "clamped" in model else 0.01)


def test_the_control_is_nearer_to_fp64_than_torchtitan() -> None:
    """Output and all gradients, with the fp32 weights and bf16 activations of training. Tokens go to experts in turn:
    which ones a router takes may hang on a rounding."""
    made = MoE(scored_after(top_k=4, route_norm=True, _debug_force_load_balance=True), D, H)
    with torch.no_grad():
        made.init_weights(0.1, torch.device("cpu"))
        for param in made.parameters():
            param.copy_(param.bfloat16())
    exact = copy.deepcopy(made).double()
    exact.experts.use_grouped_mm = False  # it multiplies in bf16
    exact, rounded = run(exact, torch.float64, 128), {}
    with torch.autocast("cpu", torch.bfloat16):
        for name, each in ("theirs", made), ("ours", convert(made, f"{DISPATCH}=auto", f"{RECIPE}={BF16.name}")):
            rounded[name] = run(each, torch.bfloat16, 128)
    exact.pop("tokens_per_expert")
    errors = {name: [relative_rms(of[name], value) for of in rounded.values()] for name, value in exact.items()}
    print(errors)
    assert all(ours < theirs for theirs, ours in errors.values()), errors


def test_a_converted_layer_can_be_copied_and_pickled() -> None:
    """As pipelines copy the model."""
    for model in ("llama4", "gpt_oss"):
        ours = convert(layer(model), f"{DISPATCH}=auto", f"{RECIPE}={BF16.name}")
        expected = run(ours)["y"]
        for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert torch.equal(run(copied)["y"], expected)


@pytest.mark.parametrize(
    "flags, degrees, reason",
    [
        ([], {"tp": 2}, "tensor parallelism"),
        (["--parallelism.expert_parallel_comm_backend=deepep"], {"dp_shard": 2, "ep": 2}, "comm_backend = 'deepep'"),
        (["--parallelism.pipeline_parallel_schedule=DualPipeV"], {"pp": 2, "dp_shard": 2, "ep": 2}, "DualPipeV"),
    ],
)
def test_where_a_layer_keeps_torchtitans_dispatch_the_log_says_so(
    flags: list[str], degrees: dict[str, int], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, flags = layer("llama4"), [*flags, "--activation_checkpoint.mode=none"]
    ours = convert(plain, f"{DISPATCH}=collective", *flags, dims=dims_of(**degrees))
    lines = [line for line in caplog.messages if "dispatch" in line]
    assert len(lines) == 1 and reason in lines[0] and "moe.experts" in lines[0]
    assert type(ours) is MoE and ours.experts.mxfp8_layers is None
    with pytest.raises(ValueError, match="recipe 'bf16' as if unconverted"):
        convert(plain, f"{DISPATCH}=collective", f"{RECIPE}=bf16", *flags, dims=dims_of(**degrees))
    off = convert(plain, f"{DISPATCH}=off")
    assert torch.equal(run(ours)["y"], run(off)["y"])


class Own(MoE):
    """A layer of the user's."""


@pytest.mark.parametrize(
    "cls, recipe, transport, reason",
    [
        (Own, "mxfp8", "auto", "experts in a Own: TorchTitan dispatches the tokens of moe.experts"),
        (MoE, "mxfp8_2d_wgrad_bf16_rebased", "auto", "recipe 'mxfp8_2d_wgrad_bf16_rebased', whose weight gradient"),
        (MoE, "mxfp8_wgrad_bf16", "collective", ""),
    ],
)
def test_which_layers_and_recipes_keep_torchtitans_dispatch(
    cls: type, recipe: str, transport: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A weight gradient of unquantised tokens cannot be had of what is dispatched, unless a user names a transport."""
    own = layer("llama4")
    own.__class__ = cls
    made = convert(own, f"{RECIPE}={recipe}", f"{DISPATCH}={transport}")
    assert type(made) is (cls if reason else plugin.MXFP8MoE)
    assert f"dispatch = '{transport}' does not work with {reason}" in caplog.text or not reason


def test_the_log_names_the_transport_and_why(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = convert(layer("llama4"))
    assert "1 MoE layer dispatches tokens itself, local: one rank has every expert; rows counted" in caplog.text
    layers = ours.experts.mxfp8_layers
    sizes = {"count": 1, "kept": 1, "top_k": 1, "experts": E, "dim": D, "hidden": H, "max_tokens": 8 * 2048}
    sizes |= {"transport": "auto", "rows": "counted"}
    assert {name: getattr(layers, name) for name in sizes} == sizes
    assert copy.deepcopy(ours).experts.mxfp8_layers is layers, "whose rows may change"

    reserved = []
    transport = SimpleNamespace(reserve=reserved.append)
    monkeypatch.setattr(CHOOSE, lambda *_: (transport, "symmetric: two ranks of one host"))
    flags = [f"{DISPATCH}=auto", "--training.local_batch_size=2", "--training.seq_len=64"]
    convert(layer("qwen3"), *flags)
    convert(layer("forced balance"), *flags)
    convert(layer("qwen3"), *flags, "--validation.enable", "--validation.seq_len=32")
    assert "symmetric: two ranks of one host; rows counted" in caplog.text
    # tokens of a step; of slots, where scores come first; of the validation
    assert reserved == [2 * 64, 2 * 64 * 2, 8 * 32]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1e9))
    with pytest.raises(ValueError, match=r"^here: dispatch_rows = 'worst_case' needs at least .* GiB of each GPU"):
        dispatching("worst_case").connect(None, torch.device("cuda"), "here: ")

    def refuse(*_: object) -> None:
        raise ValueError("no peer access")

    monkeypatch.setattr(CHOOSE, refuse)
    with pytest.raises(ValueError, match=r"grouped_mm.mx\] dispatch = 'auto': no peer access"):
        convert(layer("llama4"), f"{DISPATCH}=auto")


def dispatching(rows: str | float, ranks: int = 8, once: str = "") -> DispatchingLayers:
    """DeepSeek-V3's experts: ranks of 16384 tokens, each token 8 of 256 experts."""
    sizes = {"count": 2, "kept": 2, "max_tokens": 16384, "top_k": 8, "experts": 256, "dim": 7168, "hidden": 2048}
    return DispatchingLayers(transport="auto", rows=rows, once=once, ranks=ranks, **sizes)


def test_a_bound_grows_to_what_was_wanted_and_no_further_than_memory() -> None:
    row = 2 * (7168 + 224 + 4 * 2048) + 2 * 7168 + 2 * 2048  # bytes
    layers, balanced = dispatching("worst_case"), 8 * 16384
    assert layers.bytes_needed("worst_case") == 8 * balanced * row and not layers.may_overflow()
    assert layers.bytes_needed("bounded") == 1.5 * balanced * row and layers.bytes_needed("counted") == 0
    few = replace(layers, experts=16)
    assert few.bytes_needed("worst_case") == 2 * balanced * row, "no more than 2 experts are here"
    with pytest.raises(ValueError, match=r"at least 48.4 GiB .* has 37.3 GiB: take a factor of at most 6.15, "):
        layers.check_memory(40e9)
    # Of 2 ranks each token arrives once, not once for each of its experts here, and is kept so.
    pair, copies, rest = dispatching(1.5, ranks=2), 2 * 16384 * 2 * (7168 + 224), row - 2 * (7168 + 224)
    assert pair.bytes_needed("bounded") == copies + 1.5 * balanced * rest
    assert pair.bytes_needed("0.2") == math.ceil(0.2 * balanced / 128) * 128 * row, "fewer rows than copies"
    for factor in (1.5, 0.2):
        needed = pair.bytes_needed(f"{factor}")
        with pytest.raises(ValueError, match=f"take a factor of at most {factor - 0.01:.2f}, "):
            dispatching(factor, ranks=2).check_memory(needed - 1e7)

    layers = dispatching(0.25)
    assert layers.may_overflow() and layers.rows == "0.25"
    layers.grow(2 * balanced, math.inf)
    assert layers.rows == "4.0" and layers.may_overflow(), "twice as many"
    layers.grow(5 * balanced + 1, math.inf)
    assert layers.rows == "8.0" and not layers.may_overflow(), "all that could come"
    for free, grown in ((0, "1.1"), (0.1, "1.1"), (1, "1.5"), (3, "2.0")):
        layers = replace(dispatching(1.0), kept=1)  # at least
        layers.grow(balanced, math.inf, free * balanced * row)
        assert layers.rows == grown, free
    layers = dispatching("bounded")
    layers.grow(2 * balanced, 2 * balanced * row)
    assert layers.rows == "counted" and not layers.may_overflow()


@pytest.mark.parametrize("degree, tokens", [(1, 24 * 64), (2, 6 * 64)])
def test_the_most_tokens_may_be_a_validations(degree: int, tokens: int) -> None:
    """A pipeline divides its batch into as many microbatches as a training's, which may be larger ones."""
    config = parse("--parallelism.pipeline_parallel_microbatch_size=2")
    config.parallelism.pipeline_parallel_degree = degree
    config.training.local_batch_size, config.validation.local_batch_size = 8, 24
    config.training.seq_len = config.validation.seq_len = 64
    assert most_tokens(config.training, config.parallelism, config.validation) == tokens
    assert most_tokens(config.training, config.parallelism) == (8 if degree == 1 else 2) * 64


@pytest.mark.parametrize(
    "case, rows, line",
    [
        ({}, "bounded", ", symmetric; never run on more than 4 GPUs; rows bounded"),
        ({"ranks": 4}, "bounded", ", symmetric; rows bounded"),
        ({"ranks": 1}, "bounded", "; rows bounded"),
        ({"transport": "collective"}, "bounded", "; rows bounded"),
        ({"transport": "collective", "ranks": 9}, "counted", "as with a bound all 9 ranks would be sent every token"),
        ({"once": "pipeline parallelism"}, "counted", "as with pipeline parallelism no step can run again"),
        ({"once": "pipeline parallelism", "rows": "2"}, "counted", "as with pipeline parallelism no step can run"),
        ({"once": "pipeline parallelism", "rows": "worst_case"}, "worst_case", "rows worst_case"),
        ({"memory": 1e9}, "counted", "as there is too little memory for bounded ones"),
        ({"device": "cpu"}, "counted", "; rows counted"),
        ({"device": "cpu", "rows": 0.5}, "0.5", "; rows 0.5"),
    ],
)
def test_rows_that_are_left_to_us(case: dict, rows: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, ranks = case.get("transport", "symmetric"), case.get("ranks", 8)
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: 0, group_name="ep")
    transport = Mock(spec=Collective if name == "collective" else Local)
    properties = SimpleNamespace(total_memory=case.get("memory", 80e9))
    monkeypatch.setattr(CHOOSE, lambda *_: (transport, name))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: "nccl")
    layers = dispatching(case.get("rows", "auto"), once=case.get("once", ""))
    layers = replace(layers, experts=252) if ranks == 9 else layers
    said = layers.connect(group, torch.device(case.get("device", "cuda")))
    assert layers.rows == rows and line in said


def test_health_and_the_rebase_report_see_tokens_output_gradients_and_weights() -> None:
    flags = f"{DISPATCH}=auto", f"{RECIPE}=mxfp8_2d_rebased", f"--{GROUPED}.hopper_rebase_report=1"
    for model in ("llama4", "gpt_oss"):
        ours = convert(layer(model), *flags)
        assert ours.experts.probe is not None
        run(ours)
        assert ours.experts.probe.grad is None, "not within recording()"
        with observe.recording():
            run(ours)
        counts = dict(zip(observe.KINDS, ours.experts.probe.grad.tolist(), strict=True))
        tokens, weights = 51 * D, 3 * E * D * H
        # elements that are not zero, those that were rebased, of tokens along both axes, and those requantised
        assert [counts[kind][0] for kind in observe.KINDS] == [tokens, weights, tokens]
        assert [counts[kind][3] for kind in observe.KINDS] == [2 * tokens, weights, 2 * tokens]
        assert [counts[kind][5] for kind in observe.KINDS] == [tokens, 0, tokens]
        assert "weights" in observe.rebase_report({"experts": ours.experts.probe.grad.tolist()})


def test_a_config_for_a_cluster_is_checked_without_its_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks of a dry run would do: TorchTitan shards their experts as ever."""
    monkeypatch.chdir(ROOT)
    toml = f"{ROOT}/train_configs/debug_llama4.toml"
    flags = ["--cluster.gpu=H200", "--cluster.gpus_per_node=2", "--parallelism.expert_parallel_degree=2"]
    flags += [f"{DISPATCH}=symmetric", f"{ROWS}=worst_case", CONVERT]
    off = dry_run(parse_config(toml, [*flags[:3], f"{DISPATCH}=off", CONVERT, NO_AC]))
    on = dry_run(parse_config(toml, [*flags, NO_AC]))
    assert (on.converted, on.mesh, on.memory.parameters) == (off.converted, off.mesh, off.memory.parameters)
    assert on.memory.activations < off.memory.activations  # tests/test_configs.py counts the bytes
    with pytest.raises(ValueError, match=r"'worst_case' needs at least .* GiB of each GPU, which has 0.0 GiB"):
        monkeypatch.setattr("titan_mxfp8.tools.dry_run.card_memory", lambda _: 1e6)
        dry_run(parse_config(toml, flags))
    monkeypatch.undo()
    monkeypatch.chdir(ROOT)
    control = dry_run(parse_config(toml, [*flags, f"{RECIPE}=bf16"]))
    assert on.mxfp8_share > control.mxfp8_share == 0 and control.multiplied[GROUPED].startswith("bf16")
    with pytest.raises(ValueError, match="degree 4 does not divide the 2 processes of a host"):
        dry_run(parse_config(toml, [*flags, "--cluster.nodes=2", "--parallelism.expert_parallel_degree=4"]))


@pytest.mark.integration
@cpu_only
@pytest.mark.parametrize("models", daily(["quick deepseek_v3", "llama4 deepseek_v3 gpt_oss"], "quick deepseek_v3"))
def test_models_with_expert_parallelism_equal_torchtitans(models: str) -> None:
    processes.check(2, "parallel_moe_models.py", "cpu", *models.split())


def test_a_layer_of_gpt_oss_compiles_without_a_graph_break() -> None:
    """TorchTitan compiles none; blocks of the others are compiled below."""
    ours = convert(layer("gpt_oss"), f"{DISPATCH}=auto", f"{RECIPE}=mxfp8_2d")
    expected = run(copy.deepcopy(ours))
    actual = run(torch.compile(ours, fullgraph=True, backend="aot_eager_decomp_partition"))
    for name, value in expected.items():
        assert relative_rms(actual[f"_orig_mod.{name}" if "." in name else name], value) < 1e-6, name


@cpu_only
@pytest.mark.parametrize("mode", daily(["full", "op"], "full"))  # with expert parallelism the other: above
def test_blocks_are_compiled_whole(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each is one region, which is compiled for one text and runs for all, with the gradients of the eager one. Counts
    of tokens, to which eager recomputation adds once more, are right."""
    torch._dynamo.reset()
    counters.clear()
    common = *AC_MODES[mode], CONVERT, f"{ROWS}=0.5"
    with torch._dynamo.config.patch(recompile_limit=8):
        eager, compiled = (build("deepseek_v3", *common, *flags) for flags in ((), COMPILE))
        assert torch._dynamo.config.recompile_limit > 8
    assert "MXFP8: 1 MoE block compiled whole, each as one region" in caplog.text
    for seed, (vocabulary, rows) in enumerate(((2048, "0.5"), (16, "0.5"), (16, "0.8"), (2048, "0.9"))):
        text = tokens(seed, vocabulary=vocabulary)
        for model in (eager, compiled):
            model.mxfp8_layers.set_rows(rows)
        with Decomposed():
            expected = run_step(eager, text)
        step = run_step(compiled, text)
        assert step.loss == pytest.approx(expected.loss, rel=1e-4)
        assert max(relative_rms(step.grads[name], grad) for name, grad in expected.grads.items()) < 1e-5
        assert counters["stats"]["unique_graphs"] == 2, "a dense and a MoE block"
    counts = [model.layers["1"].moe.tokens_per_expert for model in (eager, compiled)]
    assert torch.equal(counts[0], 2 * counts[1]) and counts[1].sum() == 4 * 64 * eager.layers["1"].moe.router.top_k
    halved = [getattr(model.layers["1"], "checkpoint_impl", None) is not None for model in (eager, compiled)]
    assert halved == [True, False]


def test_blocks_whose_experts_fsdp_takes_are_compiled_in_parts() -> None:
    """And, as Dynamo could not follow them, those whose rows are counted."""
    experts = convert(layer("deepseek_v3"), f"{ROWS}=bounded").experts
    holder, layers = nn.ModuleDict({"experts": experts}), experts.mxfp8_layers
    mesh = SimpleNamespace(size=lambda: 1)
    dims = SimpleNamespace(dp_replicate_enabled=False, pp_enabled=False, get_optional_mesh=lambda names: mesh)
    config = parse(CONVERT)
    layers.why_fsdp = plugin.why_fsdp_will(holder, config, dims)
    assert plugin._why_in_parts(layers, True) == ""
    layers.set_rows("counted")
    assert "dispatch_rows = 'counted'" in plugin._why_in_parts(layers, True)
    assert plugin._why_in_parts(layers, False) == "", "one rank knows how many rows it has"
    config.training.enable_cpu_offload = True
    layers.why_fsdp = plugin.why_fsdp_will(holder, config, dims)
    assert plugin._why_in_parts(layers, False) == "FSDP takes their experts: it offloads to the CPU"


def test_a_compiled_layer_takes_the_rows_that_its_dispatch_has_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a step that runs again changes them, for which nothing is compiled. A validation counts them."""
    monkeypatch.setattr(choose("auto", None, torch.device("cpu"))[0].shared.wanted, "raises", False)
    ours, x = convert(layer("deepseek_v3"), f"{ROWS}=0.2", f"{RECIPE}={BF16.name}"), torch.randn(1, 300, D)
    compiled, outputs = torch.compile(ours, fullgraph=True, backend="eager"), {}
    with torch.no_grad():
        assert torch.equal(compiled(x), ours(x)), "it is compiled for this bound"
    for rows, training in (("0.9", True), ("2.5", True), ("0", True), ("0", False)):
        ours.experts.mxfp8_layers.set_rows(rows)
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=rows in ("0.9", "2.5")):
            outputs[rows, training] = compiled.train(training)(x)
            assert torch.equal(outputs[rows, training], ours.train(training)(x))
    shared = ours.shared_experts(x.view(-1, D)).view_as(x)
    assert torch.equal(outputs["0", True], shared), "no row has memory"
    assert torch.equal(outputs["0", False], outputs["2.5", True]), "all of them have"
    assert len({outputs[key].sum() for key in (("0", True), ("0.9", True), ("2.5", True))}) == 3


@pytest.mark.integration
@cpu_only
def test_experts_out_of_fsdp_train_and_are_saved_as_those_in_it(tmp_path: Path) -> None:
    """Losses, norms and gradients to the last digit; checkpoints with Adam's states among 2 ranks, each way read by the
    other."""
    processes.check(2, "parallel_fsdp.py", tmp_path)


@pytest.mark.integration
@cpu_only
@pytest.mark.nightly
def test_checkpoints_of_experts_out_of_fsdp_go_to_other_layouts(tmp_path: Path) -> None:
    """From 2 ranks to 4, from 4 to one, and between layouts, whoever wrote them."""
    processes.check(2, "parallel_fsdp.py", tmp_path)
    processes.check(4, "parallel_fsdp.py", tmp_path)
    whole = torch.load(tmp_path / "full0.pt")
    read = {name: torch.zeros_like(value) for name, value in whole.items()}
    dcp.load(read, checkpoint_id=tmp_path / "of 4", no_dist=True)
    assert all(torch.equal(value, whole[name]) for name, value in read.items())


def test_torchft_reduces_gradients_in_a_hook_of_fsdp() -> None:
    for enabled, reason in ((False, ""), (True, "fault_tolerance.enable")):
        config = parse(CONVERT)
        config.fault_tolerance.enable = enabled
        holder = nn.ModuleDict({"moe": layer("llama4")})
        GroupedMMConverter(config, None).convert(holder)
        assert holder["moe"].experts.needs_fsdp == reason


@pytest.mark.parametrize(
    "changed, says",
    [
        ({}, ""),
        ({"pp_enabled": True}, ""),
        ({"pp_enabled": True, "dtype": torch.bfloat16}, "adds a pipeline's gradients up in fp32"),
        ({"dtype": torch.bfloat16}, ""),
        ({"ranks": (1, 4)}, "4 ranks (dp_replicate 1 x efsdp 4)"),
        ({"ranks": (2, 1)}, "2 ranks (dp_replicate 2 x efsdp 1)"),
        ({"edp_mesh": None}, ""),
        ({"edp_mesh": None, "ranks": (1, 4)}, "4 ranks"),
        ({"edp_mesh": None, "shards": True}, "tensor parallelism has sharded them"),
        ({"cpu_offload": True}, "offloads to the CPU"),
        ({"dp_mesh_dims": object()}, "spmd_backend"),
        ({"converted": 1}, "not all of them are converted"),
        ({"needs_fsdp": "fault_tolerance.enable"}, "fault_tolerance.enable"),
    ],
)
def test_why_fsdp_takes_experts(changed: dict[str, object], says: str) -> None:
    given = {"pp_enabled": False, "cpu_offload": False, "ranks": (1, 1), "converted": 2, "needs_fsdp": ""} | changed
    experts = [nn.Linear(1, 1, dtype=given.get("dtype", torch.float32)) for _ in range(2)]
    for module in experts[: given["converted"]]:
        module.needs_fsdp = given["needs_fsdp"]
    if "shards" in given:
        experts[0] = Mock(parameters=lambda recurse: [Mock(spec=DTensor)])
    shape = given["ranks"]
    mesh = SimpleNamespace(size=lambda: shape[0] * shape[1], shape=shape, mesh_dim_names=("dp_replicate", "efsdp"))
    reason = why_fsdp(experts, {"edp_mesh": mesh, "dp_mesh": mesh} | given)
    assert says in reason and bool(says) == bool(reason)


def test_an_error_of_fsdp_is_the_one_that_is_seen() -> None:
    holder = nn.ModuleDict({"moe": layer("llama4")})
    GroupedMMConverter(parse(CONVERT), None).convert(holder)
    experts = holder["moe"].experts
    seen = []

    def apply_fsdp(model: nn.Module, dp_mesh: object, pp_enabled: bool, edp_mesh: object = None) -> None:
        seen.append(model["moe"].experts)
        raise ValueError("no such mesh")

    with pytest.raises(ValueError, match="no such mesh"):
        shard(apply_fsdp, holder, SimpleNamespace(size=lambda: 1), pp_enabled=False)
    assert seen != [experts] and holder["moe"].experts is experts
