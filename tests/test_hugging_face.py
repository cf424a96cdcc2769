"""Models of Hugging Face Transformers, at tiny sizes, converted as a user does: with ``convert_model`` alone."""

import copy
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from watch import process_group

from scripts.bench.problems import relative_rms
from titan_mxfp8 import convert_model
from titan_mxfp8.modules import ConvertedModule
from titan_mxfp8.modules.hugging_face import WITHOUT_GROUPED_MM

transformers = pytest.importorskip("transformers", minversion="5.0", reason='needs pip install -e ".[hf]"')
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ATTENTION = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
MLP = "mlp.gate_proj mlp.up_proj mlp.down_proj"
LATENT_ATTENTION = " ".join(
    f"self_attn.{name}" for name in "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj".split()
)
# 32 experts, so that a router's features are multiples of 32. Besides sizes: what is converted in the last layer.
MODELS = {
    "qwen3_moe": ({"head_dim": 32, "moe_intermediate_size": 96, "num_experts": 32}, f"mlp.experts {ATTENTION}"),
    "mixtral": ({"head_dim": 32, "num_local_experts": 32}, f"mlp.experts {ATTENTION}"),
    "deepseek_v3": (
        {
            "moe_intermediate_size": 96,
            "n_routed_experts": 32,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
        f"mlp.experts {LATENT_ATTENTION} {MLP.replace('mlp.', 'mlp.shared_experts.')}",
    ),
    "gpt_oss": ({"head_dim": 32, "num_local_experts": 32}, f"mlp.experts {ATTENTION}"),
    "olmoe": ({"num_experts": 32}, f"mlp.experts {ATTENTION}"),
}
QWEN3 = MODELS["qwen3_moe"][0]
LLAMA4 = {"head_dim": 32, "intermediate_size_mlp": 96, "num_local_experts": 32, "num_experts_per_tok": 1}


def make(name: str, sizes: dict[str, object], **options: object) -> nn.Module:
    """A model with random weights, in bf16, in training mode."""
    config = AutoConfig.for_model(name, **COMMON | sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **options).train()


def convert(model: nn.Module) -> list[str]:
    return convert_model(model, recipe="mxfp8_2d", grouped_fqns=["experts"], linear_filter_fqns=["lm_head"])


def qwen(converted: bool = True) -> nn.Module:
    torch.manual_seed(1)
    model = make("qwen3_moe", QWEN3)
    if converted:
        convert(model)
    return model


TOKENS = torch.randint(3, 256, (2, 32), generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS, labels=TOKENS).loss


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return {name: param.grad.clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_in_mxfp8_and_its_router_does_not(name: str) -> None:
    sizes, expected = MODELS[name]
    bf16 = make(name, sizes)
    mxfp8 = copy.deepcopy(bf16)
    converted = convert(mxfp8)
    last = "model.layers.1."
    assert sorted(fqn.removeprefix(last) for fqn in converted if fqn.startswith(last)) == sorted(expected.split())
    assert {fqn.removeprefix("model.layers.0.") for fqn in converted if not fqn.startswith(last)} <= {
        *expected.split(),
        *MLP.split(),
    }
    # A random model's loss says little: up to 0.005 with three seeds. So a layer's experts alone, too.
    difference = (loss_of(mxfp8) - loss_of(bf16)).abs()
    assert 0 < difference < 0.01
    x = torch.randn(64, 64).bfloat16()
    routing = torch.rand(64, 32).topk(2).indices, torch.rand(64, 2).bfloat16()
    experts = [model.get_submodule(f"{last}mlp.experts") for model in (mxfp8, bf16)]
    assert 0.02 < relative_rms(*(module(x, *routing) for module in experts)) < 0.08
    gradient = gradients(mxfp8)
    assert gradient.keys() == dict(bf16.named_parameters()).keys()
    assert all(grad.isfinite().all() and grad.any() for grad in gradient.values())


def test_generation_is_in_mxfp8_on_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """There ``generate`` switches to an implementation that never calls torch._grouped_mm while it decodes."""
    model = qwen().eval()
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = model.generate(TOKENS[:, :8], **options)
    assert expected.shape == (2, 12)
    with torch.no_grad():
        logits = model(input_ids=TOKENS).logits
    seen = []
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda module, args: seen.append(module.config._experts_implementation))
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    with model._optimize_model_for_decode():
        assert torch.equal(model(input_ids=TOKENS).logits, logits)
    assert seen == ["batched_mm"]


@pytest.mark.nightly
def test_a_compiled_model_computes_what_an_eager_one_does() -> None:
    model = qwen()
    eager, bf16 = (module(input_ids=TOKENS).logits for module in (model, qwen(converted=False)))
    compiled = torch.compile(model, backend="aot_eager")(input_ids=TOKENS, labels=TOKENS)
    assert relative_rms(compiled.logits, eager) < 1e-3 and relative_rms(compiled.logits, bf16) > 1e-2
    compiled.loss.backward()
    assert all(param.grad.any() for param in model.parameters())


def test_gradient_checkpointing_changes_no_bit() -> None:
    model = qwen()
    expected = gradients(model)
    model.gradient_checkpointing_enable()
    calls = []
    model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda *args: calls.append(None))
    actual = gradients(model)
    assert len(calls) == 2, "computed again in backward"
    assert all(torch.equal(actual[name], grad) for name, grad in expected.items())


