"""Quantisers that write scales in SM100's tiles (``format.swizzle``), each tile once and in one piece.

A program takes 128 rows of 128 columns: that is one tile of scales along the last axis, one along the first, or, in one
read, both. Ragged groups start at whole tiles of rows, so one map of the groups serves both axes.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.common.tiles import (
    ABSENT,
    as_matrices,
    columns_to_elements,
    columnwise_scales,
    load_tile,
    of_columns,
    rounding_of,
    rows_to_elements,
    rowwise_scales,
    source_of,
    square_scales,
    store_matrix,
    tile_position,
    transposed,
)
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import Operand
from titan_mxfp8.format.swizzle import TILE_COLUMNS, TILE_LINES


def swizzle_scales(operand: Operand, offs: Tensor | None) -> Operand:
    """``format.swizzle.swizzle``, by a kernel."""
    spec, groups = replace(operand.spec, block_mn=1, scales="swizzled"), None if offs is None else offs.shape[0]
    *rest, rows, length = operand.data.shape
    by_rows = operand.axis == operand.data.ndim - 1
    shape = spec.scale_shape(operand.data.shape, groups, by_rows)
    scale = torch.empty(shape, dtype=torch.uint8, device=operand.data.device)
    columns, row_tiles = operand.scale.shape[-1], ceil_div(rows, TILE_LINES)
    column_tiles, table = ceil_div(columns, TILE_COLUMNS), None
    if by_rows and groups:
        table, row_tiles = map_tiles(offs, rows, shape[0])
    elif groups:
        table, column_tiles = map_tiles(offs, length, shape[1] * BLOCK_SIZE)
    _swizzle_scales.launch(
        (rest[0] if rest else 1) * row_tiles * ceil_div(column_tiles, 8), (operand.scale, scale, table), (),
        (rows, columns, row_tiles, column_tiles), (groups is not None, by_rows, operand.spec.block_mn, 8),
        device=scale.device,
    )  # fmt: skip
    return Operand(operand.data, scale, spec, operand.axis)


class TileMap(NamedTuple):
    """Tiles of 128 tokens, each of one group.

    Attributes:
        table: int32 (5, count), or None where there are no groups. Of each tile: its first token; how many of them are
            its group's, from there to the group's end; where the first one lies if groups are padded to 32; tiles
            before the group's; and the group's.
        count: of the tiles.
    """

    table: Tensor | None
    count: int


def map_tiles(offs: Tensor | None, rows: int, room: int) -> TileMap:
    """The map of ``rows`` tokens, in as many tiles as ``room`` tokens fill."""
    if offs is None:
        return TileMap(None, ceil_div(rows, TILE_LINES))
    count = room // TILE_LINES
    table = torch.empty((5, count), dtype=torch.int32, device=offs.device)
    programs = max(ceil_div(count, 128), 1)
    _map_tiles.launch(programs, (offs, table), (), (offs.shape[0], count, rows), (128, 32), device=offs.device)
    return TileMap(table, count)


@Kernel
@triton.jit(do_not_specialize=["groups", "tiles", "rows"])
def _map_tiles(offs, table, groups, tiles, rows, TILES: tl.constexpr, GROUPS: tl.constexpr):
    """One program: ``TILES`` columns of a ``TileMap``, while the groups pass by, ``GROUPS`` at a time.

    ``offs = [2, 2, 140]``: tile 0 has tokens 0..1, tile 1 tokens 2..129 and tile 2 tokens 130..139, whose places are 0,
    32 and 160; before groups 0 and 2 there are 0 and 1 tiles, and they have 1 and 2. Tile 3 has no tokens.
    """
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    group = tl.zeros((TILES,), tl.int32)  # groups that end at or before the tile
    token = tl.zeros((TILES,), tl.int32)
    place = tl.zeros((TILES,), tl.int32)
    before = tl.zeros((TILES,), tl.int32)
    tiles_before = 0
    for first in range(0, groups, GROUPS):
        g = first + tl.arange(0, GROUPS)
        known = g < groups
        end = tl.minimum(tl.load(offs + g, mask=known, other=0), rows)
        size = end - tl.minimum(tl.load(offs + g - 1, mask=known & (g > 0), other=0), rows)
        count = tl.cdiv(size, 128)
        passed = (tiles_before + tl.cumsum(count, 0)[None, :] <= tile[:, None]) & known[None, :]
        group += tl.sum(passed.to(tl.int32), 1)
        token += tl.sum(tl.where(passed, size[None, :], 0), 1)
        place += tl.sum(tl.where(passed, (tl.cdiv(size, 32) * 32)[None, :], 0), 1)
        before += tl.sum(tl.where(passed, count[None, :], 0), 1)
        tiles_before += tl.sum(count, 0)
    size = tl.minimum(tl.load(offs + group, mask=group < groups, other=0), rows) - token
    size = tl.where(group < groups, size, 0)
    inside = (tile - before) * 128
    known = tile < tiles
    tl.store(table + tile, token + inside, mask=known)
    tl.store(table + tiles + tile, tl.maximum(size - inside, 0), mask=known)
    tl.store(table + 2 * tiles + tile, place + inside, mask=known)
    tl.store(table + 3 * tiles + tile, before, mask=known)
    tl.store(table + 4 * tiles + tile, tl.cdiv(size, 128), mask=known)


@triton.jit
def tile_of(table, tile, tile_col, rows, col_tiles, tiles, RAGGED: tl.constexpr):
    """Of 128 columns of a tile of ``TileMap``: the first token, how many are the group's from there on, the place of
    the first one along the first axis, and where the tile of scales along the last axis lies, and along the first one.

    Tile 2 of ``_map_tiles``'s example has rows 130..139 of the input. Along the last axis they are rows 0..9 of row 2
    of tiles of scales. Along the first one they are tokens 160..169 of the padded axis, up to 191 zeros, and, for
    columns 128..255 of 300, the tile behind 3 * 1 of the group before, 2 of columns 0..127, and 1 of tokens 2..129.
    """
    if RAGGED:
        token = tl.load(table + tile)
        left = tl.load(table + tiles + tile)
        place = tl.multiple_of(tl.load(table + 2 * tiles + tile), 32)
        before = tl.load(table + 3 * tiles + tile)
        width = tl.load(table + 4 * tiles + tile)
    else:
        token = tile * 128
        left = rows - token
        place = token
        before = 0
        width = tiles
    rowwise_tile = (tile * col_tiles + tile_col).to(tl.int64) * 512
    columnwise_tile = (before * col_tiles + tile_col * width + tile - before).to(tl.int64) * 512
    return token.to(tl.int64), left, place, rowwise_tile, columnwise_tile


@triton.jit
def store_scales(scales, byte, row_block, column, rows, SQUARES: tl.constexpr):
    """Stores bytes (32, ROW_BLOCKS, COLUMNS) of a tile: row ``32 (row_block + b) + r``, column ``column + c`` is at
    [r, b, c]."""
    ROW_BLOCKS: tl.constexpr = byte.shape[1]
    COLUMNS: tl.constexpr = byte.shape[2]
    at = tl.arange(0, 32 * ROW_BLOCKS * COLUMNS)
    in_block = at // (ROW_BLOCKS * COLUMNS)
    row_block += at // COLUMNS % ROW_BLOCKS
    byte = tl.reshape(byte, (32 * ROW_BLOCKS * COLUMNS,))
    if SQUARES:  # one at the edge has rows that there are not
        byte = tl.where(row_block * 32 + in_block < rows, byte, 0)
    tl.store(scales + in_block * 16 + row_block * 4 + column + at % COLUMNS, byte.to(tl.uint8))


@triton.jit
def store_rowwise(
    values, data, scales, left, block, tile_col, cols,
    SQUARES: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    """Stores ``32 * BLOCKS`` rows of a tile, (8, BLOCKS, SEGMENTS, 4, SEGMENT), as ``load_tile`` lays them, quantised
    along the last axis.

    Args:
        data, scales: of the tile's first row, and the tile of scales.
        left: rows of the group from the tile's first one on.
        block: which 32 rows of the tile are the first ones.
    """
    BLOCKS: tl.constexpr = values.shape[1]
    values = values.to(tl.float32)
    if SQUARES:
        byte = square_scales(values, FLOOR, E5M2)
        byte = tl.broadcast_to(byte[None, :, :, None, :], (8, BLOCKS, byte.shape[1], 4, byte.shape[2]))
    else:
        byte = rowwise_scales(values, FLOOR, E5M2)
    elements = rows_to_elements(values, byte, E5M2)
    row = block * 32 + tl.arange(0, 32 * BLOCKS)
    store_matrix(data, elements, row, left, tile_col * 128 + tl.arange(0, 128), cols)
    byte = tl.reshape(tl.permute(byte, (3, 0, 1, 2, 4)), (32, BLOCKS, 4))
    store_scales(scales, byte, block, 0, left, SQUARES)


@triton.jit
def store_columnwise(
    values, data, scales, left, block, tile_col, cols, padded_blocks,
    SQUARES: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    """The same along the first axis; ``data`` of where the tile's first row lies there."""
    BLOCKS: tl.constexpr = values.shape[1]
    values = values.to(tl.float32)
    if SQUARES:
        byte = of_columns(square_scales(values, FLOOR, E5M2))
    else:
        byte = columnwise_scales(values, FLOOR, E5M2)
    elements = transposed(columns_to_elements(values, byte, E5M2))
    row = block * 32 + tl.arange(0, 32 * BLOCKS)
    col = tile_col * 128 + tl.arange(0, 128)
    pointers = data + col.to(tl.int64)[:, None] * (padded_blocks * 32) + row[None, :]
    in_group = row < tl.cdiv(left, 32) * 32
    tl.store(pointers, elements.to(tl.uint8), mask=(col < cols)[:, None] & in_group[None, :])
    if left > 0:  # a tile behind the last group has no place of its own
        by_column = tl.permute(tl.reshape(byte, (BLOCKS, 4, 32)), (2, 1, 0))
        store_scales(scales, by_column, 0, block, cols - tile_col * 128, SQUARES)


