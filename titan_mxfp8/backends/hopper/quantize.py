"""Quantise kernels that rebase or even out (``format.reference``) what the quantiser makes, in one read.

Host tensors have R rows, C columns and B matrices; P is R to a multiple of 32, or with ragged groups
``ragged_rows(R, groups, 128)``. Rebased scales lie across (``OperandSpec.scales``), their last axis rounded up to a
multiple of 16:

| output | elements  | scales 1x128    | scales 32x128        | even: of 1x32   | of 32x32             |
|--------|-----------|-----------------|----------------------|-----------------|----------------------|
| last   | (B, R, C) | (B, C / 128, R) | (B, C / 128, R / 32) | (B, R, C / 32)  | (B, R / 32, C / 32)  |
| first  | (B, C, P) | (B, P / 128, C) | (B, P / 128, C / 32) |                 | (B, C / 32, P / 32)  |

A tile of 128 rows and 128 columns holds whole blocks of 128 along both axes, and its scales are whole sectors.
"""

from functools import cache

import torch
import triton
import triton.language as tl

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
from titan_mxfp8.backends.common.quantize import Launches, quantize_both_by, quantize_by, requantize_by
from titan_mxfp8.backends.common.tiles import (
    LINE_BYTES,
    Tile,
    as_matrices,
    columns_to_elements,
    is_past,
    load_tile,
    map_tiles,
    source_of,
    store_matrix,
    transposed,
)
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import Operand, OperandSpec

# By share of the copy bandwidth on an H200, 131072 x 7168 bf16. Last alone: 32 rows and 4 warps 1.02, 16 rows 0.94.
# First alone: 128 rows and 1 line 0.91, 256 rows 0.90. Both, 128 x 128: 0.76 (ragged) and 0.77; with 4 warps 0.68.
# With 64 registers four programs of both, ragged, fit instead of three: 1.13 ms instead of 1.23.
LAST_ROWS = 32  # a sector of scales, or one scale for all of them
FIRST_TILE = Tile(rows=128, lines=1)
BOTH_REGISTERS = 64
REQUANTIZE_TILE = Tile(rows=128, lines=1)  # of FP8 rows, 131072 x 7168: 0.68 ms, 2 lines 0.80


def quantize(x: torch.Tensor, axis: int, spec: OperandSpec, offs: torch.Tensor | None) -> Operand:
    """``Backend.quantize`` to rebased or evened-out FP8; ``axis`` is one of the last two, the last one for evened-out
    blocks of 1x32."""
    if spec.stored == "coalesced" and spec.block == "1x32":  # transposed x too: there is no other launch for them
        assert axis == x.ndim - 1 and offs is None, (axis, spec)
        operand = spec.empty(x, axis, None)
        _launch_rows(x, operand)
        return operand
    return quantize_by(_LAUNCHES, x, axis, spec, offs)


def quantize_both(
    x: torch.Tensor, last: OperandSpec, first: OperandSpec, offs: torch.Tensor | None
) -> tuple[Operand, Operand]:
    """``Backend.quantize_both`` to one rebased spec, or to evened-out 32x32 blocks, in one read of ``x``.

    Rebased 1x32 blocks that become 32 x 128, which nothing needs along both axes at once, cost two reads.
    """
    assert last.block_k == 128 or last.block == "32x32", last
    if last.block == "1x32" and last.block_mn == 32:
        return quantize(x, x.ndim - 1, last, None), quantize(x, x.ndim - 2, first, offs)
    return quantize_both_by(_LAUNCHES, x, last, first, offs)


def quantize_groups(
    x: torch.Tensor, last: OperandSpec | None, first: OperandSpec, offs: torch.Tensor | None
) -> tuple[Operand | None, Operand]:
    """(M, C) to rebased 1x32 blocks along the tokens, ragged, and along C too unless ``last`` is None. What lies behind
    the last group is undefined, and costs nothing."""
    along_last = None if last is None else last.empty(x, 1, None)
    along_first = first.empty(x, 0, None if offs is None else offs.shape[0])
    _launch_tiles(x, along_last, along_first, offs, None, tail=False)
    return along_last, along_first


def requantize(rows: Operand, spec: OperandSpec, offs: torch.Tensor | None) -> Operand:
    """``Backend.requantize`` along axis 0 to rebased FP8."""
    assert spec.block_k == 128 and spec.block_mn == 1, spec
    return requantize_by(_LAUNCHES, rows, spec, offs)


