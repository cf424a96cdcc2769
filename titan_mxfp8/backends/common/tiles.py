"""Tiles of a matrix in the quantise kernels: how they are loaded, converted, transposed and stored."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_mxfp8.backends.common.convert import (
    from_elements,
    magnitude_bits,
    reciprocal_scale,
    scale_byte,
    scale_value,
    to_elements,
)
from titan_mxfp8.backends.common.groups import RowBlockMap, map_row_blocks
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div, ragged_rows
from titan_mxfp8.format.spec import Operand, OperandSpec

SEGMENT_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows and 128-byte segments of a program's tile. Its warps take 32 rows of a segment each."""

    rows: int
    segments: int

    @property
    def blocks(self) -> int:
        return self.rows // BLOCK_SIZE

    @property
    def warps(self) -> int:
        return self.blocks * self.segments


# Columns of a segment of FP8 rows: a thread then holds as many numbers as of bf16.
FP8_SEGMENT = 64
# Tiles of 128 x 128, by the columns of a segment.
BOTH_TILES = {segment: Tile(rows=128, segments=128 // segment) for segment in (32, 64)}


@triton.jit
def tile_position(col_tiles, row_tiles):
    """Of a program that takes one tile: its matrix, and its row and column among the tiles of that. Neighbours in a row
    run together."""
    tile_col = tl.program_id(0) % col_tiles
    tile_row = tl.program_id(0) // col_tiles % row_tiles
    return (tl.program_id(0) // col_tiles // row_tiles).to(tl.int64), tile_row, tile_col


@triton.jit
def row_block_rows(table, rows, tile_row, row_blocks, RAGGED: tl.constexpr, BLOCKS: tl.constexpr):
    """First row of each 32-row block of a tile, and the end of the rows that are its own."""
    block = tile_row * BLOCKS + tl.arange(0, BLOCKS)
    if RAGGED:
        start = tl.load(table + block, mask=block < row_blocks, other=0)
        return start, tl.load(table + row_blocks + block, mask=block < row_blocks, other=0)
    else:
        return block * 32, tl.zeros((BLOCKS,), tl.int32) + rows


@triton.jit
def tile_rows(table, rows, tile_row, row_blocks, RAGGED: tl.constexpr, BLOCKS: tl.constexpr):
    """The ``32 * BLOCKS`` rows of a tile, and for each the end of those that are its block's own."""
    row, stop = row_block_rows(table, rows, tile_row, row_blocks, RAGGED, BLOCKS)
    row = tl.reshape(row[:, None] + tl.arange(0, 32)[None, :], (32 * BLOCKS,))
    return row, tl.reshape(tl.broadcast_to(stop[:, None], (BLOCKS, 32)), (32 * BLOCKS,))


@triton.jit
def store_matrix(matrix, values, row, row_stop, col, cols):
    """Stores bytes: rows before ``row_stop`` and columns before ``cols`` of a contiguous matrix of ``cols`` columns."""
    pointers = matrix + row.to(tl.int64)[:, None] * cols + col[None, :]
    tl.store(pointers, values.to(tl.uint8), mask=(row < row_stop)[:, None] & (col < cols)[None, :])


@triton.jit
def is_past(table, offs, groups, tile_row, BLOCKS: tl.constexpr):
    """Whether a tile lies behind the last group, by a map without a tail."""
    return tl.load(table + tile_row * BLOCKS) >= tl.load(offs + groups - 1)


@triton.jit
def load_tile(
    x, x_scale, table,
    rows, cols, row_stride, tile_row, tile_col, row_blocks, limit,
    X_BLOCK_K: tl.constexpr, X_E5M2: tl.constexpr,
    RAGGED: tl.constexpr, BLOCKS: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
    places=None, places_end=0,
):  # fmt: skip
    """A tile of ``32 * BLOCKS`` rows and ``SEGMENTS * SEGMENT`` columns as fp32, its row and column numbers and its
    mask.

    ``places``: where each row lies among the ``places_end`` rows of ``x`` and its scales, if not in its own place.

    Rows at and past ``limit`` are zeros, but inside. With X_BLOCK_K ``x`` is FP8 and has a scale for X_BLOCK_K columns
    of a row, which are K-major (32) or MN-major (128): see ``OperandSpec.scales``. Without ``x_scale`` its elements are
    loaded.

    It lies as (8 * BLOCKS * SEGMENTS * 4, SEGMENT): row ``32 b + 8 q + i``, column ``SEGMENT l + c`` is at [i, b, l,
    q, c]. A segment is 128 bytes, so Triton gives a thread 16 bytes of a segment, a warp four segments, and the warps
    the next ones: a thread holds 8 rows of 8 columns (bf16), a warp 32 x 64, and no maximum of a block crosses warps.
    Two traps: a load of five axes would leave it to the compiler which one the lanes go to, and 3.6 and 3.9 choose
    differently; and if bytes were stored in the shape of this load, its threads would get 32 bytes, which undoes all
    this (3 times slower).
    """
    start, stop = row_block_rows(table, rows, tile_row, row_blocks, RAGGED, BLOCKS)
    in_block = tl.arange(0, 8)[:, None, None, None] + 8 * tl.arange(0, 4)[None, None, None, :]
    shape: tl.constexpr = (8, BLOCKS, SEGMENTS, 4)
    row = tl.reshape(tl.broadcast_to(start[None, :, None, None] + in_block, shape), (32 * BLOCKS * SEGMENTS,))
    stop = tl.reshape(tl.broadcast_to(stop[None, :, None, None], shape), (32 * BLOCKS * SEGMENTS,))
    segment = tl.arange(0, 32 * BLOCKS * SEGMENTS) // 4 % SEGMENTS
    in_segment = tl.arange(0, SEGMENT)
    if X_BLOCK_K:
        # The same, but a thread gets 8 bytes of a segment, and 8 rows again.
        in_segment = in_segment // 8 * 8 + in_segment % 8
    col = (tile_col * SEGMENTS + segment[:, None]) * SEGMENT + in_segment[None, :]
    known_row = row < tl.minimum(stop, limit)
    known = known_row[:, None] & (col < cols)
    place, place_rows = row, rows
    if places is not None:
        place, place_rows = tl.load(places + row, mask=known_row, other=0), places_end
    loaded = tl.load(x + place.to(tl.int64)[:, None] * row_stride + col, mask=known, other=0)
    if X_BLOCK_K and x_scale is None:
        values = from_elements(loaded, X_E5M2)
    elif X_BLOCK_K:
        WIDTH: tl.constexpr = min(SEGMENT, X_BLOCK_K)
        first_col = (tile_col * SEGMENTS + segment[:, None]) * SEGMENT + tl.arange(0, SEGMENT // WIDTH)[None, :] * WIDTH
        if X_BLOCK_K == 32:
            at = place.to(tl.int64)[:, None] * tl.cdiv(cols, 32) + first_col // 32
        else:
            at = (first_col // 128).to(tl.int64) * (tl.cdiv(place_rows, 16) * 16) + place[:, None]
        scale = tl.load(x_scale + at, mask=known_row[:, None] & (first_col < cols), other=0).to(tl.int32)
        in_blocks = tl.reshape(from_elements(loaded, X_E5M2), (32 * BLOCKS * SEGMENTS, SEGMENT // WIDTH, WIDTH))
        values = tl.reshape(in_blocks * scale_value(scale)[:, :, None], (32 * BLOCKS * SEGMENTS, SEGMENT))
    else:
        values = loaded.to(tl.float32)
    inside = (row < stop)[:, None] & (col < cols)
    return values, row, col, inside


@triton.jit
def load_values(
    x, table, rows, cols, row_stride, tile_row, tile_col, row_blocks,
    RAGGED: tl.constexpr, BLOCKS: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """``load_tile`` of numbers, each row in its own place: (8, BLOCKS, SEGMENTS, 4, SEGMENT)."""
    values, _, _, _ = load_tile(
        x, None, table, rows, cols, row_stride, tile_row, tile_col, row_blocks, rows,
        0, False, RAGGED, BLOCKS, SEGMENTS, SEGMENT,
    )  # fmt: skip
    return tl.reshape(values, (8, BLOCKS, SEGMENTS, 4, SEGMENT))


# What follows is of tiles as ``load_tile`` lays them, in the shape (8, BLOCKS, SEGMENTS, 4, SEGMENT).


@triton.jit
def rowwise_scales(values, FLOOR: tl.constexpr, E5M2: tl.constexpr):
    """Scale bytes of blocks along the rows: (8, BLOCKS, SEGMENTS, 4, SEGMENT / 32)."""
    return scale_byte(tl.max(magnitude_bits(in_blocks(values)), 5), FLOOR, E5M2)


@triton.jit
def columnwise_scales(values, FLOOR: tl.constexpr, E5M2: tl.constexpr):
    """Scale bytes of blocks along the columns: (BLOCKS, SEGMENTS, SEGMENT)."""
    return scale_byte(tl.max(tl.max(magnitude_bits(values), 0), 2), FLOOR, E5M2)


@triton.jit
def square_scales(values, FLOOR: tl.constexpr, E5M2: tl.constexpr):
    """Scale bytes of the 32x32 squares: (BLOCKS, SEGMENTS, SEGMENT / 32)."""
    amax = tl.max(tl.max(magnitude_bits(values), 0), 2)
    return scale_byte(amax_of_squares(amax), FLOOR, E5M2)


@triton.jit
def amax_of_squares(amax):
    """Of 32 neighbours each: (BLOCKS, SEGMENTS, SEGMENT) becomes (BLOCKS, SEGMENTS, SEGMENT / 32)."""
    SQUARES: tl.constexpr = amax.shape[2] // 32
    return tl.max(tl.reshape(amax, (amax.shape[0], amax.shape[1], SQUARES, 32)), 3)


@triton.jit
def of_columns(of_squares):
    """Numbers of squares, (BLOCKS, SEGMENTS, SEGMENT / 32), for each column: (BLOCKS, SEGMENTS, SEGMENT)."""
    BLOCKS: tl.constexpr = of_squares.shape[0]
    SEGMENTS: tl.constexpr = of_squares.shape[1]
    SQUARES: tl.constexpr = of_squares.shape[2]
    wide = tl.broadcast_to(of_squares[:, :, :, None], (BLOCKS, SEGMENTS, SQUARES, 32))
    return tl.reshape(wide, (BLOCKS, SEGMENTS, 32 * SQUARES))


@triton.jit
def in_blocks(values):
    """The rows cut into blocks: (8, BLOCKS, SEGMENTS, 4, SEGMENT / 32, 32)."""
    SQUARES: tl.constexpr = values.shape[4] // 32
    return tl.reshape(values, (8, values.shape[1], values.shape[2], 4, SQUARES, 32))


@triton.jit
def rows_to_elements(values, byte, E5M2: tl.constexpr):
    """Elements, given the scale bytes of blocks along the rows, as (rows, columns)."""
    scaled = in_blocks(values) * reciprocal_scale(byte)[:, :, :, :, :, None]
    elements = to_elements(scaled, byte[:, :, :, :, :, None], E5M2)
    return in_rows(tl.reshape(elements, values.shape))


@triton.jit
def in_rows(tile):
    """A tile, or its scale bytes along the rows, as (rows, columns)."""
    ROWS: tl.constexpr = 32 * tile.shape[1]
    COLS: tl.constexpr = tile.shape[2] * tile.shape[4]
    return tl.reshape(tl.permute(tile, (1, 3, 0, 2, 4)), (ROWS, COLS))


@triton.jit
def columns_to_elements(values, byte, E5M2: tl.constexpr):
    """Elements, given scale bytes (BLOCKS, SEGMENTS, SEGMENT), laid out for ``transposed``.

    The conversion takes two neighbouring registers. They should hold two rows, whose bytes are to be neighbours: so
    rows are split into even and odd ones and joined on a new last axis. With two columns in them it costs a byte
    permutation for each element, and ptxas 12.8 (Triton 3.6) loses bytes where elements are stored in both orders.
    """
    split_rows: tl.constexpr = (4, 2, values.shape[1], values.shape[2], 4, values.shape[4])
    pairs = tl.permute(tl.reshape(values, split_rows), (0, 2, 3, 4, 5, 1))
    even, odd = tl.split(pairs)
    reciprocal = reciprocal_scale(byte)[None, :, :, None, :]
    scaled = tl.join(even * reciprocal, odd * reciprocal)
    return to_elements(scaled, byte[None, :, :, None, :, None], E5M2)


@triton.jit
def transposed(elements):
    """The bytes of ``columns_to_elements`` as (columns, rows)."""
    COLS: tl.constexpr = elements.shape[2] * elements.shape[4]
    ROWS: tl.constexpr = elements.shape[1] * 32
    return tl.reshape(tl.permute(elements, (2, 4, 1, 3, 0, 5)), (COLS, ROWS))


class Matrices(NamedTuple):
    """A tensor as ``batches`` matrices of (rows, cols), each contiguous along its columns.

    Attributes:
        row_stride: of a single row, whose stride means nothing, at least a row.
        sizes: what kernels are given: cols, the stride of matrices (0 where there is one: it would depend on the
            number of rows), and ``row_stride``.
    """

    x: Tensor
    batches: int
    rows: int
    cols: int
    row_stride: int
    sizes: tuple[int, int, int]


def as_matrices(x: Tensor, axis: int) -> Matrices:
    """``x`` as matrices whose rows are ``axis`` and whose columns are all behind it. Copies where strides need it."""
    if axis != x.ndim - 2 or axis > 1:  # a view takes the host as long as all the rest
        x = x.reshape(math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :]))
    strides = x.stride()
    if strides[-1] != 1:
        x = x.contiguous()
        strides = x.stride()
    *batch, rows, cols = x.shape
    batches = batch[0] if batch else 1
    row_stride = strides[-2] if rows > 1 else max(strides[-2], cols)
    return Matrices(x, batches, rows, cols, row_stride, (cols, strides[0] if batches > 1 else 0, row_stride))


def source_of(x: Tensor, rows: Operand | None) -> tuple[int, tuple[int, bool]]:
    """Columns of a segment of ``x``, and how ``load_tile`` reads it (X_BLOCK_K, X_E5M2): numbers, or FP8 elements,
    which are those of ``rows``."""
    if rows is None:
        return SEGMENT_BYTES // x.element_size(), (0, False)
    return FP8_SEGMENT, (rows.spec.block_k, rows.spec.elem_dtype == torch.float8_e5m2)


ABSENT = None, None  # data and scales of an operand that is not wanted


def rounding_of(spec: OperandSpec) -> tuple[bool, bool]:
    """The constants FLOOR and E5M2 of a kernel that quantises."""
    return spec.rounding == "floor", spec.elem_dtype == torch.float8_e5m2


def lies_transposed(x: Tensor) -> bool:
    """Whether the axis before the last one is the contiguous one, as in ``weight.mT``, and both are whole blocks: what
    is stored along one of them is then what is stored along the other one of ``x.mT``. Not of matrices without a batch:
    those are activations, whose number of rows no kernel may be compiled for."""
    if x.ndim < 3 or x.stride(-1) == 1 or x.stride(-2) != 1:
        return False
    return x.shape[-1] % BLOCK_SIZE == 0 and x.shape[-2] % BLOCK_SIZE == 0


def map_tiles(offs: Tensor | None, rows: int, tile: Tile, *, tail: bool, alignment: int = BLOCK_SIZE) -> RowBlockMap:
    """The map of the 32-row blocks of tiles; with ``tail``, whole tiles hold the rows past the last group. Without
    groups there is no table: blocks are in order."""
    if offs is None:
        return RowBlockMap(None, ceil_div(rows, BLOCK_SIZE))
    groups, tail_alignment = offs.shape[0], tile.rows if tail else None
    if tail:  # padding adds at most alignment - 1 rows to a group, and less than a tile before the tail
        row_blocks = ceil_div(rows + groups * (alignment - 1) + tile.rows - 1, tile.rows) * tile.blocks
    else:
        row_blocks = ragged_rows(rows, groups, alignment) // BLOCK_SIZE
    return map_row_blocks(offs, rows, row_blocks, alignment=alignment, tail_alignment=tail_alignment)
