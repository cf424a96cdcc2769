"""How many functions of the package a call goes through on a CPU, warm. A host that launches kernels waits for each."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_plugin_moe import convert, layer

import titan_mxfp8
from scripts.bench.problems import make_offs
from titan_mxfp8 import mxfp8_grouped_mm, mxfp8_moe
from titan_mxfp8.backends import reference

PACKAGE = str(Path(titan_mxfp8.__file__).parent)


def calls_of(function: Callable[[], object]) -> list[str]:
    """The names of the package's functions that one call of ``function`` calls, in order."""
    names = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            names.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return names


def moe_layer(*flags: str) -> Callable[[], torch.Tensor]:
    made, x = convert(layer("deepseek_v3", torch.bfloat16), *flags), torch.randn(3, 17, 64, dtype=torch.bfloat16)
    return lambda: made(x.requires_grad_())


def sorted_layer() -> Callable[[], torch.Tensor]:
    return moe_layer("--quantize.grouped_mm.mx.dispatch=off")


def grouped_mm() -> Callable[[], torch.Tensor]:
    x, w = torch.randn(50, 64, requires_grad=True), torch.randn(4, 96, 64, requires_grad=True)
    offs = make_offs([5, 20, 0, 25])
    return lambda: mxfp8_grouped_mm(x, w.mT, offs)


def moe() -> Callable[[], torch.Tensor]:
    x, scores = torch.randn(50, 64, requires_grad=True), torch.rand(50, 2, requires_grad=True)
    expert_ids = torch.rand(50, 4).topk(2, 1).indices
    weights = [torch.randn(4, *shape, requires_grad=True) for shape in ((96, 64), (96, 64), (64, 96))]
    return lambda: mxfp8_moe(x, scores, expert_ids, *weights)


# (to the first GEMM, forward, backward): at most
LIMITS = {moe_layer: (60, 100, 218), sorted_layer: (50, 87, 190), grouped_mm: (60, 70, 70), moe: (60, 95, 220)}


@pytest.mark.parametrize("made", LIMITS, ids=lambda made: made.__name__)
def test_a_call_goes_through_few_functions(made: Callable[[], Callable[[], torch.Tensor]]) -> None:
    forward = made()
    for _ in range(2):
        forward().sum().backward()
    outputs = []
    of_forward = calls_of(lambda: outputs.append(forward()))
    gradient = torch.ones_like(outputs[0])
    of_backward = calls_of(lambda: outputs[0].backward(gradient))
    first_gemm = of_forward.index(f"reference.py:{reference.gemm_m_grouped.__qualname__}")
    counts = first_gemm, len(of_forward), len(of_backward)
    print(made.__name__, counts)
    within = [0 < count <= most for count, most in zip(counts, LIMITS[made], strict=True)]
    assert all(within), (counts, of_forward, of_backward)
