"""SwiGLU's gradients, rebased along both axes in one pass over gate, up and u.

A program takes 128 rows of one group and 128 columns: whole blocks of 128 along either axis. Threads that lie along
rows compute dgate, dup and score times h once, 32 rows at a time, quantise the first two along H, and leave all three
in shared memory, in bf16. Threads that lie along columns read them from there, and quantise along M. Two programs fit
on a multiprocessor: one reads while the other writes. On an H100, 196608 x 1408 in 64 groups: 1.24 ms, which is 2.5
TB/s; gradients in bf16, and a pass over each that quantises it, took 2.28 ms.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_mxfp8.backends import Plan, SwigluGradients
from titan_mxfp8.backends.common.activation import (
    activation,
    gradient_of_gate,
    gradient_of_up,
    matrices_of,
    rounded,
    sums_of,
    widened,
)
from titan_mxfp8.backends.common.convert import (
    magnitude_bits,
    reciprocal_scale,
    scale_byte,
    shift_elements,
    to_elements,
)
from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.common.tiles import Tile, map_tiles, rounding_of
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import Operand

TILE = Tile(rows=128, segments=2)
# A thread has 8 columns of a row, a warp two rows: 16 bytes of each input, and whole lines.
_ALONG_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
# A thread has 16 rows of two columns, a warp all rows of 8: 16 bytes of a transposed row, and whole lines.
_ALONG_COLUMNS = gl.constexpr(gl.BlockedLayout([16, 2], [8, 4], [1, 8], [0, 1]))
_STAGED_COLUMNS = gl.constexpr(gl.BlockedLayout([16, 1, 2], [1, 8, 4], [1, 1, 8], [0, 1, 2]))
# Row ``16 k + j`` is at [j, k]: lanes along columns read rows 16 apart, for which the swizzle has other banks.
_STAGED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))


def swiglu_backward(
    inputs: list[Tensor], scores_M: Tensor | None, limit: float | None, plan: Plan, offs: Tensor | None
) -> SwigluGradients:
    """``Backend.swiglu_backward`` of 1x128 blocks."""
    specs = rowwise, columnwise, h_columnwise = plan.dgrad.a, plan.wgrad.a, plan.wgrad.b
    assert all(spec.block_mn == 1 and spec.block_k == 128 for spec in specs), specs
    assert rowwise.elem_dtype == columnwise.elem_dtype and len({spec.rounding for spec in specs}) == 1, specs
    gate, up, u = matrices_of(*inputs)
    inputs.clear()
    assert u.x.is_contiguous(), u.x.stride()
    groups = None if offs is None else offs.shape[0]
    interleaved = plan.in_u(gate.cols % 128 == 0) == "dgate_dup"
    if interleaved:
        both, scale_shape = u.x.view(rowwise.elem_dtype), rowwise.scale_shape(u.x.shape)
        along_h = [Operand(both, u.x.new_empty(scale_shape, dtype=torch.uint8), rowwise, 1) for _ in range(2)]
    else:
        along_h = [rowwise.empty(u.x, 1, None) for _ in range(2)]
    along_m = [spec.empty(gate.x, 0, groups) for spec in (columnwise, columnwise, h_columnwise)]
    table, row_blocks = map_tiles(offs, gate.rows, TILE, tail=False, alignment=128)
    col_tiles = ceil_div(gate.cols, 128)
    scores_M, sums = sums_of(scores_M, gate.rows, col_tiles)
    _rebased_swiglu_backward.launch(
        ceil_div(row_blocks, 4) * col_tiles,
        (gate.x, up.x, u.x, scores_M, sums, table, offs,
         *(tensor for operand in (*along_h, *along_m) for tensor in operand[:2])),
        (gate.cols, gate.row_stride, up.row_stride, u.row_stride),
        (gate.rows, along_m[0].data.shape[-1] // BLOCK_SIZE, row_blocks, groups or 0),
        (limit, interleaved, *rounding_of(rowwise), rounding_of(h_columnwise)[1]),
        device=gate.x.device, warps=8,
    )  # fmt: skip
    return SwigluGradients(*along_h, *along_m, None if sums is None else sums.sum(0))


@gluon.jit
def _load_inputs(inputs, scores, row, stop, col, cols):
    """gate, up and u of the rows before ``stop``, and their scores, 1 without any."""
    inside = (row < stop)[:, None] & (col < cols)[None, :]
    loaded = ()
    for i in gl.static_range(3):
        x, stride = inputs[i]
        loaded = loaded + (gl.load(x + row.to(gl.int64)[:, None] * stride + col[None, :], mask=inside, other=0),)  # noqa: RUF005
    if scores is None:
        score = gl.full(row.shape, 1.0, gl.float32, row.type.layout)
    else:
        score = gl.load(scores + row, mask=row < stop, other=0)
    return loaded, score


@gluon.jit
def _gradients(inputs, score, LIMIT: gl.constexpr):
    """dgate, dup and score times h in bf16, and each row's sum of u * h."""
    gate, up, u = inputs
    gate, up, u, score = widened(gate), widened(up), widened(u), score[:, None]
    cut_gate, factor, s = activation(gate, up, LIMIT)
    h = cut_gate * s * factor
    products = gl.sum(u * widened(rounded(h)), 1)  # of h as ``format.swiglu`` has it, in bf16
    dh = u * score
    dup = rounded(gradient_of_up(up, dh, cut_gate, s, LIMIT))
    dgate = rounded(gradient_of_gate(gate, dh, cut_gate, factor, s, LIMIT))
    return (dgate, dup, rounded(h * score)), products


