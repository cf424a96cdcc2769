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

    row_out, column_out = (without_marks(scales) for scales in (row_out, column_out))
    rows_out = 128 if steps > 1 else 80
    for copy, part in enumerate(row_out.view(copies, stages, rows_out, steps)):
        expected = padded(row_scale.mT[:, copy:], rows_out).view(stages, steps, rows_out).mT
        assert torch.equal(part.nan_to_num(3.0), expected.nan_to_num(3.0)), copy
    expected = padded(column_scale, 72).view(-1, 72)
    assert torch.equal(column_out.nan_to_num(3.0), expected.nan_to_num(3.0))


def marks(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(torch.int32) & 7


def without_marks(scales: torch.Tensor) -> torch.Tensor:
    return (scales.view(torch.int32) & ~7).view(torch.float32)


def test_equal_scales_are_marked():
    """In the first step, in runs of 64 rows and of 4 columns, bit i where steps i and i + 1 are equal. In stage 0 all
    are, in stage 1 none, in stage 2 all but step 1 of row 70, in the second run, and of column 2, in the first; in
    stage 3 all but the last, of one row and one column. Stage 4 has two steps."""
    rows, columns, stages = 150, 10, 5
    row_scale = torch.randint(1, 255, (rows, stages)).repeat_interleave(4, 1)
    column_scale = torch.randint(1, 255, (columns, stages)).repeat_interleave(4, 1)
    for scale in (row_scale, column_scale):
        scale[:, 4:8] ^= torch.tensor([0, 1, 2, 3])
    row_scale[70, 9] ^= 128
    column_scale[2, 9] ^= 128
    row_scale[140, 15] ^= 128
    column_scale[9, 15] ^= 128
    given = row_scale[:, :18].to(torch.uint8), column_scale[:, :18].mT[None].to(torch.uint8)
    row_out, column_out, _ = gemm.decode_scales(*given, 4, stages, 1)
    expected = torch.zeros(stages, 192, 4, dtype=torch.int32)
    expected[0, :, 0] = expected[2, :, 0] = expected[3, :128, 0] = 0b111
    expected[2, 64:128, 0], expected[3, 128:, 0], expected[4, :, 0] = 0b100, 0b011, 0b101
    assert torch.equal(marks(row_out).view(stages, 192, 4), expected)
    expected = torch.zeros(stages, 4, 12, dtype=torch.int32)
    expected[0, 0] = expected[2, 0] = expected[3, 0, :8] = 0b111
    expected[2, 0, :4], expected[3, 0, 8:], expected[4, 0] = 0b100, 0b011, 0b101
    assert torch.equal(marks(column_out).view(stages, 4, 12), expected)

    *both, _ = gemm.decode_scales(*given, 1, 18, 1)
    assert not any(marks(scales).any() for scales in both)


@pytest.mark.parametrize("rows", [1, 65, 100, 128, 150])
def test_no_step_is_added_to_one_of_another_scale(rows: int):
    """Parts of 64 rows from any row on, as the GEMM copies them: past the last row they go on into the next stage."""
    stages = 3
    row_scale = torch.full((rows, 4 * stages), 127)
    row_scale[rows * 2 // 3 :, 1] += 1  # of the first stage only the rows before have equal scales
    column_scale = torch.full((1, 4 * stages, 32), 127)
    row_out, _, _ = gemm.decode_scales(row_scale.to(torch.uint8), column_scale.to(torch.uint8), 4, stages, 1)
    stage_rows = len(row_out) // (4 * stages)
    scales, stage_scales = torch.cat([row_out, torch.zeros(64 * 4)]), row_scale.view(rows, stages, 4)
    equal = stage_scales[:, :, 1:] == stage_scales[:, :, :-1]
    found = set()
    for stage in range(stages):
        for first in range(rows):
            start = (stage * stage_rows + first) * 4
            part = marks(scales[start : start + 64 * 4]).view(64, 4)  # see _marks
            for step in range(3):
                marked = bool(part[0, 0] & part[63, 0] & 1 << step)
                assert not marked or equal[first : first + 64, stage, step].all(), (stage, first, step)
                found.add(marked)
    assert found == {True, False}
