"""Dequantise, and quantise-dequantise in one kernel: what a bf16 GEMM needs to compute with MXFP8 values."""

import math

import torch
import triton
import triton.language as tl

from titan_mxfp8.backends.triton.convert import (
    from_elements,
    magnitude_bits,
    reciprocal_scale,
    scale_byte,
    scale_value,
    to_elements,
)
from titan_mxfp8.backends.triton.quantize import (
    LINE_BYTES,
    Tile,
    as_matrices,
    load_tile,
    map_tiles,
)
from titan_mxfp8.format.mx import BLOCK_SIZE, Block, MXTensor, Rounding, ceil_div

# By share of the copy bandwidth on an H200, 131072 x 7168 bf16, both outputs: 0.92; 128 rows and 2 lines 0.87.
ROUND_TILE = Tile(rows=128, lines=1)


def dequantize(mx: MXTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``MXTensor.dequantize``; the result is stored as ``mx`` is, contiguous along its axis."""
    dtype = dtype or mx.orig_dtype
    qdata, scale = mx.qdata.movedim(mx.axis, -1).contiguous(), mx.scale.movedim(mx.axis, -1).contiguous()
    out = torch.empty(qdata.shape, dtype=dtype, device=qdata.device)
    if out.numel():
        rows, cols = math.prod(qdata.shape[:-1]), qdata.shape[-1]
        blocks = rows * scale.shape[-1]
        with torch.accelerator.device_index(out.device.index):
            _dequantize_rows[(ceil_div(blocks, 64),)](
                qdata.view(torch.uint8), scale, out,
                blocks, scale.shape[-1], cols, qdata.shape[-2] if mx.block == "32x32" else 1,
                SQUARES=mx.block == "32x32", E5M2=qdata.dtype == torch.float8_e5m2, BLOCKS=64, num_warps=4,
            )  # fmt: skip
    return out.movedim(-1, mx.axis)


def quantize_dequantize(
    x: torch.Tensor,
    axis: int,
    *,
    rounding: Rounding,
    elem_dtype: torch.dtype,
    block: Block,
    offs: torch.Tensor | None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``dequantize(quantize(x, axis, ...), dtype)``, contiguous in the shape of ``x``.

    With ``offs``, which cut the axis before the last one, rows stay where they are: blocks start where groups do, and
    rows at and past ``offs[-1]`` are zero.
    """
    if offs is None and axis == x.ndim - 1 and block == "1x32":
        return _launch_rows(x, rounding=rounding, elem_dtype=elem_dtype, dtype=dtype)
    squares = block == "32x32"
    axis = x.ndim - 2 if squares else axis
    kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "squares": squares, "offs": offs, "dtype": dtype}
    return _launch_tiles(x, axis, last=False, **kwargs)[1]


def quantize_dequantize_both(
    x: torch.Tensor,
    *,
    rounding: Rounding,
    elem_dtype: torch.dtype,
    offs: torch.Tensor | None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantize_dequantize`` in 1x32 blocks along the last axis and along the one before it, in one read of ``x``."""
    kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "squares": False, "offs": offs, "dtype": dtype}
    return _launch_tiles(x, x.ndim - 2, last=True, **kwargs)


@triton.jit
def through_elements(x, scale, E5M2: tl.constexpr):
    """``x`` rounded to the elements of blocks of scale byte ``scale``, which broadcasts over ``x``."""
    return from_elements(to_elements(x * reciprocal_scale(scale), scale, E5M2), E5M2) * scale_value(scale)


@triton.jit(do_not_specialize=["blocks", "height"])
def _dequantize_rows(
    qdata, scale, out,
    blocks, row_blocks, cols, height,
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
    blocks, row_blocks, cols, row_stride,
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


@triton.jit(do_not_specialize=["rows", "units"])
def _quantize_dequantize_tiles(
    x, last, first,
    map_start, map_stop, offs_end,
    rows, cols, units, batch_stride, row_stride,
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
            x, map_start, map_stop, rows, cols, row_stride, tile_row, tile_col, units, rows,
            RAGGED, BLOCKS, LINES, LINE,
        )  # fmt: skip
        in_blocks = tl.reshape(values, (ALL, LINE // 32, 32))
        byte = scale_byte(tl.max(magnitude_bits(in_blocks), 2), FLOOR, E5M2)
        rounded = tl.reshape(through_elements(in_blocks, byte[:, :, None], E5M2), (ALL, LINE))
        tl.store(last + out + row.to(tl.int64)[:, None] * cols + col, rounded.to(last.dtype.element_ty), mask=inside)
    # The second load comes from the L1, and costs less than the registers that the values would be kept in.
    end = tl.load(offs_end) if RAGGED else rows
    values, row, col, inside = load_tile(
        x, map_start, map_stop, rows, cols, row_stride, tile_row, tile_col, units, end,
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


def _launch_rows(x: torch.Tensor, *, rounding: Rounding, elem_dtype: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        x_RC = as_matrices(x, x.ndim - 1)[:, 0]
        row_blocks = ceil_div(x.shape[-1], BLOCK_SIZE)
        blocks = x_RC.shape[0] * row_blocks
        with torch.accelerator.device_index(x.device.index):
            _quantize_dequantize_rows[(ceil_div(blocks, 64),)](
                x_RC, out,
                blocks, row_blocks, x.shape[-1], x_RC.stride(0),
                FLOOR=rounding == "floor", E5M2=elem_dtype == torch.float8_e5m2, BLOCKS=64, num_warps=4,
            )  # fmt: skip
    return out


def _launch_tiles(
    x: torch.Tensor,
    axis: int,
    *,
    last: bool,
    rounding: Rounding,
    elem_dtype: torch.dtype,
    squares: bool,
    offs: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    x_BRC = as_matrices(x, axis)
    batches, rows, cols = x_BRC.shape
    last_out = torch.empty(x.shape, dtype=dtype, device=x.device) if last else None
    first_out = torch.empty(x.shape, dtype=dtype, device=x.device)
    tile, line = ROUND_TILE, LINE_BYTES // x.element_size()
    with torch.accelerator.device_index(x.device.index):
        unit_map = None if offs is None else map_tiles(offs, rows, tile, tail=True)
        units = ceil_div(rows, BLOCK_SIZE) if unit_map is None else unit_map.units
        programs = batches * ceil_div(units, tile.blocks) * ceil_div(cols, tile.lines * line)
        if x.numel():
            _quantize_dequantize_tiles[(programs,)](
                x_BRC, last_out, first_out,
                unit_map and unit_map.start, unit_map and unit_map.stop, None if offs is None else offs[-1:],
                rows, cols, units, x_BRC.stride(0), x_BRC.stride(1),
                LAST=last, SQUARES=squares, RAGGED=offs is not None,
                FLOOR=rounding == "floor", E5M2=elem_dtype == torch.float8_e5m2,
                BLOCKS=tile.blocks, LINES=tile.lines, LINE=line, num_warps=tile.warps,
            )  # fmt: skip
    return last_out, first_out
