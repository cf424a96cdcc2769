"""What ``backends/sm100`` does beside torch's GEMMs, on any NVIDIA GPU; its quantisers and SwiGLU are in
``test_backends.py``, and on SM100 its GEMMs."""

import pytest
import torch
from contract import BF16, filled, wild
from poison import poisoned_empty

from scripts.bench.problems import make_offs
from titan_mxfp8.backends.common.swizzled import swizzle_scales
from titan_mxfp8.backends.sm100 import gemm
from titan_mxfp8.format import reference, swizzle
from titan_mxfp8.format.spec import OperandSpec

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.get_device_capability() < (9, 0),
    reason="needs an NVIDIA GPU that converts to FP8",
)


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


def test_what_torch_leaves_of_a_product() -> None:
    offs = make_offs([0, 44, 0, 100], "cuda")
    out, bias = torch.ones(300, 416, dtype=BF16, device="cuda"), torch.randn(4, 416, device="cuda")
    gemm.finish_rows(out, bias, offs, zero_tail=True)
    expected = (1 + torch.cat([bias[1].expand(44, -1), bias[3].expand(100, -1)])).to(BF16)
    assert torch.equal(out[:144], expected) and not out[144:].any()
    dw = torch.ones(4, 416, 288, dtype=BF16, device="cuda")
    gemm.zero_empty_groups(dw, offs)
    assert not dw[[0, 2]].any() and (dw[[1, 3]] == 1).all()