@Kernel
@triton.jit(do_not_specialize=["rows", "padded_blocks", "tiles"])
def _quantize_tiles(
    x, x_scale, rowwise_data, rowwise_scale, columnwise_data, columnwise_scale, table,
    cols, batch_stride, row_stride,
    rows, padded_blocks, tiles,
    X_BLOCK_K: tl.constexpr, X_E5M2: tl.constexpr,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, RAGGED: tl.constexpr, SQUARES: tl.constexpr,
    FLOOR: tl.constexpr, E5M2: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """One program: a tile of 128 rows x 128 columns of one matrix, in blocks along the last axis (ROWWISE), the one
    before (COLUMNWISE), or both."""
    tl.static_assert(SEGMENTS * SEGMENT == 128)
    col_tiles = tl.cdiv(cols, 128)
    batch, tile, tile_col = tile_position(col_tiles, tiles)
    token, left, place, rowwise_tile, columnwise_tile = tile_of(table, tile, tile_col, rows, col_tiles, tiles, RAGGED)
    if X_BLOCK_K:
        x_scale += token * tl.cdiv(cols, 32)
    values, _, _, _ = load_tile(
        x + batch * batch_stride + token * row_stride, x_scale, None, left, cols, row_stride, 0, tile_col, 4, left,
        X_BLOCK_K, X_E5M2, False, 4, SEGMENTS, SEGMENT,
    )  # fmt: skip
    values = tl.reshape(values, (8, 4, SEGMENTS, 4, SEGMENT))
    scales_before = batch * tiles * col_tiles * 512
    if ROWWISE:
        store_rowwise(
            values, rowwise_data + (batch * rows + token) * cols, rowwise_scale + scales_before + rowwise_tile,
            left, 0, tile_col, cols, SQUARES, FLOOR, E5M2,
        )  # fmt: skip
    if COLUMNWISE:
        store_columnwise(
            values, columnwise_data + batch * cols * (padded_blocks * 32) + place,
            columnwise_scale + scales_before + columnwise_tile,
            left, 0, tile_col, cols, padded_blocks, SQUARES, FLOOR, E5M2,
        )  # fmt: skip


@Kernel
@triton.jit(do_not_specialize=["rows", "columns", "row_tiles", "column_tiles"])
def _swizzle_scales(
    source, swizzled, table,
    rows, columns, row_tiles, column_tiles,
    RAGGED: tl.constexpr, BY_ROWS: tl.constexpr, REPEAT: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One program: TILES neighbouring tiles of scales, from where their rows lie in rows, REPEAT rows of the result
    on one of them. Eight tiles are a sector of each row."""
    programs = tl.cdiv(column_tiles, TILES)
    tile_column = (tl.program_id(0) % programs * TILES + tl.arange(0, TILES))[:, None]
    tile_row = tl.program_id(0) // programs % row_tiles
    batch = (tl.program_id(0) // programs // row_tiles).to(tl.int64)
    at = tl.arange(0, 512)[None, :]
    row = at // 4 % 4 * 32 + at // 16
    known = tile_column < column_tiles
    column = at % 4
    index = (batch * row_tiles + tile_row) * column_tiles + tile_column
    if RAGGED and BY_ROWS:
        inside = (row < tl.load(table + row_tiles + tile_row)) & (tile_column * 4 + column < columns)
        row += tl.load(table + tile_row)
        column += tile_column * 4
    elif RAGGED:
        place = table + tile_column
        left = tl.cdiv(tl.load(place + column_tiles, mask=known, other=0), 32)
        before = tl.load(place + 3 * column_tiles, mask=known, other=0)
        width = tl.load(place + 4 * column_tiles, mask=known, other=0)
        row += tile_row * 128
        inside = (row < rows) & (column < left)
        column += tl.load(place + 2 * column_tiles, mask=known, other=0) // 32
        # tiles behind the last group have no place of their own: all rows of them write the same zeros
        index = (before * row_tiles + tile_row * width + tile_column - before).to(tl.int64)
    else:
        row += tile_row * 128
        column += tile_column * 4
        inside = (row < rows) & (column < columns)
    at_source = (batch * tl.cdiv(rows, REPEAT) + row // REPEAT) * columns + column
    tl.store(swizzled + index * 512 + at, tl.load(source + at_source, mask=inside & known, other=0), mask=known)


def launch(
    x: Tensor, rowwise: Operand | None, columnwise: Operand | None, offs: Tensor | None, source: Operand | None
) -> None:
    """Fills operands of FP8 with swizzled scales, see ``quantizers.LAUNCHES``."""
    spec, matrices = (rowwise or columnwise).spec, as_matrices(x, x.ndim - 2)
    segment, source_constants = source_of(x, source)
    room = rowwise.scale.shape[0] if rowwise else columnwise.scale.shape[1] * BLOCK_SIZE  # both have as much
    tiles = map_tiles(offs, matrices.rows, room)
    col_tiles = ceil_div(matrices.cols, 128)
    outputs = *(rowwise or ABSENT)[:2], *(columnwise or ABSENT)[:2]
    constants = (
        *source_constants, rowwise is not None, columnwise is not None, offs is not None, spec.block == "32x32",
        *rounding_of(spec), 128 // segment, segment,
    )  # fmt: skip
    counts = matrices.rows, columnwise.data.shape[-1] // BLOCK_SIZE if columnwise else 0, tiles.count
    _quantize_tiles.launch(
        matrices.batches * tiles.count * col_tiles, (matrices.x, source and source.scale, *outputs, tiles.table),
        matrices.sizes, counts, constants, device=x.device, warps=8,
    )  # fmt: skip