@gluon.jit
def rebased(values, AXIS: gl.constexpr, FLOOR: gl.constexpr, E5M2: gl.constexpr):
    """Blocks of 128 along the axis, the last or the first, which is as long: their elements, and their scales."""
    rows: gl.constexpr = values.shape[0]
    columns: gl.constexpr = values.shape[1]
    blocks = widened(values).reshape((rows, 4, 32) if AXIS == 1 else (4, 32, columns))
    byte = scale_byte(gl.max(magnitude_bits(blocks), AXIS + 1), FLOOR, E5M2)
    largest = gl.max(byte, AXIS)
    old, new = byte.expand_dims(AXIS + 1), largest.expand_dims(AXIS).expand_dims(AXIS + 1)
    elements = shift_elements(to_elements(blocks * reciprocal_scale(old), old, E5M2), old, new, E5M2)
    elements = gl.convert_layout(elements.reshape(values.shape), values.type.layout, assert_trivial=True)
    return elements, largest.to(gl.uint8)


@gluon.jit
def _store_rows(
    values, out, row, stop, rows, tile_col, cols, MATRICES: gl.constexpr, FLOOR: gl.constexpr, E5M2: gl.constexpr
):
    """Stores rows before ``stop`` and 128 columns, quantised along the columns, of one of so many interleaved MATRICES,
    whose first element the data starts with."""
    data, scale = out
    elements, scales = rebased(values, 1, FLOOR, E5M2)
    col = gl.arange(0, 128, gl.SliceLayout(0, values.type.layout))
    inside = (row < stop)[:, None] & (tile_col * 128 + col < cols)[None, :]
    at = row.to(gl.int64)[:, None] * (cols * MATRICES) + (tile_col * (128 * MATRICES) + col)[None, :]
    gl.store(data + at, elements, mask=inside)
    row = gl.convert_layout(row, scales.type.layout)
    gl.store(scale + tile_col.to(gl.int64) * (gl.cdiv(rows, 16) * 16) + row, scales, mask=row < stop)


@gluon.jit
def _store_columns(values, out, tile_row, col, cols, padded_rows, FLOOR: gl.constexpr, E5M2: gl.constexpr):
    """Stores 128 rows and the columns ``col``, quantised along the rows, transposed."""
    data, scale = out
    elements, scales = rebased(values, 0, FLOOR, E5M2)
    position = tile_row * 128 + gl.arange(0, 128, gl.SliceLayout(1, values.type.layout))
    inside = (position < padded_rows)[:, None] & (col < cols)[None, :]
    gl.store(data + col.to(gl.int64)[None, :] * padded_rows + position[:, None], elements, mask=inside)
    col = gl.convert_layout(col, scales.type.layout)
    gl.store(scale + tile_row.to(gl.int64) * (gl.cdiv(cols, 16) * 16) + col, scales, mask=col < cols)


