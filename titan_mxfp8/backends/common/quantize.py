"""Quantise kernels: 1x32 along the last axis, along another one with transposed output, both in one read, and 32x32.

Host tensors have R rows, C columns and B matrices; P is R to a multiple of 32, or with ragged groups
``ragged_rows(R, groups)``.

| output | elements  | scales 1x32    | scales 32x32        |
|--------|-----------|----------------|---------------------|
| last   | (B, R, C) | (B, R, C / 32) | (B, R / 32, C / 32) |
| first  | (B, C, P) | (B, C, P / 32) | (B, C / 32, P / 32) |

On an H200 the L2 is what limits: it takes as long for a byte of a 32-byte sector as for the sector. So stores are whole
sectors wherever a program has them, and where both outputs are made, with 4 scales in a row each, a second kernel
puts the scales in their places (``_place_scales``).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from titan_mxfp8.backends.common.convert import magnitude_bits, reciprocal_scale, scale_byte, to_elements
from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.common.tiles import (
    LINE_BYTES,
    Tile,
    as_matrices,
    as_rows,
    columns_to_elements,
    is_past,
    lies_transposed,
    load_tile,
    map_tiles,
    source_of,
    store_matrix,
    transposed,
    unit_rows,
)
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import Operand, OperandSpec

# By share of the copy bandwidth on an H200, 131072 x 7168 bf16. Both outputs: 128 rows and 2 lines 0.85, 16 warps 0.63
# to 0.77. First alone: 256 rows and 1 line 0.90, 128 rows and 2 lines 0.87.
BOTH_TILE = Tile(rows=128, lines=2)
FIRST_TILE = Tile(rows=256, lines=1)


class Launches(NamedTuple):
    """The launches of a backend's quantisers, each of a tensor and the operands it fills, None for one not wanted."""

    rows: Callable[[torch.Tensor, Operand], None]
    """Blocks of 1x32 along the last axis."""
    tiles: Callable[[torch.Tensor, Operand | None, Operand, torch.Tensor | None, Operand | None], None]
    """Blocks of 1x32 along the last axis and another one, which may have ragged groups, or along that one alone; then
    the tensor may be the FP8 elements of rows, which are given last."""
    squares: Callable[[torch.Tensor, Operand | None, Operand | None], None]
    """Blocks of 32x32, stored along the last axis, the one before, or both."""


def quantize(x: torch.Tensor, axis: int, spec: OperandSpec, offs: torch.Tensor | None) -> Operand:
    """``Backend.quantize`` to exact FP8."""
    return quantize_by(_EXACT, x, axis, spec, offs)


def quantize_both(
    x: torch.Tensor, last: OperandSpec, first: OperandSpec, offs: torch.Tensor | None
) -> tuple[Operand, Operand]:
    """``Backend.quantize_both`` to exact FP8 of one spec, in one read of ``x``."""
    return quantize_both_by(_EXACT, x, last, first, offs)


def requantize(rows: Operand, spec: OperandSpec, offs: torch.Tensor | None) -> Operand:
    """``Backend.requantize`` along axis 0 to exact FP8."""
    return requantize_by(_EXACT, rows, spec, offs)


def quantize_by(
    launches: Launches, x: torch.Tensor, axis: int, spec: OperandSpec, offs: torch.Tensor | None
) -> Operand:
    """``Backend.quantize`` with these launches: which of them runs, on which view of ``x``."""
    along_last, other = axis == x.ndim - 1, 2 * x.ndim - 3 - axis  # other: of the last two axes
    if offs is None and axis >= x.ndim - 2 and lies_transposed(x):
        return quantize_by(launches, x.mT, other, spec, None)._replace(axis=axis)
    if offs is not None and along_last:  # no GEMM wants this, so it may cost a copy
        return quantize_by(launches, x.mT.contiguous(), other, spec, offs)._replace(axis=axis)
    operand = spec.empty(x, axis, None if offs is None else offs.shape[0])
    if spec.block == "32x32":
        launches.squares(x, operand if along_last else None, None if along_last else operand)
    elif along_last:
        launches.rows(x, operand)
    else:
        launches.tiles(x, None, operand, offs, None)
    return operand


