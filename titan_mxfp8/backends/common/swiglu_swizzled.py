"""SwiGLU of the experts and its gradients, as ``common.swiglu`` has them, with scales in SM100's tiles.

A program takes 32 tokens of one group and 128 columns, as much as registers hold: a fourth of a tile of the quantisers,
and of each tile of scales every fourth byte along the first axis, four of each 16 along the last one.
"""

import triton
import triton.language as tl
from torch import Tensor

from titan_mxfp8.backends import Plan, SwigluGradients
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
from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.common.swizzled import map_tiles, store_columnwise, store_rowwise, tile_of
from titan_mxfp8.backends.common.tiles import load_values, rounding_of
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import UNQUANTIZED, Operand, OperandSpec


def swiglu(gate_MH: Tensor, up_MH: Tensor, limit: float | None, spec: OperandSpec, offs: Tensor | None) -> Operand:
    """``Backend.swiglu`` with swizzled scales."""
    assert spec.scales == "swizzled" and spec.block == "1x32", spec
    gate, up = matrices_of(gate_MH, up_MH)
    out = spec.empty(gate.x, 1, None if offs is None else offs.shape[0])
    tiles = map_tiles(offs, gate.rows, out.scale.shape[0])
    _swiglu.launch(
        tiles.count * 4 * ceil_div(gate.cols, 128), (gate.x, up.x, out.data, out.scale, tiles.table),
        (gate.cols, gate.row_stride, up.row_stride), (gate.rows, tiles.count),
        (limit, offs is not None, *rounding_of(spec), SEGMENT), device=gate.x.device, warps=4,
    )  # fmt: skip
    return out


def swiglu_backward(
    inputs: list[Tensor], scores_M: Tensor | None, limit: float | None, plan: Plan, offs: Tensor | None
) -> SwigluGradients:
    """``Backend.swiglu_backward`` with swizzled scales along H, and swizzled ones or bf16 along M."""
    rowwise, columnwise, h_columnwise = plan.dgrad.a, plan.wgrad.a, plan.wgrad.b
    assert rowwise.scales == "swizzled" and rowwise.block == "1x32", rowwise
    assert columnwise == h_columnwise and columnwise in (rowwise, UNQUANTIZED), (rowwise, columnwise, h_columnwise)
    gate, up, u = matrices_of(*inputs)
    inputs.clear()
    assert u.x.is_contiguous(), u.x.stride()
    groups = None if offs is None else offs.shape[0]
    operands = [rowwise.empty(gate.x, 1, groups) for _ in range(2)]
    operands += [columnwise.empty(gate.x, 0, groups) for _ in range(3)]
    if not columnwise.is_quantized:
        operands[2] = Operand(u.x, None, columnwise, 0)  # programs write dgate last, after all that they read
    tiles, col_tiles = map_tiles(offs, gate.rows, operands[0].scale.shape[0]), ceil_div(gate.cols, 128)
    scores_M, sums = sums_of(scores_M, gate.rows, col_tiles)
    padded_blocks = operands[-1].data.shape[-1] // BLOCK_SIZE if columnwise.is_quantized else 0
    _swiglu_backward.launch(
        tiles.count * 4 * col_tiles,
        (gate.x, up.x, u.x, scores_M, sums, tiles.table, *(tensor for operand in operands for tensor in operand[:2])),
        (gate.cols, gate.row_stride, up.row_stride, u.row_stride), (gate.rows, padded_blocks, tiles.count),
        (limit, offs is not None, scores_M is not None, columnwise.is_quantized,
        *rounding_of(rowwise), SEGMENT),
        device=gate.x.device, warps=4,
    )  # fmt: skip
    return SwigluGradients(*operands, None if sums is None else sums.sum(0))