@Kernel
@gluon.jit(do_not_specialize=["rows", "padded_blocks", "row_blocks", "groups"])
def _rebased_swiglu_backward(
    gate, up, u, scores, sums, table, offs,
    dgate_rowwise, dgate_rowwise_scale, dup_rowwise, dup_rowwise_scale,
    dgate_columnwise, dgate_columnwise_scale, dup_columnwise, dup_columnwise_scale, h_columnwise, h_columnwise_scale,
    cols, gate_stride, up_stride, u_stride,
    rows, padded_blocks, row_blocks, groups,
    LIMIT: gl.constexpr, INTERLEAVED: gl.constexpr, FLOOR: gl.constexpr, E5M2: gl.constexpr, H_E5M2: gl.constexpr,
):  # fmt: skip
    """One program: a tile of 128 rows, those of the next four blocks of the map, and 128 columns.

    INTERLEAVED: what is along H lies over u: a row's 128 bytes of dgate and of dup where its 128 columns of u were. All
    of these have been read when they are written, as the scales, which their largest elements decide, are part of both.
    """
    col_tiles = gl.cdiv(cols, 128)
    tile_col = gl.program_id(0) % col_tiles  # neighbours in a row run together
    tile_row = gl.program_id(0) // col_tiles
    start, stop = tile_row * 128, rows
    if table is not None:
        start = gl.load(table + tile_row * 4)
        stop = gl.load(table + row_blocks + tile_row * 4)
        if start >= gl.load(offs + groups - 1):  # past the last group
            return
    inputs = (gate, gate_stride), (up, up_stride), (u, u_stride)
    MATRICES: gl.constexpr = 2 if INTERLEAVED else 1
    staged = ()
    for _ in gl.static_range(3):
        staged = staged + (gl.allocate_shared_memory(gl.bfloat16, [16, 8, 128], _STAGED),)  # noqa: RUF005
    row = gl.arange(0, 32, gl.SliceLayout(1, _ALONG_ROWS))
    row = start + row % 8 * 16 + row // 8
    col = tile_col * 128 + gl.arange(0, 128, gl.SliceLayout(0, _ALONG_ROWS))
    loaded, score = _load_inputs(inputs, scores, row, stop, col, cols)
    for i in gl.static_range(4):
        made, products = _gradients(loaded, score, LIMIT)
        row_i = row + i * 4
        if i < 3:
            loaded, score = _load_inputs(inputs, scores, row_i + 4, stop, col, cols)
        if scores is not None:
            gl.store(sums + tile_col.to(gl.int64) * rows + row_i, products, mask=row_i < stop)
        for j in gl.static_range(3):
            staged[j].slice(i * 4, 4, dim=0).store(made[j].reshape((4, 8, 128)))
        dgate_out = dgate_rowwise, dgate_rowwise_scale
        dup_out = dup_rowwise + (128 if INTERLEAVED else 0), dup_rowwise_scale
        _store_rows(made[0], dgate_out, row_i, stop, rows, tile_col, cols, MATRICES, FLOOR, E5M2)
        _store_rows(made[1], dup_out, row_i, stop, rows, tile_col, cols, MATRICES, FLOOR, E5M2)
    outs = (
        (dgate_columnwise, dgate_columnwise_scale),
        (dup_columnwise, dup_columnwise_scale),
        (h_columnwise, h_columnwise_scale),
    )
    for j in gl.static_range(3):
        for half in gl.static_range(2):
            values = staged[j].slice(half * 64, 64, dim=2).load(_STAGED_COLUMNS).permute((1, 0, 2)).reshape((128, 64))
            values = gl.convert_layout(values, _ALONG_COLUMNS, assert_trivial=True)
            col = tile_col * 128 + half * 64 + gl.arange(0, 64, gl.SliceLayout(0, _ALONG_COLUMNS))
            _store_columns(values, outs[j], tile_row, col, cols, padded_blocks * 32, FLOOR, H_E5M2 if j == 2 else E5M2)