def quantize_both_by(
    launches: Launches, x: torch.Tensor, last: OperandSpec, first: OperandSpec, offs: torch.Tensor | None
) -> tuple[Operand, Operand]:
    """``Backend.quantize_both`` with these launches, to operands of one spec."""
    assert last == first, (last, first)
    if offs is None and lies_transposed(x):
        along_last, along_first = quantize_both_by(launches, x.mT, last, first, None)
        return along_first._replace(axis=x.ndim - 1), along_last._replace(axis=x.ndim - 2)
    along_last = last.empty(x, x.ndim - 1, None)
    along_first = first.empty(x, x.ndim - 2, None if offs is None else offs.shape[0])
    if last.block == "32x32":
        launches.squares(x, along_last, along_first)
    else:
        launches.tiles(x, along_last, along_first, offs, None)
    return along_last, along_first


def requantize_by(launches: Launches, rows: Operand, spec: OperandSpec, offs: torch.Tensor | None) -> Operand:
    """``Backend.requantize`` along axis 0 with these launches."""
    operand = spec.empty(rows.data, 0, None if offs is None else offs.shape[0])
    launches.tiles(rows.data, None, operand, offs, rows)
    return operand


@triton.jit(do_not_specialize=["blocks"])
def _quantize_rows(
    x, qdata, scale,
    row_blocks, cols, row_stride,
    blocks,
    FLOOR: tl.constexpr, E5M2: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCKS`` neighbouring 1x32 blocks, counted through the rows.

    Rows of 70 columns have ``row_blocks = 3``: block 4 is row 1, columns 32..63, and block 5 is row 1, columns 64..69.
    """
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row = (block // row_blocks).to(tl.int64)[:, None]
    col = (block % row_blocks)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = (block < blocks)[:, None] & (col < cols)
    values = tl.load(x + row * row_stride + col, mask=inside, other=0).to(tl.float32)
    byte = scale_byte(tl.max(magnitude_bits(values), 1), FLOOR, E5M2)
    elements = to_elements(values * reciprocal_scale(byte)[:, None], byte[:, None], E5M2)
    tl.store(qdata + row * cols + col, elements, mask=inside)
    tl.store(scale + block, byte.to(tl.uint8), mask=block < blocks)


@triton.jit(do_not_specialize=["rows", "padded_blocks", "units", "groups"])
def _quantize_tiles(
    x, x_scale, last_qdata, last_pieces, first_qdata, first_scale, table, offs,
    cols, batch_stride, row_stride,
    rows, padded_blocks, units, groups,
    X_SPAN: tl.constexpr, X_E5M2: tl.constexpr,
    LAST: tl.constexpr, RAGGED: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr,
    BLOCKS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """One program: a tile of one matrix in 1x32 blocks along the first axis and, with ``LAST``, along the last one too.

    With ragged groups its rows are those of the next ``BLOCKS`` units of the map. ``offs = [2, 40]`` of 50 rows, tiles
    of 128: the first tile holds the groups, at its rows 0..1 and 32..69, the second the tail, at its rows 0..9, for
    which the first axis gets zeros.

    With ``LAST`` the scales go to pieces: 128 x 128 values leave 4 scales for each row and each column, stored as
    (row, 4) at [batch, tile column], and as (column, 4) at [batch, tile row].
    """
    ROWS: tl.constexpr = BLOCKS * 32
    COLS: tl.constexpr = LINES * LINE
    col_tiles = tl.cdiv(cols, COLS)
    row_tiles = tl.cdiv(units, BLOCKS)
    tile_col = tl.program_id(0) % col_tiles  # neighbours in a row run together
    tile_row = tl.program_id(0) // col_tiles % row_tiles
    batch = (tl.program_id(0) // col_tiles // row_tiles).to(tl.int64)
    if X_SPAN and RAGGED:
        if is_past(table, offs, groups, tile_row, BLOCKS):
            return
    values, _, _, _ = load_tile(
        x + batch * batch_stride, x_scale, table, rows, cols, row_stride, tile_row, tile_col, units, rows,
        X_SPAN, X_E5M2, RAGGED, BLOCKS, LINES, LINE,
    )  # fmt: skip
    values = tl.reshape(values, (8, BLOCKS, LINES, 4, LINE))
    col = tile_col * COLS + tl.arange(0, COLS)

    if LAST:
        row, stop = unit_rows(table, rows, tile_row, units, RAGGED, BLOCKS)
        row = tl.reshape(row[:, None] + tl.arange(0, 32)[None, :], (ROWS,))
        stop = tl.reshape(tl.broadcast_to(stop[:, None], (BLOCKS, 32)), (ROWS,))
        in_blocks = tl.reshape(values, (8, BLOCKS, LINES, 4, LINE // 32, 32))
        last_byte = scale_byte(tl.max(magnitude_bits(in_blocks), 5), FLOOR, E5M2)
        scaled = in_blocks * reciprocal_scale(last_byte)[:, :, :, :, :, None]
        elements = to_elements(scaled, last_byte[:, :, :, :, :, None], E5M2)
        elements = tl.reshape(elements, (8, BLOCKS, LINES, 4, LINE))
        elements = tl.reshape(tl.permute(elements, (1, 3, 0, 2, 4)), (ROWS, COLS))
        store_matrix(last_qdata + batch * rows * cols, elements, row, stop, col, cols)
        last_byte = tl.reshape(tl.permute(last_byte, (1, 3, 0, 2, 4)), (ROWS, COLS // 32))
        last_pieces += (batch * col_tiles + tile_col) * rows * (COLS // 32)
        store_matrix(last_pieces, last_byte, row, stop, tl.arange(0, COLS // 32), COLS // 32)

    byte = scale_byte(tl.max(tl.max(magnitude_bits(values), 0), 2), FLOOR, E5M2)  # (BLOCKS, LINES, LINE)
    elements = transposed(columns_to_elements(values, byte, E5M2, BLOCKS, LINES, LINE), BLOCKS, LINES, LINE)
    byte = tl.reshape(tl.permute(byte, (1, 2, 0)), (COLS, BLOCKS))
    position = tile_row * ROWS + tl.arange(0, ROWS)
    padded_rows = padded_blocks * 32
    first_qdata += batch * cols * padded_rows
    if LAST:
        in_tail = False
        if RAGGED:
            in_tail = tl.load(table + tile_row * BLOCKS) >= tl.load(offs + groups - 1)
        filled_cols = tl.where(in_tail, 0, cols)
        first_scale += (batch * row_tiles + tile_row) * cols * BLOCKS
        store_matrix(first_qdata, elements, col, filled_cols, position, padded_rows)
        store_matrix(first_scale, byte, col, filled_cols, tl.arange(0, BLOCKS), BLOCKS)
        if in_tail:  # last: a branch before would keep all values in registers
            store_matrix(first_qdata, tl.zeros((COLS, ROWS), tl.uint8), col, cols, position, padded_rows)
            store_matrix(first_scale, tl.zeros((COLS, BLOCKS), tl.uint8), col, cols, tl.arange(0, BLOCKS), BLOCKS)
    else:
        first_scale += batch * cols * padded_blocks
        store_matrix(first_qdata, elements, col, cols, position, padded_rows)
        store_matrix(first_scale, byte, col, cols, tile_row * BLOCKS + tl.arange(0, BLOCKS), padded_blocks)


@triton.jit(do_not_specialize=["last_programs", "last_lines", "first_width"])
def _place_scales(
    last_pieces, last_scale, first_pieces, first_scale,
    last_width, first_lines,
    last_programs, last_lines, first_width,
    LAST_PIECE: tl.constexpr, FIRST_PIECE: tl.constexpr,
):  # fmt: skip
    """One program: 32 bytes in each of 128 lines of scales, the first ``last_programs`` of the last axis, the others of
    the first one.

    A line is a row of the matrix (last) or a column (first). Lines of 7 scales in pieces of 4: scale 5 of line 9 is
    byte 1 of line 9 of piece 1.
    """
    program = tl.program_id(0)
    if program < last_programs:
        place_lines(program, last_pieces, last_scale, last_lines, last_width, LAST_PIECE)
    else:
        place_lines(program - last_programs, first_pieces, first_scale, first_lines, first_width, FIRST_PIECE)


@triton.jit
def place_lines(program, pieces, scale, lines, width, PIECE: tl.constexpr):
    """Half of ``_place_scales``."""
    LINES: tl.constexpr = 128
    PIECES: tl.constexpr = 32 // PIECE
    line_tiles = tl.cdiv(lines, LINES)
    width_tiles = tl.cdiv(width, 32)
    tile_line = program // width_tiles % line_tiles * LINES
    tile_byte = program % width_tiles * 32
    batch = (program // width_tiles // line_tiles).to(tl.int64)
    piece = tile_byte // PIECE + tl.arange(0, PIECES)
    at = tile_line * PIECE + tl.arange(0, LINES * PIECE)
    line = tile_line + tl.arange(0, LINES)
    byte = tile_byte + tl.arange(0, 32)
    pieces += batch * tl.cdiv(width, PIECE) * (lines * PIECE)
    inside = (piece * PIECE < width)[:, None] & (at < lines * PIECE)[None, :]
    values = tl.load(pieces + piece.to(tl.int64)[:, None] * (lines * PIECE) + at[None, :], mask=inside, other=0)
    values = tl.permute(tl.reshape(values, (PIECES, LINES, PIECE)), (1, 0, 2))
    store_matrix(scale + batch * lines * width, tl.reshape(values, (LINES, 32)), line, lines, byte, width)


@triton.jit(do_not_specialize=["rows"])
def _quantize_squares(
    x, last_qdata, last_scale, first_qdata, first_scale,
    cols, batch_stride, row_stride,
    rows,
    LAST: tl.constexpr, FIRST: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr,
    BLOCKS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """One program: a tile of one matrix in 32x32 blocks, stored as it lies (``LAST``), transposed (``FIRST``), or both
    ways."""
    ROWS: tl.constexpr = BLOCKS * 32
    COLS: tl.constexpr = LINES * LINE
    col_tiles = tl.cdiv(cols, COLS)
    row_blocks = tl.cdiv(rows, 32)
    col_blocks = tl.cdiv(cols, 32)
    row_tiles = tl.cdiv(row_blocks, BLOCKS)
    tile_col = tl.program_id(0) % col_tiles
    tile_row = tl.program_id(0) // col_tiles % row_tiles
    batch = (tl.program_id(0) // col_tiles // row_tiles).to(tl.int64)
    values, _, _, _ = load_tile(
        x + batch * batch_stride, None, None, rows, cols, row_stride, tile_row, tile_col, row_blocks, rows,
        0, False, False, BLOCKS, LINES, LINE,
    )  # fmt: skip
    values = tl.reshape(values, (8, BLOCKS, LINES, 4, LINE))
    amax = tl.max(tl.max(magnitude_bits(values), 0), 2)
    byte = scale_byte(tl.max(tl.reshape(amax, (BLOCKS, LINES, LINE // 32, 32)), 3), FLOOR, E5M2)
    wide = tl.broadcast_to(byte[:, :, :, None], (BLOCKS, LINES, LINE // 32, 32))
    wide = tl.reshape(wide, (BLOCKS, LINES, LINE))
    byte = tl.reshape(byte, (BLOCKS, COLS // 32))
    row = tile_row * ROWS + tl.arange(0, ROWS)
    col = tile_col * COLS + tl.arange(0, COLS)
    row_block = tile_row * BLOCKS + tl.arange(0, BLOCKS)
    col_block = tile_col * (COLS // 32) + tl.arange(0, COLS // 32)
    if LAST:
        scaled = values * reciprocal_scale(wide)[None, :, :, None, :]
        elements = to_elements(scaled, wide[None, :, :, None, :], E5M2)
        elements = tl.reshape(tl.permute(elements, (1, 3, 0, 2, 4)), (ROWS, COLS))
        store_matrix(last_qdata + batch * rows * cols, elements, row, rows, col, cols)
        store_matrix(last_scale + batch * row_blocks * col_blocks, byte, row_block, row_blocks, col_block, col_blocks)
    if FIRST:
        elements = transposed(columns_to_elements(values, wide, E5M2, BLOCKS, LINES, LINE), BLOCKS, LINES, LINE)
        padded_rows = row_blocks * 32
        store_matrix(first_qdata + batch * padded_rows * cols, elements, col, cols, row, padded_rows)
        first_scale += batch * row_blocks * col_blocks
        store_matrix(first_scale, tl.trans(byte), col_block, col_blocks, row_block, row_blocks)


_QUANTIZE_ROWS = Kernel(_quantize_rows)
_QUANTIZE_TILES = Kernel(_quantize_tiles)
_PLACE_SCALES = Kernel(_place_scales)
_QUANTIZE_SQUARES = Kernel(_quantize_squares)


def _launch_rows(x: torch.Tensor, out: Operand) -> None:
    """1x32 blocks along the last axis."""
    rows = as_rows(x)
    blocks = out.scale.numel()
    constants = (out.spec.rounding == "floor", out.spec.elem_dtype == torch.float8_e5m2, 64)
    _QUANTIZE_ROWS.launch(
        ceil_div(blocks, 64), (rows.x, out.data, out.scale), (out.scale.shape[-1], rows.cols, rows.row_stride),
        (blocks,), constants, device=x.device,
    )  # fmt: skip


def _launch_tiles(
    x: torch.Tensor, last: Operand | None, first: Operand, offs: torch.Tensor | None, source: Operand | None
) -> None:
    """1x32 blocks along ``first.axis`` and, unless ``last`` is None, along the last axis too."""
    spec, matrices = first.spec, as_matrices(x, first.axis)
    tile, (line, source_constants) = BOTH_TILE if last else FIRST_TILE, source_of(x, source)
    tile_cols = tile.lines * line
    unit_map = None if offs is None else map_tiles(offs, matrices.rows, tile, tail=last is not None)
    units = ceil_div(matrices.rows, BLOCK_SIZE) if unit_map is None else unit_map.units
    row_tiles, col_tiles = ceil_div(units, tile.blocks), ceil_div(matrices.cols, tile_cols)
    padded_blocks = first.scale.shape[-1]
    last_pieces, first_pieces = None, first.scale
    if last:
        shapes = (col_tiles, matrices.rows, tile_cols // BLOCK_SIZE), (row_tiles, matrices.cols, tile.blocks)
        last_pieces, first_pieces = (
            torch.empty((matrices.batches, *shape), dtype=torch.uint8, device=x.device) for shape in shapes
        )
    table = unit_map and unit_map.table
    tensors = (
        matrices.x, source and source.scale,
        last and last.data, last_pieces, first.data, first_pieces, table, offs,
    )  # fmt: skip
    constants = (
        *source_constants,
        last is not None, offs is not None, spec.rounding == "floor", spec.elem_dtype == torch.float8_e5m2,
        tile.blocks, tile.lines, line,
    )  # fmt: skip
    _QUANTIZE_TILES.launch(
        matrices.batches * row_tiles * col_tiles, tensors, (matrices.cols, matrices.batch_stride, matrices.row_stride),
        (matrices.rows, padded_blocks, units, 0 if offs is None else offs.shape[0]), constants,
        device=x.device, warps=tile.warps,
    )  # fmt: skip
    if last:
        last_width = last.scale.shape[-1]
        last_programs = matrices.batches * ceil_div(matrices.rows, 128) * ceil_div(last_width, 32)
        first_programs = matrices.batches * ceil_div(matrices.cols, 128) * ceil_div(padded_blocks, 32)
        _PLACE_SCALES.launch(
            last_programs + first_programs, (last_pieces, last.scale, first_pieces, first.scale),
            (last_width, matrices.cols), (last_programs, matrices.rows, padded_blocks),
            (tile_cols // BLOCK_SIZE, tile.blocks), device=x.device,
        )  # fmt: skip


def _launch_squares(x: torch.Tensor, last: Operand | None, first: Operand | None) -> None:
    """32x32 blocks, as ``x`` lies, with the last two axes swapped, or both."""
    spec, matrices = (last or first).spec, as_matrices(x, x.ndim - 2)
    tile, line = BOTH_TILE, LINE_BYTES // x.element_size()
    row_tiles = ceil_div(ceil_div(matrices.rows, BLOCK_SIZE), tile.blocks)
    programs = matrices.batches * row_tiles * ceil_div(matrices.cols, tile.lines * line)
    tensors = matrices.x, last and last.data, last and last.scale, first and first.data, first and first.scale
    constants = (
        last is not None, first is not None, spec.rounding == "floor", spec.elem_dtype == torch.float8_e5m2,
        tile.blocks, tile.lines, line,
    )  # fmt: skip
    _QUANTIZE_SQUARES.launch(
        programs, tensors, (matrices.cols, matrices.batch_stride, matrices.row_stride), (matrices.rows,), constants,
        device=x.device, warps=tile.warps,
    )  # fmt: skip


_EXACT = Launches(rows=_launch_rows, tiles=_launch_tiles, squares=_launch_squares)
