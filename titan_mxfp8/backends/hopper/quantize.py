"""Quantise kernels that rebase: ``format.reference.rebase`` or ``even_out`` of what the quantiser makes, in one read.

Host tensors have R rows, C columns and B matrices; P is R, or with ragged groups ``ragged_rows(R, groups, 128)``.
Rebased scales are stored across (``format.mx.stored_across``), their last axis rounded up to a multiple of 16:

| output | elements  | scales 1x128    | scales 32x128        | even: of 1x32   | of 32x32             |
|--------|-----------|-----------------|----------------------|-----------------|----------------------|
| last   | (B, R, C) | (B, C / 128, R) | (B, C / 128, R / 32) | (B, R, C / 32)  | (B, R / 32, C / 32)  |
| first  | (B, C, P) | (B, P / 128, C) | (B, P / 128, C / 32) |                 | (B, C / 32, R / 32)  |

A tile of 128 rows and 128 columns holds whole blocks of 128 along both axes, and its scales are whole sectors.
"""

import torch
import triton
import triton.language as tl

from titan_mxfp8.backends.triton.convert import (
    count_changed,
    element_units,
    magnitude_bits,
    reciprocal_scale,
    scale_byte,
    shift_elements,
    to_elements,
)
from titan_mxfp8.backends.triton.quantize import (
    LINE_BYTES,
    Tile,
    as_matrices,
    columns_to_elements,
    lies_transposed,
    load_tile,
    map_tiles,
    store_matrix,
    transposed,
)
from titan_mxfp8.format.mx import (
    BLOCK_SIZE,
    REBASED_SIZE,
    SQUARES,
    Block,
    Form,
    MXTensor,
    Rounding,
    ceil_div,
    ragged_rows,
    stored_across,
)

# By share of the copy bandwidth on an H200, 131072 x 7168 bf16. Last alone: 32 rows and 4 warps 1.02, 16 rows 0.94.
# First alone: 128 rows and 1 line 0.91, 256 rows 0.90. Both, 128 x 128: 0.76 (ragged) and 0.77; with 4 warps 0.68.
LAST_ROWS = 32  # a sector of scales, or one scale for all of them
FIRST_TILE = Tile(rows=128, lines=1)


def quantize_rebased(
    x: torch.Tensor,
    *,
    forms: tuple[Form | None, Form | None],
    rounding: Rounding,
    elem_dtype: torch.dtype,
    block: Block,
    offs: torch.Tensor | None,
    changed: torch.Tensor | None,
) -> tuple[MXTensor | None, MXTensor | None]:
    """``format.reference.rebase(quantize(x, axis, ...), form, changed)``, or ``even_out``, along one axis or both.

    Args:
        x: 2-D or 3-D, bf16 or fp32.
        forms: what to make along the last axis and along the one before it, which ``offs`` cuts into groups, each
            moved to a multiple of 128; None: nothing. ``even`` goes with itself or None; of 1x32 blocks along one axis
            only, without ``offs``, and for the one before the last by way of a copy, which no recipe needs.
        rounding, elem_dtype, block, offs, changed: as in ``format.reference``.

    Returns:
        Along the last axis, and along the one before it.
    """
    kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "block": block, "changed": changed}
    even = "even" in forms
    assert not even or set(forms) <= {"even", None}, forms
    if even and block == "1x32" and forms[1]:
        assert forms[0] is None and offs is None, forms
        along_last, _ = quantize_rebased(x.mT.contiguous(), forms=forms[::-1], offs=None, **kwargs)
        return None, along_last.mT
    if offs is None and lies_transposed(x) and not (even and block == "1x32"):
        along_first, along_last = quantize_rebased(x.mT, forms=forms[::-1], offs=None, **kwargs)
        return along_last and along_last.mT, along_first and along_first.mT
    assert block == "1x32" or "1x128" not in forms
    last, first = forms
    squares = block == "1x32" and "32x128" in forms
    if squares and last and first:  # nothing needs both at once, so they may cost two reads
        along_last, _ = quantize_rebased(x, forms=(last, None), offs=None, **kwargs)
        _, along_first = quantize_rebased(x, forms=(None, first), offs=offs, **kwargs)
        return along_last, along_first
    *_, rows, cols = x.shape
    padded_rows = rows if offs is None else ragged_rows(rows, offs.shape[0], REBASED_SIZE)
    along_last = _empty(x, rows, cols, block, last) if last else (None, None)
    along_first = _empty(x, cols, padded_rows, block, first) if first else (None, None)
    options = {"FLOOR": rounding == "floor", "E5M2": elem_dtype == torch.float8_e5m2}
    if block == "1x32":
        options["SQUARES"] = squares
    launch = _launch_squares if block == "32x32" else _launch_tiles if first else _launch_rows
    if launch is not _launch_tiles:
        options["EVEN"] = even
    with torch.accelerator.device_index(x.device.index):
        launch(as_matrices(x, x.ndim - 2), *along_last, *along_first, changed, offs, options)
    along_last, along_first = (
        MXTensor(qdata.view(elem_dtype), scale if even else scale.mT, x.ndim - 1, block if even else form, x.dtype)
        if form
        else None
        for form, (qdata, scale) in zip(forms, (along_last, along_first), strict=True)
    )
    return along_last, along_first and along_first.mT


