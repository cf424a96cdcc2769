"""The first two GEMMs of rebased experts and SwiGLU of both, in one kernel.

A tile is 128 features of both products. The warps have the roles of ``gemm_kernel.py``, and the two products pass
through the stages one after the other, that of the gate first:

| after the product of | a warpgroup, with 64 rows and 128 features of it in registers                                |
|----------------------|----------------------------------------------------------------------------------------------|
| w1                   | rounds the gate to bf16, leaves it in its staging buffer and stores it from there            |
| w3                   | rounds up likewise, takes the gate back out, computes h, rounds that to bf16 and rebases its |
|                      | blocks of 128 features; stores up, then the elements of h, through the same buffer           |

So gate and up are not read again to make h, and the rows of ``a`` have their scales decoded once. All bits are those of
``gemm.gemm_m_grouped`` twice and ``common.swiglu.swiglu``. On an H100, 196608 x 2048 by 2 x 1408 in 64 groups: 2.5 ms;
the three kernels 2.9.

The score times h along M, which wgrad takes, is made with SwiGLU's gradients: these read gate and up in any case, and h
in a second layout would take memory until then.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from titan_mxfp8.backends.common.activation import activation, rounded, widened
from titan_mxfp8.backends.common.launch import Kernel, TileLayout, descriptor
from titan_mxfp8.backends.common.tiles import rounding_of
from titan_mxfp8.backends.hardware import multiprocessors
from titan_mxfp8.backends.hopper import gemm
from titan_mxfp8.backends.hopper.scales import PART, STAGE, decode_scales
from titan_mxfp8.backends.hopper.stages import (
    copy_out,
    first_slot,
    load_stages,
    product,
    readable_scales,
    reinterpreted,
    store_rows,
)
from titan_mxfp8.backends.hopper.swiglu_gradients import rebased
from titan_mxfp8.backends.hopper.tile_scheduler import advance, start_position, swizzled_position
from titan_mxfp8.format.spec import Operand, OperandSpec


def swiglu_gemm(
    a: Operand, w1: Operand, w3: Operand, spec: OperandSpec, offs: Tensor | None, tiles: gemm.Tiles | None = None
) -> tuple[Tensor, Tensor, Operand]:
    """``Backend.swiglu_gemm_m_grouped`` of 1x128 blocks by 32x128, of features in whole blocks of 128; with given tiles
    for measurements."""
    m, features, device = a.data.shape[0], w1.data.shape[1], a.data.device
    gate, up = (torch.empty((m, features), dtype=torch.bfloat16, device=device) for _ in range(2))
    h = spec.empty(gate, 1, None)
    assert features % 128 == 0 and spec.block_k == 128, (features, spec)
    scales, scales_3 = decode_scales(a, w1, offs), decode_scales(a, w3, offs, with_rows=False)
    shapes, dtypes = (a.data.shape, w1.data.shape, gate.shape), (a.data.dtype, w1.data.dtype, gate.dtype)
    tensors = a.data, w1.data, scales.buffer, scales.buffer, w3.data, scales_3.buffer, gate, up, h.data
    in_bf16, in_fp8 = (
        TileLayout(dtype, (m, features), (PART, STAGE), gluon=True) for dtype in (gate.dtype, h.data.dtype)
    )
    for i, chosen in enumerate((tiles,) if tiles else gemm.tiles_for(a, w1)):
        assert chosen.parts == chosen.warpgroups, chosen
        plan = gemm.plan_launch(shapes, dtypes, scales.layout, chosen, False, False, False)
        a_tile, w_tile, row_scale, column_scale, _ = plan.layouts
        layouts = a_tile, w_tile, row_scale, column_scale, w_tile, column_scale._replace(offset=0), in_bf16, in_bf16
        is_new = _swiglu_gemm_kernel.launch(
            min(plan.tiles, multiprocessors(device)) if i == 0 else 0,
            (gate, up, h.data, h.scale, offs, scales.buffer[scales.layout.size :]),
            plan.sizes, plan.counts,
            (scales.layout.copies, *rounding_of(spec), chosen.warpgroups, chosen.stages, gemm.GROUP_M,
             *chosen.registers),
            device=device, descriptors=tuple(map(descriptor, tensors, (*layouts, in_fp8))),
        )  # fmt: skip
        if not is_new:
            break
    return gate, up, h


@gluon.jit
def _store(value, out, out_tiles, buffer, row, row_end, rows, tile_column, H):
    """Stores the rows before ``row_end`` of 64 rows and 128 features, all of which stay in ``buffer``; the copy runs
    on."""
    buffer.store(value)
    fence_async_shared()
    if row + 64 <= row_end:
        copy_out(out_tiles, [row, tile_column * 128], buffer)
    else:
        column = tile_column * 128 + gl.arange(0, 128, gl.SliceLayout(0, value.type.layout))
        store_rows(value.to(out.dtype.element_ty, bitcast=True), out, row * 0, row, row_end, rows, column, H)


@gluon.jit
def _swiglu(gate, up):
    """h in bf16."""
    gate, factor, s = activation(widened(gate), widened(up), None)
    return rounded(gate * s * factor)


@gluon.jit
def _multiply(
    given, outs, out_tiles, staging, h_staging, WARPGROUP: gl.constexpr, GROUP_M: gl.constexpr, FLOOR: gl.constexpr,
    E5M2: gl.constexpr,
):  # fmt: skip
    """The role of a warpgroup: 64 rows of each tile."""
    buffers, groups, C, H, rows = given
    gate_out, up_out, h_out, h_scale = outs
    gate_tiles, up_tiles, h_tiles = out_tiles
    a_tiles, b_tiles, row_scales, column_scales, next_tiles, full, empty = buffers
    TILE_ROWS: gl.constexpr = a_tiles.shape[0] // full.shape[0] * 64
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    row_scales, column_scales = readable_scales(row_scales, column_scales)
    buffers = (a_tiles, b_tiles, row_scales, column_scales, next_tiles, full, empty)
    zero = gl.zeros((64, 128), gl.float32, MMA)
    buffer, h_buffer = staging.index(WARPGROUP), h_staging.index(2 * WARPGROUP)
    slot, phase = first_slot()
    _, experts, _, tiles_across = groups
    tile = gl.program_id(0)
    state = advance(tile, start_position(), groups, False, TILE_ROWS)
    while state[0] < experts:
        _, _, _, start, end, _ = state
        tile_row, tile_column = swizzled_position(tile, state, tiles_across, GROUP_M)
        row = start + tile_row * TILE_ROWS + WARPGROUP * 64
        row_end = gl.minimum(end, rows)
        is_used = row < row_end
        total, _, slot, phase = product(zero, buffers, C, is_used, slot, phase, WARPGROUP)
        if is_used:
            tma.store_wait(0)  # of h of the tile before
            _store(rounded(total), gate_out, gate_tiles, buffer, row, row_end, rows, tile_column, H)
        total, tile, slot, phase = product(zero, buffers, C, is_used, slot, phase, WARPGROUP)
        if is_used:
            up = rounded(total)
            tma.store_wait(0)
            gate = buffer.load(MMA)
            _store(up, up_out, up_tiles, buffer, row, row_end, rows, tile_column, H)
            elements, scales = rebased(_swiglu(gate, up), 1, FLOOR, E5M2)
            tma.store_wait(0)
            elements = elements.to(h_tiles.dtype, bitcast=True)
            _store(elements, h_out, h_tiles, h_buffer, row, row_end, rows, tile_column, H)
            at = row + gl.arange(0, 64, scales.type.layout)
            gl.store(h_scale + tile_column.to(gl.int64) * (gl.cdiv(rows, 16) * 16) + at, scales, mask=at < row_end)
        state = advance(tile, state, groups, False, TILE_ROWS)
    tma.store_wait(0)


@Kernel
@gluon.jit(do_not_specialize=["experts", "tiles_down", "tiles_across", "rows", "scale_rows", "scale_stages"])
def _swiglu_gemm_kernel(
    a, w1, row_scale, column_scale, w3, column_scale_3, gate_tiles, up_tiles, h_tiles,
    gate, up, h, h_scale, offs, tile_counter,
    C, H,
    experts, tiles_down, tiles_across, rows, scale_rows, scale_stages,
    COPIES: gl.constexpr, FLOOR: gl.constexpr, E5M2: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, MULTIPLY_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: tiles, as long as there are any.

    ``a``: descriptor of (rows, C). ``w1``, ``w3``: of (E * H, C). ``row_scale``, ``column_scale``, ``column_scale_3``:
    of what ``decode_scales`` makes. ``gate_tiles``, ``up_tiles``, ``h_tiles``: of the outputs, 64 rows and 128 features
    of each. ``offs``, ``tile_counter``: as of ``gemm_kernel``.
    """
    if offs is None:
        offs = tile_counter + 1
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES * WARPGROUPS, 64, 128], a.layout)
    b_tiles = gl.allocate_shared_memory(w1.dtype, [STAGES, 128, 128], w1.layout)
    row_scales = gl.allocate_shared_memory(gl.float32, [STAGES * WARPGROUPS, 64], row_scale.layout)
    column_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, column_scale.block_shape[1]], column_scale.layout)
    staging = gl.allocate_shared_memory(gl.bfloat16, [WARPGROUPS, 64, 128], gate_tiles.layout)
    H_SHAPE: gl.constexpr = [2 * WARPGROUPS, 64, 128]
    H_LAYOUT: gl.constexpr = h_tiles.layout
    h_staging = reinterpreted(staging, h_tiles.dtype, H_SHAPE, H_LAYOUT)
    next_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    buffers = (a_tiles, b_tiles, row_scales, column_scales, next_tiles, full, empty)
    groups = (offs, experts, tiles_down, tiles_across)
    products = ((a, w1, row_scale, column_scale), (a, w3, row_scale, column_scale_3))
    load = (products, buffers, groups, C, H, scale_rows, scale_stages, tile_counter)
    multiply = (buffers, groups, C, H, rows)
    outs = (gate, up, h, h_scale)
    out_tiles = (gate_tiles, up_tiles, h_tiles)
    gl.static_assert(WARPGROUPS == 2 or WARPGROUPS == 3)
    # Written twice: see gemm_kernel.
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (multiply, outs, out_tiles, staging, h_staging, 0, GROUP_M, FLOOR, E5M2)),
                (_multiply, (multiply, outs, out_tiles, staging, h_staging, 1, GROUP_M, FLOOR, E5M2)),
                (load_stages, (load, COPIES, False, False, GROUP_M)),
            ],
            [4, 1],
            [MULTIPLY_REGISTERS, LOAD_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (multiply, outs, out_tiles, staging, h_staging, 0, GROUP_M, FLOOR, E5M2)),
                (_multiply, (multiply, outs, out_tiles, staging, h_staging, 1, GROUP_M, FLOOR, E5M2)),
                (_multiply, (multiply, outs, out_tiles, staging, h_staging, 2, GROUP_M, FLOOR, E5M2)),
                (load_stages, (load, COPIES, False, False, GROUP_M)),
            ],
            [4, 4, 1],
            [MULTIPLY_REGISTERS, MULTIPLY_REGISTERS, LOAD_REGISTERS],
        )