@Kernel
@triton.jit(do_not_specialize=["rows", "tiles"])
def _swiglu(
    gate, up, h, h_scale, table,
    cols, gate_stride, up_stride,
    rows, tiles,
    LIMIT: tl.constexpr, RAGGED: tl.constexpr,
    FLOOR: tl.constexpr, E5M2: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """One program: 32 rows and 128 columns of a tile."""
    col_tiles = tl.cdiv(cols, 128)
    tile_col = tl.program_id(0) % col_tiles  # neighbours in a row run together
    block = tl.program_id(0) // col_tiles % 4
    tile = tl.program_id(0) // col_tiles // 4
    token, left, _, rowwise_tile, _ = tile_of(table, tile, tile_col, rows, col_tiles, tiles, RAGGED)
    h_scale += rowwise_tile
    if left <= 0:
        clear_tile(h_scale)
        return
    gate += token * gate_stride
    g = load_values(gate, None, left, cols, gate_stride, block, tile_col, 4, False, 1, 2, SEGMENT)
    up += token * up_stride
    v = load_values(up, None, left, cols, up_stride, block, tile_col, 4, False, 1, 2, SEGMENT)
    g, v, s = activation(g, v, LIMIT)
    store_rowwise(rounded(g * s * v), h + token * cols, h_scale, left, block, tile_col, cols, False, FLOOR, E5M2)


@Kernel
@triton.jit(do_not_specialize=["rows", "padded_blocks", "tiles"])
def _swiglu_backward(
    gate, up, u, scores, sums, table,
    dgate_rowwise, dgate_rowwise_scale, dup_rowwise, dup_rowwise_scale,
    dgate_columnwise, dgate_columnwise_scale, dup_columnwise, dup_columnwise_scale, h_columnwise, h_columnwise_scale,
    cols, gate_stride, up_stride, u_stride,
    rows, padded_blocks, tiles,
    LIMIT: tl.constexpr, RAGGED: tl.constexpr, SCORED: tl.constexpr,
    COLUMNWISE: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """One program: 32 rows and 128 columns of a tile; along the first axis quantised (COLUMNWISE), or in bf16."""
    col_tiles = tl.cdiv(cols, 128)
    tile_col = tl.program_id(0) % col_tiles  # neighbours in a row run together
    block = tl.program_id(0) // col_tiles % 4
    tile = tl.program_id(0) // col_tiles // 4
    token, left, place, rowwise_tile, columnwise_tile = tile_of(table, tile, tile_col, rows, col_tiles, tiles, RAGGED)
    if left <= 0:
        clear_tile(dgate_rowwise_scale + rowwise_tile)
        clear_tile(dup_rowwise_scale + rowwise_tile)
        return
    gate += token * gate_stride
    up += token * up_stride
    u += token * u_stride
    if SCORED:
        scores += token
        sums += tile_col.to(tl.int64) * rows + token
    # Outputs load again, from the L1, and compute again: that costs less than the registers for all of them.
    for output in tl.static_range(3):
        g, v, du, cut_g, factor, s, score, at, inside, row, stop = load_parts(
            gate, up, u, scores, None, left, cols, gate_stride, up_stride, u_stride,
            block, tile_col, 4, LIMIT, False, SCORED, 1, 2, SEGMENT,
        )  # fmt: skip
        if output == 0:
            h = cut_g * s * factor
            if SCORED:
                store_products(sums, h, du, row, stop)
            values, columnwise, columnwise_scale = rounded(h * score), h_columnwise, h_columnwise_scale
        elif output == 1:
            values = rounded(gradient_of_up(v, du * score, cut_g, s, LIMIT))
            rowwise, rowwise_scale = dup_rowwise, dup_rowwise_scale
            columnwise, columnwise_scale = dup_columnwise, dup_columnwise_scale
        else:
            values = rounded(gradient_of_gate(g, du * score, cut_g, factor, s, LIMIT))
            rowwise, rowwise_scale = dgate_rowwise, dgate_rowwise_scale
            columnwise, columnwise_scale = dgate_columnwise, dgate_columnwise_scale
        if output > 0:
            store_rowwise(
                values, rowwise + token * cols, rowwise_scale + rowwise_tile,
                left, block, tile_col, cols, False, FLOOR, E5M2,
            )  # fmt: skip
        if COLUMNWISE:
            store_columnwise(
                values, columnwise + place, columnwise_scale + columnwise_tile,
                left, block, tile_col, cols, padded_blocks, False, FLOOR, E5M2,
            )  # fmt: skip
        else:
            tl.store(columnwise + token * cols + at, tl.reshape(values, at.shape), mask=inside)


@triton.jit
def clear_tile(scales):
    """Zeros in a tile behind the last group, as the quantisers leave it."""
    tl.store(scales + tl.arange(0, 512), tl.zeros((512,), tl.uint8))
