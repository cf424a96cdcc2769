"""Where the rows of ragged token groups go: a table made on the device, read by the quantise kernels."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.format.mx import ceil_div


class RowBlockMap(NamedTuple):
    """For each block of 32 rows of the padded axis, the rows of the packed axis that it holds.

    Attributes:
        table: int32 (2 * row_blocks + E,). For each block its first packed row; then, for each, the end of the packed
            rows that are the block's, unless the block is full before; then the end offsets of the padded groups. None
            where there are no groups.
        row_blocks: how many there are.
    """

    table: Tensor | None
    row_blocks: int

    @property
    def padded_offs(self) -> Tensor:
        """int32 (E,) end offsets of the padded groups."""
        return self.table[2 * self.row_blocks :]


@Kernel
@triton.jit(do_not_specialize=["groups", "row_blocks", "rows"])
def _map_row_blocks(
    offs, table,
    groups, row_blocks, rows,
    ALIGNMENT: tl.constexpr, TAIL: tl.constexpr, TAIL_ALIGNMENT: tl.constexpr,
    ROW_BLOCKS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One program: ``ROW_BLOCKS`` blocks of a ``RowBlockMap``, while the groups pass by, ``GROUPS`` at a time.

    ``offs = [2, 2, 40]`` of 50 rows, groups aligned to 32, the tail to 128: the padded groups end at 32, 32 and 96, so
    the blocks at 0, 32 and 64 hold rows 0..1, 2..33 and 34..39, the one at 96 nothing, and the one at 128 the tail,
    40..49.
    """
    padded_offs = table + 2 * row_blocks
    row_block = tl.program_id(0) * ROW_BLOCKS + tl.arange(0, ROW_BLOCKS)
    position = row_block * 32
    group = tl.zeros((ROW_BLOCKS,), tl.int32)  # groups that end at or before the block
    padding = tl.zeros((ROW_BLOCKS,), tl.int32)  # rows of padding in those groups
    padded_start = 0
    for first in range(0, groups, GROUPS):
        g = first + tl.arange(0, GROUPS)
        known = g < groups
        size = tl.load(offs + g, mask=known, other=0) - tl.load(offs + g - 1, mask=known & (g > 0), other=0)
        padded_size = tl.cdiv(size, ALIGNMENT) * ALIGNMENT
        padded_end = padded_start + tl.cumsum(padded_size, 0)
        tl.store(padded_offs + g, padded_end, mask=known & (tl.program_id(0) == 0))
        passed = (padded_end[None, :] <= position[:, None]) & known[None, :]
        group += tl.sum(passed.to(tl.int32), 1)
        padding += tl.sum(tl.where(passed, (padded_size - size)[None, :], 0), 1)
        padded_start += tl.sum(padded_size, 0)
    row = position - padding
    stop_row = tl.minimum(tl.load(offs + group, mask=group < groups, other=0), rows)
    if TAIL:
        tail_start = tl.cdiv(padded_start, TAIL_ALIGNMENT) * TAIL_ALIGNMENT
        in_tail = position >= tail_start
        row = tl.where(in_tail, tl.load(offs + groups - 1) + position - tail_start, row)
        stop_row = tl.where(in_tail, rows, stop_row)
    tl.store(table + row_block, row, mask=row_block < row_blocks)
    tl.store(table + row_blocks + row_block, stop_row, mask=row_block < row_blocks)


def map_row_blocks(
    offs: Tensor, rows: int, row_blocks: int, *, alignment: int, tail_alignment: int | None = None
) -> RowBlockMap:
    """The map of ``row_blocks`` blocks of 32 rows.

    Args:
        offs: int32 (E,) end offsets of the packed groups, contiguous.
        rows: of the packed axis.
        row_blocks: as many as the groups, and with ``tail_alignment`` the tail, may fill.
        alignment: padded groups start at multiples of it; itself a multiple of 32.
        tail_alignment: with it, the blocks from its next multiple on hold the rows past the last group; else none.
    """
    groups = offs.shape[0]
    table = torch.empty(2 * row_blocks + groups, dtype=torch.int32, device=offs.device)
    constants = (alignment, tail_alignment is not None, tail_alignment, 128, 32)
    programs = max(ceil_div(row_blocks, 128), 1)
    _map_row_blocks.launch(programs, (offs, table), (), (groups, row_blocks, rows), constants, device=offs.device)
    return RowBlockMap(table, row_blocks)
