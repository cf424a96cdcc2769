"""Pad and unpad of token groups: each group moves to the next multiple of an alignment, and back."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_mxfp8.backends.common.groups import RowBlockMap, map_row_blocks, row_blocks_with_tail
from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.format.mx import ceil_div

BLOCK_ROWS = 16  # rows that a program moves; alignments are multiples of it
COLUMN_BYTES = 1024  # of a row that a program moves


def pad_token_groups(x: Tensor, offs: Tensor, *, alignment: int, padded_rows: int) -> tuple[Tensor, Tensor]:
    """The groups of ``x`` (M, D) in a buffer of ``padded_rows``, zeros elsewhere, and the padded groups' offsets."""
    x, offs = x.contiguous(), offs.contiguous()
    padded = torch.empty((padded_rows, x.shape[1]), dtype=x.dtype, device=x.device)
    row_block_map = map_row_blocks(
        offs, x.shape[0], row_blocks=padded_rows // BLOCK_ROWS, block_rows=BLOCK_ROWS, alignment=alignment
    )
    _move(padded, x, row_block_map, offs, pad=True)
    return padded, row_block_map.padded_offs


def unpad_token_groups(padded: Tensor, offs: Tensor, *, alignment: int, rows: int) -> Tensor:
    """The (rows, D) that ``pad_token_groups`` was given; rows past the last group are zeros."""
    padded, offs = padded.contiguous(), offs.contiguous()
    packed = torch.empty((rows, padded.shape[1]), dtype=padded.dtype, device=padded.device)
    kwargs = {"block_rows": BLOCK_ROWS, "alignment": alignment, "tail_alignment": BLOCK_ROWS}
    row_block_map = map_row_blocks(offs, rows, row_blocks=row_blocks_with_tail(rows, offs.shape[0], **kwargs), **kwargs)
    _move(packed, padded, row_block_map, offs, pad=False)
    return packed


@triton.jit(do_not_specialize=["row_blocks", "groups"])
def _move_row_blocks(
    out, source, table, offs, cols, row_blocks, groups, BLOCK_ROWS: tl.constexpr, COLS: tl.constexpr, PAD: tl.constexpr
):
    """One program: ``BLOCK_ROWS`` rows of a block of the map, ``COLS`` of their columns, into the padded buffer or
    out of it.

    ``offs = [2, 40]`` aligned to 32: block 3, padded rows 48..63, holds packed rows 18..33.
    """
    col_tiles = tl.cdiv(cols, COLS)
    row_block = tl.program_id(0) // col_tiles
    i = tl.arange(0, BLOCK_ROWS)
    col = (tl.program_id(0) % col_tiles * COLS + tl.arange(0, COLS))[None, :]
    packed_row = tl.load(table + row_block) + i
    inside = (packed_row < tl.load(table + row_blocks + row_block))[:, None]
    packed = packed_row.to(tl.int64)[:, None] * cols + col
    padded = (row_block.to(tl.int64) * BLOCK_ROWS + i)[:, None] * cols + col
    if PAD:
        tl.store(out + padded, tl.load(source + packed, mask=inside & (col < cols), other=0), mask=col < cols)
    else:
        in_group = (packed_row < tl.load(offs + groups - 1))[:, None]  # else the tail
        values = tl.load(source + padded, mask=inside & in_group & (col < cols), other=0)
        tl.store(out + packed, values, mask=inside & (col < cols))


_MOVE_ROW_BLOCKS = Kernel(_move_row_blocks)


def _move(out: Tensor, source: Tensor, row_block_map: RowBlockMap, offs: Tensor, *, pad: bool) -> None:
    cols = out.shape[1]
    tile_cols = COLUMN_BYTES // out.element_size()
    programs = row_block_map.row_blocks * ceil_div(cols, tile_cols) if out.numel() else 0
    tensors, counts = (out, source, row_block_map.table, offs), (row_block_map.row_blocks, offs.shape[0])
    _MOVE_ROW_BLOCKS.launch(programs, tensors, (cols,), counts, (BLOCK_ROWS, tile_cols, pad), device=out.device)
