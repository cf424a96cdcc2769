"""SwiGLU's gradients in tiles of ``tiles.load_tile``: FP8 that is transposed along M, and bf16 for other quantisers."""

import torch
import triton
import triton.language as tl

from titan_mxfp8.backends.common.activation import (
    activation,
    alpha_of,
    gradient_of_gate,
    gradient_of_up,
    load_parts,
    matrices_of,
    memory_of,
    rounded,
    store_products,
)
from titan_mxfp8.backends.common.convert import magnitude_bits, reciprocal_scale, scale_byte, to_elements
from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.common.tiles import columns_to_elements, store_matrix, transposed
from titan_mxfp8.format import swiglu as definition
from titan_mxfp8.format.mx import ceil_div

GRADIENT_ROWS, GRADIENT_COLS = 4, 256


def gradients(
    inputs: list[torch.Tensor], scores_M: torch.Tensor | None, limit: float | None, offs: torch.Tensor | None
) -> definition.Gradients:
    """``format.swiglu.backward`` itself of gate, up and u, nothing quantised; rows at and past ``offs[-1]`` are not
    computed. The list is emptied, and dgate takes the memory of u."""
    gate, up, u = matrices_of(*inputs)
    inputs.clear()
    dup, sh = (torch.empty_like(gate.x, memory_format=torch.contiguous_format) for _ in range(2))
    dgate = memory_of(u)
    dscores = None if scores_M is None else scores_M.new_empty(gate.rows)
    _GRADIENTS.launch(
        ceil_div(gate.rows, GRADIENT_ROWS),
        (gate.x, up.x, u.x, scores_M if scores_M is None else scores_M.contiguous(), dgate, dup, sh, dscores, offs),
        (gate.cols, gate.row_stride, up.row_stride, u.row_stride), (gate.rows, 0 if offs is None else offs.shape[0]),
        (limit, alpha_of(limit), offs is not None, scores_M is not None, GRADIENT_ROWS, GRADIENT_COLS),
        device=gate.x.device,
    )  # fmt: skip
    return definition.Gradients(dgate, dup, sh, dscores)


