"""SwiGLU's gradients in tiles of ``tiles.load_tile``: FP8, transposed along M."""

import triton
import triton.language as tl

from titan_mxfp8.backends.common.activation import gradient_of_gate, gradient_of_up, load_parts, rounded, store_products
from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.common.tiles import (
    columns_to_elements,
    columnwise_scales,
    in_rows,
    rows_to_elements,
    rowwise_scales,
    store_matrix,
    transposed,
)


@triton.jit
def store_rows(values, data, scale, row, stop, tile_col, cols, FLOOR: tl.constexpr, E5M2: tl.constexpr):
    """Stores a tile (8, 1, 2, 4, SEGMENT) in bf16, as ``load_tile`` lays it, as FP8 along the last axis, at those of
    its 32 rows ``row`` that are before ``stop``."""
    values = values.to(tl.float32)
    byte = rowwise_scales(values, FLOOR, E5M2)
    elements = rows_to_elements(values, byte, E5M2)
    store_matrix(data, elements, row, stop, tile_col * 128 + tl.arange(0, 128), cols)
    store_matrix(scale, in_rows(byte), row, stop, tile_col * 4 + tl.arange(0, 4), tl.cdiv(cols, 32))


@triton.jit
def store_transposed(
    values, data, scale, tile_row, tile_col, cols, padded_blocks,
    FLOOR: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    """Stores a tile (8, BLOCKS, 1, 4, SEGMENT) in bf16, as ``load_tile`` lays it, as FP8 along the first axis,
    transposed, at its place in the padded rows."""
    BLOCKS: tl.constexpr = values.shape[1]
    SEGMENT: tl.constexpr = values.shape[4]
    values = values.to(tl.float32)
    byte = columnwise_scales(values, FLOOR, E5M2)  # (BLOCKS, 1, SEGMENT)
    col = tile_col * SEGMENT + tl.arange(0, SEGMENT)
    elements = transposed(columns_to_elements(values, byte, E5M2))
    byte = tl.reshape(tl.permute(byte, (1, 2, 0)), (SEGMENT, BLOCKS))
    store_matrix(scale, byte, col, cols, tile_row * BLOCKS + tl.arange(0, BLOCKS), padded_blocks)
    row = tile_row * 32 * BLOCKS + tl.arange(0, 32 * BLOCKS)
    store_matrix(data, elements, col, cols, row, padded_blocks * 32)


@triton.jit(do_not_specialize=["rows", "padded_blocks", "row_blocks", "groups"])
def _swiglu_backward(
    gate, up, u, scores, sums, table,
    dgate_rowwise, dgate_rowwise_scale, dup_rowwise, dup_rowwise_scale,
    dgate_columnwise, dgate_columnwise_scale, dup_columnwise, dup_columnwise_scale, h_columnwise, h_columnwise_scale,
    cols, gate_stride, up_stride, u_stride,
    rows, padded_blocks, row_blocks, groups,
    LIMIT: tl.constexpr, RAGGED: tl.constexpr, SCORED: tl.constexpr,
    FLOOR: tl.constexpr, E5M2: tl.constexpr, H_E5M2: tl.constexpr,
    BLOCKS: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """One program: a tile of ``32 * BLOCKS`` rows and 128 columns, its rows those of the next blocks of the map; what
    is quantised along M is stored transposed."""
    ROWS: tl.constexpr = 32 * BLOCKS
    col_tiles = tl.cdiv(cols, 128)
    tile_col = tl.program_id(0) % col_tiles  # neighbours in a row run together
    tile_row = tl.program_id(0) // col_tiles
    if RAGGED:
        if tile_row * ROWS >= tl.load(table + 2 * row_blocks + groups - 1):
            return
    if SCORED:
        sums += tile_col.to(tl.int64) * rows
    # Outputs load again, from the L1, and compute again: that costs less than the registers for all of them. First
    # along H, 32 rows of 128 columns at a time, then along M, all rows of 64 columns: whole blocks of the axis either
    # time.
    for block in range(BLOCKS):
        g, v, du, cut_g, factor, s, score, _, _, row, stop = load_parts(
            gate, up, u, scores, table, rows, cols, gate_stride, up_stride, u_stride,
            tile_row * BLOCKS + block, tile_col, row_blocks, LIMIT, RAGGED, SCORED, 1, 2, SEGMENT,
        )  # fmt: skip
        if SCORED:
            store_products(sums, cut_g * s * factor, du, row, stop)
        dup = rounded(gradient_of_up(v, du * score, cut_g, s, LIMIT))
        store_rows(dup, dup_rowwise, dup_rowwise_scale, row, stop, tile_col, cols, FLOOR, E5M2)
        dgate = rounded(gradient_of_gate(g, du * score, cut_g, factor, s, LIMIT))
        store_rows(dgate, dgate_rowwise, dgate_rowwise_scale, row, stop, tile_col, cols, FLOOR, E5M2)
    for segment in range(SEGMENTS):
        tile_segment = tile_col * SEGMENTS + segment
        for output in tl.static_range(3):
            g, v, du, cut_g, factor, s, score, _, _, row, stop = load_parts(
                gate, up, u, scores, table, rows, cols, gate_stride, up_stride, u_stride,
                tile_row, tile_segment, row_blocks, LIMIT, RAGGED, SCORED, BLOCKS, 1, SEGMENT,
            )  # fmt: skip
            if output == 0:
                values, data, scale = rounded(cut_g * s * factor * score), h_columnwise, h_columnwise_scale
            elif output == 1:
                values, data = rounded(gradient_of_up(v, du * score, cut_g, s, LIMIT)), dup_columnwise
                scale = dup_columnwise_scale
            else:
                values = rounded(gradient_of_gate(g, du * score, cut_g, factor, s, LIMIT))
                data, scale = dgate_columnwise, dgate_columnwise_scale
            store_transposed(
                values, data, scale, tile_row, tile_segment, cols, padded_blocks,
                FLOOR, H_E5M2 if output == 0 else E5M2,
            )  # fmt: skip


SWIGLU_BACKWARD = Kernel(_swiglu_backward)
