"""SwiGLU of the experts (``format.swiglu``) and its gradients, with the score, quantised as they are made.

| kernel     | reads, bytes an element | writes                                                                   |
|------------|-------------------------|--------------------------------------------------------------------------|
| ``swiglu`` | 4: gate, up             | h along H                                                                |
| backward   | 6: gate, up, u          | dgate and dup along H and along M, score times h along M, sums of u * h  |
| gradients  | 6: gate, up, u          | dgate, dup and score times h in bf16, for quantisers; sums of u * h      |

dgate in bf16, or as values in bf16 along M, takes the memory of u: a program writes it last, after all that it reads.

With ragged groups programs past ``offs[-1]`` end at once, and what belongs to no group is neither read nor written,
but for the zeros between groups that start at multiples of 32 or 128 rows.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from titan_mxfp8.backends import SwigluGradients
from titan_mxfp8.backends.common.convert import (
    element_units,
    even_scales,
    magnitude_bits,
    reciprocal_scale,
    scale_byte,
    shift_elements,
    to_elements,
)
from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.common.pairs import (
    join_pairs,
    load_pairs,
    magnitude_bits_of_pairs,
    pair_maxima,
    round_pairs,
    split_pairs,
    store_pairs,
    tile_blocks,
)
from titan_mxfp8.backends.common.tiles import (
    LINE_BYTES,
    Matrices,
    Tile,
    as_matrices,
    columns_to_elements,
    load_tile,
    map_tiles,
    store_matrix,
    transposed,
    unit_rows,
)
from titan_mxfp8.format import swiglu as definition
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import UNQUANTIZED, Operand, OperandSpec
from titan_mxfp8.format.swiglu import GPT_OSS_ALPHA

# How an operand lies: unquantised; values in bf16; FP8 with scales of 1x32, evened out, or of 1x128 across.
Form = Literal["bf16", "values", "fp8", "coalesced", "across"]

TRANSPOSED_TILE = Tile(rows=128, lines=2)
LINE = LINE_BYTES // 2
GRADIENT_ROWS, GRADIENT_COLS = 4, 256
COLS = 2 * LINE  # of all tiles: whole blocks of 128
LIMITED_ALPHA = tl.constexpr(GPT_OSS_ALPHA)  # for _limited


def swiglu(
    gate_MH: torch.Tensor, up_MH: torch.Tensor, limit: float | None, spec: OperandSpec, offs: torch.Tensor | None
) -> Operand:
    """``Backend.swiglu``."""
    gate, up = matrices_of(gate_MH, up_MH)
    out = spec.empty(gate.x, 1, None)
    cols, strides = _in_pairs(gate, up)
    _SWIGLU.launch(
        ceil_div(gate.rows, BLOCK_SIZE) * ceil_div(gate.cols, COLS),
        (gate.x, up.x, out.data, out.scale, offs),
        (cols, *strides), (gate.rows, 0 if offs is None else offs.shape[0]),
        (limit, alpha_of(limit), offs is not None, _form(spec), *rounding_of(spec)), device=gate.x.device,
    )  # fmt: skip
    return out


def swiglu_backward(
    inputs: list[torch.Tensor],
    scores_M: torch.Tensor | None,
    limit: float | None,
    last: OperandSpec,
    first: OperandSpec,
    h_first: OperandSpec,
    offs: torch.Tensor | None,
) -> SwigluGradients:
    """``Backend.swiglu_backward``, but to rebased operands along M."""
    assert _form(first) == _form(h_first) and _form(first) not in ("coalesced", "across"), (first, h_first)
    roundings = {spec.rounding for spec in (last, first, h_first) if spec.is_quantized}
    assert len(roundings) <= 1 and (not first.is_quantized or first.elem_dtype == last.elem_dtype), (last, first)
    gate, up, u = matrices_of(*inputs)
    inputs.clear()
    groups = None if offs is None else offs.shape[0]
    in_place = Operand(_memory_of(u), None, first, 0) if first.stored == "bf16" else first.empty(gate.x, 0, groups)
    if first == last and not last.is_quantized:  # the same values along either axis
        operands = [in_place._replace(axis=1), last.empty(gate.x, 1, None)]
        operands += [operand._replace(axis=0) for operand in operands]
    else:
        operands = [*(last.empty(gate.x, 1, None) for _ in range(2)), in_place, first.empty(gate.x, 0, groups)]
    operands.append(h_first.empty(gate.x, 0, groups))
    tile = TRANSPOSED_TILE  # the map is the same for any, as it has no tail
    unit_map = None if offs is None else map_tiles(offs, gate.rows, tile, tail=False, alignment=first.block_k)
    units = ceil_div(gate.rows, BLOCK_SIZE) if unit_map is None else unit_map.units
    col_tiles = ceil_div(gate.cols, COLS)
    sums = None
    if scores_M is not None:
        sums = torch.empty((col_tiles, gate.rows), dtype=torch.float32, device=gate.x.device)
        scores_M = scores_M.contiguous()
    sources = gate.x, up.x, u.x, scores_M, sums, unit_map and unit_map.table
    constants = limit, alpha_of(limit), offs is not None, scores_M is not None, *rounding_of(last)
    constants += (h_first.elem_dtype == torch.float8_e5m2,)
    if operands[-1].scale is not None:
        assert _form(last) == "fp8", last
        _SWIGLU_BACKWARD.launch(
            ceil_div(units, tile.blocks) * col_tiles,
            (*sources, *(tensor for operand in operands for tensor in operand[:2])),
            (gate.cols, gate.row_stride, up.row_stride, u.row_stride),
            (gate.rows, operands[-1].data.shape[-1] // BLOCK_SIZE, units, groups or 0),
            (*constants, tile.blocks, tile.lines, LINE), device=gate.x.device, warps=8,
        )  # fmt: skip
    else:
        cols, strides = _in_pairs(gate, up, u)
        _SWIGLU_BACKWARD_IN_ROWS.launch(
            units * col_tiles,
            (*sources, *(tensor for operand in operands[:2] for tensor in operand[:2]),
             *(operand.data for operand in operands[2:])),
            (cols, *strides), (gate.rows, units), (*constants, _form(last), first.is_quantized),
            device=gate.x.device,
        )  # fmt: skip
    return SwigluGradients(*operands, None if sums is None else sums.sum(0))


def gradients(
    inputs: list[torch.Tensor], scores_M: torch.Tensor | None, limit: float | None, offs: torch.Tensor | None
) -> definition.Gradients:
    """``format.swiglu.backward`` itself of gate, up and u, nothing quantised; rows at and past ``offs[-1]`` are not
    computed. The list is emptied, and dgate takes the memory of u."""
    gate, up, u = matrices_of(*inputs)
    inputs.clear()
    dup, sh = (torch.empty_like(gate.x, memory_format=torch.contiguous_format) for _ in range(2))
    dgate = _memory_of(u)
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
def sigmoid(x):
    """``1 / (1 + tl.exp(-x))``; on NVIDIA in half the instructions, but 0 where that is below 2^-126."""
    if cuda_capability_geq(8, 0):
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
            "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return 1 / (1 + tl.exp(-x))


@triton.jit
def rounded(values):
    """``values.to(tl.bfloat16)``, on NVIDIA two at a time, which ptxas does not see by itself."""
    if cuda_capability_geq(8, 0):
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [values], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return values.to(tl.bfloat16)


@triton.jit
def activation(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """The cut gate, what it is multiplied by, and its sigmoid."""
    if LIMIT is None:
        return gate, up, sigmoid(gate)
    else:
        NAN_STAYS: tl.constexpr = tl.PropagateNan.ALL
        gate = tl.minimum(gate, LIMIT, NAN_STAYS)
        up = tl.maximum(tl.minimum(up, LIMIT, NAN_STAYS), -LIMIT, NAN_STAYS)
        return gate, up + 1, sigmoid(ALPHA * gate)


@triton.jit
def load_parts(
    gate, up, u, scores, table, rows, cols, gate_stride, up_stride, u_stride, tile_row, tile_col, units,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, RAGGED: tl.constexpr, SCORED: tl.constexpr,
    BLOCKS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """What the gradients are made of, tiles of (8, BLOCKS, LINES, 4, LINE) in fp32.

    Returns:
        gate, up and u; the parts of ``activation``; the scores, which broadcast; and of the tile its places in a matrix
        of ``cols`` columns and its mask, as ``load_tile`` lays it, its rows and where they end.
    """
    g, row, col, inside = load_tile(
        gate, None, table, rows, cols, gate_stride, tile_row, tile_col, units, rows,
        0, False, RAGGED, BLOCKS, LINES, LINE,
    )  # fmt: skip
    at = row.to(tl.int64)[:, None] * cols + col
    v, _, _, _ = load_tile(
        up, None, table, rows, cols, up_stride, tile_row, tile_col, units, rows,
        0, False, RAGGED, BLOCKS, LINES, LINE,
    )  # fmt: skip
    du, _, _, _ = load_tile(
        u, None, table, rows, cols, u_stride, tile_row, tile_col, units, rows,
        0, False, RAGGED, BLOCKS, LINES, LINE,
    )  # fmt: skip
    row, stop = unit_rows(table, rows, tile_row, units, RAGGED, BLOCKS)
    row = tl.reshape(row[:, None] + tl.arange(0, 32)[None, :], (32 * BLOCKS,))
    stop = tl.reshape(tl.broadcast_to(stop[:, None], (BLOCKS, 32)), (32 * BLOCKS,))
    score = 1.0
    if SCORED:
        score = tl.load(scores + row, mask=row < stop, other=0)
        score = tl.permute(tl.reshape(score, (BLOCKS, 4, 8)), (2, 0, 1))[:, :, None, :, None]
    g = tl.reshape(g, (8, BLOCKS, LINES, 4, LINE))
    v = tl.reshape(v, (8, BLOCKS, LINES, 4, LINE))
    du = tl.reshape(du, (8, BLOCKS, LINES, 4, LINE))
    cut_g, factor, s = activation(g, v, LIMIT, ALPHA)
    return g, v, du, cut_g, factor, s, score, at, inside, row, stop


@triton.jit
def gradient_of_up(up, dh, cut_g, s, LIMIT: tl.constexpr):
    dup = dh * (cut_g * s)
    if LIMIT is not None:
        dup = tl.where(tl.abs(up) > LIMIT, 0.0, dup)
    return dup


@triton.jit
def gradient_of_gate(gate, dh, cut_g, factor, s, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    dgate = dh * factor * (s * (1 + ALPHA * cut_g * (1 - s)))
    if LIMIT is not None:
        dgate = tl.where(gate > LIMIT, 0.0, dgate)
    return dgate


@triton.jit
def store_products(sums, h, du, row, stop, BLOCKS: tl.constexpr):
    """The sums of u * h over the columns of a tile."""
    products = tl.sum(tl.sum(du * rounded(h).to(tl.float32), 4), 2)  # (8, BLOCKS, 4)
    products = tl.reshape(tl.permute(products, (1, 2, 0)), (32 * BLOCKS,))
    tl.store(sums + row, products, mask=row < stop)


@triton.jit
def store_last(
    pairs, data, scale, start, rows_left, tile_col, rows, pair_cols,
    FORM: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    """Stores a tile of pairs (4, 4, 8, 16), quantised along its rows, as ``Form`` names it.

    Args:
        start, rows_left: its first row, and how many there are from there on.
        rows: of the matrix, by which scales across lie.
    """
    if FORM == "bf16":
        store_pairs(data, pairs, start, rows_left, tile_col, pair_cols)
    elif FORM == "values":
        maxima = pair_maxima(pairs, 3)
        largest = tl.maximum(maxima & 0x7FFF, maxima >> 16)
        pairs = round_pairs(pairs, (largest | (largest << 16))[:, :, :, None], FLOOR, E5M2)
        store_pairs(data, pairs, start, rows_left, tile_col, pair_cols)
    else:
        low, high = magnitude_bits_of_pairs(pair_maxima(pairs, 3))
        byte = scale_byte(tl.maximum(low, high), FLOOR, E5M2)
        scales = tl.reshape(tl.permute(byte, (0, 2, 1)), (32, 4))
        old = byte[:, :, :, None]
        low, high = split_pairs(pairs)
        values = tl.join(low * reciprocal_scale(old), high * reciprocal_scale(old))
        elements = to_elements(tl.reshape(values, (4, 4, 8, 32)), old, E5M2)
        if FORM != "fp8":
            if FORM == "coalesced":
                units = tl.reduce_or(element_units(elements, E5M2), 3)
                scales = even_scales(scales, tl.reshape(tl.permute(units, (0, 2, 1)), (32, 4)), 32)
                new = scales
            else:
                largest = tl.max(scales, 1)
                new = tl.broadcast_to(largest[:, None], (32, 4))
            new = tl.permute(tl.reshape(new, (4, 8, 4)), (0, 2, 1))
            elements = shift_elements(elements, old, new[:, :, :, None], E5M2)
        row, block = tile_blocks()
        col = tl.arange(0, 32)
        col = col // 8 * 8 + col % 8  # the same, but a thread stores no more than the 8 bytes that it has
        row, col, cols = row[:, None], block[:, None] * 32 + col[None, :], pair_cols * 2
        inside = (row < rows_left) & (col < cols - tile_col * 128)
        data += start.to(tl.int64) * cols + tile_col * 128
        tl.store(data + (row * cols + col), tl.reshape(elements, (128, 32)), mask=inside)
        row = start + tl.arange(0, 32)
        if FORM == "across":
            scale += tile_col.to(tl.int64) * (tl.cdiv(rows, 16) * 16)
            tl.store(scale + row, largest.to(tl.uint8), mask=row < start + rows_left)
        else:
            store_matrix(scale, scales, row, start + rows_left, tile_col * 4 + tl.arange(0, 4), tl.cdiv(cols, 32))


@triton.jit
def store_first(
    pairs, data, start, rows_left, tile_col, pair_cols,
    QUANTIZED: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    """Stores a tile of pairs (4, 4, 8, 16) in bf16: as it is, or (QUANTIZED) the values of blocks along its columns."""
    if QUANTIZED:
        columns = tl.reshape(tl.permute(pairs, (1, 0, 2, 3)), (4, 32, 16))
        pairs = round_pairs(pairs, pair_maxima(columns, 1)[None, :, None, :], FLOOR, E5M2)
    store_pairs(data, pairs, start, rows_left, tile_col, pair_cols)


@triton.jit
def pair_gradients(gate, up, u, score, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Of pairs: dgate, dup, score times h, and the sum of both u * h in fp32."""
    g0, g1 = split_pairs(gate)
    v0, v1 = split_pairs(up)
    u0, u1 = split_pairs(u)
    cut0, factor0, s0 = activation(g0, v0, LIMIT, ALPHA)
    cut1, factor1, s1 = activation(g1, v1, LIMIT, ALPHA)
    dup = join_pairs(gradient_of_up(v0, u0 * score, cut0, s0, LIMIT), gradient_of_up(v1, u1 * score, cut1, s1, LIMIT))
    dgate = join_pairs(
        gradient_of_gate(g0, u0 * score, cut0, factor0, s0, LIMIT, ALPHA),
        gradient_of_gate(g1, u1 * score, cut1, factor1, s1, LIMIT, ALPHA),
    )
    h0, h1 = cut0 * s0 * factor0, cut1 * s1 * factor1
    rounded0, rounded1 = split_pairs(join_pairs(h0, h1))
    return dgate, dup, join_pairs(h0 * score, h1 * score), u0 * rounded0 + u1 * rounded1


