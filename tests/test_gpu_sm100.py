"""The quantisers and SwiGLU of ``backends/sm100`` on any NVIDIA GPU; its GEMMs run on SM100 alone, in
``test_backends.py``."""

import pytest
import torch
from contract import BF16, FP32, check_quantize, check_quantize_both, filled, partly_coalescible, to, uneven, wild
from poison import poisoned_empty
from swiglu_contract import check_nan_stays_in_its_group, check_swiglu

from scripts.bench.problems import SPREADS, group_sizes, make_offs
from titan_mxfp8.backends import sm100
from titan_mxfp8.backends.common.swizzled import swizzle_scales
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.backends.sm100 import gemm
from titan_mxfp8.format import reference, swizzle
from titan_mxfp8.format.spec import OperandSpec
from titan_mxfp8.recipe import get_recipe

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.get_device_capability() < (9, 0),
    reason="needs an NVIDIA GPU that converts to FP8",
)
PLANS = [sm100.plan(get_recipe(name), Hardware("sm_100", "B200")) for name in ("mxfp8", "mxfp8_floor", "mxfp8_2d")]


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("plan", PLANS, ids=["mxfp8", "floor", "2d"])
def test_quantisers_give_the_references_bits(plan, dtype: torch.dtype) -> None:
    spec = plan.forward.a
    for make in (uneven, wild, partly_coalescible):
        for shape in ((129, 288), (1, 32), (0, 64), (77, 96), (1300, 416)):
            check_quantize_both(sm100, make(shape, dtype), spec, spec, device="cuda")
        for spread in SPREADS:
            x, offs = make((1300, 416), dtype), make_offs(group_sizes(spread, 1200, 37))
            check_quantize_both(sm100, x, spec, spec, offs, "cuda")
            for axis in (0, 1):
                check_quantize(sm100, x, axis, spec, offs, "cuda")
        w = make((3, 288, 160), dtype)
        for x in (w, w.mT):
            check_quantize_both(sm100, x, plan.forward.b, plan.dgrad.b, device="cuda")
            for axis in (1, 2):
                check_quantize(sm100, x, axis, plan.forward.b, device="cuda")


@pytest.mark.parametrize("sizes", [None, [1300], [0, 1, 44, 130, 0, 800, 200]])
def test_blocked_and_unblocked_are_the_same_scales(sizes: list[int] | None) -> None:
    offs = None if sizes is None else make_offs(sizes, "cuda")
    for axis in (0, 1):
        rows = reference.quantize(wild((1300, 416), BF16).cuda(), axis, OperandSpec(), None if axis else offs)
        with poisoned_empty():
            ours = swizzle_scales(rows, offs)
        theirs = swizzle.swizzle(rows, ours.spec, offs)
        assert torch.equal(filled(ours, offs).scale, filled(theirs, offs).scale)
        back, (_, known) = swizzle.unswizzle(ours, offs), swizzle.positions(rows, offs)
        assert known.any() and torch.equal(back.scale[known], rows.scale[known])


def test_requantise() -> None:
    offs, spec = make_offs([0, 1, 44, 130, 0, 800, 200]), PLANS[0].wgrad.a
    rows = reference.quantize(uneven((1300, 416), BF16), 1, OperandSpec())
    ours = sm100.requantize(to(rows, "cuda"), 0, spec, offs.cuda())
    expected = filled(reference.requantize(rows, 0, spec, offs), offs)
    ours = filled(to(ours, "cpu"), offs)
    assert torch.equal(ours.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(ours.scale, expected.scale)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_floor", "mxfp8_2d_wgrad_bf16", "mxfp8_e5m2_grad"])
def test_swiglu(recipe: str) -> None:
    plan = sm100.plan(get_recipe(recipe), Hardware("sm_100", "B200"))
    for sizes, extra, hidden, limit, scored in (
        ([0, 44, 1, 130, 0, 31, 0], 20, 160, None, True),
        ([3, 0, 260], 0, 96, 1.5, False),
        ([700, 0, 1500, 257, 1], 5000, 1408, 7.0, True),
        (None, 1300, 416, None, True),
        ([0, 0], 40, 96, None, True),
    ):
        check_swiglu(sm100, plan, sizes, extra, hidden, limit, scored, "cuda")
    check_nan_stays_in_its_group(sm100, plan, "cuda")


def test_what_torch_leaves_of_a_product() -> None:
    offs = make_offs([0, 44, 0, 100], "cuda")
    out, bias = torch.ones(300, 416, dtype=BF16, device="cuda"), torch.randn(4, 416, device="cuda")
    gemm.finish_rows(out, bias, offs, zero_tail=True)
    expected = (1 + torch.cat([bias[1].expand(44, -1), bias[3].expand(100, -1)])).to(BF16)
    assert torch.equal(out[:144], expected) and not out[144:].any()
    dw = torch.ones(4, 416, 288, dtype=BF16, device="cuda")
    gemm.zero_empty_groups(dw, offs)
    assert not dw[[0, 2]].any() and (dw[[1, 3]] == 1).all()
