"""Dequantise, and quantise-dequantise in one kernel: what a bf16 GEMM needs to compute with MXFP8 values.

Whole rows that are not FP8 yet are quantised and dequantised in ``quantize.py``.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_mxfp8.backends.common.convert import from_elements, magnitude_bits, scale_byte, scale_value, through_elements
from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.common.quantize import launch_rows
from titan_mxfp8.backends.common.tiles import (
    Tile,
    amax_of_squares,
    as_matrices,
    is_past,
    load_tile,
    map_tiles,
    of_columns,
    rounding_of,
    source_of,
    tile_position,
)
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import Operand

# By share of the copy bandwidth on an H200, 131072 x 7168 bf16, both outputs: 0.92; 128 rows and 2 segments 0.87.
ROUND_TILE = Tile(rows=128, segments=1)
REQUANTIZE_TILE = Tile(rows=64, segments=2)  # of FP8 rows: 0.84 ms there, 128 rows and 2 segments 0.94


def dequantize(operand: Operand, dtype: torch.dtype = torch.bfloat16, offs: Tensor | None = None) -> Tensor:
    """The values of an FP8 operand, exact or rebased rows, as its elements lie; with ``offs`` of those before
    ``offs[-1]``, nothing in the others."""
    data, scale, spec, _ = operand
    mn_major, squares = spec.scales == "mn_major", spec.block == "32x32"
    assert spec.stored != "bf16" and not (mn_major and (spec.block_mn > 1 or data.ndim > 2)), spec
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    blocks_per_row = ceil_div(data.shape[-1], BLOCK_SIZE)
    blocks = math.prod(data.shape[:-1]) * blocks_per_row
    height = data.shape[-2] if squares or mn_major else 1
    _dequantize_rows.launch(
        ceil_div(blocks, 64), (data, scale, out, offs), (blocks_per_row, data.shape[-1]),
        (blocks, height, 0 if offs is None else offs.shape[0]),
        (squares, mn_major, spec.elem_dtype == torch.float8_e5m2, 64), device=data.device,
    )  # fmt: skip
    return out


@Kernel
@triton.jit(do_not_specialize=["blocks", "height", "groups"])
def _dequantize_rows(
    qdata, scale, out, offs,
    blocks_per_row, cols,
    blocks, height, groups,
    SQUARES: tl.constexpr, MN_MAJOR: tl.constexpr, E5M2: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCKS`` neighbouring 1x32 blocks, counted through the rows of all matrices.

    32x32 scales of matrices of ``height = 40`` rows and ``blocks_per_row = 3``: row 41 is row 1 of matrix 1, whose
    scales start at row 2 of all scales, so its block 2 has scale 2 * 3 + 2. MN_MAJOR: ``height`` is that of the one
    matrix.
    """
    if offs is not None:
        if tl.program_id(0) * BLOCKS // blocks_per_row >= tl.load(offs + groups - 1):
            return
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row = block // blocks_per_row
    source = block
    if SQUARES:
        source = (row // height * tl.cdiv(height, 32) + row % height // 32) * blocks_per_row + block % blocks_per_row
    if MN_MAJOR:
        source = (block % blocks_per_row // 4).to(tl.int64) * (tl.cdiv(height, 16) * 16) + row
    byte = tl.load(scale + source, mask=block < blocks, other=0).to(tl.int32)
    col = (block % blocks_per_row)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = (block < blocks)[:, None] & (col < cols)
    at = row.to(tl.int64)[:, None] * cols + col
    values = from_elements(tl.load(qdata + at, mask=inside, other=0), E5M2) * scale_value(byte)[:, None]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


@Kernel
@triton.jit(do_not_specialize=["rows", "row_blocks", "groups", "places_end"])
def _quantize_dequantize_tiles(
    x, x_scale, places, rowwise, columnwise, table, offs,
    cols, batch_stride, row_stride,
    rows, row_blocks, groups, places_end,
    X_BLOCK_K: tl.constexpr, X_E5M2: tl.constexpr,
    ROWWISE: tl.constexpr, SQUARES: tl.constexpr, RAGGED: tl.constexpr,
    FLOOR: tl.constexpr, E5M2: tl.constexpr,
    BLOCKS: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """One program: a tile, as in ``quantize._quantize_tiles``, stored where it was read.

    ``columnwise`` always, in blocks along the first axis or in squares, with zeros for the tail but of FP8 rows;
    ``rowwise`` on demand.
    """
    ALL: tl.constexpr = 32 * BLOCKS * SEGMENTS
    batch, tile_row, tile_col = tile_position(tl.cdiv(cols, SEGMENTS * SEGMENT), tl.cdiv(row_blocks, BLOCKS))
    if X_BLOCK_K and RAGGED:
        if is_past(table, offs, groups, tile_row, BLOCKS):
            return
    x += batch * batch_stride
    out = batch * rows * cols
    if ROWWISE:
        values, row, col, inside = load_tile(
            x, x_scale, table, rows, cols, row_stride, tile_row, tile_col, row_blocks, rows,
            X_BLOCK_K, X_E5M2, RAGGED, BLOCKS, SEGMENTS, SEGMENT,
        )  # fmt: skip
        in_blocks = tl.reshape(values, (ALL, SEGMENT // 32, 32))
        byte = scale_byte(tl.max(magnitude_bits(in_blocks), 2), FLOOR, E5M2)
        rounded = tl.reshape(through_elements(in_blocks, byte[:, :, None], E5M2), (ALL, SEGMENT))
        tl.store(
            rowwise + out + row.to(tl.int64)[:, None] * cols + col, rounded.to(rowwise.dtype.element_ty), mask=inside
        )
    # The second load comes from the L1, and costs less than the registers that the values would be kept in.
    end = tl.load(offs + groups - 1) if RAGGED else rows
    values, row, col, inside = load_tile(
        x, x_scale, table, rows, cols, row_stride, tile_row, tile_col, row_blocks, end,
        X_BLOCK_K, X_E5M2, RAGGED, BLOCKS, SEGMENTS, SEGMENT, places, places_end,
    )  # fmt: skip
    values = tl.reshape(values, (8, BLOCKS, SEGMENTS, 4, SEGMENT))
    amax = tl.max(tl.max(magnitude_bits(values), 0), 2)
    if SQUARES:
        amax = of_columns(amax_of_squares(amax))
    byte = scale_byte(amax, FLOOR, E5M2)
    rounded = tl.reshape(through_elements(values, byte[None, :, :, None, :], E5M2), (ALL, SEGMENT))
    tl.store(
        columnwise + out + row.to(tl.int64)[:, None] * cols + col, rounded.to(columnwise.dtype.element_ty), mask=inside
    )


def launch(
    x: Tensor,
    rowwise: Operand | None,
    columnwise: Operand | None,
    offs: Tensor | None,
    source: Operand | None,
    places: Tensor | None = None,
) -> None:
    """Fills operands of quantised values in bf16, see ``quantizers.LAUNCHES``. With ``offs`` rows at and past
    ``offs[-1]`` are zeros, but where there is a ``source``."""
    if columnwise is None:
        if offs is None and rowwise.spec.block == "1x32":
            launch_rows(x, rowwise)
            return
        rowwise, columnwise = None, rowwise
    spec = columnwise.spec
    matrices = as_matrices(x, x.ndim - 2 if spec.block == "32x32" else columnwise.axis)
    rows = matrices.rows if places is None else places.shape[0]
    tile, (segment, source_constants) = REQUANTIZE_TILE if source else ROUND_TILE, source_of(x, source)
    table, row_blocks = map_tiles(offs, rows, tile, tail=source is None)
    programs = matrices.batches * ceil_div(row_blocks, tile.blocks) * ceil_div(matrices.cols, tile.segments * segment)
    programs = programs if x.numel() else 0
    constants = (
        *source_constants, rowwise is not None, spec.block == "32x32", offs is not None,
        *rounding_of(spec), tile.blocks, tile.segments, segment,
    )  # fmt: skip
    _quantize_dequantize_tiles.launch(
        programs,
        (matrices.x, source and source.scale, places, rowwise and rowwise.data, columnwise.data, table, offs),
        matrices.sizes,
        (rows, row_blocks, 0 if offs is None else offs.shape[0], matrices.rows), constants,
        device=x.device, warps=tile.warps,
    )  # fmt: skip