def test_a_saved_model_is_an_ordinary_one_that_one_converts_again(tmp_path: Path) -> None:
    model = qwen().eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert not any(isinstance(module, ConvertedModule) for module in loaded.modules())
    with torch.no_grad():
        assert not torch.equal(loaded(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)
        convert(loaded)
        assert torch.equal(loaded(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


def test_every_implementation_of_transformers_is_known() -> None:
    """CI takes the newest 5.x: one that it adds would convert, and fail at the first forward if it calls another op."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    unknown = {*ALL_EXPERTS_FUNCTIONS.valid_keys()} - {"grouped_mm", *WITHOUT_GROUPED_MM}
    assert not unknown, "does it call torch._grouped_mm? If not, it belongs to hugging_face.WITHOUT_GROUPED_MM"
    assert "grouped_mm" in ALL_EXPERTS_FUNCTIONS and "eager" in WITHOUT_GROUPED_MM, "eager is the class's own forward"


@process_group()
def test_what_transformers_split_itself_is_refused_with_what_to_do() -> None:
    """Its tensor and expert parallelism run a forward of their own, which a model has as soon as it is loaded."""
    styles = pytest.importorskip("transformers.distributed.tensor_parallel", reason="of Transformers 5.24 and later")
    plan = {"self_attn.q_proj": "colwise", "self_attn.q_proj.weight": "colwise", "mlp.experts": "moe_tp_experts"}
    model = make("qwen3_moe", QWEN3)
    styles.apply_tensor_parallelism(
        model,
        torch.distributed.init_device_mesh("cpu", (1,)),
        {f"model.layers.1.{name}": style for name, style in plan.items()},
    )
    advice = "is split by Transformers' own tensor or expert parallelism: load the model without tp_plan"
    with pytest.raises(ValueError, match=rf"layers.1.mlp.experts {advice}"):
        convert(model)
    converted = convert_model(model, grouped_fqns=["layers.0.mlp.experts"])
    assert f"model.layers.1.self_attn.q_proj ({advice}" in str(converted)
    assert "model.layers.1.self_attn.k_proj" in converted


class Inherited:
    """Mixed in before a class of Transformers: a subclass without a forward."""


class Scaled:
    """A subclass that leaves the multiplication to super's forward."""

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(*args)


class Own:
    """A subclass that multiplies by itself, and otherwise has super's forward."""

    def forward(self, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        return self.multiply(x) if routing else super().forward(x)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        offs = torch.full((32,), len(x), dtype=torch.int32)
        return torch._grouped_mm(x, self.gate_up_proj.mT, offs=offs)[:, : x.shape[1]]


class Untold:
    """A subclass of which nobody knows what it calls."""

    def forward(self, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        return x


def subclass_experts(model: nn.Module, mixed_in: type) -> nn.Module:
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.__class__ = type("Mine", (mixed_in, type(module)), {})
    return model


@pytest.mark.parametrize("mixed_in", [None, Inherited, Scaled])
def test_experts_that_run_otherwise_are_refused_until_they_are_switched(mixed_in: type | None) -> None:
    """A subclass as the class whose forward it runs."""
    llama, qwen = make("llama4_text", LLAMA4), make("qwen3_moe", QWEN3, experts_implementation="eager")
    name = "Llama4TextExperts"
    if mixed_in:
        name = f"Mine that multiplies with the forward of {name}"
        subclass_experts(llama, mixed_in), subclass_experts(qwen, mixed_in)
    with pytest.raises(ValueError, match=rf"is a {name} of Transformers, .*; or leave this module out of grouped_fqns"):
        convert(llama)
    with pytest.raises(
        ValueError, match=r"layers.0.mlp.experts runs with experts_implementation='eager'.*\(\"grouped_mm\"\) before"
    ):
        convert(qwen)
    assert not any(isinstance(module, ConvertedModule) for model in (llama, qwen) for module in model.modules())
    qwen.set_experts_implementation("grouped_mm")
    convert(qwen)
    loss_of(qwen).backward()
    converted = convert_model(llama, linear_filter_fqns=["lm_head"])
    assert "feed_forward.router (router)" in str(converted) and "model.layers.1.self_attn.q_proj" in converted
    loss_of(llama).backward()


def test_a_subclass_with_a_forward_of_its_own_is_left_to_run() -> None:
    own = subclass_experts(make("qwen3_moe", QWEN3, experts_implementation="eager"), Own)
    assert "model.layers.1.mlp.experts" in convert(own)
    loss_of(own).backward()
    untold = subclass_experts(make("llama4_text", LLAMA4), Untold)
    convert(untold)
    advice = r"If the class is yours, call it there\. If not, leave .* or register .*\(\"grouped_mm\"\)"
    with pytest.raises(RuntimeError, match=f"MXFP8Mine.forward made no call of torch._grouped_mm.*{advice}"):
        loss_of(untold)


# A model's own files, as Transformers loads them with trust_remote_code; "{multiply}" is one of the two below.
REMOTE = """
import torch
{imports}

class TinyExperts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2, 32, 32, dtype=torch.bfloat16))

    def forward(self, x):
        return {multiply}
"""
LOOP = {"imports": "", "multiply": "torch.cat([rows @ w for rows, w in zip(x.chunk(2), self.w)])"}
GROUPED = {"imports": "from .gemm import gemm", "multiply": "gemm(x, self.w)"}
GEMM = """
import torch

def gemm(x, w):
    return torch._grouped_mm(x, w, offs=torch.tensor([len(x) // 2, len(x)], dtype=torch.int32))
"""


@pytest.mark.parametrize(("name", "code"), [("remote_loop", LOOP), ("remote_grouped", GROUPED)])
def test_remote_code_that_never_says_grouped_mm_is_refused(
    name: str, code: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / name
    folder.mkdir()
    (folder / "modeling_tiny.py").write_text(REMOTE.format(**code))
    (folder / "gemm.py").write_text(GEMM)
    loaded = dynamic_module_utils.get_class_from_dynamic_module("modeling_tiny.TinyExperts", str(folder))
    assert loaded.__module__.startswith("transformers_modules.")
    model = nn.ModuleDict({"experts": loaded()})
    if name == "remote_loop":
        with pytest.raises(ValueError, match=r"a TinyExperts of the model's remote code, .* without.*; or leave"):
            convert_model(model, grouped_fqns=["experts"])
        assert not isinstance(model["experts"], ConvertedModule)
    else:
        convert_model(model, grouped_fqns=["experts"])
        model["experts"](torch.ones(64, 32, dtype=torch.bfloat16)).sum().backward()
        assert isinstance(model["experts"], ConvertedModule) and model["experts"].w.grad.any()


def test_the_script_trains_with_the_trainer(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from scripts.examples import train_hf

    text = tmp_path / "text.jsonl"
    text.write_text((train_hf.ASSETS / "kjv" / "data.jsonl").read_text().splitlines()[0])
    losses = {}
    for recipe in ("bf16", "mxfp8_2d"):
        out = tmp_path / recipe
        flags = f"--recipe {recipe} --text {text} --max_steps 2 --logging_steps 1 --output_dir {out} --seq_len 64"
        train_hf.main([*flags.split(), "--disable_tqdm", "True"])
        log = capsys.readouterr().out
        losses[recipe] = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", log)]
        assert ("converted 2 expert modules (recipe mxfp8_2d" in log) == (recipe == "mxfp8_2d")
        assert f"saved model and tokenizer to {out}: " in log
    assert losses["bf16"] != losses["mxfp8_2d"]
    assert all(losses[recipe] == pytest.approx([math.log(2048)] * 2, abs=0.5) for recipe in losses)
    assert losses["mxfp8_2d"] == pytest.approx(losses["bf16"], abs=0.05)
    train_hf.main([*flags.split(), "--model", str(out)])  # what was saved, tokenizer included
    assert "converted 2 expert modules" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, message",
    [
        (b'{"text": "a b c d e"}\n\n{"body": "x"}', "line 3: each line must be .* \\(KeyError: 'text'\\)"),
        (b'{"text": "a b c d e"}\n{"text": null}', "line 2: each line must be .* its text is None"),
        ('{"text": "é"}'.encode("latin-1"), "line 1: each line must be .* UTF-8 .* can't decode"),
        (b'{"text": "Amen."}', "--seq_len 64: a sequence has 2 tokens or more, and .*text.jsonl has [1-9]$"),
        (b"", "--seq_len 64: .*text.jsonl has 0"),
    ],
)
def test_the_script_names_the_line_that_is_no_text(text: bytes, message: str, tmp_path: Path) -> None:
    from scripts.examples import train_hf

    (tmp_path / "text.jsonl").write_bytes(text)
    with pytest.raises(SystemExit, match=f"^train_hf: .*{message}"):
        train_hf.main(f"--text {tmp_path / 'text.jsonl'} --seq_len 64 --output_dir {tmp_path / 'out'}".split())


def test_an_implementation_of_the_users_is_left_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    calls = []

    def own(module: nn.Module, *args: torch.Tensor) -> torch.Tensor:
        calls.append(module)
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, *args)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "own", own)
    model = make("qwen3_moe", QWEN3, experts_implementation="own")
    convert(model)
    loss_of(model)
    assert len(calls) == 2
