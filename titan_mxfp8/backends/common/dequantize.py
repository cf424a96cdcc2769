"""Dequantise, and quantise-dequantise in one kernel: what a bf16 GEMM needs to compute with MXFP8 values."""

import math

import torch
import triton
import triton.language as tl

from titan_mxfp8.backends.common.convert import (
    from_elements,
    magnitude_bits,
    scale_byte,
    scale_value,
    through_elements,
)
from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.common.tiles import (
    Tile,
    as_matrices,
    as_rows,
    is_past,
    load_tile,
    map_tiles,
    source_of,
)
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import Operand, OperandSpec

# By share of the copy bandwidth on an H200, 131072 x 7168 bf16, both outputs: 0.92; 128 rows and 2 lines 0.87.
ROUND_TILE = Tile(rows=128, lines=1)
REQUANTIZE_TILE = Tile(rows=64, lines=2)  # of FP8 rows: 0.84 ms there, 128 rows and 2 lines 0.94


def dequantize(operand: Operand, dtype: torch.dtype = torch.bfloat16, offs: torch.Tensor | None = None) -> torch.Tensor:
    """The values of an FP8 operand, exact or rebased rows, as its elements lie; with ``offs`` of those before
    ``offs[-1]``, nothing in the others."""
    data, scale, spec, _ = operand
    across, squares = spec.scales == "mn_major", spec.block == "32x32"
    assert spec.stored != "bf16" and not (across and (spec.block_mn > 1 or data.ndim > 2)), spec
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    row_blocks = ceil_div(data.shape[-1], BLOCK_SIZE)
    blocks = math.prod(data.shape[:-1]) * row_blocks
    height = data.shape[-2] if squares or across else 1
    _DEQUANTIZE_ROWS.launch(
        ceil_div(blocks, 64), (data, scale, out, offs), (row_blocks, data.shape[-1]),
        (blocks, height, 0 if offs is None else offs.shape[0]),
        (squares, across, spec.elem_dtype == torch.float8_e5m2, 64), device=data.device,
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
        _launch_tiles(x, x.ndim - 2 if spec.block == "32x32" else axis, None, out, offs, None)
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
    _launch_tiles(x, x.ndim - 2, along_last, along_first, offs, None)
    return along_last, along_first


def requantize(rows: Operand, spec: OperandSpec, offs: torch.Tensor | None) -> Operand:
    """``Backend.requantize`` along axis 0 to values in bf16."""
    if not spec.is_quantized:
        return Operand(dequantize(rows, offs=offs), None, spec, 0)
    out = spec.empty(rows.data, 0, None)
    _launch_tiles(rows.data, 0, None, out, offs, rows)
    return out


@triton.jit(do_not_specialize=["blocks", "height", "groups"])
def _dequantize_rows(
    qdata, scale, out, offs,
    row_blocks, cols,
    blocks, height, groups,
    SQUARES: tl.constexpr, ACROSS: tl.constexpr, E5M2: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCKS`` neighbouring 1x32 blocks, counted through the rows of all matrices.

    32x32 scales of matrices of ``height = 40`` rows and ``row_blocks = 3``: row 41 is row 1 of matrix 1, whose scales
    start at row 2 of all scales, so its block 2 has scale 2 * 3 + 2. ACROSS: ``height`` is that of the one matrix.
    """
    if offs is not None:
        if tl.program_id(0) * BLOCKS // row_blocks >= tl.load(offs + groups - 1):
            return
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row = block // row_blocks
    source = block
    if SQUARES:
        source = (row // height * tl.cdiv(height, 32) + row % height // 32) * row_blocks + block % row_blocks
    if ACROSS:
        source = (block % row_blocks // 4).to(tl.int64) * (tl.cdiv(height, 16) * 16) + row
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
    x, x_scale, last, first, table, offs,
    cols, batch_stride, row_stride,
    rows, units, groups,
    X_SPAN: tl.constexpr, X_E5M2: tl.constexpr,
    LAST: tl.constexpr, SQUARES: tl.constexpr, RAGGED: tl.constexpr,
    FLOOR: tl.constexpr, E5M2: tl.constexpr,
    BLOCKS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """One program: a tile, as in ``quantize._quantize_tiles``, stored where it was read.

    ``first`` always, in blocks along the first axis or in squares, with zeros for the tail but of FP8 rows; ``last`` on
    demand.
    """
    ALL: tl.constexpr = 32 * BLOCKS * LINES
    col_tiles = tl.cdiv(cols, LINES * LINE)
    row_tiles = tl.cdiv(units, BLOCKS)
    tile_col = tl.program_id(0) % col_tiles
    tile_row = tl.program_id(0) // col_tiles % row_tiles
    batch = (tl.program_id(0) // col_tiles // row_tiles).to(tl.int64)
    if X_SPAN and RAGGED:
        if is_past(table, offs, groups, tile_row, BLOCKS):
            return
    x += batch * batch_stride
    out = batch * rows * cols
    if LAST:
        values, row, col, inside = load_tile(
            x, x_scale, table, rows, cols, row_stride, tile_row, tile_col, units, rows,
            X_SPAN, X_E5M2, RAGGED, BLOCKS, LINES, LINE,
        )  # fmt: skip
        in_blocks = tl.reshape(values, (ALL, LINE // 32, 32))
        byte = scale_byte(tl.max(magnitude_bits(in_blocks), 2), FLOOR, E5M2)
        rounded = tl.reshape(through_elements(in_blocks, byte[:, :, None], E5M2), (ALL, LINE))
        tl.store(last + out + row.to(tl.int64)[:, None] * cols + col, rounded.to(last.dtype.element_ty), mask=inside)
    # The second load comes from the L1, and costs less than the registers that the values would be kept in.
    end = tl.load(offs + groups - 1) if RAGGED else rows
    values, row, col, inside = load_tile(
        x, x_scale, table, rows, cols, row_stride, tile_row, tile_col, units, end,
        X_SPAN, X_E5M2, RAGGED, BLOCKS, LINES, LINE,
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


def _launch_tiles(
    x: torch.Tensor,
    axis: int,
    last: Operand | None,
    first: Operand,
    offs: torch.Tensor | None,
    source: Operand | None,
) -> None:
    spec, matrices = first.spec, as_matrices(x, axis)
    tile, (line, source_constants) = REQUANTIZE_TILE if source else ROUND_TILE, source_of(x, source)
    unit_map = None if offs is None else map_tiles(offs, matrices.rows, tile, tail=source is None)
    units = ceil_div(matrices.rows, BLOCK_SIZE) if unit_map is None else unit_map.units
    programs = matrices.batches * ceil_div(units, tile.blocks) * ceil_div(matrices.cols, tile.lines * line)
    programs = programs if x.numel() else 0
    constants = (
        *source_constants, last is not None, spec.block == "32x32", offs is not None,
        spec.rounding == "floor", spec.elem_dtype == torch.float8_e5m2, tile.blocks, tile.lines, line,
    )  # fmt: skip
    _QUANTIZE_DEQUANTIZE_TILES.launch(
        programs,
        (matrices.x, source and source.scale, last and last.data, first.data, unit_map and unit_map.table, offs),
        (matrices.cols, matrices.batch_stride, matrices.row_stride),
        (matrices.rows, units, 0 if offs is None else offs.shape[0]), constants,
        device=x.device, warps=tile.warps,
    )  # fmt: skip
