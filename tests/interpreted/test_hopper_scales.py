"""The scales as Hopper's GEMMs copy them, in the interpreter."""

import pytest
import torch
from poison import poisoned_empty

from scripts.bench.problems import make_offs
from titan_mxfp8.backends.hopper import scales as hopper
from titan_mxfp8.format.mx import ceil_to, decode_scale
from titan_mxfp8.format.spec import Operand, OperandSpec

ROWS = OperandSpec()
SQUARES = OperandSpec(block="32x32", block_mn=32)
REBASED = OperandSpec(block_k=128, scales="mn_major")


def operand(scale: torch.Tensor, mn: int, spec: OperandSpec = ROWS) -> Operand:
    """An operand of these scales, (..., mn, blocks), with what fills them up where they lie across; any elements."""
    elements = torch.empty((*scale.shape[:-2], mn * spec.block_mn, scale.shape[-1] * spec.block_k), dtype=torch.uint8)
    if spec.scales == "mn_major":
        stored = torch.full((*scale.shape[:-2], scale.shape[-1], ceil_to(mn, 16)), 200, dtype=torch.uint8)
        stored[..., :mn] = scale.mT
        scale = stored
    return Operand(elements, scale.to(torch.uint8), spec, 1)


def parts(scales: hopper.Scales) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of the rows, (copies, stages, rows, steps), and of the columns, as int32."""
    buffer, layout = scales
    rows = buffer[: layout.row_size].view(layout.copies, layout.stages, layout.rows, layout.steps)
    return rows, buffer[layout.row_size : layout.size].view(layout.column_rows, layout.columns)


@pytest.mark.parametrize("exact, copies, experts", [(True, 1, 3), (False, 4, 3), (False, 1, 1)])
def test_decoded_scales_lie_where_the_gemm_looks(
    exact: bool, copies: int, experts: int, monkeypatch: pytest.MonkeyPatch
):
    """Those of forward and dgrad, and of wgrad, whose ``b`` is one matrix."""
    monkeypatch.setattr(hopper, "DECODE_MN", 64)
    rows, columns, stages, steps = 77, 70, 3, 4 if exact else 1
    blocks = steps * stages - steps // 2  # of four steps the last stage has two
    row_scale = torch.randint(256, (rows, blocks), dtype=torch.uint8)
    column_scale = torch.randint(256, (experts, columns, blocks), dtype=torch.uint8)
    a = operand(row_scale, rows, ROWS if exact else REBASED)
    b = operand(column_scale if experts > 1 else column_scale[0], columns, SQUARES if exact else REBASED)
    k_grouped = experts == 1
    scales, end = hopper.decode_scales(a, b, None, k_grouped), a.data.shape[k_grouped]
    assert scales.layout.steps == steps and scales.buffer[scales.layout.size :][:2].tolist() == [0, end]
    assert scales.layout.copies == copies

    def padded(scale: torch.Tensor, mn: int) -> torch.Tensor:
        """fp32 (..., mn, steps * stages), 2^-127 where there is nothing."""
        *rest, there, found = scale.shape
        out = torch.full((*rest, mn, steps * stages), 2.0**-127)
        out[..., :there, :found] = decode_scale(scale)
        return out

    row_out, column_out = (without_marks(part) for part in parts(scales))
    rows_out = 128 + 64 if exact else 80
    for copy, part in enumerate(row_out):
        expected = padded(row_scale[copy:], rows_out).view(rows_out, stages, steps).transpose(0, 1)
        assert torch.equal(part.nan_to_num(3.0), expected.nan_to_num(3.0)), copy
    expected = padded(column_scale, 72).mT.reshape(-1, 72)
    assert torch.equal(column_out.nan_to_num(3.0), expected.nan_to_num(3.0))


@pytest.mark.parametrize("exact, k_grouped", [(True, False), (False, False), (False, True)])
def test_scales_of_no_group_are_not_decoded(exact: bool, k_grouped: bool, monkeypatch: pytest.MonkeyPatch):
    """Rows from the next 64 past ``offs[-1]`` on, in each of the shifted copies; those before are as behind the last
    one. Of wgrad stages that no group can reach, of both operands: 130 tokens in two groups fill at most 3."""
    monkeypatch.setattr(hopper, "DECODE_MN", 64)
    rows, stages, copies = 300, 5, 1 if exact or k_grouped else 4
    row_scale = torch.randint(256, (rows, stages * (4 if exact else 1)))
    a = operand(row_scale, rows, ROWS if exact else REBASED)
    matrices = () if k_grouped else (2,)
    column_scale = torch.randint(256, (*matrices, 70, stages * (4 if exact else 1)))
    b = operand(column_scale, 70, SQUARES if exact else REBASED)
    whole = hopper.decode_scales(a, b, None, k_grouped)
    with poisoned_empty():
        part = hopper.decode_scales(a, b, make_offs([1, 129]), k_grouped)
    assert part.buffer[part.layout.size :][:2].tolist() == [0, a.data.shape[k_grouped]]
    (row_whole, column_whole), (row_part, column_part) = parts(whole), parts(part)
    if k_grouped:
        assert torch.equal(row_part[:, :3], row_whole[:, :3]) and (row_part[:, 3:] == -1).all()
        column_part, column_whole = (t.view(stages, -1) for t in (column_part, column_whole))
        assert torch.equal(column_part[:3], column_whole[:3]) and (column_part[3:] == -1).all()
    else:
        until = 256 if exact else 192  # whole programs; marks are looked for in a run more
        for copy in range(copies):
            used = 130 - copy
            assert torch.equal(row_part[copy, :, :64], row_whole[copy, :, :64])
            assert torch.equal(row_part[copy, :, 64:used] & ~7, row_whole[copy, :, 64:used] & ~7)
            assert (row_part[copy, :, used:until] & ~7 == 0x00400000).all()
        assert (row_part[:, :, until:] == -1).all() and torch.equal(column_part, column_whole)
        other = row_scale.clone()
        other[130:] = torch.randint(256, other[130:].shape)
        a = operand(other, rows, ROWS if exact else REBASED)
        again = hopper.decode_scales(a, b, make_offs([1, 129]), k_grouped)
        assert torch.equal(parts(again)[0][:, :, :until], row_part[:, :, :until])  # marks too


def marks(scales: torch.Tensor) -> torch.Tensor:
    return scales & 7


def without_marks(scales: torch.Tensor) -> torch.Tensor:
    return (scales & ~7).view(torch.float32)


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
    a, b = operand(row_scale[:, :18], rows), operand(column_scale[None, :, :18], columns, SQUARES)
    row_out, column_out = (marks(part) for part in parts(hopper.decode_scales(a, b, None)))
    expected = torch.zeros(stages, 256, 4, dtype=torch.int32)
    expected[0, :, 0] = expected[2, :, 0] = expected[3, :128, 0] = 0b111
    expected[2, 64:128, 0], expected[3, 128:192, 0], expected[4, :, 0] = 0b100, 0b011, 0b101
    expected[:, 192:, 0] = 0b111  # behind the last row
    assert torch.equal(row_out[0], expected)
    expected = torch.zeros(stages, 4, 12, dtype=torch.int32)
    expected[0, 0] = expected[2, 0] = expected[3, 0, :8] = 0b111
    expected[2, 0, :4], expected[3, 0, 8:], expected[4, 0] = 0b100, 0b011, 0b101
    assert torch.equal(column_out.view(stages, 4, 12), expected)

    a, b = (operand(scale, len(scale), REBASED) for scale in (row_scale, column_scale))
    assert not any(marks(part).any() for part in parts(hopper.decode_scales(a, b, None)))


@pytest.mark.parametrize("rows", [1, 65, 100, 128, 150])
def test_no_step_is_added_to_one_of_another_scale(rows: int):
    """Parts of 64 rows from any row on, as the GEMM copies them: past the last row they go on into the next stage."""
    stages = 3
    row_scale = torch.full((rows, 4 * stages), 127)
    row_scale[rows * 2 // 3 :, 1] += 1  # of the first stage only the rows before have equal scales
    a, b = operand(row_scale, rows), operand(torch.full((1, 32, 4 * stages), 127), 32, SQUARES)
    scales = hopper.decode_scales(a, b, None)
    row_out = torch.cat([parts(scales)[0].flatten(), torch.zeros(64 * 4, dtype=torch.int32)])
    stage_scales = row_scale.view(rows, stages, 4)
    equal = stage_scales[:, :, 1:] == stage_scales[:, :, :-1]
    found = set()
    for stage in range(stages):
        for first in range(rows):
            start = (stage * scales.layout.rows + first) * 4
            part = marks(row_out[start : start + 64 * 4]).view(64, 4)  # see _marks
            for step in range(3):
                marked = bool(part[0, 0] & part[63, 0] & 1 << step)
                assert not marked or equal[first : first + 64, stage, step].all(), (stage, first, step)
                found.add(marked)
    assert found == {True, False}
