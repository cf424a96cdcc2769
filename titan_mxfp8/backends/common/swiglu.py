"""SwiGLU of the experts (``format.swiglu``) and its gradients, with the score, quantised as they are made.

| kernel     | reads, bytes an element | writes                                                                   |
|------------|-------------------------|--------------------------------------------------------------------------|
| ``swiglu`` | 4: gate, up             | h along H                                                                |
| backward   | 6: gate, up, u          | dgate and dup along H and along M, score times h along M, sums of u * h  |

dgate in bf16, quantised along M or not, is written over u: by each program last, after all that it reads.

With ragged groups programs past ``offs[-1]`` end at once, and what belongs to no group is neither read nor written,
but for the zeros between groups that start at multiples of 32 or 128 rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from titan_mxfp8.backends import Plan, SwigluGradients
from titan_mxfp8.backends.common import swiglu_swizzled
from titan_mxfp8.backends.common.activation import (
    SEGMENT,
    activation,
    gradient_of_gate,
    gradient_of_up,
    load_parts,
    matrices_of,
    rounded,
    store_products,
    sums_of,
)
from titan_mxfp8.backends.common.bf16x2 import (
    amax_bf16x2,
    load_bf16x2,
    magnitude_bits_bf16x2,
    pack_bf16x2,
    round_bf16x2,
    store_bf16x2,
    tile_blocks,
    unpack_bf16x2,
)
from titan_mxfp8.backends.common.convert import (
    coalesce_scales,
    halving_bits,
    reciprocal_scale,
    scale_byte,
    shift_elements,
    to_elements,
)
from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.common.quantizers import layout_of
from titan_mxfp8.backends.common.tiles import (
    Matrices,
    Tile,
    columns_to_elements,
    columnwise_scales,
    in_rows,
    map_tiles,
    rounding_of,
    rows_to_elements,
    rowwise_scales,
    store_matrix,
    transposed,
)
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import Operand, OperandSpec

TRANSPOSED_TILE = Tile(rows=128, segments=2)
COLS = 2 * SEGMENT  # of all tiles: whole blocks of 128


def swiglu(gate_MH: Tensor, up_MH: Tensor, limit: float | None, spec: OperandSpec, offs: Tensor | None) -> Operand:
    """``Backend.swiglu``."""
    assert spec.block_mn == 1, spec
    if spec.scales == "swizzled":
        return swiglu_swizzled.swiglu(gate_MH, up_MH, limit, spec, offs)
    gate, up = matrices_of(gate_MH, up_MH)
    out = spec.empty(gate.x, 1, None)
    cols, strides = _packed(gate, up)
    _swiglu.launch(
        ceil_div(gate.rows, BLOCK_SIZE) * ceil_div(gate.cols, COLS),
        (gate.x, up.x, out.data, out.scale, offs),
        (cols, *strides), (gate.rows, 0 if offs is None else offs.shape[0]),
        (limit, offs is not None, layout_of(spec), *rounding_of(spec)), device=gate.x.device,
    )  # fmt: skip
    return out


def swiglu_backward(
    inputs: list[Tensor], scores_M: Tensor | None, limit: float | None, plan: Plan, offs: Tensor | None
) -> SwigluGradients:
    """``Backend.swiglu_backward``."""
    specs = rowwise, columnwise, h_columnwise = plan.dgrad.a, plan.wgrad.a, plan.wgrad.b
    layout, layout_m, h_layout = map(layout_of, specs)
    if "swizzled" in (layout, layout_m, h_layout):
        return swiglu_swizzled.swiglu_backward(inputs, scores_M, limit, plan, offs)
    assert layout_m == h_layout in ("fp8", "qdq", "bf16") and all(spec.block_mn == 1 for spec in specs), specs
    assert len({spec.rounding for spec in specs if spec.is_quantized}) <= 1, specs
    assert not columnwise.is_quantized or columnwise.elem_dtype == rowwise.elem_dtype, specs
    gate, up, u = matrices_of(*inputs)
    inputs.clear()
    assert u.x.is_contiguous(), u.x.stride()
    groups = None if offs is None else offs.shape[0]
    dgate = columnwise.empty(gate.x, 0, groups) if layout_m == "fp8" else Operand(u.x, None, columnwise, 0)
    if layout == layout_m == "bf16":  # the same values along either axis
        operands = [dgate._replace(axis=1), rowwise.empty(gate.x, 1, None)]
        operands += [operand._replace(axis=0) for operand in operands]
    else:
        operands = [*(rowwise.empty(gate.x, 1, None) for _ in range(2)), dgate, columnwise.empty(gate.x, 0, groups)]
    operands.append(h_columnwise.empty(gate.x, 0, groups))
    tile = TRANSPOSED_TILE  # the map is the same for any, as it has no tail
    table, row_blocks = map_tiles(offs, gate.rows, tile, tail=False)
    col_tiles = ceil_div(gate.cols, COLS)
    scores_M, sums = sums_of(scores_M, gate.rows, col_tiles)
    sources = gate.x, up.x, u.x, scores_M, sums, table
    constants = limit, offs is not None, scores_M is not None, *rounding_of(rowwise)
    constants += (h_columnwise.elem_dtype == torch.float8_e5m2,)
    if layout_m == "fp8":
        assert layout == "fp8", specs
        _swiglu_backward.launch(
            ceil_div(row_blocks, tile.blocks) * col_tiles,
            (*sources, *(tensor for operand in operands for tensor in operand[:2])),
            (gate.cols, gate.row_stride, up.row_stride, u.row_stride),
            (gate.rows, operands[-1].data.shape[-1] // BLOCK_SIZE, row_blocks, groups or 0),
            (*constants, tile.blocks, tile.segments, SEGMENT), device=gate.x.device, warps=8,
        )  # fmt: skip
    else:
        cols, strides = _packed(gate, up, u)
        _swiglu_backward_in_rows.launch(
            row_blocks * col_tiles,
            (*sources, *(tensor for operand in operands[:2] for tensor in operand[:2]),
             *(operand.data for operand in operands[2:])),
            (cols, *strides), (gate.rows, row_blocks), (*constants, layout, columnwise.is_quantized),
            device=gate.x.device,
        )  # fmt: skip
    return SwigluGradients(*operands, None if sums is None else sums.sum(0))


@triton.jit
def store_rowwise(
    packed, data, scale, start, rows_left, tile_col, rows, packed_cols,
    LAYOUT: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    """Stores a tile of pairs (4, 4, 8, 16), quantised along its rows, as ``quantizers.Layout`` names it.

    Args:
        start, rows_left: its first row, and how many there are from there on.
        rows: of the matrix, by which MN-major scales lie.
    """
    if LAYOUT == "bf16":
        store_bf16x2(data, packed, start, rows_left, tile_col, packed_cols)
    elif LAYOUT == "qdq":
        maxima = amax_bf16x2(packed, 3)
        largest = tl.maximum(maxima & 0x7FFF, maxima >> 16)
        packed = round_bf16x2(packed, (largest | (largest << 16))[:, :, :, None], FLOOR, E5M2)
        store_bf16x2(data, packed, start, rows_left, tile_col, packed_cols)
    else:
        low, high = magnitude_bits_bf16x2(amax_bf16x2(packed, 3))
        byte = scale_byte(tl.maximum(low, high), FLOOR, E5M2)
        scales = tl.reshape(tl.permute(byte, (0, 2, 1)), (32, 4))
        old = byte[:, :, :, None]
        low, high = unpack_bf16x2(packed)
        values = tl.join(low * reciprocal_scale(old), high * reciprocal_scale(old))
        elements = to_elements(tl.reshape(values, (4, 4, 8, 32)), old, E5M2)
        if LAYOUT != "fp8":
            if LAYOUT == "coalesced":
                halvings = tl.reduce_or(halving_bits(elements, E5M2), 3)
                scales = coalesce_scales(scales, tl.reshape(tl.permute(halvings, (0, 2, 1)), (32, 4)), 32)
                new = scales
            else:
                largest = tl.max(scales, 1)
                new = tl.broadcast_to(largest[:, None], (32, 4))
            new = tl.permute(tl.reshape(new, (4, 8, 4)), (0, 2, 1))
            elements = shift_elements(elements, old, new[:, :, :, None], E5M2)
        row, block = tile_blocks()
        col = tl.arange(0, 32)
        col = col // 8 * 8 + col % 8  # the same, but a thread stores no more than the 8 bytes that it has
        row, col, cols = row[:, None], block[:, None] * 32 + col[None, :], packed_cols * 2
        inside = (row < rows_left) & (col < cols - tile_col * 128)
        data += start.to(tl.int64) * cols + tile_col * 128
        tl.store(data + (row * cols + col), tl.reshape(elements, (128, 32)), mask=inside)
        row = start + tl.arange(0, 32)
        if LAYOUT == "mn_major":
            scale += tile_col.to(tl.int64) * (tl.cdiv(rows, 16) * 16)
            tl.store(scale + row, largest.to(tl.uint8), mask=row < start + rows_left)
        else:
            store_matrix(scale, scales, row, start + rows_left, tile_col * 4 + tl.arange(0, 4), tl.cdiv(cols, 32))


@triton.jit
def store_columnwise(
    packed, data, start, rows_left, tile_col, packed_cols,
    QUANTIZED: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    """Stores a tile of pairs (4, 4, 8, 16) in bf16: as it is, or (QUANTIZED) the values of blocks along its columns."""
    if QUANTIZED:
        columns = tl.reshape(tl.permute(packed, (1, 0, 2, 3)), (4, 32, 16))
        packed = round_bf16x2(packed, amax_bf16x2(columns, 1)[None, :, None, :], FLOOR, E5M2)
    store_bf16x2(data, packed, start, rows_left, tile_col, packed_cols)


@triton.jit
def gradients_bf16x2(gate, up, u, score, LIMIT: tl.constexpr):
    """Of pairs: dgate, dup, score times h, and the sum of both u * h in fp32."""
    g0, g1 = unpack_bf16x2(gate)
    v0, v1 = unpack_bf16x2(up)
    u0, u1 = unpack_bf16x2(u)
    cut0, factor0, s0 = activation(g0, v0, LIMIT)
    cut1, factor1, s1 = activation(g1, v1, LIMIT)
    dup = pack_bf16x2(gradient_of_up(v0, u0 * score, cut0, s0, LIMIT), gradient_of_up(v1, u1 * score, cut1, s1, LIMIT))
    dgate = pack_bf16x2(
        gradient_of_gate(g0, u0 * score, cut0, factor0, s0, LIMIT),
        gradient_of_gate(g1, u1 * score, cut1, factor1, s1, LIMIT),
    )
    h0, h1 = cut0 * s0 * factor0, cut1 * s1 * factor1
    rounded0, rounded1 = unpack_bf16x2(pack_bf16x2(h0, h1))
    return dgate, dup, pack_bf16x2(h0 * score, h1 * score), u0 * rounded0 + u1 * rounded1


# What ``tl.map_elementwise`` calls gets tensors alone: so the limit is one.
@triton.jit
def _unlimited(gate, up, u, score):
    return gradients_bf16x2(gate, up, u, score, None)


@triton.jit
def _limited(gate, up, u, score, limit):
    return gradients_bf16x2(gate, up, u, score, limit)


@Kernel
@triton.jit(do_not_specialize=["rows", "groups"])
def _swiglu(
    gate, up, h, h_scale, offs,
    packed_cols, gate_stride, up_stride,
    rows, groups,
    LIMIT: tl.constexpr, RAGGED: tl.constexpr,
    LAYOUT: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    """One program: a tile of pairs. Columns and strides are counted in pairs."""
    col_tiles = tl.cdiv(packed_cols, 64)
    tile_col = tl.program_id(0) % col_tiles
    start, end = tl.program_id(0) // col_tiles * 32, rows
    if RAGGED:
        end = tl.minimum(tl.load(offs + groups - 1), rows)
        if start >= end:
            return
    g = load_bf16x2(gate, start, end - start, tile_col, packed_cols, gate_stride)
    v = load_bf16x2(up, start, end - start, tile_col, packed_cols, up_stride)
    g0, g1 = unpack_bf16x2(g)
    v0, v1 = unpack_bf16x2(v)
    g0, v0, s0 = activation(g0, v0, LIMIT)
    g1, v1, s1 = activation(g1, v1, LIMIT)
    packed = tl.reshape(pack_bf16x2(g0 * s0 * v0, g1 * s1 * v1), (4, 4, 8, 16))
    store_rowwise(packed, h, h_scale, start, end - start, tile_col, rows, packed_cols, LAYOUT, FLOOR, E5M2)


@Kernel
@triton.jit(do_not_specialize=["rows", "row_blocks"])
def _swiglu_backward_in_rows(
    gate, up, u, scores, sums, table,
    dgate_rowwise, dgate_rowwise_scale, dup_rowwise, dup_rowwise_scale, dgate_columnwise, dup_columnwise, h_columnwise,
    packed_cols, gate_stride, up_stride, u_stride,
    rows, row_blocks,
    LIMIT: tl.constexpr, RAGGED: tl.constexpr, SCORED: tl.constexpr,
    FLOOR: tl.constexpr, E5M2: tl.constexpr, H_E5M2: tl.constexpr,
    LAYOUT: tl.constexpr, COLUMNWISE_QUANTIZED: tl.constexpr,
):  # fmt: skip
    """One program: a tile of pairs whose rows are those of a block of the map, at most 32 of one group.

    What is quantised along M (COLUMNWISE_QUANTIZED), or is in bf16, goes to the same place in a matrix of its own,
    dgate in the memory of u. Columns and strides are counted in pairs.
    """
    col_tiles = tl.cdiv(packed_cols, 64)
    tile_col = tl.program_id(0) % col_tiles  # neighbours in a row run together
    row_block = tl.program_id(0) // col_tiles
    start, stop = row_block * 32, rows
    if RAGGED:
        start, stop = tl.load(table + row_block), tl.load(table + row_blocks + row_block)
        if start >= stop:
            return
    left = stop - start
    g = load_bf16x2(gate, start, left, tile_col, packed_cols, gate_stride)
    v = load_bf16x2(up, start, left, tile_col, packed_cols, up_stride)
    du = load_bf16x2(u, start, left, tile_col, packed_cols, u_stride)
    score = tl.full((128, 16), 1.0, tl.float32)
    if SCORED:
        row, _ = tile_blocks()
        score *= tl.load(scores + start + row, mask=row < left, other=0)[:, None]
    # Pair by pair: step by step all tiles would be in fp32 at once, and take a quarter more registers.
    if not cuda_capability_geq(8, 0):
        dgate, dup, sh, products = gradients_bf16x2(g, v, du, score, LIMIT)
    elif LIMIT is None:
        dgate, dup, sh, products = tl.map_elementwise(_unlimited, g, v, du, score)
    else:
        limit = tl.full((128, 16), LIMIT, tl.float32)
        dgate, dup, sh, products = tl.map_elementwise(_limited, g, v, du, score, limit)
    if SCORED:  # u * h over these 128 columns; the host adds up the column tiles, in the same order every time
        row = tl.arange(0, 32)
        products = tl.sum(tl.reshape(tl.sum(products, 1), (4, 4, 8)), 1)
        sums += tile_col.to(tl.int64) * rows + start
        tl.store(sums + row, tl.reshape(products, (32,)), mask=row < left)
    # One result after the other, so that the registers of each are free for the next. dgate comes last: it may lie
    # where u lay, which has been read by now.
    sh = tl.reshape(sh, (4, 4, 8, 16))
    dup = tl.reshape(dup, (4, 4, 8, 16))
    dgate = tl.reshape(dgate, (4, 4, 8, 16))
    store_columnwise(sh, h_columnwise, start, left, tile_col, packed_cols, COLUMNWISE_QUANTIZED, FLOOR, H_E5M2)
    # In bf16 what lies along both axes is one tensor.
    STORED_ONCE: tl.constexpr = LAYOUT == "bf16" and not COLUMNWISE_QUANTIZED
    if not STORED_ONCE:
        store_rowwise(
            dup, dup_rowwise, dup_rowwise_scale, start, left, tile_col, rows, packed_cols, LAYOUT, FLOOR, E5M2
        )
    store_columnwise(dup, dup_columnwise, start, left, tile_col, packed_cols, COLUMNWISE_QUANTIZED, FLOOR, E5M2)
    if not STORED_ONCE:
        store_rowwise(
            dgate, dgate_rowwise, dgate_rowwise_scale, start, left, tile_col, rows, packed_cols, LAYOUT, FLOOR, E5M2
        )
    store_columnwise(dgate, dgate_columnwise, start, left, tile_col, packed_cols, COLUMNWISE_QUANTIZED, FLOOR, E5M2)


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


@Kernel
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


def _packed(*matrices: Matrices) -> tuple[int, list[int]]:
    """Columns and strides of rows, counted in pairs: of multiples of 32, as the kernels load 16 bytes at a time where
    Triton knows that 16 divides these numbers."""
    strides = [matrix.row_stride for matrix in matrices]
    assert not any(n % 32 for n in (matrices[0].cols, *strides)), (matrices[0].cols, strides)
    return matrices[0].cols // 2, [stride // 2 for stride in strides]