@triton.jit
def rebase_rows(
    x, qdata, row, stop, cols, row_stride, tile_col,
    FLOOR: tl.constexpr, E5M2: tl.constexpr, ROWS: tl.constexpr, SQUARES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows, those before ``stop``, and 128 columns of a matrix, along the last axis. Returns the scale of each
    row, with SQUARES the same, or with EVEN the four of each."""
    col = tile_col * 128 + tl.arange(0, 128)
    inside = (row < stop)[:, None] & (col < cols)[None, :]
    values = tl.load(x + row.to(tl.int64)[:, None] * row_stride + col[None, :], mask=inside, other=0)
    values = tl.reshape(values.to(tl.float32), (ROWS, 4, 32))
    byte = scale_byte(tl.max(magnitude_bits(values), 2), FLOOR, E5M2)
    old = byte[:, :, None]
    elements = to_elements(values * reciprocal_scale(old), old, E5M2)
    if EVEN:
        scale = even_scales(byte, tl.reduce_or(element_units(elements, E5M2), 2), ROWS)
        shifted = shift_elements(elements, old, scale[:, :, None], E5M2)
    else:
        scale = tl.max(byte, 1)
        if SQUARES:
            scale = tl.zeros((ROWS,), tl.int32) + tl.max(scale, 0)
        new = scale[:, None, None]
        shifted = shift_elements(elements, old, new, E5M2)
    store_matrix(qdata, tl.reshape(shifted, (ROWS, 128)), row, stop, col, cols)
    return scale.to(tl.uint8)


@triton.jit(do_not_specialize=["rows"])
def _rebase_rows(
    x, qdata, scale,
    cols, batch_stride, row_stride,
    rows,
    FLOOR: tl.constexpr, E5M2: tl.constexpr, ROWS: tl.constexpr, SQUARES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One program: ``ROWS`` rows and 128 columns of one matrix, along the last axis."""
    col_tiles = tl.cdiv(cols, 128)
    row_tiles = tl.cdiv(rows, ROWS)
    tile_col = tl.program_id(0) % col_tiles  # neighbours in a row run together
    tile_row = tl.program_id(0) // col_tiles % row_tiles
    batch = (tl.program_id(0) // col_tiles // row_tiles).to(tl.int64)
    row = tile_row * ROWS + tl.arange(0, ROWS)
    scales = rebase_rows(
        x + batch * batch_stride, qdata + batch * rows * cols,
        row, rows, cols, row_stride, tile_col, FLOOR, E5M2, ROWS, SQUARES, EVEN,
    )  # fmt: skip
    if EVEN:
        block, blocks = tile_col * 4 + tl.arange(0, 4), tl.cdiv(cols, 32)
        store_matrix(scale + batch * rows * blocks, scales, row, rows, block, blocks)
    else:
        lines = row_tiles if SQUARES else rows
        scale += (batch * col_tiles + tile_col) * (tl.cdiv(lines, 16) * 16)
        if SQUARES:
            tl.static_assert(ROWS == 32)
            tl.store(scale + tile_row, tl.max(scales, 0))
        else:
            tl.store(scale + row, scales, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "padded_blocks", "units", "groups"])
def _rebase_tiles(
    x, x_scale, last_qdata, last_scale, first_qdata, first_scale, table, offs,
    cols, batch_stride, row_stride,
    rows, padded_blocks, units, groups,
    X_SPAN: tl.constexpr, X_E5M2: tl.constexpr, TAIL: tl.constexpr,
    LAST: tl.constexpr, SQUARES: tl.constexpr, RAGGED: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr,
    BLOCKS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """One program: a tile of one matrix along the first axis and, with ``LAST``, along the last one too; with ``TAIL``
    also of what lies behind the last group.

    As ``backends.triton.quantize._quantize_tiles``, but that groups start at multiples of 128 rows, so that 128 rows of
    a tile belong to one group, and that the scales of a tile, one for each row and each column, or with ``SQUARES`` for
    32 columns, need no second kernel.
    """
    ROWS: tl.constexpr = BLOCKS * 32
    COLS: tl.constexpr = LINES * LINE
    GROUPS: tl.constexpr = BLOCKS // 4
    col_tiles = tl.cdiv(cols, COLS)
    row_tiles = tl.cdiv(units, BLOCKS)
    tile_col = tl.program_id(0) % col_tiles
    tile_row = tl.program_id(0) // col_tiles % row_tiles
    batch = (tl.program_id(0) // col_tiles // row_tiles).to(tl.int64)
    if RAGGED and not TAIL:
        if is_past(table, offs, groups, tile_row, BLOCKS):
            return
    x += batch * batch_stride
    end = rows
    if LAST:
        tl.static_assert(ROWS == 128 and COLS == 128)
        start, stop = tile_row * 128, rows
        if RAGGED:
            start = tl.load(table + tile_row * 4)
            stop = tl.load(table + units + tile_row * 4)
            end = tl.load(offs + groups - 1)  # the tail is zeros along the first axis
        row = start + tl.arange(0, 128)
        last_largest = rebase_rows(
            x, last_qdata + batch * rows * cols, row, stop, cols, row_stride, tile_col,
            FLOOR, E5M2, 128, False, False,
        )  # fmt: skip
        last_scale += (batch * col_tiles + tile_col) * (tl.cdiv(rows, 16) * 16)
        tl.store(last_scale + row, last_largest, mask=row < stop)
    # A second load comes from the L1. In one layout for both axes a maximum would cross warps on either.
    values, _, _, _ = load_tile(
        x, x_scale, table, rows, cols, row_stride, tile_row, tile_col, units, end,
        X_SPAN, X_E5M2, RAGGED, BLOCKS, LINES, LINE,
    )  # fmt: skip
    values = tl.reshape(values, (8, BLOCKS, LINES, 4, LINE))
    byte = scale_byte(tl.max(tl.max(magnitude_bits(values), 0), 2), FLOOR, E5M2)  # (BLOCKS, LINES, LINE)
    largest = tl.max(tl.reshape(byte, (GROUPS, 4, LINES, LINE)), 1)
    if SQUARES:
        square = tl.max(tl.reshape(largest, (GROUPS, LINES, LINE // 32, 32)), 3)
        largest = tl.broadcast_to(square[:, :, :, None], (GROUPS, LINES, LINE // 32, 32))
        largest = tl.reshape(largest, (GROUPS, LINES, LINE))
    wide = tl.broadcast_to(largest[:, None, :, :], (GROUPS, 4, LINES, LINE))
    wide = tl.reshape(wide, (BLOCKS, LINES, LINE))
    old, new = byte[None, :, :, None, :, None], wide[None, :, :, None, :, None]
    elements = columns_to_elements(values, byte, E5M2, BLOCKS, LINES, LINE)
    shifted = shift_elements(elements, old, new, E5M2)
    padded_rows = padded_blocks * 32
    col = tile_col * COLS + tl.arange(0, COLS)
    position = tile_row * ROWS + tl.arange(0, ROWS)
    shifted = transposed(shifted, BLOCKS, LINES, LINE)
    store_matrix(first_qdata + batch * cols * padded_rows, shifted, col, cols, position, padded_rows)
    lines = cols
    if SQUARES:
        largest = square
        col, lines = tile_col * (COLS // 32) + tl.arange(0, COLS // 32), tl.cdiv(cols, 32)
    group, groups = tile_row * GROUPS + tl.arange(0, GROUPS), tl.cdiv(padded_rows, 128)
    first_scale += (batch * groups + group.to(tl.int64)[:, None]) * (tl.cdiv(lines, 16) * 16) + col[None, :]
    inside = (group < groups)[:, None] & (col < lines)[None, :]
    tl.store(first_scale, tl.reshape(largest, (GROUPS, col.shape[0])).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _rebase_squares(
    x, last_qdata, last_scale, first_qdata, first_scale,
    cols, batch_stride, row_stride,
    rows,
    LAST: tl.constexpr, FIRST: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr, EVEN: tl.constexpr,
    BLOCKS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """One program: a 128 x 128 tile in 32x32 blocks, rebased along the last axis, the first one or both."""
    tl.static_assert(LINES * LINE == 128 and BLOCKS == 4)
    SQUARES: tl.constexpr = LINE // 32
    col_tiles = tl.cdiv(cols, 128)
    row_tiles = tl.cdiv(rows, 128)
    tile_col = tl.program_id(0) % col_tiles
    tile_row = tl.program_id(0) // col_tiles % row_tiles
    batch = (tl.program_id(0) // col_tiles // row_tiles).to(tl.int64)
    values, _, _, _ = load_tile(
        x + batch * batch_stride, None, None, rows, cols, row_stride, tile_row, tile_col, row_tiles * 4, rows,
        0, False, False, BLOCKS, LINES, LINE,
    )  # fmt: skip
    values = tl.reshape(values, (8, BLOCKS, LINES, 4, LINE))
    amax = tl.max(tl.max(magnitude_bits(values), 0), 2)
    byte = scale_byte(tl.max(tl.reshape(amax, (BLOCKS, LINES, SQUARES, 32)), 3), FLOOR, E5M2)
    wide = tl.reshape(tl.broadcast_to(byte[:, :, :, None], (BLOCKS, LINES, SQUARES, 32)), (BLOCKS, LINES, LINE))
    row = tile_row * 128 + tl.arange(0, 128)
    col = tile_col * 128 + tl.arange(0, 128)
    row_block = tile_row * 4 + tl.arange(0, 4)
    col_block = tile_col * 4 + tl.arange(0, 4)
    row_blocks, col_blocks = tl.cdiv(rows, 32), tl.cdiv(cols, 32)
    if LAST:
        old = wide[None, :, :, None, :]
        elements = to_elements(values * reciprocal_scale(old), old, E5M2)
        if EVEN:
            units = tl.reduce_or(tl.reduce_or(element_units(elements, E5M2), 0), 2)  # (BLOCKS, LINES, LINE)
            units = tl.reduce_or(tl.reshape(units, (BLOCKS, 4, 32)), 2)
            scales = even_scales(tl.reshape(byte, (BLOCKS, 4)), units, BLOCKS)
            new = tl.reshape(tl.broadcast_to(scales[:, :, None], (BLOCKS, 4, 32)), (BLOCKS, LINES, LINE))
            shifted = shift_elements(elements, old, new[None, :, :, None, :], E5M2)
            last_scale += batch * row_blocks * col_blocks
            store_matrix(last_scale, scales, row_block, row_blocks, col_block, col_blocks)
        else:
            largest = tl.max(tl.max(byte, 2), 1)
            new = largest[None, :, None, None, None]
            shifted = shift_elements(elements, old, new, E5M2)
            last_scale += (batch * col_tiles + tile_col) * (tl.cdiv(row_blocks, 16) * 16)
            tl.store(last_scale + row_block, largest.to(tl.uint8), mask=row_block < row_blocks)
        shifted = tl.reshape(tl.permute(shifted, (1, 3, 0, 2, 4)), (128, 128))
        store_matrix(last_qdata + batch * rows * cols, shifted, row, rows, col, cols)
    if FIRST:
        elements = columns_to_elements(values, wide, E5M2, BLOCKS, LINES, LINE)  # (4, BLOCKS, LINES, 4, LINE, 2)
        old = wide[None, :, :, None, :, None]
        if EVEN:
            if not LAST:
                units = tl.reduce_or(tl.reduce_or(element_units(elements, E5M2), 5), 0)
                units = tl.reduce_or(units, 2)  # (BLOCKS, LINES, LINE)
                units = tl.reduce_or(tl.reshape(units, (BLOCKS, 4, 32)), 2)
            scales = even_scales(tl.trans(tl.reshape(byte, (BLOCKS, 4))), tl.trans(units), 4)
            new = tl.broadcast_to(tl.trans(scales)[:, :, None], (BLOCKS, 4, 32))
            new = tl.reshape(new, (BLOCKS, LINES, LINE))
            shifted = shift_elements(elements, old, new[None, :, :, None, :, None], E5M2)
            first_scale += batch * row_blocks * col_blocks
            store_matrix(first_scale, scales, col_block, col_blocks, row_block, row_blocks)
        else:
            largest = tl.max(byte, 0)
            new = tl.reshape(tl.broadcast_to(largest[:, :, None], (LINES, SQUARES, 32)), (LINES, LINE))
            new = new[None, None, :, None, :, None]
            shifted = shift_elements(elements, old, new, E5M2)
            first_scale += (batch * row_tiles + tile_row) * (tl.cdiv(col_blocks, 16) * 16)
            tl.store(first_scale + col_block, tl.reshape(largest, (4,)).to(tl.uint8), mask=col_block < col_blocks)
        shifted = transposed(shifted, BLOCKS, LINES, LINE)
        padded_rows = row_blocks * 32
        store_matrix(first_qdata + batch * padded_rows * cols, shifted, col, cols, row, padded_rows)


_REBASE_ROWS = Kernel(_rebase_rows)
_REBASE_TILES = Kernel(_rebase_tiles)
_REBASE_SQUARES = Kernel(_rebase_squares)


def _rounding(spec: OperandSpec) -> tuple[bool, bool]:
    """The constants FLOOR and E5M2."""
    return spec.rounding == "floor", spec.elem_dtype == torch.float8_e5m2


def _launch_rows(x: torch.Tensor, out: Operand) -> None:
    matrices = as_matrices(x, x.ndim - 2)
    _REBASE_ROWS.launch(
        matrices.batches * ceil_div(matrices.rows, LAST_ROWS) * ceil_div(matrices.cols, 128),
        (matrices.x, out.data, out.scale), (matrices.cols, matrices.batch_stride, matrices.row_stride),
        (matrices.rows,), (*_rounding(out.spec), LAST_ROWS, out.spec.block_mn == 32, out.spec.stored == "coalesced"),
        device=x.device,
    )  # fmt: skip


def _launch_tiles(
    x: torch.Tensor,
    last: Operand | None,
    first: Operand,
    offs: torch.Tensor | None,
    source: Operand | None,
    tail: bool = True,
) -> None:
    matrices, tail = as_matrices(x, x.ndim - 2), tail and source is None
    tile = _square_tile(x.dtype) if last else REQUANTIZE_TILE if source else FIRST_TILE
    line, source_constants = source_of(x, source)
    unit_map = (
        None if offs is None else map_tiles(offs, matrices.rows, tile, tail=tail and last is not None, alignment=128)
    )
    units = ceil_div(matrices.rows, BLOCK_SIZE) if unit_map is None else unit_map.units
    # Only what was timed so; without groups ptxas would spill.
    was_timed = x.dtype == torch.bfloat16 and first.spec.elem_dtype == torch.float8_e4m3fn and offs is not None
    registers = BOTH_REGISTERS if last and was_timed else None
    constants = (
        *source_constants, tail, last is not None, first.spec.block_mn == 32, offs is not None, *_rounding(first.spec),
        tile.blocks, tile.lines, line,
    )  # fmt: skip
    _REBASE_TILES.launch(
        matrices.batches * ceil_div(units, tile.blocks) * ceil_div(matrices.cols, tile.lines * line),
        (matrices.x, source and source.scale, last and last.data, last and last.scale, first.data, first.scale,
         unit_map and unit_map.table, offs),
        (matrices.cols, matrices.batch_stride, matrices.row_stride),
        (matrices.rows, first.data.shape[-1] // BLOCK_SIZE, units, 0 if offs is None else offs.shape[0]), constants,
        device=x.device, warps=tile.warps, registers=registers,
    )  # fmt: skip


def _launch_squares(x: torch.Tensor, last: Operand | None, first: Operand | None) -> None:
    spec, matrices = (last or first).spec, as_matrices(x, x.ndim - 2)
    tile, line, even = _square_tile(x.dtype), LINE_BYTES // x.element_size(), spec.stored == "coalesced"
    # So that two programs fit on a multiprocessor: Triton 3.6 takes 167 registers, and on an H100 1.3 times as long.
    registers = 128 if even and last and first and spec.elem_dtype == torch.float8_e4m3fn else None
    constants = (
        last is not None, first is not None, *_rounding(spec), even, tile.blocks, tile.lines, line,
    )  # fmt: skip
    _REBASE_SQUARES.launch(
        matrices.batches * ceil_div(matrices.rows, 128) * ceil_div(matrices.cols, 128),
        (matrices.x, last and last.data, last and last.scale, first and first.data, first and first.scale),
        (matrices.cols, matrices.batch_stride, matrices.row_stride), (matrices.rows,), constants,
        device=x.device, warps=tile.warps, registers=registers,
    )  # fmt: skip


@cache
def _square_tile(dtype: torch.dtype) -> Tile:
    """128 rows and 128 columns."""
    return Tile(rows=128, lines=128 * dtype.itemsize // LINE_BYTES)


_LAUNCHES = Launches(rows=_launch_rows, tiles=_launch_tiles, squares=_launch_squares)
