"""Quantise kernels that rebase or coalesce (``format.reference``) 1x32 blocks as they make them, in one read.

Host tensors have R rows, C columns and B matrices; P is R to a multiple of 32, or with ragged groups
``ragged_rows(R, groups, 128)``. Rebased scales are MN-major (``OperandSpec.scales``), their last axis rounded up to a
multiple of 16:

| output     | elements  | scales 1x128    | scales 32x128        | coalesced      |
|------------|-----------|-----------------|----------------------|----------------|
| rowwise    | (B, R, C) | (B, C / 128, R) | (B, C / 128, R / 32) | (B, R, C / 32) |
| columnwise | (B, C, P) | (B, P / 128, C) | (B, P / 128, C / 32) |                |

A tile of 128 rows and 128 columns holds whole blocks of 128 along both axes, and its scales are whole sectors.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_mxfp8.backends.common.convert import (
    coalesce_scales,
    halving_bits,
    magnitude_bits,
    reciprocal_scale,
    scale_byte,
    shift_elements,
    to_elements,
)
from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.common.tiles import (
    ABSENT,
    BOTH_TILES,
    Tile,
    amax_of_squares,
    as_matrices,
    columns_to_elements,
    columnwise_scales,
    is_past,
    load_tile,
    map_tiles,
    of_columns,
    rounding_of,
    source_of,
    store_matrix,
    tile_position,
    transposed,
)
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import Operand

# By share of the copy bandwidth on an H200, 131072 x 7168 bf16. Rowwise alone: 32 rows and 4 warps 1.02, 16 rows 0.94.
# Columnwise alone: 128 rows and 1 segment 0.91, 256 rows 0.90. Both, 128 x 128: 0.76 (ragged) and 0.77; with 4 warps
# 0.68. With 64 registers four programs of both, ragged, fit instead of three: 1.13 ms instead of 1.23.
ROWWISE_ROWS = 32  # a sector of scales, or one scale for all of them
COLUMNWISE_TILE = Tile(rows=128, segments=1)
BOTH_REGISTERS = 64
# Of FP8 rows, 131072 x 7168: 0.68 ms, 2 segments 0.80. On Hopper most are for ``hopper/requantize_rows.py``.
REQUANTIZE_TILE = Tile(rows=128, segments=1)


@triton.jit
def rebase_rows(
    x, qdata, row, stop, cols, row_stride, tile_col,
    FLOOR: tl.constexpr, E5M2: tl.constexpr, ROWS: tl.constexpr, SQUARES: tl.constexpr, COALESCE: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows, those before ``stop``, and 128 columns of a matrix, along the last axis. Returns the scale of each
    row, with SQUARES the same, or with COALESCE the four of each."""
    col = tile_col * 128 + tl.arange(0, 128)
    inside = (row < stop)[:, None] & (col < cols)[None, :]
    values = tl.load(x + row.to(tl.int64)[:, None] * row_stride + col[None, :], mask=inside, other=0)
    values = tl.reshape(values.to(tl.float32), (ROWS, 4, 32))
    byte = scale_byte(tl.max(magnitude_bits(values), 2), FLOOR, E5M2)
    old = byte[:, :, None]
    elements = to_elements(values * reciprocal_scale(old), old, E5M2)
    if COALESCE:
        scale = coalesce_scales(byte, tl.reduce_or(halving_bits(elements, E5M2), 2), ROWS)
        shifted = shift_elements(elements, old, scale[:, :, None], E5M2)
    else:
        scale = tl.max(byte, 1)
        if SQUARES:
            scale = tl.zeros((ROWS,), tl.int32) + tl.max(scale, 0)
        new = scale[:, None, None]
        shifted = shift_elements(elements, old, new, E5M2)
    store_matrix(qdata, tl.reshape(shifted, (ROWS, 128)), row, stop, col, cols)
    return scale.to(tl.uint8)


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _rebase_rows(
    x, qdata, scale,
    cols, batch_stride, row_stride,
    rows,
    FLOOR: tl.constexpr, E5M2: tl.constexpr, ROWS: tl.constexpr, SQUARES: tl.constexpr, COALESCE: tl.constexpr,
):  # fmt: skip
    """One program: ``ROWS`` rows and 128 columns of one matrix, along the last axis."""
    col_tiles = tl.cdiv(cols, 128)
    row_tiles = tl.cdiv(rows, ROWS)
    batch, tile_row, tile_col = tile_position(col_tiles, row_tiles)
    row = tile_row * ROWS + tl.arange(0, ROWS)
    scales = rebase_rows(
        x + batch * batch_stride, qdata + batch * rows * cols,
        row, rows, cols, row_stride, tile_col, FLOOR, E5M2, ROWS, SQUARES, COALESCE,
    )  # fmt: skip
    if COALESCE:
        block, blocks = tile_col * 4 + tl.arange(0, 4), tl.cdiv(cols, 32)
        store_matrix(scale + batch * rows * blocks, scales, row, rows, block, blocks)
    else:
        scale_rows = row_tiles if SQUARES else rows
        scale += (batch * col_tiles + tile_col) * (tl.cdiv(scale_rows, 16) * 16)
        if SQUARES:
            tl.static_assert(ROWS == 32)
            tl.store(scale + tile_row, tl.max(scales, 0))
        else:
            tl.store(scale + row, scales, mask=row < rows)