@triton.jit
def store_rows(
    values, data, scale, row, stop, tile_col, cols,
    FLOOR: tl.constexpr, E5M2: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Stores a tile (8, 1, 2, 4, SEGMENT) in bf16, as ``load_tile`` lays it, as FP8 along the last axis, at those of
    its 32 rows ``row`` that are before ``stop``."""
    in_blocks = tl.reshape(values.to(tl.float32), (8, 1, 2, 4, SEGMENT // 32, 32))
    byte = scale_byte(tl.max(magnitude_bits(in_blocks), 5), FLOOR, E5M2)
    elements = to_elements(in_blocks * reciprocal_scale(byte)[:, :, :, :, :, None], byte[:, :, :, :, :, None], E5M2)
    elements = tl.reshape(elements, (8, 1, 2, 4, SEGMENT))
    elements = tl.reshape(tl.permute(elements, (1, 3, 0, 2, 4)), (32, 2 * SEGMENT))
    store_matrix(data, elements, row, stop, tile_col * 128 + tl.arange(0, 128), cols)
    scales = tl.reshape(tl.permute(byte, (1, 3, 0, 2, 4)), (32, 4))
    store_matrix(scale, scales, row, stop, tile_col * 4 + tl.arange(0, 4), tl.cdiv(cols, 32))


@triton.jit
def store_transposed(
    values, data, scale, tile_row, tile_col, cols, padded_blocks,
    FLOOR: tl.constexpr, E5M2: tl.constexpr, BLOCKS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Stores a tile (8, BLOCKS, 1, 4, SEGMENT) in bf16, as ``load_tile`` lays it, as FP8 along the first axis,
    transposed, at its place in the padded rows."""
    values = values.to(tl.float32)
    byte = scale_byte(tl.max(tl.max(magnitude_bits(values), 0), 2), FLOOR, E5M2)  # (BLOCKS, 1, SEGMENT)
    col = tile_col * SEGMENT + tl.arange(0, SEGMENT)
    elements = transposed(columns_to_elements(values, byte, E5M2, BLOCKS, 1, SEGMENT), BLOCKS, 1, SEGMENT)
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
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, RAGGED: tl.constexpr, SCORED: tl.constexpr,
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
            tile_row * BLOCKS + block, tile_col, row_blocks, LIMIT, ALPHA, RAGGED, SCORED, 1, 2, SEGMENT,
        )  # fmt: skip
        if SCORED:
            store_products(sums, cut_g * s * factor, du, row, stop, 1)
        dup = rounded(gradient_of_up(v, du * score, cut_g, s, LIMIT))
        store_rows(dup, dup_rowwise, dup_rowwise_scale, row, stop, tile_col, cols, FLOOR, E5M2, SEGMENT)
        dgate = rounded(gradient_of_gate(g, du * score, cut_g, factor, s, LIMIT, ALPHA))
        store_rows(dgate, dgate_rowwise, dgate_rowwise_scale, row, stop, tile_col, cols, FLOOR, E5M2, SEGMENT)
    for segment in range(SEGMENTS):
        tile_segment = tile_col * SEGMENTS + segment
        for output in tl.static_range(3):
            g, v, du, cut_g, factor, s, score, _, _, row, stop = load_parts(
                gate, up, u, scores, table, rows, cols, gate_stride, up_stride, u_stride,
                tile_row, tile_segment, row_blocks, LIMIT, ALPHA, RAGGED, SCORED, BLOCKS, 1, SEGMENT,
            )  # fmt: skip
            if output == 0:
                values, data, scale = rounded(cut_g * s * factor * score), h_columnwise, h_columnwise_scale
            elif output == 1:
                values, data = rounded(gradient_of_up(v, du * score, cut_g, s, LIMIT)), dup_columnwise
                scale = dup_columnwise_scale
            else:
                values = rounded(gradient_of_gate(g, du * score, cut_g, factor, s, LIMIT, ALPHA))
                data, scale = dgate_columnwise, dgate_columnwise_scale
            store_transposed(
                values, data, scale, tile_row, tile_segment, cols, padded_blocks,
                FLOOR, H_E5M2 if output == 0 else E5M2, BLOCKS, SEGMENT,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "groups"])
def _gradients(
    gate, up, u, scores, dgate, dup, sh, dscores, offs,
    cols, gate_stride, up_stride, u_stride,
    rows, groups,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, RAGGED: tl.constexpr, SCORED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One program: ``ROWS`` rows, ``COLS`` columns at a time, so that it has the whole sums of u * h of its rows."""
    end = rows
    if RAGGED:
        end = tl.minimum(tl.load(offs + groups - 1), rows)
        if tl.program_id(0) * ROWS >= end:
            return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    products = tl.zeros((ROWS,), tl.float32)
    score = tl.full((ROWS,), 1.0, tl.float32)
    if SCORED:
        score = tl.load(scores + row, mask=row < end, other=0)
    far = row.to(tl.int64)[:, None]
    for first in range(0, cols, COLS):
        col = first + tl.arange(0, COLS)[None, :]
        inside = (row < end)[:, None] & (col < cols)
        g = tl.load(gate + far * gate_stride + col, mask=inside, other=0).to(tl.float32)
        v = tl.load(up + far * up_stride + col, mask=inside, other=0).to(tl.float32)
        du = tl.load(u + far * u_stride + col, mask=inside, other=0).to(tl.float32)
        cut_g, factor, s = activation(g, v, LIMIT, ALPHA)
        h = cut_g * s * factor
        products += tl.sum(du * rounded(h).to(tl.float32), 1)  # of h as ``format.swiglu`` has it, in bf16
        at = far * cols + col
        dh = du * score[:, None]
        tl.store(sh + at, rounded(h * score[:, None]), mask=inside)
        tl.store(dup + at, rounded(gradient_of_up(v, dh, cut_g, s, LIMIT)), mask=inside)
        tl.store(dgate + at, rounded(gradient_of_gate(g, dh, cut_g, factor, s, LIMIT, ALPHA)), mask=inside)
    if SCORED:
        tl.store(dscores + row, products, mask=row < end)


_GRADIENTS = Kernel(_gradients)
SWIGLU_BACKWARD = Kernel(_swiglu_backward)