@triton.jit
def add_to(changed, byte, shifted, scale, largest, E5M2: tl.constexpr):
    """Adds to ``changed``, unless that is None."""
    if changed is not None:
        tl.atomic_add(changed, count_changed(byte, shifted, scale, largest, E5M2).to(tl.int64), sem="relaxed")


@triton.jit
def even_scales(byte, units, ROWS: tl.constexpr):
    """``format.reference.even_out``: the new scales of (ROWS, 4) blocks, neighbours in a row, from the old ones and the
    bitwise or of each block's ``element_units``."""
    zeros = ((units & -units).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    room = tl.where(zeros >= 18, 255, tl.minimum(zeros, 15))
    scale = byte
    for BLOCKS in tl.static_range(2, 5, 2):
        old = tl.reshape(byte, (ROWS, 4 // BLOCKS, BLOCKS))
        largest = tl.max(old, 2)[:, :, None]
        fits = (largest - old <= tl.reshape(room, (ROWS, 4 // BLOCKS, BLOCKS))) & (largest < 255)
        fit = tl.min(fits.to(tl.int32), 2)[:, :, None] > 0
        scale = tl.reshape(tl.where(fit, largest, tl.reshape(scale, (ROWS, 4 // BLOCKS, BLOCKS))), (ROWS, 4))
    return scale


@triton.jit
def rebase_rows(
    x, qdata, changed, row, stop, cols, row_stride, tile_col,
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
        add_to(changed, elements, shifted, old, new, E5M2)
    store_matrix(qdata, tl.reshape(shifted, (ROWS, 128)), row, stop, col, cols)
    return scale.to(tl.uint8)


@triton.jit(do_not_specialize=["rows"])
def _rebase_rows(
    x, qdata, scale, changed,
    rows, cols, batch_stride, row_stride,
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
        x + batch * batch_stride, qdata + batch * rows * cols, changed,
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


@triton.jit(do_not_specialize=["rows", "units"])
def _rebase_tiles(
    x, last_qdata, last_scale, first_qdata, first_scale, changed,
    map_start, map_stop, offs_end,
    rows, cols, padded_rows, units, batch_stride, row_stride,
    LAST: tl.constexpr, SQUARES: tl.constexpr, RAGGED: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr,
    BLOCKS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """One program: a tile of one matrix along the first axis and, with ``LAST``, along the last one too.

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
    x += batch * batch_stride
    end = rows
    if LAST:
        tl.static_assert(ROWS == 128 and COLS == 128)
        start, stop = tile_row * 128, rows
        if RAGGED:
            start = tl.load(map_start + tile_row * 4)
            stop = tl.load(map_stop + tile_row * 4)
            end = tl.load(offs_end)  # the tail is zeros along the first axis
        row = start + tl.arange(0, 128)
        last_largest = rebase_rows(
            x, last_qdata + batch * rows * cols, changed, row, stop, cols, row_stride, tile_col,
            FLOOR, E5M2, 128, False, False,
        )  # fmt: skip
        last_scale += (batch * col_tiles + tile_col) * (tl.cdiv(rows, 16) * 16)
        tl.store(last_scale + row, last_largest, mask=row < stop)
    # A second load comes from the L1. In one layout for both axes a maximum would cross warps on either.
    values, _, _, _ = load_tile(
        x, map_start, map_stop, rows, cols, row_stride, tile_row, tile_col, units, end,
        RAGGED, BLOCKS, LINES, LINE,
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
    add_to(changed, elements, shifted, old, new, E5M2)
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
    x, last_qdata, last_scale, first_qdata, first_scale, changed,
    rows, cols, first_cols, batch_stride, row_stride,
    LAST: tl.constexpr, FIRST: tl.constexpr, FLOOR: tl.constexpr, E5M2: tl.constexpr, EVEN: tl.constexpr,
    BLOCKS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """One program: a 128 x 128 tile in 32x32 blocks, rebased along the last axis, the first one or both.

    ``first_cols`` is ``rows`` again, but compiled for what divides it: it is the row length of the transposed output.
    """
    tl.static_assert(LINES * LINE == 128 and BLOCKS == 4)
    SQUARES: tl.constexpr = LINE // 32
    col_tiles = tl.cdiv(cols, 128)
    row_tiles = tl.cdiv(rows, 128)
    tile_col = tl.program_id(0) % col_tiles
    tile_row = tl.program_id(0) // col_tiles % row_tiles
    batch = (tl.program_id(0) // col_tiles // row_tiles).to(tl.int64)
    values, _, _, _ = load_tile(
        x + batch * batch_stride, None, None, rows, cols, row_stride, tile_row, tile_col, row_tiles * 4, rows,
        False, BLOCKS, LINES, LINE,
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
            add_to(changed, elements, shifted, old, new, E5M2)
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
            add_to(changed, elements, shifted, old, new, E5M2)
            first_scale += (batch * row_tiles + tile_row) * (tl.cdiv(col_blocks, 16) * 16)
            tl.store(first_scale + col_block, tl.reshape(largest, (4,)).to(tl.uint8), mask=col_block < col_blocks)
        shifted = transposed(shifted, BLOCKS, LINES, LINE)
        store_matrix(first_qdata + batch * rows * cols, shifted, col, cols, row, first_cols)


def _empty(x: torch.Tensor, rows: int, length: int, block: Block, form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of ``rows`` rows for each matrix of ``x``, and their scales as they are stored but without the rows that
    fill up a multiple of 16."""
    lines = ceil_div(rows, BLOCK_SIZE) if form in SQUARES or block in SQUARES else rows
    rebased = stored_across(lines, ceil_div(length, REBASED_SIZE))
    shape = (lines, ceil_div(length, BLOCK_SIZE)) if form == "even" else rebased
    qdata, scale = (
        torch.empty((*x.shape[:-2], *shape), dtype=torch.uint8, device=x.device) for shape in ((rows, length), shape)
    )
    return qdata, scale if form == "even" else scale.narrow(-1, 0, lines)


def _launch_rows(x_BRC, qdata, scale, _first_qdata, _first_scale, changed, _offs, options) -> None:
    batches, rows, cols = x_BRC.shape
    programs = batches * ceil_div(rows, LAST_ROWS) * ceil_div(cols, REBASED_SIZE)
    if programs:
        _rebase_rows[(programs,)](
            x_BRC, qdata, scale, changed,
            rows, cols, x_BRC.stride(0), x_BRC.stride(1),
            **options, ROWS=LAST_ROWS, num_warps=4,
        )  # fmt: skip


def _launch_tiles(x_BRC, last_qdata, last_scale, first_qdata, first_scale, changed, offs, options) -> None:
    batches, rows, cols = x_BRC.shape
    both = last_qdata is not None
    tile, line = _square_tile(x_BRC) if both else FIRST_TILE, LINE_BYTES // x_BRC.element_size()
    unit_map = None if offs is None else map_tiles(offs, rows, tile, tail=both, alignment=REBASED_SIZE)
    units = ceil_div(rows, BLOCK_SIZE) if unit_map is None else unit_map.units
    programs = batches * ceil_div(units, tile.blocks) * ceil_div(cols, tile.lines * line)
    if programs:
        _rebase_tiles[(programs,)](
            x_BRC, last_qdata, last_scale, first_qdata, first_scale, changed,
            unit_map and unit_map.start, unit_map and unit_map.stop, None if offs is None else offs[-1:],
            rows, cols, first_qdata.shape[-1], units, x_BRC.stride(0), x_BRC.stride(1),
            LAST=both, RAGGED=offs is not None, **options,
            BLOCKS=tile.blocks, LINES=tile.lines, LINE=line, num_warps=tile.warps,
        )  # fmt: skip


def _launch_squares(x_BRC, last_qdata, last_scale, first_qdata, first_scale, changed, _offs, options) -> None:
    batches, rows, cols = x_BRC.shape
    programs = batches * ceil_div(rows, REBASED_SIZE) * ceil_div(cols, REBASED_SIZE)
    tile, line = _square_tile(x_BRC), LINE_BYTES // x_BRC.element_size()
    last, first = last_qdata is not None, first_qdata is not None
    # So that two programs fit on a multiprocessor: Triton 3.6 takes 167 registers, and on an H100 1.3 times as long.
    registers = 128 if options["EVEN"] and last and first and not options["E5M2"] else None
    if programs:
        _rebase_squares[(programs,)](
            x_BRC, last_qdata, last_scale, first_qdata, first_scale, changed,
            rows, cols, rows, x_BRC.stride(0), x_BRC.stride(1),
            LAST=last, FIRST=first, **options,
            BLOCKS=tile.blocks, LINES=tile.lines, LINE=line, num_warps=tile.warps, maxnreg=registers,
        )  # fmt: skip


def _square_tile(x: torch.Tensor) -> Tile:
    """128 rows and 128 columns."""
    return Tile(rows=REBASED_SIZE, lines=REBASED_SIZE * x.element_size() // LINE_BYTES)
