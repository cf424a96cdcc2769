"""TorchTitan's models on one GPU: every model learns, with activation checkpointing and compiled by the inductor."""

import threading

import processes
import pytest
import torch
from models import MODELS, build, run_step
from test_late_compilation import compilations, forget_compiled, kernels
from test_models import AC_MODES, GEMM_BY_GEMM, check_full_checkpointing, tokens
from torch._dynamo.utils import counters

import titan_mxfp8.plugin  # noqa: F401 - what a run's config loads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
COMPILED, COMPILED_IDS = [(), ("--compile.enable",)], ["eager", "compiled"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, text: torch.Tensor) -> float:
    """Its loss."""
    result = run_step(model, text.cuda())
    for name, param in model.named_parameters():
        param.grad = result.grads[name.replace("_orig_mod.", "")]
    optimizer.step()
    return result.loss


@pytest.mark.parametrize("model", MODELS)
def test_mxfp8_tracks_bf16_with_and_without_compile(model: str) -> None:
    """gpt_oss with its flex attention, which no CPU runs backward. The band is a guess that held on an H200."""
    losses, compiled = {}, "--compile.enable"
    kinds = {"bf16": ["--model.converters="], "mxfp8": [GEMM_BY_GEMM], "compiled": [GEMM_BY_GEMM, compiled]}
    if model != "llama3":
        kinds |= {"dispatch": [], "dispatch compiled": [compiled]}
    for kind, flags in kinds.items():
        built = build(model, *AC_MODES["none"], *flags, device="cuda")
        optimizer = torch.optim.AdamW(built.parameters(), lr=5e-4)
        losses[kind], graphs = [], []
        for step in range(10):
            losses[kind].append(train_step(built, optimizer, tokens(step % 2, length=256)) / (2 * 256))
            graphs.append(counters["stats"]["unique_graphs"])
        assert graphs[-1] == graphs[2], graphs
    print(model, losses)
    for kind in losses.keys() - {"bf16"}:
        assert losses[kind][-1] < losses[kind][0] - 0.1
        assert max(abs(a - b) for a, b in zip(losses[kind], losses["bf16"], strict=True)) < 0.05


@pytest.mark.parametrize("compiled", COMPILED, ids=COMPILED_IDS)
def test_full_checkpointing_keeps_nothing_of_experts(compiled: tuple[str, ...]) -> None:
    check_full_checkpointing("cuda", *compiled)


@pytest.mark.parametrize("compile_flags", COMPILED, ids=COMPILED_IDS)
@pytest.mark.parametrize("dispatch", ["off", "auto"])
@pytest.mark.parametrize("model", ["llama4", "deepseek_v3"])
def test_training_compiles_nothing_late(
    model: str, dispatch: str, compile_flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 steps after the first three, in which graphs settle; the router learns, and texts are of vocabularies of 1 to
    1024 tokens, of which few reach few experts."""
    forget_compiled(monkeypatch)
    flags = (f"--quantize.grouped_mm.mx.dispatch={dispatch}", *compile_flags)
    built = build(model, *AC_MODES["none"], *flags, device="cuda")
    optimizer = torch.optim.AdamW(built.parameters(), lr=5e-4)

    def train(steps: range) -> None:
        for step in steps:
            train_step(built, optimizer, tokens(step, length=256, vocabulary=2 ** (step % 11)))

    train(range(10, 13))  # of 1024 tokens, then of 1 and of 2
    assert any(kernel.compiled for kernel in kernels())
    graphs = counters["stats"]["unique_graphs"]
    with compilations() as late:
        train(range(13, 113))
    torch.cuda.synchronize()
    assert not late and graphs == counters["stats"]["unique_graphs"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_models_with_expert_parallelism_equal_torchtitans() -> None:
    """Both transports; the symmetric one with rows for the worst case too."""
    processes.check(2, "parallel_moe_models.py", "cuda")


def test_autograd_takes_a_thread_of_its_own_unless_told() -> None:
    """The symptom that ``run_backward_in_the_calling_thread`` cures; importing the plugin has done so here."""
    threads = {}
    for enabled in (True, False):
        x = torch.ones(4, device="cuda", requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad, enabled=enabled: threads.update({enabled: threading.get_ident()}))
        with torch.autograd.set_multithreading_enabled(enabled):
            y.sum().backward()
    assert threads[False] == threading.get_ident() != threads[True]
    assert not torch._C._is_multithreading_enabled()
