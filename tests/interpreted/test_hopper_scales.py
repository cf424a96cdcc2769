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
    monkeypatch.setattr(gemm, "DECODE_LINES", 64)
    rows, columns, experts, stages = 77, 70, 3, 3
    blocks = steps * stages - steps // 2  # of four steps the last stage has two
    row_scale = torch.randint(256, (blocks, rows), dtype=torch.uint8).mT
    column_scale = torch.randint(256, (experts, columns, blocks), dtype=torch.uint8).mT
    if contiguous:
        row_scale, column_scale = row_scale.contiguous(), column_scale.contiguous()
    row_out, column_out, taken = gemm.decode_scales(row_scale, column_scale, steps, stages, copies)
    assert taken.dtype == torch.int32 and taken.tolist() == [0]

    def padded(scale: torch.Tensor, lines: int) -> torch.Tensor:
        """fp32 (..., steps * stages, lines), 2^-127 where there is nothing."""
        *rest, found, there = scale.shape
        out = torch.full((*rest, steps * stages, lines), 2.0**-127)
        out[..., :found, :there] = decode_scale(scale)
        return out

    row_out, column_out = row_out.abs(), column_out.abs()  # for the signs see below
    rows_out = 128 if steps > 1 else 80
    for copy, part in enumerate(row_out.view(copies, stages, rows_out, steps)):
        expected = padded(row_scale.mT[:, copy:], rows_out).view(stages, steps, rows_out).mT
        assert torch.equal(part.nan_to_num(3.0), expected.nan_to_num(3.0)), copy
    expected = padded(column_scale, 72).view(-1, 72)
    assert torch.equal(column_out.nan_to_num(3.0), expected.nan_to_num(3.0))


def test_equal_scales_are_marked():
    """By the first step's signs, in runs of 64 rows and of 4 columns. Stage 0 is equal everywhere, stage 1 nowhere,
    stage 2 but for row 70 of the second run and column 2 of the first, stage 3 but for its last step."""
    rows, columns, stages = 150, 10, 4
    row_scale, column_scale = torch.randint(256, (rows, stages)), torch.randint(256, (1, stages, columns))
    row_scale, column_scale = row_scale.repeat_interleave(4, 1), column_scale.repeat_interleave(4, 1)
    for scale in (row_scale, column_scale[0].T):
        scale[:, 5] ^= 1
        scale[:, 15] ^= 255
    row_scale[70, 9] ^= 128
    column_scale[0, 10, 2] ^= 2
    row_out, column_out, _ = gemm.decode_scales(row_scale.to(torch.uint8), column_scale.to(torch.uint8), 4, stages, 1)
    marked = row_out.signbit().view(stages, 192, 4)
    expected = torch.zeros_like(marked)
    expected[0, :, 0] = expected[2, :64, 0] = expected[2, 128:, 0] = True
    assert torch.equal(marked, expected)
    marked = column_out.signbit().view(stages, 4, 12)
    expected = torch.zeros_like(marked)
    expected[0, 0] = expected[2, 0, 4:] = True
    assert torch.equal(marked, expected)

    *both, _ = gemm.decode_scales(row_scale.to(torch.uint8), column_scale.to(torch.uint8), 1, 4 * stages, 1)
    assert not any(scales.signbit().any() for scales in both)


@pytest.mark.parametrize("rows", [1, 65, 100, 128, 150])
def test_no_part_is_taken_for_even_that_is_not(rows: int):
    """Parts of 64 rows from any row on, as the GEMM copies them: past the last row they go on into the next stage."""
    stages = 3
    row_scale = torch.full((rows, 4 * stages), 127)
    row_scale[rows * 2 // 3 :, 1] += 1  # of the first stage only the rows before are even
    column_scale = torch.full((1, 4 * stages, 32), 127)
    row_out, _, _ = gemm.decode_scales(row_scale.to(torch.uint8), column_scale.to(torch.uint8), 4, stages, 1)
    stage_rows = len(row_out) // (4 * stages)
    scales, even = torch.cat([row_out, torch.zeros(64 * 4)]), row_scale.view(rows, stages, 4)
    even = (even.amax(2) == even.amin(2)).T  # (stages, rows)
    found = 0
    for stage in range(stages):
        for first in range(rows):
            start = (stage * stage_rows + first) * 4
            part = scales[start : start + 64 * 4].view(64, 4)  # see _is_even
            if part[0, 0] < 0 and part[63, 0] < 0:
                assert even[stage, first : first + 64].all(), (stage, first)
                found += 1
    assert found > 0
