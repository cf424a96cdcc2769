"""Quantise kernels of 32x32 blocks: exact, coalesced or rebased, as ``x`` lies, transposed, or both in one read.

Host tensors have R rows, C columns and B matrices; P is R to a multiple of 32. Rebased scales are MN-major
(``OperandSpec.scales``), their last axis rounded up to a multiple of 16:

| output     | elements  | exact and coalesced scales | rebased: 32x128      |
|------------|-----------|----------------------------|----------------------|
| rowwise    | (B, R, C) | (B, R / 32, C / 32)        | (B, C / 128, R / 32) |
| columnwise | (B, C, P) | (B, C / 32, P / 32)        | (B, P / 128, C / 32) |
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_mxfp8.backends.common.convert import (
    coalesce_scales,
    halving_bits,
    reciprocal_scale,
    shift_elements,
    to_elements,
)
from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.common.tiles import (
    ABSENT,
    BOTH_TILES,
    as_matrices,
    columns_to_elements,
    in_rows,
    load_tile,
    of_columns,
    rounding_of,
    source_of,
    square_scales,
    store_matrix,
    tile_position,
    transposed,
)
from titan_mxfp8.format.mx import ceil_div
from titan_mxfp8.format.spec import Operand


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _quantize_squares(
    x, x_scale, rowwise_qdata, rowwise_scale, columnwise_qdata, columnwise_scale,
    cols, batch_stride, row_stride,
    rows,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr,
    COALESCE: tl.constexpr, REBASE: tl.constexpr,
    BLOCKS: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """One program: a 128 x 128 tile in 32x32 blocks, along the last axis, the first one or both.

    With ``x_scale``, ``x`` is FP8 of exact blocks: their elements and scales are taken as they are.
    """
    tl.static_assert(SEGMENTS * SEGMENT == 128 and BLOCKS == 4)
    IS_FP8: tl.constexpr = x_scale is not None
    SQUARES: tl.constexpr = SEGMENT // 32
    col_tiles = tl.cdiv(cols, 128)
    row_tiles = tl.cdiv(rows, 128)
    batch, tile_row, tile_col = tile_position(col_tiles, row_tiles)
    values, _, _, _ = load_tile(
        x + batch * batch_stride, None, None, rows, cols, row_stride, tile_row, tile_col, row_tiles * 4, rows,
        32 if IS_FP8 else 0, E5M2, False, BLOCKS, SEGMENTS, SEGMENT,
    )  # fmt: skip
    values = tl.reshape(values, (8, BLOCKS, SEGMENTS, 4, SEGMENT))
    if IS_FP8:
        block_row = tile_row * 4 + tl.arange(0, 4)[:, None, None]
        square = tl.arange(0, SEGMENTS)[None, :, None] * SQUARES + tl.arange(0, SQUARES)[None, None, :]
        block_col = tile_col * 4 + square
        squares_in_row = tl.cdiv(cols, 32)
        at = (batch * tl.cdiv(rows, 32) + block_row) * squares_in_row + block_col
        known = (block_row < tl.cdiv(rows, 32)) & (block_col < squares_in_row)
        byte = tl.load(x_scale + at, mask=known, other=0).to(tl.int32)
    else:
        byte = square_scales(values, FLOOR, E5M2)
    wide = of_columns(byte)
    rounded_by = tl.where(wide == 255, 255, 127) if IS_FP8 else wide  # elements are to be divided by nothing
    row = tile_row * 128 + tl.arange(0, 128)
    col = tile_col * 128 + tl.arange(0, 128)
    row_block = tile_row * 4 + tl.arange(0, 4)
    col_block = tile_col * 4 + tl.arange(0, 4)
    row_blocks, col_blocks = tl.cdiv(rows, 32), tl.cdiv(cols, 32)
    if ROWWISE:
        old, divisor = wide[None, :, :, None, :], rounded_by[None, :, :, None, :]
        elements = to_elements(values * reciprocal_scale(divisor), divisor, E5M2)
        if REBASE:
            largest = tl.max(tl.max(byte, 2), 1)
            new = largest[None, :, None, None, None]
            stored = shift_elements(elements, old, new, E5M2)
            rowwise_scale += (batch * col_tiles + tile_col) * (tl.cdiv(row_blocks, 16) * 16)
            tl.store(rowwise_scale + row_block, largest.to(tl.uint8), mask=row_block < row_blocks)
        else:
            scales, stored = tl.reshape(byte, (BLOCKS, 4)), elements
            if COALESCE:
                halvings = tl.reduce_or(tl.reduce_or(halving_bits(elements, E5M2), 0), 2)  # (BLOCKS, SEGMENTS, SEGMENT)
                halvings = tl.reduce_or(tl.reshape(halvings, (BLOCKS, 4, 32)), 2)
                scales = coalesce_scales(scales, halvings, BLOCKS)
                new = tl.reshape(tl.broadcast_to(scales[:, :, None], (BLOCKS, 4, 32)), (BLOCKS, SEGMENTS, SEGMENT))
                stored = shift_elements(elements, old, new[None, :, :, None, :], E5M2)
            rowwise_scale += batch * row_blocks * col_blocks
            store_matrix(rowwise_scale, scales, row_block, row_blocks, col_block, col_blocks)
        store_matrix(rowwise_qdata + batch * rows * cols, in_rows(stored), row, rows, col, cols)
    if COLUMNWISE:
        elements = columns_to_elements(values, rounded_by, E5M2)  # (4, BLOCKS, SEGMENTS, 4, SEGMENT, 2)
        old = wide[None, :, :, None, :, None]
        if REBASE:
            largest = tl.max(byte, 0)
            new = tl.reshape(tl.broadcast_to(largest[:, :, None], (SEGMENTS, SQUARES, 32)), (SEGMENTS, SEGMENT))
            new = new[None, None, :, None, :, None]
            stored = shift_elements(elements, old, new, E5M2)
            columnwise_scale += (batch * row_tiles + tile_row) * (tl.cdiv(col_blocks, 16) * 16)
            tl.store(columnwise_scale + col_block, tl.reshape(largest, (4,)).to(tl.uint8), mask=col_block < col_blocks)
        else:
            scales, stored = tl.trans(tl.reshape(byte, (BLOCKS, 4))), elements
            if COALESCE:
                if not ROWWISE:
                    halvings = tl.reduce_or(tl.reduce_or(halving_bits(elements, E5M2), 5), 0)
                    halvings = tl.reduce_or(halvings, 2)  # (BLOCKS, SEGMENTS, SEGMENT)
                    halvings = tl.reduce_or(tl.reshape(halvings, (BLOCKS, 4, 32)), 2)
                scales = coalesce_scales(scales, tl.trans(halvings), 4)
                new = tl.broadcast_to(tl.trans(scales)[:, :, None], (BLOCKS, 4, 32))
                new = tl.reshape(new, (BLOCKS, SEGMENTS, SEGMENT))
                stored = shift_elements(elements, old, new[None, :, :, None, :, None], E5M2)
            columnwise_scale += batch * row_blocks * col_blocks
            store_matrix(columnwise_scale, scales, col_block, col_blocks, row_block, row_blocks)
        padded_rows = row_blocks * 32
        store_matrix(columnwise_qdata + batch * padded_rows * cols, transposed(stored), col, cols, row, padded_rows)


def launch(
    x: Tensor, rowwise: Operand | None, columnwise: Operand | None, offs: Tensor | None, source: Operand | None
) -> None:
    """Fills operands of 32x32 blocks in FP8, but with swizzled scales, see ``quantizers.LAUNCHES``."""
    assert offs is None, "squares are cut by no groups"
    spec, matrices = (rowwise or columnwise).spec, as_matrices(x, x.ndim - 2)
    (segment, _), coalesced = source_of(x, source), spec.stored == "coalesced"
    tile = BOTH_TILES[segment]
    # So that two programs fit on a multiprocessor: of bf16, coalesced, Triton 3.6 takes 167 registers, and on an H100
    # 1.3 times as long. Of fp32 one of 16 warps takes 1.1 times as long as two of 8.
    is_wide = x.dtype == torch.float32 and rowwise is not None and columnwise is not None
    both = rowwise and columnwise and spec.elem_dtype == torch.float8_e4m3fn
    registers = 128 if both and (coalesced or is_wide) else None
    constants = (
        rowwise is not None, columnwise is not None, *rounding_of(spec), coalesced, spec.block_k == 128,
        tile.blocks, tile.segments, segment,
    )  # fmt: skip
    _quantize_squares.launch(
        matrices.batches * ceil_div(matrices.rows, 128) * ceil_div(matrices.cols, 128),
        (matrices.x, source and source.scale, *(rowwise or ABSENT)[:2], *(columnwise or ABSENT)[:2]),
        matrices.sizes, (matrices.rows,), constants,
        device=x.device, warps=tile.warps // 2 if is_wide else tile.warps, registers=registers,
    )  # fmt: skip
