"""The scales as Hopper's GEMMs copy them, in the interpreter."""

import pytest
import torch

from titan_mxfp8.backends.hopper import gemm
from titan_mxfp8.format.mx import decode_scale


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("steps, copies", [(4, 1), (1, 4), (1, 1)])
def test_decoded_scales_lie_where_the_gemm_looks(
    steps: int, copies: int, contiguous: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gemm, "DECODE_LINES", 32)
    rows, columns, experts, stages = 37, 70, 3, 3
    blocks = steps * stages - steps // 2  # of four steps the last stage has two
    row_scale = torch.randint(256, (blocks, rows), dtype=torch.uint8).mT
    column_scale = torch.randint(256, (experts, columns, blocks), dtype=torch.uint8).mT
    if contiguous:
        row_scale, column_scale = row_scale.contiguous(), column_scale.contiguous()
    row_out, column_out = gemm.decode_scales(row_scale, column_scale, steps, stages, copies)

    def padded(scale: torch.Tensor, lines: int) -> torch.Tensor:
        """fp32 (..., steps * stages, lines), 2^-127 where there is nothing."""
        *rest, found, there = scale.shape
        out = torch.full((*rest, steps * stages, lines), 2.0**-127)
        out[..., :found, :there] = decode_scale(scale)
        return out

    for copy, part in enumerate(row_out.view(copies, stages, 40, steps)):
        expected = padded(row_scale.mT[:, copy:], 40).view(stages, steps, 40).mT
        assert torch.equal(part.nan_to_num(3.0), expected.nan_to_num(3.0)), copy
    expected = padded(column_scale, 72).view(-1, 72)
    assert torch.equal(column_out.nan_to_num(3.0), expected.nan_to_num(3.0))
