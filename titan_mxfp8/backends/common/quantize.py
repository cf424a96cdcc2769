"""Quantise kernels of 1x32 blocks: along the last axis, along another one with transposed output, both in one read.

Host tensors have R rows, C columns and B matrices; P is R to a multiple of 32, or with ragged groups
``ragged_rows(R, groups)``.

| output     | elements  | scales         |
|------------|-----------|----------------|
| rowwise    | (B, R, C) | (B, R, C / 32) |
| columnwise | (B, C, P) | (B, C, P / 32) |

On an H200 the L2 is what limits: it takes as long for a byte of a 32-byte sector as for the sector. So stores are whole
sectors wherever a program has them, and where both outputs are made, with 4 scales in a row each, a second kernel
puts the scales in their places (``_place_scales``).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_mxfp8.backends.common.convert import (
    magnitude_bits,
    reciprocal_scale,
    scale_byte,
    through_elements,
    to_elements,
)
from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.common.tiles import (
    Tile,
    as_matrices,
    columns_to_elements,
    columnwise_scales,
    in_rows,
    is_past,
    load_tile,
    map_tiles,
    rounding_of,
    rows_to_elements,
    rowwise_scales,
    source_of,
    store_matrix,
    tile_position,
    tile_rows,
    transposed,
)
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import Operand

# By share of the copy bandwidth on an H200, 131072 x 7168 bf16. Both outputs: 128 rows and 2 segments 0.85, 16 warps
# 0.63 to 0.77. Columnwise alone: 256 rows and 1 segment 0.90, 128 rows and 2 segments 0.87.
BOTH_TILE = Tile(rows=128, segments=2)
COLUMNWISE_TILE = Tile(rows=256, segments=1)


@Kernel
@triton.jit(do_not_specialize=["blocks"])
def _quantize_rows(
    x, qdata, scale,
    blocks_per_row, cols, row_stride,
    blocks,
    FLOOR: tl.constexpr, E5M2: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCKS`` neighbouring 1x32 blocks, counted through the rows: elements and scales, or without
    ``scale`` the quantised values.

    Rows of 70 columns have ``blocks_per_row = 3``: block 4 is row 1, columns 32..63, and block 5 is row 1, columns
    64..69.
    """
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row = (block // blocks_per_row).to(tl.int64)[:, None]
    col = (block % blocks_per_row)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = (block < blocks)[:, None] & (col < cols)
    values = tl.load(x + row * row_stride + col, mask=inside, other=0).to(tl.float32)
    byte = scale_byte(tl.max(magnitude_bits(values), 1), FLOOR, E5M2)
    if scale is None:
        values = through_elements(values, byte[:, None], E5M2)
        tl.store(qdata + row * cols + col, values.to(qdata.dtype.element_ty), mask=inside)
    else:
        elements = to_elements(values * reciprocal_scale(byte)[:, None], byte[:, None], E5M2)
        tl.store(qdata + row * cols + col, elements, mask=inside)
        tl.store(scale + block, byte.to(tl.uint8), mask=block < blocks)


@Kernel
@triton.jit(do_not_specialize=["rows", "padded_blocks", "row_blocks", "groups"])
def _quantize_tiles(
    x, x_scale, rowwise_qdata, rowwise_pieces, columnwise_qdata, columnwise_scale, table, offs,
    cols, batch_stride, row_stride,
    rows, padded_blocks, row_blocks, groups,
    X_BLOCK_K: tl.constexpr, X_E5M2: tl.constexpr,
    ROWWISE: tl.constexpr, RAGGED: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr,
    BLOCKS: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """One program: a tile of one matrix in 1x32 blocks along the first axis and, with ``ROWWISE``, along the last one
    too.

    With ragged groups its rows are those of the next ``BLOCKS`` row blocks of the map. ``offs = [2, 40]`` of 50 rows,
    tiles of 128: the first tile holds the groups, at its rows 0..1 and 32..69, the second the tail, at its rows 0..9,
    for which the first axis gets zeros.

    With ``ROWWISE`` the scales go to pieces: 128 x 128 values leave 4 scales for each row and each column, stored as
    (row, 4) at [batch, tile column], and as (column, 4) at [batch, tile row].
    """
    ROWS: tl.constexpr = BLOCKS * 32
    COLS: tl.constexpr = SEGMENTS * SEGMENT
    col_tiles = tl.cdiv(cols, COLS)
    row_tiles = tl.cdiv(row_blocks, BLOCKS)
    batch, tile_row, tile_col = tile_position(col_tiles, row_tiles)
    if X_BLOCK_K and RAGGED:
        if is_past(table, offs, groups, tile_row, BLOCKS):
            return
    values, _, _, _ = load_tile(
        x + batch * batch_stride, x_scale, table, rows, cols, row_stride, tile_row, tile_col, row_blocks, rows,
        X_BLOCK_K, X_E5M2, RAGGED, BLOCKS, SEGMENTS, SEGMENT,
    )  # fmt: skip
    values = tl.reshape(values, (8, BLOCKS, SEGMENTS, 4, SEGMENT))
    col = tile_col * COLS + tl.arange(0, COLS)

    if ROWWISE:
        row, stop = tile_rows(table, rows, tile_row, row_blocks, RAGGED, BLOCKS)
        rowwise_byte = rowwise_scales(values, FLOOR, E5M2)
        elements = rows_to_elements(values, rowwise_byte, E5M2)
        store_matrix(rowwise_qdata + batch * rows * cols, elements, row, stop, col, cols)
        rowwise_pieces += (batch * col_tiles + tile_col) * rows * (COLS // 32)
        store_matrix(rowwise_pieces, in_rows(rowwise_byte), row, stop, tl.arange(0, COLS // 32), COLS // 32)

    byte = columnwise_scales(values, FLOOR, E5M2)
    elements = transposed(columns_to_elements(values, byte, E5M2))
    byte = tl.reshape(tl.permute(byte, (1, 2, 0)), (COLS, BLOCKS))
    position = tile_row * ROWS + tl.arange(0, ROWS)
    padded_rows = padded_blocks * 32
    columnwise_qdata += batch * cols * padded_rows
    if ROWWISE:
        in_tail = False
        if RAGGED:
            in_tail = tl.load(table + tile_row * BLOCKS) >= tl.load(offs + groups - 1)
        filled_cols = tl.where(in_tail, 0, cols)
        columnwise_scale += (batch * row_tiles + tile_row) * cols * BLOCKS
        store_matrix(columnwise_qdata, elements, col, filled_cols, position, padded_rows)
        store_matrix(columnwise_scale, byte, col, filled_cols, tl.arange(0, BLOCKS), BLOCKS)
        if in_tail:  # last: a branch before would keep all values in registers
            store_matrix(columnwise_qdata, tl.zeros((COLS, ROWS), tl.uint8), col, cols, position, padded_rows)
            store_matrix(columnwise_scale, tl.zeros((COLS, BLOCKS), tl.uint8), col, cols, tl.arange(0, BLOCKS), BLOCKS)
    else:
        columnwise_scale += batch * cols * padded_blocks
        store_matrix(columnwise_qdata, elements, col, cols, position, padded_rows)
        store_matrix(columnwise_scale, byte, col, cols, tile_row * BLOCKS + tl.arange(0, BLOCKS), padded_blocks)


@Kernel
@triton.jit(do_not_specialize=["rowwise_programs", "rowwise_rows", "columnwise_width"])
def _place_scales(
    rowwise_pieces, rowwise_scale, columnwise_pieces, columnwise_scale,
    rowwise_width, columnwise_rows,
    rowwise_programs, rowwise_rows, columnwise_width,
    ROWWISE_PIECE: tl.constexpr, COLUMNWISE_PIECE: tl.constexpr,
):  # fmt: skip
    """One program: 32 bytes in each of 128 rows of scales, the first ``rowwise_programs`` of the last axis, the others
    of the first one.

    A row of scales is of a row of the matrix (rowwise) or of a column (columnwise). Rows of 7 scales in pieces of 4:
    scale 5 of row 9 is byte 1 of row 9 of piece 1.
    """
    program = tl.program_id(0)
    if program < rowwise_programs:
        place_rows(program, rowwise_pieces, rowwise_scale, rowwise_rows, rowwise_width, ROWWISE_PIECE)
    else:
        place_rows(
            program - rowwise_programs, columnwise_pieces, columnwise_scale, columnwise_rows, columnwise_width,
            COLUMNWISE_PIECE,
        )  # fmt: skip


@triton.jit
def place_rows(program, pieces, scale, rows, width, PIECE: tl.constexpr):
    """Half of ``_place_scales``."""
    ROWS: tl.constexpr = 128
    PIECES: tl.constexpr = 32 // PIECE
    row_tiles = tl.cdiv(rows, ROWS)
    width_tiles = tl.cdiv(width, 32)
    tile_row = program // width_tiles % row_tiles * ROWS
    tile_byte = program % width_tiles * 32
    batch = (program // width_tiles // row_tiles).to(tl.int64)
    piece = tile_byte // PIECE + tl.arange(0, PIECES)
    at = tile_row * PIECE + tl.arange(0, ROWS * PIECE)
    row = tile_row + tl.arange(0, ROWS)
    byte = tile_byte + tl.arange(0, 32)
    pieces += batch * tl.cdiv(width, PIECE) * (rows * PIECE)
    inside = (piece * PIECE < width)[:, None] & (at < rows * PIECE)[None, :]
    values = tl.load(pieces + piece.to(tl.int64)[:, None] * (rows * PIECE) + at[None, :], mask=inside, other=0)
    values = tl.permute(tl.reshape(values, (PIECES, ROWS, PIECE)), (1, 0, 2))
    store_matrix(scale + batch * rows * width, tl.reshape(values, (ROWS, 32)), row, rows, byte, width)


def launch_rows(x: Tensor, out: Operand) -> None:
    """1x32 blocks along the last axis, in FP8 or, of an operand without scales, in bf16."""
    rows = as_matrices(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), 0)
    blocks_per_row = ceil_div(rows.cols, BLOCK_SIZE)
    blocks = rows.rows * blocks_per_row
    _quantize_rows.launch(
        ceil_div(blocks, 64), (rows.x, out.data, out.scale), (blocks_per_row, rows.cols, rows.row_stride), (blocks,),
        (*rounding_of(out.spec), 64), device=x.device,
    )  # fmt: skip


def launch(
    x: Tensor, rowwise: Operand | None, columnwise: Operand | None, offs: Tensor | None, source: Operand | None
) -> None:
    """Fills operands of exact FP8 in 1x32 blocks, see ``quantizers.LAUNCHES``."""
    if columnwise is None:
        launch_rows(x, rowwise)
        return
    spec, matrices = columnwise.spec, as_matrices(x, columnwise.axis)
    tile, (segment, source_constants) = BOTH_TILE if rowwise else COLUMNWISE_TILE, source_of(x, source)
    tile_cols = tile.segments * segment
    table, row_blocks = map_tiles(offs, matrices.rows, tile, tail=rowwise is not None)
    row_tiles, col_tiles = ceil_div(row_blocks, tile.blocks), ceil_div(matrices.cols, tile_cols)
    padded_blocks = columnwise.scale.shape[-1]
    rowwise_pieces, columnwise_pieces = None, columnwise.scale
    if rowwise:
        shapes = (col_tiles, matrices.rows, tile_cols // BLOCK_SIZE), (row_tiles, matrices.cols, tile.blocks)
        rowwise_pieces, columnwise_pieces = (
            torch.empty((matrices.batches, *shape), dtype=torch.uint8, device=x.device) for shape in shapes
        )
    tensors = (
        matrices.x, source and source.scale,
        rowwise and rowwise.data, rowwise_pieces, columnwise.data, columnwise_pieces, table, offs,
    )  # fmt: skip
    constants = (
        *source_constants,
        rowwise is not None, offs is not None, *rounding_of(spec),
        tile.blocks, tile.segments, segment,
    )  # fmt: skip
    _quantize_tiles.launch(
        matrices.batches * row_tiles * col_tiles, tensors, matrices.sizes,
        (matrices.rows, padded_blocks, row_blocks, 0 if offs is None else offs.shape[0]), constants,
        device=x.device, warps=tile.warps,
    )  # fmt: skip
    if rowwise:
        rowwise_width = rowwise.scale.shape[-1]
        rowwise_programs = matrices.batches * ceil_div(matrices.rows, 128) * ceil_div(rowwise_width, 32)
        columnwise_programs = matrices.batches * ceil_div(matrices.cols, 128) * ceil_div(padded_blocks, 32)
        _place_scales.launch(
            rowwise_programs + columnwise_programs,
            (rowwise_pieces, rowwise.scale, columnwise_pieces, columnwise.scale),
            (rowwise_width, matrices.cols), (rowwise_programs, matrices.rows, padded_blocks),
            (tile_cols // BLOCK_SIZE, tile.blocks), device=x.device,
        )  # fmt: skip
