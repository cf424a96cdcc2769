"""Quantise kernels: 1x32 along the last axis, along another one with transposed output, both in one read, and 32x32.

Host tensors have R rows, C columns and B matrices; P is R, or with ragged groups ``ragged_rows(R, groups)``.

| output | elements  | scales 1x32    | scales 32x32        |
|--------|-----------|----------------|---------------------|
| last   | (B, R, C) | (B, R, C / 32) | (B, R / 32, C / 32) |
| first  | (B, C, P) | (B, C, P / 32) | (B, C / 32, P / 32) |

On an H200 the L2 is what limits: it takes as long for a byte of a 32-byte sector as for the sector. So stores are whole
sectors wherever a program has them, and where both outputs are made, with 4 scales in a row each, a second kernel
puts the scales in their places (``_place_scales``).
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from titan_mxfp8.backends.triton.convert import magnitude_bits, reciprocal_scale, scale_byte, to_elements
from titan_mxfp8.backends.triton.groups import UnitMap, map_units, units_with_tail
from titan_mxfp8.format.mx import BLOCK_SIZE, Block, MXTensor, Rounding, ceil_div, ragged_rows

LINE_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows and 128-byte lines of a program's tile. Its warps take 32 rows of a line each."""

    rows: int
    lines: int

    @property
    def blocks(self) -> int:
        return self.rows // BLOCK_SIZE

    @property
    def warps(self) -> int:
        return self.blocks * self.lines


# By share of the copy bandwidth on an H200, 131072 x 7168 bf16. Both outputs: 128 rows and 2 lines 0.85, 16 warps 0.63
# to 0.77. First alone: 256 rows and 1 line 0.90, 128 rows and 2 lines 0.87.
BOTH_TILE = Tile(rows=128, lines=2)
FIRST_TILE = Tile(rows=256, lines=1)


def quantize(
    x: torch.Tensor,
    axis: int,
    *,
    rounding: Rounding,
    elem_dtype: torch.dtype,
    block: Block,
    offs: torch.Tensor | None,
) -> MXTensor:
    """``format.reference.quantize``."""
    kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "block": block, "offs": offs}
    along_last, other = axis == x.ndim - 1, 2 * x.ndim - 3 - axis  # other: of the last two axes
    if offs is None and axis >= x.ndim - 2 and lies_transposed(x):
        return quantize(x.mT, other, **kwargs).mT
    if offs is not None and along_last:  # no GEMM wants this, so it may cost a copy
        return quantize(x.mT.contiguous(), other, **kwargs).mT
    floor = rounding == "floor"
    with torch.accelerator.device_index(x.device.index):
        if block == "32x32":
            qdata, scale = _launch_squares(x, floor, elem_dtype, last=along_last, first=not along_last)
        elif along_last:
            qdata, scale = _launch_rows(x, floor, elem_dtype)
        else:
            qdata, scale = _launch_tiles(x, axis, offs, floor, elem_dtype, both=False)
    return MXTensor(qdata.movedim(-1, axis), scale.movedim(-1, axis), axis, block, x.dtype)


def quantize_both(
    x: torch.Tensor,
    *,
    rounding: Rounding,
    elem_dtype: torch.dtype,
    block: Block,
    offs: torch.Tensor | None,
) -> tuple[MXTensor, MXTensor]:
    """``format.reference.quantize_both``, in one read of ``x``."""
    if offs is None and lies_transposed(x):
        last, first = quantize_both(x.mT, rounding=rounding, elem_dtype=elem_dtype, block=block, offs=None)
        return first.mT, last.mT
    floor = rounding == "floor"
    with torch.accelerator.device_index(x.device.index):
        if block == "32x32":
            outputs = _launch_squares(x, floor, elem_dtype, last=True, first=True)
        else:
            outputs = _launch_tiles(x, x.ndim - 2, offs, floor, elem_dtype, both=True)
    last_qdata, last_scale, first_qdata, first_scale = outputs
    return (
        MXTensor(last_qdata, last_scale, x.ndim - 1, block, x.dtype),
        MXTensor(first_qdata.mT, first_scale.mT, x.ndim - 2, block, x.dtype),
    )


