"""Dequantise, and quantise-dequantise in one kernel: what a bf16 GEMM needs to compute with MXFP8 values."""

import math

import torch
import triton
import triton.language as tl

from titan_mxfp8.backends.common.convert import (
    from_elements,
    magnitude_bits,
    reciprocal_scale,
    scale_byte,
    scale_value,
    to_elements,
)
from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.common.tiles import LINE_BYTES, Tile, as_matrices, as_rows, load_tile, map_tiles
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import Operand, OperandSpec

# By share of the copy bandwidth on an H200, 131072 x 7168 bf16, both outputs: 0.92; 128 rows and 2 lines 0.87.
ROUND_TILE = Tile(rows=128, lines=1)


def dequantize(operand: Operand, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The values of an exact FP8 operand, as its elements lie."""
    data, scale, spec, _ = operand
    assert spec.scales == "rows" and spec.stored != "bf16", spec
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    row_blocks, squares = scale.shape[-1], spec.block == "32x32"
    blocks = math.prod(data.shape[:-1]) * row_blocks
    _DEQUANTIZE_ROWS.launch(
        ceil_div(blocks, 64), (data, scale, out), (row_blocks, data.shape[-1]),
        (blocks, data.shape[-2] if squares else 1), (squares, spec.elem_dtype == torch.float8_e5m2, 64),
        device=data.device,
    )  # fmt: skip
    return out


def quantize_dequantize(x: torch.Tensor, axis: int, spec: OperandSpec, offs: torch.Tensor | None) -> Operand:
    """``Backend.quantize`` to values in bf16. With ``offs`` rows at and past ``offs[-1]`` are zero."""
    if not spec.is_quantized:
        return Operand(x.to(torch.bfloat16).contiguous(), None, spec, axis)
    out = spec.empty(x, axis, None)
    if offs is None and axis == x.ndim - 1 and spec.block == "1x32":
        _launch_rows(x, out)
    else:
        _launch_tiles(x, x.ndim - 2 if spec.block == "32x32" else axis, None, out, offs)
    return out


def quantize_dequantize_both(
    x: torch.Tensor, last: OperandSpec, first: OperandSpec, offs: torch.Tensor | None
) -> tuple[Operand, Operand]:
    """``Backend.quantize_both`` to values in bf16 of one quantised spec, in one read of ``x``.

    32x32 blocks have the same values along both axes, and then lie in memory once.
    """
    assert last == first, (last, first)
    if last.block == "32x32":
        along_last = quantize_dequantize(x, x.ndim - 1, last, offs)
        return along_last, along_last._replace(axis=x.ndim - 2)
    along_last, along_first = last.empty(x, x.ndim - 1, None), first.empty(x, x.ndim - 2, None)
    _launch_tiles(x, x.ndim - 2, along_last, along_first, offs)
    return along_last, along_first


@triton.jit
def through_elements(x, scale, E5M2: tl.constexpr):
    """``x`` rounded to the elements of blocks of scale byte ``scale``, which broadcasts over ``x``."""
    return from_elements(to_elements(x * reciprocal_scale(scale), scale, E5M2), E5M2) * scale_value(scale)


@triton.jit(do_not_specialize=["blocks", "height"])
def _dequantize_rows(
    qdata, scale, out,
    row_blocks, cols,
    blocks, height,
    SQUARES: tl.constexpr, E5M2: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCKS`` neighbouring 1x32 blocks, counted through the rows of all matrices.

    32x32 scales of matrices of ``height = 40`` rows and ``row_blocks = 3``: row 41 is row 1 of matrix 1, whose scales
    start at row 2 of all scales, so its block 2 has scale 2 * 3 + 2.
    """
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row = block // row_blocks
    source = block
    if SQUARES:
        source = (row // height * tl.cdiv(height, 32) + row % height // 32) * row_blocks + block % row_blocks
    byte = tl.load(scale + source, mask=block < blocks, other=0).to(tl.int32)
    col = (block % row_blocks)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = (block < blocks)[:, None] & (col < cols)
    at = row.to(tl.int64)[:, None] * cols + col
    values = from_elements(tl.load(qdata + at, mask=inside, other=0), E5M2) * scale_value(byte)[:, None]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["blocks"])
def _quantize_dequantize_rows(
    x, out,
    row_blocks, cols, row_stride,
    blocks,
    FLOOR: tl.constexpr, E5M2: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCKS`` neighbouring 1x32 blocks, as in ``quantize._quantize_rows``."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row = (block // row_blocks).to(tl.int64)[:, None]
    col = (block % row_blocks)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = (block < blocks)[:, None] & (col < cols)
    values = tl.load(x + row * row_stride + col, mask=inside, other=0).to(tl.float32)
    byte = scale_byte(tl.max(magnitude_bits(values), 1), FLOOR, E5M2)
    values = through_elements(values, byte[:, None], E5M2)
    tl.store(out + row * cols + col, values.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "units", "groups"])
def _quantize_dequantize_tiles(
    x, last, first, table, offs,
    cols, batch_stride, row_stride,
    rows, units, groups,
    LAST: tl.constexpr, SQUARES: tl.constexpr, RAGGED: tl.constexpr,
    FLOOR: tl.constexpr, E5M2: tl.constexpr,
    BLOCKS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """One program: a tile, as in ``quantize._quantize_tiles``, stored where it was read.

    ``first`` always, in blocks along the first axis or in squares, with zeros for the tail; ``last`` on demand.
    """
    ALL: tl.constexpr = 32 * BLOCKS * LINES
    col_tiles = tl.cdiv(cols, LINES * LINE)
    row_tiles = tl.cdiv(units, BLOCKS)
    tile_col = tl.program_id(0) % col_tiles
    tile_row = tl.program_id(0) // col_tiles % row_tiles
    batch = (tl.program_id(0) // col_tiles // row_tiles).to(tl.int64)
    x += batch * batch_stride
    out = batch * rows * cols
    if LAST:
        values, row, col, inside = load_tile(
            x, table, rows, cols, row_stride, tile_row, tile_col, units, rows,
            RAGGED, BLOCKS, LINES, LINE,
        )  # fmt: skip
        in_blocks = tl.reshape(values, (ALL, LINE // 32, 32))
        byte = scale_byte(tl.max(magnitude_bits(in_blocks), 2), FLOOR, E5M2)
        rounded = tl.reshape(through_elements(in_blocks, byte[:, :, None], E5M2), (ALL, LINE))
        tl.store(last + out + row.to(tl.int64)[:, None] * cols + col, rounded.to(last.dtype.element_ty), mask=inside)
    # The second load comes from the L1, and costs less than the registers that the values would be kept in.
    end = tl.load(offs + groups - 1) if RAGGED else rows
    values, row, col, inside = load_tile(
        x, table, rows, cols, row_stride, tile_row, tile_col, units, end,
        RAGGED, BLOCKS, LINES, LINE,
    )  # fmt: skip
    values = tl.reshape(values, (8, BLOCKS, LINES, 4, LINE))
    amax = tl.max(tl.max(magnitude_bits(values), 0), 2)
    if SQUARES:
        square = tl.max(tl.reshape(amax, (BLOCKS, LINES, LINE // 32, 32)), 3)
        amax = tl.broadcast_to(square[:, :, :, None], (BLOCKS, LINES, LINE // 32, 32))
        amax = tl.reshape(amax, (BLOCKS, LINES, LINE))
    byte = scale_byte(amax, FLOOR, E5M2)
    rounded = tl.reshape(through_elements(values, byte[None, :, :, None, :], E5M2), (ALL, LINE))
    tl.store(first + out + row.to(tl.int64)[:, None] * cols + col, rounded.to(first.dtype.element_ty), mask=inside)


_DEQUANTIZE_ROWS = Kernel(_dequantize_rows)
_QUANTIZE_DEQUANTIZE_ROWS = Kernel(_quantize_dequantize_rows)
_QUANTIZE_DEQUANTIZE_TILES = Kernel(_quantize_dequantize_tiles)


def _launch_rows(x: torch.Tensor, out: Operand) -> None:
    rows = as_rows(x)
    row_blocks = ceil_div(rows.cols, BLOCK_SIZE)
    blocks = rows.rows * row_blocks
    constants = (out.spec.rounding == "floor", out.spec.elem_dtype == torch.float8_e5m2, 64)
    _QUANTIZE_DEQUANTIZE_ROWS.launch(
        ceil_div(blocks, 64), (rows.x, out.data), (row_blocks, rows.cols, rows.row_stride), (blocks,), constants,
        device=x.device,
    )  # fmt: skip


def _launch_tiles(x: torch.Tensor, axis: int, last: Operand | None, first: Operand, offs: torch.Tensor | None) -> None:
    spec, matrices = first.spec, as_matrices(x, axis)
    tile, line = ROUND_TILE, LINE_BYTES // x.element_size()
    unit_map = None if offs is None else map_tiles(offs, matrices.rows, tile, tail=True)
    units = ceil_div(matrices.rows, BLOCK_SIZE) if unit_map is None else unit_map.units
    programs = matrices.batches * ceil_div(units, tile.blocks) * ceil_div(matrices.cols, tile.lines * line)
    programs = programs if x.numel() else 0
    constants = (
        last is not None, spec.block == "32x32", offs is not None,
        spec.rounding == "floor", spec.elem_dtype == torch.float8_e5m2, tile.blocks, tile.lines, line,
    )  # fmt: skip
    _QUANTIZE_DEQUANTIZE_TILES.launch(
        programs, (matrices.x, last and last.data, first.data, unit_map and unit_map.table, offs),
        (matrices.cols, matrices.batch_stride, matrices.row_stride),
        (matrices.rows, units, 0 if offs is None else offs.shape[0]), constants,
        device=x.device, warps=tile.warps,
    )  # fmt: skip
