"""The GEMM before SwiGLU's gradients, dgrad of w2, and those gradients, in one kernel: its product, u, is never stored.

| role                            | does                                                                              |
|---------------------------------|-----------------------------------------------------------------------------------|
| ``load_stages``, one warp       | fills the stages                                                                  |
| ``_multiply``, two warpgroups   | 64 rows each of u, rounded to bf16, handed over in shared memory                  |
| ``_differentiate``, eight warps | what ``swiglu_gradients`` does, of a tile, while the next one is multiplied        |
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from titan_mxfp8.backends import SwigluGradients
from titan_mxfp8.backends.common.activation import matrices_of, rounded, sums_of
from titan_mxfp8.backends.common.launch import Kernel, descriptor
from titan_mxfp8.backends.common.tiles import rounding_of
from titan_mxfp8.backends.hardware import multiprocessors
from titan_mxfp8.backends.hopper import gemm
from titan_mxfp8.backends.hopper.scales import STAGE, decode_scales
from titan_mxfp8.backends.hopper.stages import first_slot, load_stages, next_slot, product, readable_scales
from titan_mxfp8.backends.hopper.swiglu_gradients import (
    ALONG_COLUMNS,
    ALONG_ROWS,
    STAGED,
    STAGED_COLUMNS,
    gradients,
    load_inputs,
    store_columns,
    store_rows,
)
from titan_mxfp8.backends.hopper.tile_scheduler import advance, start_position, swizzled_position
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import Operand, OperandSpec

TILES = gemm.Tiles(warpgroups=2, parts=2, stages=3, registers=(144, 24))
DIFFERENTIATE_REGISTERS = 80
# Row ``16 k + j`` of u is at [j, k], as in STAGED, but neighbours in j lie in other banks.
_HANDED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [2, 0, 1]))
_HANDED_ROWS = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 2, 16], [2, 4, 1], [2, 1, 0]))
_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_ONE_OF_8 = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))


def swiglu_backward_gemm(
    g: Operand,
    w2: Operand,
    inputs: list[Tensor],
    scores_M: Tensor | None,
    rowwise: OperandSpec,
    columnwise: OperandSpec,
    h_columnwise: OperandSpec,
    offs: Tensor | None,
) -> SwigluGradients:
    """``Backend.swiglu_backward_gemm_m_grouped`` of 1x128 blocks by 32x128."""
    gate, up = matrices_of(*inputs)
    inputs.clear()
    (m, c), features = g.data.shape, w2.data.shape[1]
    groups = None if offs is None else offs.shape[0]
    along_h = [rowwise.empty(gate.x, 1, None) for _ in range(2)]
    along_m = [spec.empty(gate.x, 0, groups) for spec in (columnwise, columnwise, h_columnwise)]
    scores_M, sums = sums_of(scores_M, m, ceil_div(features, 128))
    scales = decode_scales(g, w2, features // BLOCK_SIZE, ceil_div(c, STAGE), copies=4, end=m, offs=offs)
    shapes, dtypes = (g.data.shape, w2.data.shape, gate.x.shape), (g.data.dtype, w2.data.dtype, torch.float32)
    plan = gemm.plan_launch(shapes, dtypes, scales.layout, TILES, False, False, False)
    tensors = g.data, w2.data, scales.buffer, scales.buffer
    _SWIGLU_BACKWARD_GEMM.launch(
        min(plan.tiles, multiprocessors(gate.x.device)),
        (gate.x, up.x, scores_M, sums, offs, scales.buffer[scales.layout.size :],
         *(tensor for operand in (*along_h, *along_m) for tensor in operand[:2])),
        (*plan.sizes, gate.row_stride, up.row_stride),
        (*plan.counts, along_m[0].data.shape[-1] // BLOCK_SIZE),
        (scales.layout.copies, *rounding_of(rowwise), rounding_of(h_columnwise)[1],
         TILES.stages, gemm.GROUP_M, TILES.registers[0], DIFFERENTIATE_REGISTERS, TILES.registers[1]),
        device=gate.x.device, descriptors=tuple(map(descriptor, tensors, plan.layouts)),
    )  # fmt: skip
    return SwigluGradients(*along_h, *along_m, None if sums is None else sums.sum(0))


@gluon.jit
def _tell(exchange, slot, tile):
    """The number of a tile that will be handed over, or of none, for ``_told``. Of two slots one is always free."""
    _, number, told, _, _ = exchange
    number.index(slot).store(gl.zeros((4,), gl.int32, _ONE) + tile)
    mbarrier.arrive(told.index(slot), count=1)


@gluon.jit
def _told(exchange, slot, phase):
    _, number, told, _, _ = exchange
    mbarrier.wait(told.index(slot), phase)
    tile = number.index(slot).slice(0, 1).load(_ONE_OF_8)
    # Over all lanes: so ptxas knows that it, and what follows from it, is the same in all, and spills 2 KB less.
    return gl.max(tile + gl.zeros((32,), gl.int32, _ONE_OF_8), 0)


@gluon.jit
def _multiply(given, WARPGROUP: gl.constexpr, GROUP_M: gl.constexpr):
    """The role of a warpgroup that multiplies."""
    buffers, groups, C, rows, exchange = given
    a_tiles, b_tiles, row_scales, column_scales, next_tiles, full, empty = buffers
    handed, _, _, ready, free = exchange
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    row_scales, column_scales = readable_scales(row_scales, column_scales)
    buffers = (a_tiles, b_tiles, row_scales, column_scales, next_tiles, full, empty)
    zero = gl.zeros((64, 128), gl.float32, MMA)
    slot, phase = first_slot()
    told_slot, turn = first_slot()
    _, experts, _, tiles_across = groups
    tile = gl.program_id(0)
    state = advance(tile, start_position(), groups, False, 128)
    while state[0] < experts:
        _, _, _, start, end, _ = state
        if WARPGROUP == 0:
            _tell(exchange, told_slot, tile)
        tile_row, _ = swizzled_position(tile, state, tiles_across, GROUP_M)
        is_used = start + tile_row * 128 + WARPGROUP * 64 < gl.minimum(end, rows)
        total, tile, slot, phase = product(zero, buffers, C, is_used, slot, phase, WARPGROUP)
        mbarrier.wait(free, turn ^ 1)
        if is_used:
            u = rounded(total).reshape((4, 16, 128)).permute((1, 0, 2))
            handed.slice(4 * WARPGROUP, 4, dim=1).store(u)
        mbarrier.arrive(ready, count=1)
        told_slot, _ = next_slot(told_slot, turn, 2)
        turn = turn ^ 1
        state = advance(tile, state, groups, False, 128)
    if WARPGROUP == 0:
        _tell(exchange, told_slot, tile)


@gluon.jit
def _u_of(handed, i: gl.constexpr):
    """Rows ``16 k + 4 i`` to ``16 k + 4 i + 3``, as ``load_inputs`` has them."""
    u = handed.slice(i * 4, 4, dim=0).load(_HANDED_ROWS)
    return gl.convert_layout(u.reshape((32, 128)), ALONG_ROWS, assert_trivial=True)


@gluon.jit
def _differentiate(
    given, inputs, scores, sums, rowwise, columnwise, staged,
    GROUP_M: gl.constexpr, FLOOR: gl.constexpr, E5M2: gl.constexpr, H_E5M2: gl.constexpr,
):  # fmt: skip
    """The role of the warps that take u: the gradients of a tile of 128 rows and 128 columns."""
    groups, H, rows, padded_rows, exchange = given
    handed, _, _, ready, free = exchange
    _, experts, _, tiles_across = groups
    told_slot, told_phase = first_slot()
    turn = gl.to_tensor(0)
    tile = _told(exchange, told_slot, told_phase)
    state = advance(tile, start_position(), groups, False, 128)
    while state[0] < experts:
        _, first, _, start, end, _ = state
        tile_row, tile_col = swizzled_position(tile, state, tiles_across, GROUP_M)
        stop = gl.minimum(end, rows)
        row = gl.arange(0, 32, gl.SliceLayout(1, ALONG_ROWS))
        row = start + tile_row * 128 + row % 8 * 16 + row // 8
        col = tile_col * 128 + gl.arange(0, 128, gl.SliceLayout(0, ALONG_ROWS))
        loaded, score = load_inputs(inputs, scores, row, stop, col, H)
        mbarrier.wait(ready, turn)
        for i in gl.static_range(4):
            row_i = row + i * 4
            inside = (row_i < stop)[:, None] & (col < H)[None, :]
            u = gl.where(inside, _u_of(handed, i), 0.0)
            made, products = gradients((loaded[0], loaded[1], u), score, None, 1.0)
            if i < 3:
                loaded, score = load_inputs(inputs, scores, row_i + 4, stop, col, H)
            else:
                mbarrier.arrive(free, count=1)
            if scores is not None:
                gl.store(sums + tile_col.to(gl.int64) * rows + row_i, products, mask=row_i < stop)
            for j in gl.static_range(3):
                staged[j].slice(i * 4, 4, dim=0).store(made[j].reshape((4, 8, 128)))
            for j in gl.static_range(2):
                store_rows(made[j], rowwise[j], row_i, stop, rows, tile_col, H, FLOOR, E5M2)
        tile_row += first // tiles_across  # groups start at multiples of 128 along M
        for j in gl.static_range(3):
            for half in gl.static_range(2):
                values = (
                    staged[j].slice(half * 64, 64, dim=2).load(STAGED_COLUMNS).permute((1, 0, 2)).reshape((128, 64))
                )
                values = gl.convert_layout(values, ALONG_COLUMNS, assert_trivial=True)
                col = tile_col * 128 + half * 64 + gl.arange(0, 64, gl.SliceLayout(0, ALONG_COLUMNS))
                store_columns(values, columnwise[j], tile_row, col, H, padded_rows, FLOOR, H_E5M2 if j == 2 else E5M2)
        turn = turn ^ 1
        told_slot, told_phase = next_slot(told_slot, told_phase, 2)
        tile = _told(exchange, told_slot, told_phase)
        state = advance(tile, state, groups, False, 128)


@gluon.jit(
    do_not_specialize=[
        "experts", "tiles_down", "tiles_across", "rows", "scale_rows", "scale_stages", "padded_blocks"
    ]
)  # fmt: skip
def _swiglu_backward_gemm_kernel(
    a, b, row_scale, column_scale,
    gate, up, scores, sums, offs, tile_counter,
    dgate_rowwise, dgate_rowwise_scale, dup_rowwise, dup_rowwise_scale,
    dgate_columnwise, dgate_columnwise_scale, dup_columnwise, dup_columnwise_scale, h_columnwise, h_columnwise_scale,
    C, H, gate_stride, up_stride,
    experts, tiles_down, tiles_across, rows, scale_rows, scale_stages, padded_blocks,
    COPIES: gl.constexpr, FLOOR: gl.constexpr, E5M2: gl.constexpr,
    H_E5M2: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr, DIFFERENTIATE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: tiles, as long as there are any."""
    if offs is None:
        offs = tile_counter + 1
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES * 2, 64, 128], a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, 128, 128], b.layout)
    row_scales = gl.allocate_shared_memory(gl.float32, [STAGES * 2, 64], row_scale.layout)
    column_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, column_scale.block_shape[1]], column_scale.layout)
    handed = gl.allocate_shared_memory(gl.bfloat16, [16, 8, 128], _HANDED)
    staged = ()
    for _ in gl.static_range(3):
        staged = staged + (gl.allocate_shared_memory(gl.bfloat16, [16, 8, 128], STAGED),)  # noqa: RUF005
    next_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    number = gl.allocate_shared_memory(gl.int32, [2, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(told.index(i), count=1)
    mbarrier.init(ready, count=2)
    mbarrier.init(free, count=1)
    fence_async_shared()
    buffers = (a_tiles, b_tiles, row_scales, column_scales, next_tiles, full, empty)
    groups = (offs, experts, tiles_down, tiles_across)
    exchange = (handed, number, told, ready, free)
    load = (((a, b, row_scale, column_scale),), buffers, groups, C, H, scale_rows, scale_stages, tile_counter)
    multiply = (buffers, groups, C, rows, exchange)
    inputs = ((gate, gate_stride), (up, up_stride))
    rowwise = ((dgate_rowwise, dgate_rowwise_scale), (dup_rowwise, dup_rowwise_scale))
    columnwise = (
        (dgate_columnwise, dgate_columnwise_scale),
        (dup_columnwise, dup_columnwise_scale),
        (h_columnwise, h_columnwise_scale),
    )
    differentiate = (groups, H, rows, padded_blocks * 32, exchange)
    gl.warp_specialize(
        [
            (_multiply, (multiply, 0, GROUP_M)),
            (_multiply, (multiply, 1, GROUP_M)),
            (
                _differentiate,
                (differentiate, inputs, scores, sums, rowwise, columnwise, staged, GROUP_M, FLOOR, E5M2, H_E5M2),
            ),
            (load_stages, (load, COPIES, False, GROUP_M)),
        ],
        [4, 8, 1],
        [MULTIPLY_REGISTERS, DIFFERENTIATE_REGISTERS, LOAD_REGISTERS],
    )


_SWIGLU_BACKWARD_GEMM = Kernel(_swiglu_backward_gemm_kernel)