# What ``tl.map_elementwise`` calls gets tensors alone: so the limit is one, and alpha is no argument.
@triton.jit
def _unlimited(gate, up, u, score):
    return pair_gradients(gate, up, u, score, None, 1.0)


@triton.jit
def _limited(gate, up, u, score, limit):
    return pair_gradients(gate, up, u, score, limit, LIMITED_ALPHA)


@triton.jit(do_not_specialize=["rows", "groups"])
def _swiglu(
    gate, up, h, h_scale, offs,
    pair_cols, gate_stride, up_stride,
    rows, groups,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, RAGGED: tl.constexpr,
    FORM: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    """One program: a tile of pairs. Columns and strides are counted in pairs."""
    col_tiles = tl.cdiv(pair_cols, 64)
    tile_col = tl.program_id(0) % col_tiles
    start, end = tl.program_id(0) // col_tiles * 32, rows
    if RAGGED:
        end = tl.minimum(tl.load(offs + groups - 1), rows)
        if start >= end:
            return
    g = load_pairs(gate, start, end - start, tile_col, pair_cols, gate_stride)
    v = load_pairs(up, start, end - start, tile_col, pair_cols, up_stride)
    g0, g1 = split_pairs(g)
    v0, v1 = split_pairs(v)
    g0, v0, s0 = activation(g0, v0, LIMIT, ALPHA)
    g1, v1, s1 = activation(g1, v1, LIMIT, ALPHA)
    pairs = tl.reshape(join_pairs(g0 * s0 * v0, g1 * s1 * v1), (4, 4, 8, 16))
    store_last(pairs, h, h_scale, start, end - start, tile_col, rows, pair_cols, FORM, FLOOR, E5M2)


@triton.jit(do_not_specialize=["rows", "units"])
def _swiglu_backward_in_rows(
    gate, up, u, scores, sums, table,
    dgate_rowwise, dgate_last_scale, dup_rowwise, dup_last_scale, dgate_columnwise, dup_columnwise, h_first,
    pair_cols, gate_stride, up_stride, u_stride,
    rows, units,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, RAGGED: tl.constexpr, SCORED: tl.constexpr,
    FLOOR: tl.constexpr, E5M2: tl.constexpr, H_E5M2: tl.constexpr,
    LAST: tl.constexpr, FIRST_QUANTIZED: tl.constexpr,
):  # fmt: skip
    """One program: a tile of pairs whose rows are those of a unit of the map, at most 32 of one group.

    What is quantised along M (FIRST_QUANTIZED), or is in bf16, goes to the same place in a matrix of its own, dgate in
    the memory of u. Columns and strides are counted in pairs.
    """
    col_tiles = tl.cdiv(pair_cols, 64)
    tile_col = tl.program_id(0) % col_tiles  # neighbours in a row run together
    unit = tl.program_id(0) // col_tiles
    start, stop = unit * 32, rows
    if RAGGED:
        start, stop = tl.load(table + unit), tl.load(table + units + unit)
        if start >= stop:
            return
    left = stop - start
    g = load_pairs(gate, start, left, tile_col, pair_cols, gate_stride)
    v = load_pairs(up, start, left, tile_col, pair_cols, up_stride)
    du = load_pairs(u, start, left, tile_col, pair_cols, u_stride)
    score = tl.full((128, 16), 1.0, tl.float32)
    if SCORED:
        row, _ = tile_blocks()
        score *= tl.load(scores + start + row, mask=row < left, other=0)[:, None]
    # Pair by pair: step by step all tiles would be in fp32 at once, and take a quarter more registers.
    if not cuda_capability_geq(8, 0):
        dgate, dup, sh, products = pair_gradients(g, v, du, score, LIMIT, ALPHA)
    elif LIMIT is None:
        dgate, dup, sh, products = tl.map_elementwise(_unlimited, g, v, du, score)
    else:
        limit = tl.full((128, 16), LIMIT, tl.float32)
        dgate, dup, sh, products = tl.map_elementwise(_limited, g, v, du, score, limit)
    if SCORED:
        row = tl.arange(0, 32)
        products = tl.sum(tl.reshape(tl.sum(products, 1), (4, 4, 8)), 1)
        sums += tile_col.to(tl.int64) * rows + start
        tl.store(sums + row, tl.reshape(products, (32,)), mask=row < left)
    sh = tl.reshape(sh, (4, 4, 8, 16))
    dup = tl.reshape(dup, (4, 4, 8, 16))
    dgate = tl.reshape(dgate, (4, 4, 8, 16))
    store_first(sh, h_first, start, left, tile_col, pair_cols, FIRST_QUANTIZED, FLOOR, H_E5M2)
    STORED_ONCE: tl.constexpr = LAST == "bf16" and not FIRST_QUANTIZED  # along both axes it is one tensor then
    if not STORED_ONCE:
        store_last(dup, dup_rowwise, dup_last_scale, start, left, tile_col, rows, pair_cols, LAST, FLOOR, E5M2)
    store_first(dup, dup_columnwise, start, left, tile_col, pair_cols, FIRST_QUANTIZED, FLOOR, E5M2)
    if not STORED_ONCE:
        store_last(dgate, dgate_rowwise, dgate_last_scale, start, left, tile_col, rows, pair_cols, LAST, FLOOR, E5M2)
    store_first(dgate, dgate_columnwise, start, left, tile_col, pair_cols, FIRST_QUANTIZED, FLOOR, E5M2)


@triton.jit
def store_rows(
    values, data, scale, row, stop, tile_col, cols,
    FLOOR: tl.constexpr, E5M2: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Stores a tile (8, 1, 2, 4, LINE) in bf16, as ``load_tile`` lays it, as FP8 along the last axis, at those of its
    32 rows ``row`` that are before ``stop``."""
    in_blocks = tl.reshape(values.to(tl.float32), (8, 1, 2, 4, LINE // 32, 32))
    byte = scale_byte(tl.max(magnitude_bits(in_blocks), 5), FLOOR, E5M2)
    elements = to_elements(in_blocks * reciprocal_scale(byte)[:, :, :, :, :, None], byte[:, :, :, :, :, None], E5M2)
    elements = tl.reshape(elements, (8, 1, 2, 4, LINE))
    elements = tl.reshape(tl.permute(elements, (1, 3, 0, 2, 4)), (32, 2 * LINE))
    store_matrix(data, elements, row, stop, tile_col * 128 + tl.arange(0, 128), cols)
    scales = tl.reshape(tl.permute(byte, (1, 3, 0, 2, 4)), (32, 4))
    store_matrix(scale, scales, row, stop, tile_col * 4 + tl.arange(0, 4), tl.cdiv(cols, 32))


@triton.jit
def store_transposed(
    values, data, scale, tile_row, tile_col, cols, padded_blocks,
    FLOOR: tl.constexpr, E5M2: tl.constexpr, BLOCKS: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """Stores a tile (8, BLOCKS, 1, 4, LINE) in bf16, as ``load_tile`` lays it, as FP8 along the first axis, transposed,
    at its place in the padded rows."""
    values = values.to(tl.float32)
    byte = scale_byte(tl.max(tl.max(magnitude_bits(values), 0), 2), FLOOR, E5M2)  # (BLOCKS, 1, LINE)
    col = tile_col * LINE + tl.arange(0, LINE)
    elements = transposed(columns_to_elements(values, byte, E5M2, BLOCKS, 1, LINE), BLOCKS, 1, LINE)
    byte = tl.reshape(tl.permute(byte, (1, 2, 0)), (LINE, BLOCKS))
    store_matrix(scale, byte, col, cols, tile_row * BLOCKS + tl.arange(0, BLOCKS), padded_blocks)
    row = tile_row * 32 * BLOCKS + tl.arange(0, 32 * BLOCKS)
    store_matrix(data, elements, col, cols, row, padded_blocks * 32)


@triton.jit(do_not_specialize=["rows", "padded_blocks", "units", "groups"])
def _swiglu_backward(
    gate, up, u, scores, sums, table,
    dgate_rowwise, dgate_last_scale, dup_rowwise, dup_last_scale,
    dgate_columnwise, dgate_first_scale, dup_columnwise, dup_first_scale, h_first, h_first_scale,
    cols, gate_stride, up_stride, u_stride,
    rows, padded_blocks, units, groups,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, RAGGED: tl.constexpr, SCORED: tl.constexpr,
    FLOOR: tl.constexpr, E5M2: tl.constexpr, H_E5M2: tl.constexpr,
    BLOCKS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """One program: a tile of ``32 * BLOCKS`` rows and 128 columns, its rows those of the next units of the map; what is
    quantised along M is stored transposed."""
    ROWS: tl.constexpr = 32 * BLOCKS
    col_tiles = tl.cdiv(cols, 128)
    tile_col = tl.program_id(0) % col_tiles  # neighbours in a row run together
    tile_row = tl.program_id(0) // col_tiles
    if RAGGED:
        if tile_row * ROWS >= tl.load(table + 2 * units + groups - 1):
            return
    if SCORED:
        sums += tile_col.to(tl.int64) * rows
    # Outputs load again, from the L1, and compute again: that costs less than the registers for all of them.
    for block in range(BLOCKS):
        g, v, du, cut_g, factor, s, score, _, _, row, stop = load_parts(
            gate, up, u, scores, table, rows, cols, gate_stride, up_stride, u_stride,
            tile_row * BLOCKS + block, tile_col, units, LIMIT, ALPHA, RAGGED, SCORED, 1, 2, LINE,
        )  # fmt: skip
        if SCORED:
            store_products(sums, cut_g * s * factor, du, row, stop, 1)
        dup = rounded(gradient_of_up(v, du * score, cut_g, s, LIMIT))
        store_rows(dup, dup_rowwise, dup_last_scale, row, stop, tile_col, cols, FLOOR, E5M2, LINE)
        dgate = rounded(gradient_of_gate(g, du * score, cut_g, factor, s, LIMIT, ALPHA))
        store_rows(dgate, dgate_rowwise, dgate_last_scale, row, stop, tile_col, cols, FLOOR, E5M2, LINE)
    for line in range(LINES):
        tile_line = tile_col * LINES + line
        for output in tl.static_range(3):
            g, v, du, cut_g, factor, s, score, _, _, row, stop = load_parts(
                gate, up, u, scores, table, rows, cols, gate_stride, up_stride, u_stride,
                tile_row, tile_line, units, LIMIT, ALPHA, RAGGED, SCORED, BLOCKS, 1, LINE,
            )  # fmt: skip
            if output == 0:
                values, data, scale = rounded(cut_g * s * factor * score), h_first, h_first_scale
            elif output == 1:
                values, data = rounded(gradient_of_up(v, du * score, cut_g, s, LIMIT)), dup_columnwise
                scale = dup_first_scale
            else:
                values = rounded(gradient_of_gate(g, du * score, cut_g, factor, s, LIMIT, ALPHA))
                data, scale = dgate_columnwise, dgate_first_scale
            store_transposed(
                values, data, scale, tile_row, tile_line, cols, padded_blocks,
                FLOOR, H_E5M2 if output == 0 else E5M2, BLOCKS, LINE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "groups"])
def _gradients(
    gate, up, u, scores, dgate, dup, sh, dscores, offs,
    cols, gate_stride, up_stride, u_stride,
    rows, groups,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, RAGGED: tl.constexpr, SCORED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One program: ``ROWS`` rows, ``COLS`` columns at a time."""
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
        products += tl.sum(du * rounded(h).to(tl.float32), 1)
        at = far * cols + col
        dh = du * score[:, None]
        tl.store(sh + at, rounded(h * score[:, None]), mask=inside)
        tl.store(dup + at, rounded(gradient_of_up(v, dh, cut_g, s, LIMIT)), mask=inside)
        tl.store(dgate + at, rounded(gradient_of_gate(g, dh, cut_g, factor, s, LIMIT, ALPHA)), mask=inside)
    if SCORED:
        tl.store(dscores + row, products, mask=row < end)


_GRADIENTS = Kernel(_gradients)
_SWIGLU = Kernel(_swiglu)
_SWIGLU_BACKWARD = Kernel(_swiglu_backward)
_SWIGLU_BACKWARD_IN_ROWS = Kernel(_swiglu_backward_in_rows)


def matrices_of(*tensors: torch.Tensor) -> tuple[Matrices, ...]:
    for x in tensors:
        assert x.dtype == torch.bfloat16 and x.shape == tensors[0].shape and x.ndim == 2, (x.dtype, x.shape)
    return tuple(as_matrices(x, 0) for x in tensors)


def _in_pairs(*matrices: Matrices) -> tuple[int, list[int]]:
    """Columns and strides of rows, counted in pairs: of multiples of 32, as the kernels load 16 bytes at a time where
    Triton knows that 16 divides these numbers."""
    strides = [matrix.row_stride for matrix in matrices]
    assert not any(n % 32 for n in (matrices[0].cols, *strides)), (matrices[0].cols, strides)
    return matrices[0].cols // 2, [stride // 2 for stride in strides]


def _memory_of(u: Matrices) -> torch.Tensor:
    """u itself, or new memory where rows do not follow each other."""
    return u.x if u.x.is_contiguous() else torch.empty_like(u.x, memory_format=torch.contiguous_format)


def alpha_of(limit: float | None) -> float:
    return 1.0 if limit is None else GPT_OSS_ALPHA


def _form(spec: OperandSpec) -> Form:
    assert spec.block_mn == 1 and spec.scales != "swizzled", spec
    if spec == UNQUANTIZED:
        return "bf16"
    if spec.stored == "fp8":
        return "fp8" if spec.block_k == BLOCK_SIZE else "across"
    return "values" if spec.stored == "bf16" else "coalesced"


def rounding_of(spec: OperandSpec) -> tuple[bool, bool]:
    """The constants FLOOR and E5M2."""
    return spec.rounding == "floor", spec.elem_dtype == torch.float8_e5m2
