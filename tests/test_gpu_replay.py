"""Operators that launch what they launched before: the bits are those of the implementations, on a GPU."""

from collections.abc import Callable

import pytest
import torch
from poison import poisoned_empty

from scripts.bench.problems import group_sizes, make_offs
from titan_mxfp8 import mxfp8_grouped_mm, mxfp8_linear
from titan_mxfp8.backends.common import replay
from titan_mxfp8.ops import library

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
RECIPES = ("mxfp8", "mxfp8_2d", "mxfp8_e5m2_grad", "mxfp8_2d_wgrad_bf16", "mxfp8_2d_rebased")
LAYERS = ("grouped", "linear", "biased", "requantised", "fp32")
ROWS, EXPERTS, N, K = 1000, 5, 288, 416
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(params=RECIPES)
def recipe(request) -> str:
    if request.param.endswith("rebased") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    return request.param


def make_layer(kind: str, **options: str) -> Layer:
    def layer(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        if kind == "linear":
            return mxfp8_linear(x, w[0], **options)
        if kind == "biased":
            return mxfp8_linear(x, w[0], x.new_ones(N), **options)
        if kind == "fp32":
            return mxfp8_grouped_mm(x.float(), w.float().mT, offs, out_dtype=torch.float32, **options)
        return mxfp8_grouped_mm(x, w.mT, offs, requantize_input=kind == "requantised", **options)

    return layer


def make_inputs(seed: int) -> Inputs:
    torch.manual_seed(seed)
    x, dy = (torch.randn(ROWS, size, dtype=torch.bfloat16, device="cuda") for size in (K, N))
    w = torch.randn(EXPERTS, N, K, dtype=torch.bfloat16, device="cuda") / K**0.5
    return x, w, make_offs(group_sizes("zipf", ROWS - 100, EXPERTS, seed), "cuda"), dy


def step(layer: Layer, inputs: Inputs) -> list[torch.Tensor]:
    """Output and gradients."""
    x, w, offs, dy = inputs
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = layer(x, w, offs)
    return [y.detach(), *torch.autograd.grad(y, (x, w), dy.to(y.dtype))]


def recordings() -> int:
    return sum(isinstance(known, replay._Recording) for known in replay._known.values())


def check(results: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for ours, theirs in zip(results, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("kind", LAYERS)
def test_bits_are_those_of_the_implementations(
    kind: str, backend: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "triton" and recipe.endswith("rebased"):
        pytest.skip("the portable kernels do not rebase")
    inputs, layer = [make_inputs(seed) for seed in range(6)], make_layer(kind, recipe=recipe, backend=backend)
    results = [step(layer, each) for each in inputs[:2]]
    assert recordings() >= 3  # torch multiplies in some GEMMs, and on SM100 in all
    with poisoned_empty():
        results += [step(layer, each) for each in inputs[2:]]
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        beside = [step(layer, each) for each in inputs]
        torch.cuda.current_stream().synchronize()
    monkeypatch.setattr(library.KernelOperator, "run", library.Operator.run)
    expected = [step(layer, each) for each in inputs]
    check(results, expected)
    check(beside, expected)