@Kernel
@triton.jit(do_not_specialize=["rows", "padded_blocks", "row_blocks", "groups", "places_end"])
def _rebase_tiles(
    x, x_scale, places, rowwise_qdata, rowwise_scale, columnwise_qdata, columnwise_scale, table, offs,
    cols, batch_stride, row_stride,
    rows, padded_blocks, row_blocks, groups, places_end,
    X_BLOCK_K: tl.constexpr, X_E5M2: tl.constexpr,
    ROWWISE: tl.constexpr, SQUARES: tl.constexpr, RAGGED: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr,
    BLOCKS: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """One program: a tile of one matrix along the first axis and, with ``ROWWISE``, along the last one too.

    As ``quantize._quantize_tiles``, but that groups start at multiples of 128 rows, so that 128 rows of
    a tile belong to one group, and that the scales of a tile, one for each row and each column, or with ``SQUARES`` for
    32 columns, need no second kernel.
    """
    ROWS: tl.constexpr = BLOCKS * 32
    COLS: tl.constexpr = SEGMENTS * SEGMENT
    GROUPS: tl.constexpr = BLOCKS // 4
    col_tiles = tl.cdiv(cols, COLS)
    batch, tile_row, tile_col = tile_position(col_tiles, tl.cdiv(row_blocks, BLOCKS))
    if X_BLOCK_K and RAGGED:
        if is_past(table, offs, groups, tile_row, BLOCKS):
            return
    x += batch * batch_stride
    end = rows
    if ROWWISE:
        tl.static_assert(ROWS == 128 and COLS == 128)
        start, stop = tile_row * 128, rows
        if RAGGED:
            start = tl.load(table + tile_row * 4)
            stop = tl.load(table + row_blocks + tile_row * 4)
            end = tl.load(offs + groups - 1)  # the tail is zeros along the first axis
        row = start + tl.arange(0, 128)
        rowwise_largest = rebase_rows(
            x, rowwise_qdata + batch * rows * cols, row, stop, cols, row_stride, tile_col,
            FLOOR, E5M2, 128, False, False,
        )  # fmt: skip
        rowwise_scale += (batch * col_tiles + tile_col) * (tl.cdiv(rows, 16) * 16)
        tl.store(rowwise_scale + row, rowwise_largest, mask=row < stop)
    # A second load comes from the L1. In one layout for both axes a maximum would cross warps on either.
    values, _, _, _ = load_tile(
        x, x_scale, table, rows, cols, row_stride, tile_row, tile_col, row_blocks, end,
        X_BLOCK_K, X_E5M2, RAGGED, BLOCKS, SEGMENTS, SEGMENT, places, places_end,
    )  # fmt: skip
    values = tl.reshape(values, (8, BLOCKS, SEGMENTS, 4, SEGMENT))
    byte = columnwise_scales(values, FLOOR, E5M2)
    largest = tl.max(tl.reshape(byte, (GROUPS, 4, SEGMENTS, SEGMENT)), 1)
    if SQUARES:
        square = amax_of_squares(largest)
        largest = of_columns(square)
    wide = tl.broadcast_to(largest[:, None, :, :], (GROUPS, 4, SEGMENTS, SEGMENT))
    wide = tl.reshape(wide, (BLOCKS, SEGMENTS, SEGMENT))
    old, new = byte[None, :, :, None, :, None], wide[None, :, :, None, :, None]
    shifted = shift_elements(columns_to_elements(values, byte, E5M2), old, new, E5M2)
    padded_rows = padded_blocks * 32
    col = tile_col * COLS + tl.arange(0, COLS)
    position = tile_row * ROWS + tl.arange(0, ROWS)
    store_matrix(columnwise_qdata + batch * cols * padded_rows, transposed(shifted), col, cols, position, padded_rows)
    scale_rows = cols
    if SQUARES:
        largest = square
        col, scale_rows = tile_col * (COLS // 32) + tl.arange(0, COLS // 32), tl.cdiv(cols, 32)
    group, groups = tile_row * GROUPS + tl.arange(0, GROUPS), tl.cdiv(padded_rows, 128)
    columnwise_scale += (batch * groups + group.to(tl.int64)[:, None]) * (tl.cdiv(scale_rows, 16) * 16) + col[None, :]
    inside = (group < groups)[:, None] & (col < scale_rows)[None, :]
    tl.store(columnwise_scale, tl.reshape(largest, (GROUPS, col.shape[0])).to(tl.uint8), mask=inside)


def _launch_rows(x: Tensor, out: Operand) -> None:
    matrices = as_matrices(x, x.ndim - 2)
    _rebase_rows.launch(
        matrices.batches * ceil_div(matrices.rows, ROWWISE_ROWS) * ceil_div(matrices.cols, 128),
        (matrices.x, out.data, out.scale), matrices.sizes, (matrices.rows,),
        (*rounding_of(out.spec), ROWWISE_ROWS, out.spec.block_mn == 32, out.spec.stored == "coalesced"),
        device=x.device,
    )  # fmt: skip


def launch(
    x: Tensor,
    rowwise: Operand | None,
    columnwise: Operand | None,
    offs: Tensor | None,
    source: Operand | None,
    places: Tensor | None = None,
) -> None:
    """Fills operands of rebased or coalesced FP8 of 1x32 blocks, see ``quantizers.LAUNCHES``."""
    if columnwise is None:
        _launch_rows(x, rowwise)
        return
    assert columnwise.spec.block_k == 128, "coalesced 1x32 blocks are made along the last axis"
    matrices, (segment, source_constants) = as_matrices(x, x.ndim - 2), source_of(x, source)
    rows = matrices.rows if places is None else places.shape[0]
    if rowwise:
        tile = BOTH_TILES[segment]
    else:
        tile = REQUANTIZE_TILE if source else COLUMNWISE_TILE
    table, row_blocks = map_tiles(offs, rows, tile, tail=rowwise is not None, alignment=128)
    # Only what was timed so; without groups ptxas would spill.
    was_timed = x.dtype == torch.bfloat16 and columnwise.spec.elem_dtype == torch.float8_e4m3fn and offs is not None
    registers = BOTH_REGISTERS if rowwise and was_timed else None
    constants = (
        *source_constants, rowwise is not None, columnwise.spec.block_mn == 32, offs is not None,
        *rounding_of(columnwise.spec), tile.blocks, tile.segments, segment,
    )  # fmt: skip
    _rebase_tiles.launch(
        matrices.batches * ceil_div(row_blocks, tile.blocks) * ceil_div(matrices.cols, tile.segments * segment),
        (matrices.x, source and source.scale, places, *(rowwise or ABSENT)[:2], *columnwise[:2], table, offs),
        matrices.sizes,
        (rows, columnwise.data.shape[-1] // BLOCK_SIZE, row_blocks, 0 if offs is None else offs.shape[0],
         matrices.rows),
        constants, device=x.device, warps=tile.warps, registers=registers,
    )  # fmt: skip