@triton.jit(do_not_specialize=["blocks"])
def _quantize_rows(
    x, qdata, scale,
    blocks, row_blocks, cols, row_stride,
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


@triton.jit
def unit_rows(map_start, map_stop, rows, tile_row, units, RAGGED: tl.constexpr, BLOCKS: tl.constexpr):
    """First row of each 32-row block of a tile, and the end of the rows that are its own."""
    block = tile_row * BLOCKS + tl.arange(0, BLOCKS)
    if RAGGED:
        start = tl.load(map_start + block, mask=block < units, other=0)
        return start, tl.load(map_stop + block, mask=block < units, other=0)
    else:
        return block * 32, tl.zeros((BLOCKS,), tl.int32) + rows


@triton.jit
def store_matrix(matrix, values, row, row_stop, col, cols):
    """Stores bytes: rows before ``row_stop`` and columns before ``cols`` of a contiguous matrix of ``cols`` columns."""
    pointers = matrix + row.to(tl.int64)[:, None] * cols + col[None, :]
    tl.store(pointers, values.to(tl.uint8), mask=(row < row_stop)[:, None] & (col < cols)[None, :])


@triton.jit
def load_tile(
    x, map_start, map_stop,
    rows, cols, row_stride, tile_row, tile_col, units, limit,
    RAGGED: tl.constexpr, BLOCKS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """A tile of ``32 * BLOCKS`` rows and ``LINES * LINE`` columns as fp32, its row and column numbers and its mask.

    Rows at and past ``limit`` are zeros, but inside.

    It lies as (8 * BLOCKS * LINES * 4, LINE): row ``32 b + 8 q + i``, column ``LINE l + c`` is at [i, b, l, q, c]. A
    line is 128 bytes, so Triton gives a thread 16 bytes of a line, a warp four lines, and the warps the next ones: a
    thread holds 8 rows of 8 columns (bf16), a warp 32 x 64, and no maximum of a block crosses warps. Two traps: a load
    of five axes would leave it to the compiler which one the lanes go to, and 3.6 and 3.9 choose differently; and if
    bytes were stored in the shape of this load, its threads would get 32 bytes, which undoes all this (3 times slower).
    """
    start, stop = unit_rows(map_start, map_stop, rows, tile_row, units, RAGGED, BLOCKS)
    in_block = tl.arange(0, 8)[:, None, None, None] + 8 * tl.arange(0, 4)[None, None, None, :]
    shape: tl.constexpr = (8, BLOCKS, LINES, 4)
    row = tl.reshape(tl.broadcast_to(start[None, :, None, None] + in_block, shape), (32 * BLOCKS * LINES,))
    stop = tl.reshape(tl.broadcast_to(stop[None, :, None, None], shape), (32 * BLOCKS * LINES,))
    line = tl.arange(0, 32 * BLOCKS * LINES) // 4 % LINES
    col = (tile_col * LINES + line[:, None]) * LINE + tl.arange(0, LINE)[None, :]
    known = (row < tl.minimum(stop, limit))[:, None] & (col < cols)
    values = tl.load(x + row.to(tl.int64)[:, None] * row_stride + col, mask=known, other=0).to(tl.float32)
    inside = (row < stop)[:, None] & (col < cols)
    return values, row, col, inside


@triton.jit
def columns_to_elements(
    values, byte, E5M2: tl.constexpr, BLOCKS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr
):
    """Elements of a tile with scale bytes (BLOCKS, LINES, LINE), laid out for ``transposed``.

    The conversion takes two neighbouring registers. They should hold two rows, whose bytes are to be neighbours: so
    rows are split into even and odd ones and joined on a new last axis. With two columns in them it costs a byte
    permutation for each element, and ptxas 12.8 (Triton 3.6) loses bytes where elements are stored in both orders.
    """
    pairs = tl.permute(tl.reshape(values, (4, 2, BLOCKS, LINES, 4, LINE)), (0, 2, 3, 4, 5, 1))
    even, odd = tl.split(pairs)
    reciprocal = reciprocal_scale(byte)[None, :, :, None, :]
    scaled = tl.join(even * reciprocal, odd * reciprocal)
    return to_elements(scaled, byte[None, :, :, None, :, None], E5M2)


@triton.jit
def transposed(elements, BLOCKS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr):
    """The bytes of ``columns_to_elements`` as (columns, rows)."""
    return tl.reshape(tl.permute(elements, (2, 4, 1, 3, 0, 5)), (LINES * LINE, BLOCKS * 32))


@triton.jit(do_not_specialize=["rows", "units"])
def _quantize_tiles(
    x, last_qdata, last_pieces, first_qdata, first_scale,
    map_start, map_stop, offs_end,
    rows, cols, padded_rows, units, batch_stride, row_stride,
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
    values, _, _, _ = load_tile(
        x + batch * batch_stride, map_start, map_stop, rows, cols, row_stride, tile_row, tile_col, units, rows,
        RAGGED, BLOCKS, LINES, LINE,
    )  # fmt: skip
    values = tl.reshape(values, (8, BLOCKS, LINES, 4, LINE))
    col = tile_col * COLS + tl.arange(0, COLS)

    if LAST:
        row, stop = unit_rows(map_start, map_stop, rows, tile_row, units, RAGGED, BLOCKS)
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
    first_qdata += batch * cols * padded_rows
    if LAST:
        in_tail = False
        if RAGGED:
            in_tail = tl.load(map_start + tile_row * BLOCKS) >= tl.load(offs_end)
        filled_cols = tl.where(in_tail, 0, cols)
        first_scale += (batch * row_tiles + tile_row) * cols * BLOCKS
        store_matrix(first_qdata, elements, col, filled_cols, position, padded_rows)
        store_matrix(first_scale, byte, col, filled_cols, tl.arange(0, BLOCKS), BLOCKS)
        if in_tail:  # last: a branch before would keep all values in registers
            store_matrix(first_qdata, tl.zeros((COLS, ROWS), tl.uint8), col, cols, position, padded_rows)
            store_matrix(first_scale, tl.zeros((COLS, BLOCKS), tl.uint8), col, cols, tl.arange(0, BLOCKS), BLOCKS)
    else:
        padded_blocks = tl.cdiv(padded_rows, 32)
        first_scale += batch * cols * padded_blocks
        store_matrix(first_qdata, elements, col, cols, position, padded_rows)
        store_matrix(first_scale, byte, col, cols, tile_row * BLOCKS + tl.arange(0, BLOCKS), padded_blocks)


@triton.jit(do_not_specialize=["batches"])
def _place_scales(
    batches,
    last_pieces, last_scale, last_lines, last_width,
    first_pieces, first_scale, first_lines, first_width,
    LAST_PIECE: tl.constexpr, FIRST_PIECE: tl.constexpr,
):  # fmt: skip
    """One program: 32 bytes in each of 128 lines of scales, of the last axis (grid axis 1: 0) or the first (1).

    A line is a row of the matrix (last) or a column (first). Lines of 7 scales in pieces of 4: scale 5 of line 9 is
    byte 1 of line 9 of piece 1.
    """
    if tl.program_id(1) == 0:
        place_lines(batches, last_pieces, last_scale, last_lines, last_width, LAST_PIECE)
    else:
        place_lines(batches, first_pieces, first_scale, first_lines, first_width, FIRST_PIECE)


@triton.jit
def place_lines(batches, pieces, scale, lines, width, PIECE: tl.constexpr):
    """Half of ``_place_scales``. The grid fits the larger half: programs past the last matrix do nothing."""
    LINES: tl.constexpr = 128
    PIECES: tl.constexpr = 32 // PIECE
    line_tiles = tl.cdiv(lines, LINES)
    width_tiles = tl.cdiv(width, 32)
    tile_line = tl.program_id(0) // width_tiles % line_tiles * LINES
    tile_byte = tl.program_id(0) % width_tiles * 32
    batch = (tl.program_id(0) // width_tiles // line_tiles).to(tl.int64)
    piece = tile_byte // PIECE + tl.arange(0, PIECES)
    at = tile_line * PIECE + tl.arange(0, LINES * PIECE)
    line = tile_line + tl.arange(0, LINES)
    byte = tile_byte + tl.arange(0, 32)
    if batch < batches:
        pieces += batch * tl.cdiv(width, PIECE) * (lines * PIECE)
        inside = (piece * PIECE < width)[:, None] & (at < lines * PIECE)[None, :]
        values = tl.load(pieces + piece.to(tl.int64)[:, None] * (lines * PIECE) + at[None, :], mask=inside, other=0)
        values = tl.permute(tl.reshape(values, (PIECES, LINES, PIECE)), (1, 0, 2))
        store_matrix(scale + batch * lines * width, tl.reshape(values, (LINES, 32)), line, lines, byte, width)


@triton.jit(do_not_specialize=["rows"])
def _quantize_squares(
    x, last_qdata, last_scale, first_qdata, first_scale,
    rows, cols, first_cols, batch_stride, row_stride,
    LAST: tl.constexpr, FIRST: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr,
    BLOCKS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """One program: a tile of one matrix in 32x32 blocks, stored as it lies (``LAST``), transposed (``FIRST``) or both.

    ``first_cols`` is ``rows`` again, but compiled for what divides it: it is the row length of the transposed output.
    """
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
        False, BLOCKS, LINES, LINE,
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
        store_matrix(first_qdata + batch * rows * cols, elements, col, cols, row, first_cols)
        first_scale += batch * row_blocks * col_blocks
        store_matrix(first_scale, tl.trans(byte), col_block, col_blocks, row_block, row_blocks)


def lies_transposed(x: torch.Tensor) -> bool:
    """Whether the axis before the last one is the contiguous one, as in ``weight.mT``."""
    return x.ndim >= 2 and x.stride(-1) != 1 and x.stride(-2) == 1


def as_matrices(x: torch.Tensor, axis: int) -> torch.Tensor:
    """``x`` as (B, R, C), R being ``axis`` and C all behind it, contiguous along C. Copies where strides need it."""
    matrices = x.reshape(math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :]))
    return matrices if matrices.stride(-1) == 1 else matrices.contiguous()


def map_tiles(offs: torch.Tensor, rows: int, tile: Tile, *, tail: bool, alignment: int = BLOCK_SIZE) -> UnitMap:
    """The map of the 32-row blocks of tiles; with ``tail``, whole tiles hold the rows past the last group."""
    groups = offs.shape[0]
    kwargs = {"unit": BLOCK_SIZE, "alignment": alignment}
    if not tail:
        return map_units(offs, rows, units=ragged_rows(rows, groups, alignment) // BLOCK_SIZE, **kwargs)
    kwargs["tail_alignment"] = tile.rows
    return map_units(offs, rows, units=units_with_tail(rows, groups, **kwargs), **kwargs)


def _empty_bytes(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, device=like.device)


def _launch_rows(x: torch.Tensor, floor: bool, elem_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """qdata and scale in 1x32 blocks along the last axis."""
    cols = x.shape[-1]
    qdata, scale = _empty_bytes(x, *x.shape), _empty_bytes(x, *x.shape[:-1], ceil_div(cols, BLOCK_SIZE))
    if x.numel():
        x_RC = as_matrices(x, x.ndim - 1)[:, 0]
        _quantize_rows[(ceil_div(scale.numel(), 64),)](
            x_RC, qdata, scale,
            scale.numel(), scale.shape[-1], cols, x_RC.stride(0),
            FLOOR=floor, E5M2=elem_dtype == torch.float8_e5m2, BLOCKS=64, num_warps=4,
        )  # fmt: skip
    return qdata.view(elem_dtype), scale


def _launch_tiles(
    x: torch.Tensor, axis: int, offs: torch.Tensor | None, floor: bool, elem_dtype: torch.dtype, *, both: bool
) -> tuple[torch.Tensor, ...]:
    """qdata and scale in 1x32 blocks along ``axis``, which lies last; with ``both``, first those of the last axis."""
    before, rows, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    x_BRC = as_matrices(x, axis)
    batches, _, cols = x_BRC.shape
    tile = BOTH_TILE if both else FIRST_TILE
    line = LINE_BYTES // x.element_size()
    tile_cols = tile.lines * line
    unit_map = None if offs is None else map_tiles(offs, rows, tile, tail=both)
    units = ceil_div(rows, BLOCK_SIZE) if unit_map is None else unit_map.units
    padded_rows = rows if offs is None else ragged_rows(rows, offs.shape[0])
    row_tiles, col_tiles = ceil_div(units, tile.blocks), ceil_div(cols, tile_cols)

    first_qdata = _empty_bytes(x, *before, *after, padded_rows)
    first_scale = _empty_bytes(x, *before, *after, ceil_div(padded_rows, BLOCK_SIZE))
    last_qdata = last_scale = last_pieces = None
    first_pieces = first_scale
    if both:
        last_qdata, last_scale = _empty_bytes(x, *x.shape), _empty_bytes(x, *before, rows, ceil_div(cols, BLOCK_SIZE))
        last_pieces = _empty_bytes(x, batches, col_tiles, rows, tile_cols // BLOCK_SIZE)
        first_pieces = _empty_bytes(x, batches, row_tiles, cols, tile.blocks)
    programs = batches * row_tiles * col_tiles
    if programs:
        _quantize_tiles[(programs,)](
            x_BRC, last_qdata, last_pieces, first_qdata, first_pieces,
            unit_map and unit_map.start, unit_map and unit_map.stop, None if offs is None else offs[-1:],
            rows, cols, padded_rows, units, x_BRC.stride(0), x_BRC.stride(1),
            LAST=both, RAGGED=offs is not None, FLOOR=floor, E5M2=elem_dtype == torch.float8_e5m2,
            BLOCKS=tile.blocks, LINES=tile.lines, LINE=line, num_warps=tile.warps,
        )  # fmt: skip
    if not both:
        return first_qdata.view(elem_dtype), first_scale
    if programs:
        widths = last_scale.shape[-1], first_scale.shape[-1]
        tiles = max(ceil_div(rows, 128) * ceil_div(widths[0], 32), ceil_div(cols, 128) * ceil_div(widths[1], 32))
        _place_scales[(batches * tiles, 2)](
            batches, last_pieces, last_scale, rows, widths[0], first_pieces, first_scale, cols, widths[1],
            LAST_PIECE=last_pieces.shape[-1], FIRST_PIECE=first_pieces.shape[-1],
        )  # fmt: skip
    return last_qdata.view(elem_dtype), last_scale, first_qdata.view(elem_dtype), first_scale


def _launch_squares(
    x: torch.Tensor, floor: bool, elem_dtype: torch.dtype, *, last: bool, first: bool
) -> tuple[torch.Tensor, ...]:
    """qdata and scale in 32x32 blocks: as ``x`` lies if ``last``, then with the last two axes swapped if ``first``."""
    x_BRC = as_matrices(x, x.ndim - 2)
    batches, rows, cols = x_BRC.shape
    row_blocks, col_blocks = ceil_div(rows, BLOCK_SIZE), ceil_div(cols, BLOCK_SIZE)
    outputs = [None] * 4
    if last:
        outputs[:2] = _empty_bytes(x, *x.shape), _empty_bytes(x, *x.shape[:-2], row_blocks, col_blocks)
    if first:
        outputs[2:] = _empty_bytes(x, *x.mT.shape), _empty_bytes(x, *x.shape[:-2], col_blocks, row_blocks)
    if x.numel():
        tile, line = BOTH_TILE, LINE_BYTES // x.element_size()
        programs = batches * ceil_div(row_blocks, tile.blocks) * ceil_div(cols, tile.lines * line)
        _quantize_squares[(programs,)](
            x_BRC, *outputs, rows, cols, rows, x_BRC.stride(0), x_BRC.stride(1),
            LAST=last, FIRST=first, FLOOR=floor, E5M2=elem_dtype == torch.float8_e5m2,
            BLOCKS=tile.blocks, LINES=tile.lines, LINE=line, num_warps=tile.warps,
        )  # fmt: skip
    qdata = [out.view(elem_dtype) for out in outputs[::2] if out is not None]
    scales = [out for out in outputs[1::2] if out is not None]
    return tuple(tensor for pair in zip(qdata, scales, strict=True) for tensor in pair)
