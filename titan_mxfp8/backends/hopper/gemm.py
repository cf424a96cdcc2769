"""The grouped GEMMs on Hopper: FP8 tensor cores, whose sums are scaled and added up in fp32 registers.

Hopper's tensor cores (``wgmma``) multiply FP8 but know no scales. So a chain of them sums 32 to 128 products of a row
and a column, and each sum p is added to the output as ``acc += p * (row scale * column scale)``. One FP32 instruction
for each p takes as long as the tensor cores take for 32 products, and power besides, so this decides how fast a form
can be:

| GEMM      | ``b``  | sums of   | scales of a sum             | FP32 instructions per element of it |
|-----------|--------|-----------|-----------------------------|-------------------------------------|
| m_grouped | 32x32  | 32 to 128 | one per row and 32 columns  | 1                                   |
| m_grouped | 32x128 | 128       | one per row and 32 columns  | 1                                   |
| k_grouped | 1x128  | 128       | one per row, one per column | 2                                   |

Exact operands (32x32) have blocks of 32. A sum goes on over the next block of the stage where its scales are those of
the block before, in all of 64 rows of ``a`` and 128 columns of ``b``: the quantiser sees to it where that changes no
value (``format.reference.coalesce_scales``), ``decode_scales`` looks for it and leaves marks, and each warpgroup goes
by them.
The result is exact in any case, but for the bits that tensor cores cut off a sum; so the last bits of a row depend on
which rows are beside it.

A persistent program per multiprocessor. Its warps have roles, and pass stages of 128 of the contraction through shared
memory. A stage holds the tile's rows of ``a``, in parts of 64, 128 rows of ``b.mT``, and their scales as fp32:

| role                        | waits for       | does                                              | then arrives at |
|-----------------------------|-----------------|---------------------------------------------------|-----------------|
| ``_load``, one warp         | ``empty[stage]``| starts the copies (TMA) of the stage              | ``full[stage]`` |
| ``_multiply``, a warpgroup  | ``full[stage]`` | its parts of ``a`` times ``b``, adds up the sums  | ``empty[stage]``|
| of 4 warps, two or three    |                 | after the last stage: stores its part of the tile |                 |

Tiles are taken on demand. A program starts with the one that has its own number; its loading warp takes the next from
a counter in device memory and hands the number on with the last stage of the tile before. So the tiles in flight are
nearly neighbours, which read the same rows of ``a`` and ``b`` while those are in L2, and a program that starts late, as
a kernel of NCCL has its multiprocessor, leaves its share to the others.

Every role finds its tile by itself (``walk.seek``), from the offsets in device memory: groups may end anywhere, nothing
is padded and the host never waits. A tile may read rows of the next group: rows do not mix, and only the group's own
are stored. What the copies read outside a tensor is zero.

``decode_scales`` prepares the scales, however they lie, in the layouts that single copies want: a copy of TMA must
start at a multiple of 16 bytes, but a group at any row. Exact: the four scales of a row's stage are side by side, 16
bytes. Rebased: the rows' scales are stored four times, shifted by 0 to 3 rows, and one of the four fits any start.

M tokens, N out features, K in features, E experts; C is a contraction axis and D the other one of ``b``.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from titan_mxfp8.backends.common.launch import Kernel, TileLayout, descriptor
from titan_mxfp8.backends.hardware import multiprocessors
from titan_mxfp8.backends.hopper.walk import before_first_group, seek, tile_position
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div, ceil_to
from titan_mxfp8.format.spec import Operand

# Renamed after Triton 3.6.
_copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

STAGE = 128  # of the contraction
COLUMNS = 128  # of a tile
PART = 64  # rows of a tile that one wgmma multiplies
BAND = 8  # rows of tiles that are in flight together, see walk.tile_position
DECODE_LINES = 512  # rows or columns whose scales a program decodes


@gluon.jit
def _first_slot():
    """Where the first stage lies, and the phase of its barriers: it flips each time that the slots have been used."""
    return gl.to_tensor(0), gl.to_tensor(0)


@gluon.jit
def _next_slot(slot, phase, STAGES: gl.constexpr):
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _load(given, COPIES: gl.constexpr, K_GROUPED: gl.constexpr, BAND: gl.constexpr):
    """The role of the warp that fills the stages, and takes the next tile."""
    products, buffers, groups, C, D, scale_rows, scale_stages, taken = given
    a_tiles, b_tiles, row_scales, column_scales, next_tiles, full, empty = buffers
    PRODUCTS: gl.constexpr = len(products)
    STAGES: gl.constexpr = full.shape[0]
    PARTS: gl.constexpr = a_tiles.shape[0] // STAGES
    STEPS: gl.constexpr = column_scales.shape[1]
    COLUMNS: gl.constexpr = b_tiles.shape[1]
    WIDTH: gl.constexpr = column_scales.shape[2]
    BYTES: gl.constexpr = (PARTS * 64 + COLUMNS) * 128 + (PARTS * 64 + WIDTH) * STEPS * 4
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    slot, phase = _first_slot()
    _, experts, _, tiles_across = groups
    tile = gl.program_id(0)
    state = seek(tile, before_first_group(), groups, K_GROUPED, PARTS * 64, 128)
    while state[0] < experts:
        # By one lane, as a scalar would go through shared memory, which costs 2 to 3%.
        count = gl.atomic_add(taken + 0 * lane, 0 * lane + 1, mask=lane == 0, sem="relaxed")
        next_tile = gl.where(lane == 0, gl.num_programs(0) + count, 0)
        group, _, _, start, end, _ = state
        tile_row, tile_column = tile_position(tile, state, tiles_across, BAND)
        row = tile_row * (PARTS * 64)
        column = tile_column * COLUMNS
        scale_base = group * 0
        k_start = start
        k_end = end
        if not K_GROUPED:
            row += start
            column += group * D
            scale_base = group * scale_stages
            k_start = group * 0
            k_end = k_start + C
        shift = row % COPIES
        for p in gl.static_range(PRODUCTS):
            a, b, row_scale, column_scale = products[p]
            for k in range(k_start, k_end, 128):
                mbarrier.wait(empty.index(slot), phase ^ 1)
                bar = full.index(slot)
                if p == PRODUCTS - 1:
                    if k + 128 >= k_end:
                        next_tiles.index(slot).store(next_tile)
                mbarrier.expect(bar, BYTES)
                for i in gl.static_range(PARTS):
                    _copy_in(a, [row + i * 64, k], bar, a_tiles.index(slot * PARTS + i))
                    scale_row = (shift * scale_stages + k // 128) * scale_rows + row - shift + i * 64
                    _copy_in(row_scale, [scale_row * STEPS], bar, row_scales.index(slot * PARTS + i))
                _copy_in(b, [column, k], bar, b_tiles.index(slot))
                at = [(scale_base + k // 128) * STEPS, tile_column * (WIDTH if WIDTH == COLUMNS else COLUMNS // 32)]
                _copy_in(column_scale, at, bar, column_scales.index(slot))
                slot, phase = _next_slot(slot, phase, STAGES)
        tile = gl.max(next_tile, 0)
        state = seek(tile, state, groups, K_GROUPED, PARTS * 64, 128)


@gluon.jit
def _sums(a, b, step, p, more, STEPS: gl.constexpr):
    """Starts the sums of one step: 64 rows times all columns over ``128 / STEPS`` of the contraction, plus p if
    ``more``."""
    LENGTH: gl.constexpr = 128 // STEPS
    b_step = b.slice(step * LENGTH, LENGTH, dim=1).permute((1, 0))
    return warpgroup_mma(a.slice(step * LENGTH, LENGTH, dim=1), b_step, p, use_acc=more, is_async=True)


@gluon.jit
def _square_scales(acc, row_scales, column_scales, part, slot, step):
    """The scales of one step for ``acc`` of (64, columns / 32, 32): (64, columns / 32, 1)."""
    STEPS: gl.constexpr = row_scales.shape[2]
    L: gl.constexpr = gl.SliceLayout(2, acc.type.layout)
    rows = row_scales.index(part).slice(step, 1, dim=1).load(L)
    groups = column_scales.index(slot * STEPS + step).slice(0, acc.shape[1]).load(gl.SliceLayout(0, L))
    if STEPS > 1 and step == 0:  # their last three bits are marks, see _marks
        rows = (rows.to(gl.int32, bitcast=True) & -8).to(gl.float32, bitcast=True)
        groups = (groups.to(gl.int32, bitcast=True) & -8).to(gl.float32, bitcast=True)
    return (rows * groups.expand_dims(0)).expand_dims(2)


@gluon.jit
def _marks(row_scales, column_scales, part, slot):
    """Bit i: each of 64 rows and each column has the same scale in steps i and i + 1 of the stage.

    ``decode_scales`` marks runs of 64 rows, counted from the first one of ``a``: the rows here may lie in two of them.
    """
    ROW: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0])
    COLUMN: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    STEPS: gl.constexpr = row_scales.shape[2]
    rows = row_scales.index(part).slice(0, 1, dim=1)
    first = gl.max(gl.max(rows.slice(0, 1, dim=0).load(ROW).to(gl.int32, bitcast=True), 1), 0)
    last = gl.max(gl.max(rows.slice(63, 1, dim=0).load(ROW).to(gl.int32, bitcast=True), 1), 0)
    column = gl.max(column_scales.index(slot * STEPS).slice(0, 1).load(COLUMN).to(gl.int32, bitcast=True), 0)
    return first & last & column


@gluon.jit
def _add_stage_of_squares(acc, a, b, zero, row_scales, column_scales, part, slot):
    """``acc`` plus the sums of a stage: one over all steps in a row that ``_marks`` shows to have the same scales."""
    STEPS: gl.constexpr = row_scales.shape[2]
    p = _sums(a, b, 0, zero, False, STEPS)
    if STEPS > 1:
        marks = _marks(row_scales, column_scales, part, slot)
    for step in gl.static_range(1, STEPS):
        same = (marks & (1 << (step - 1))) != 0
        if not same:
            scales = _square_scales(acc, row_scales, column_scales, part, slot, step - 1)
            done = warpgroup_mma_wait(0, deps=(p,))
            acc = gl.fma(done.reshape(acc.shape), scales, acc)
        p = _sums(a, b, step, p, same, STEPS)
    scales = _square_scales(acc, row_scales, column_scales, part, slot, STEPS - 1)
    p = warpgroup_mma_wait(0, deps=(p,))
    return gl.fma(p.reshape(acc.shape), scales, acc)


@gluon.jit
def _add_stage(acc, a, b, zero, row_scales, column_scales, part, slot):
    """``acc`` plus the sums of a stage, whose columns have a scale each."""
    p = warpgroup_mma_wait(0, deps=(_sums(a, b, 0, zero, False, 1),))
    rows = row_scales.index(part).load(acc.type.layout)
    columns = column_scales.index(slot).load(gl.SliceLayout(0, acc.type.layout))
    return gl.fma(p * rows, columns.expand_dims(0), acc)


@gluon.jit
def _store(value, out, matrix, first_row, row_end, out_rows, column, D):
    """Stores the rows before ``row_end`` from registers."""
    row = first_row + gl.arange(0, 64, gl.SliceLayout(1, value.type.layout))
    at = (matrix.to(gl.int64) * out_rows + row) * D
    inside = (row < row_end).expand_dims(1) & (column < D).expand_dims(0)
    gl.store(out + at.expand_dims(1) + column.expand_dims(0), value, mask=inside)


@gluon.jit
def _store_whole(value, out_tiles, staging, first_row, tile_column, WARPGROUP: gl.constexpr):
    """Stores 64 rows through shared memory, half of the columns at a time; the copies run on."""
    HALF: gl.constexpr = staging.shape[2]
    halves = value.reshape((64, 2, HALF)).permute((0, 2, 1)).split()
    for i in gl.static_range(2):
        buffer = staging.index(WARPGROUP)
        tma.store_wait(0)
        buffer.store(halves[i])
        fence_async_shared()
        _copy_out(out_tiles, [first_row, (2 * tile_column + i) * HALF], buffer)


@gluon.jit
def _fill_zeros(out, begin, end, program, programs):
    """Elements ``begin .. end`` become 0, 8192 at a time, programs taking turns."""
    L: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    at = begin + program * 8192
    while at < end:
        index = at + gl.arange(0, 8192, L)
        gl.store(out + index, gl.zeros((8192,), out.dtype.element_ty, L), mask=index < end)
        at += programs * 8192


@gluon.jit
def _multiply(
    given, out_tiles, staging, bias, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, K_GROUPED: gl.constexpr,
    ZERO_TAIL: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """The role of a warpgroup that multiplies and stores ``PARTS / WARPGROUPS`` parts of each tile.

    The warpgroups fill each other's gaps. The branch around the sums of m_grouped, which skips parts without rows, also
    keeps ptxas from overlapping them: it lacks the registers. Of k_grouped, where that would cost 8 to 14%, it is
    around all parts of a warpgroup: on an H200 mostly 2 to 5% faster than none.
    """
    out, buffers, groups, length, D, out_rows = given
    a_tiles, b_tiles, row_scales, column_scales, next_tiles, full, empty = buffers
    STAGES: gl.constexpr = full.shape[0]
    PARTS: gl.constexpr = a_tiles.shape[0] // STAGES
    STEPS: gl.constexpr = column_scales.shape[1]
    COLUMNS: gl.constexpr = b_tiles.shape[1]
    WIDTH: gl.constexpr = column_scales.shape[2]
    OURS: gl.constexpr = PARTS // WARPGROUPS
    SQUARES: gl.constexpr = not K_GROUPED
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    ROW_MAJOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if _REINTERPRET:
        row_scales = row_scales.reinterpret(gl.float32, [STAGES * PARTS, 64, STEPS], ROW_MAJOR)
        column_scales = column_scales.reinterpret(gl.float32, [STAGES * STEPS, WIDTH], LINE)
    else:
        row_scales = row_scales._reinterpret(gl.float32, [STAGES * PARTS, 64, STEPS], ROW_MAJOR)
        column_scales = column_scales._reinterpret(gl.float32, [STAGES * STEPS, WIDTH], LINE)
    zero = gl.zeros((64, COLUMNS), gl.float32, MMA)
    slot, phase = _first_slot()
    _, experts, _, tiles_across = groups
    tile = gl.program_id(0)
    state = seek(tile, before_first_group(), groups, K_GROUPED, PARTS * 64, 128)
    while state[0] < experts:
        group, _, _, start, end, _ = state
        tile_row, tile_column = tile_position(tile, state, tiles_across, BAND)
        row = tile_row * (PARTS * 64) + WARPGROUP * OURS * 64
        row_end = out_rows
        matrix = group  # of the output
        k_length = end - start
        if not K_GROUPED:
            row += start
            row_end = gl.minimum(end, out_rows)
            matrix = group * 0
            k_length = group * 0 + length
        accs = ()
        for _i in gl.static_range(OURS):
            accs = accs + (zero.reshape((64, COLUMNS // 32, 32)) if SQUARES else zero,)  # noqa: RUF005, no unpacking here
        next_tile = tile
        for k in range(0, k_length, 128):
            part = slot * PARTS + WARPGROUP * OURS
            mbarrier.wait(full.index(slot), phase)
            b = b_tiles.index(slot)
            if SQUARES or row < row_end:
                for i in gl.static_range(OURS):
                    acc = accs[i]
                    a = a_tiles.index(part + i)
                    if not SQUARES:
                        acc = _add_stage(acc, a, b, zero, row_scales, column_scales, part + i, slot)
                    elif row + i * 64 < row_end:
                        acc = _add_stage_of_squares(acc, a, b, zero, row_scales, column_scales, part + i, slot)
                    if OURS == 1:
                        accs = (acc,)
                    elif i == 0:
                        accs = (acc, accs[1])
                    else:
                        accs = (accs[0], acc)
            if k + 128 >= k_length:
                next_tile = gl.max(next_tiles.index(slot).slice(0, 1).load(ONE), 0)
            mbarrier.arrive(empty.index(slot), count=1)
            slot, phase = _next_slot(slot, phase, STAGES)
        column = tile_column * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA))
        for i in gl.static_range(OURS):
            total = gl.convert_layout(accs[i].reshape((64, COLUMNS)), MMA, assert_trivial=True)
            if bias is not None:
                total += gl.load(bias + group * D + column, mask=column < D, other=0.0).to(gl.float32).expand_dims(0)
            value = total.to(out.dtype.element_ty)
            first_row = row + i * 64
            if out_tiles is None:
                _store(value, out, matrix, first_row, row_end, out_rows, column, D)
            elif first_row + 64 <= row_end:
                _store_whole(value, out_tiles, staging, matrix * out_rows + first_row, tile_column, WARPGROUP)
            else:
                _store(value, out, matrix, first_row, row_end, out_rows, column, D)
        tile = next_tile
        state = seek(tile, state, groups, K_GROUPED, PARTS * 64, 128)
    if out_tiles is not None:
        tma.store_wait(0)
    program = gl.program_id(0) * WARPGROUPS + WARPGROUP
    programs = gl.num_programs(0) * WARPGROUPS
    if K_GROUPED:  # groups without tokens have no tiles
        size = out_rows.to(gl.int64) * D
        start = gl.to_tensor(0)
        for e in range(experts):
            stop = gl.load(groups[0] + e)
            if stop <= start:
                _fill_zeros(out, e * size, (e + 1) * size, program, programs)
            start = stop
    elif ZERO_TAIL:
        _, _, _, _, _, stop = state
        _fill_zeros(out, stop.to(gl.int64) * D, out_rows.to(gl.int64) * D, program, programs)


@gluon.jit(do_not_specialize=["experts", "tiles_down", "tiles_across", "out_rows", "scale_rows", "scale_stages"])
def _gemm_kernel(
    a, b, row_scale, column_scale, out_tiles, a_2, b_2, row_scale_2, column_scale_2, out, bias, offs, taken, C, D,
    experts, tiles_down, tiles_across, out_rows, scale_rows, scale_stages,
    STEPS: gl.constexpr, COPIES: gl.constexpr, K_GROUPED: gl.constexpr, ZERO_TAIL: gl.constexpr,
    WARPGROUPS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr, MULTIPLY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: output tiles, as long as there are any, then its warpgroups' share of what is zero; of the rows of
    no group with ZERO_TAIL.

    ``a``: descriptor of (rows, C). ``b``: of (E * D, C), or (D, C) with K_GROUPED. STEPS: sums of a stage.
    ``row_scale``, ``column_scale``: descriptors of what ``decode_scales`` makes. ``out_tiles``: descriptor of ``out``
    for whole parts, or None. ``a_2`` and so on: of a second product of the same shapes, which is added, or None.
    ``taken``: int32 that is 0, how often a next tile was asked for, and behind it, for ``offs`` of None, the end of the
    one group. C: of one product; not used with K_GROUPED, where it depends on the tokens.
    """
    if offs is None:
        offs = taken + 1
    COLUMNS: gl.constexpr = b.block_shape[0]
    WIDTH: gl.constexpr = column_scale.block_shape[1]
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES * PARTS, 64, 128], a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, COLUMNS, 128], b.layout)
    row_scales = gl.allocate_shared_memory(gl.float32, [STAGES * PARTS, 64 * STEPS], row_scale.layout)
    column_scales = gl.allocate_shared_memory(gl.float32, [STAGES, STEPS, WIDTH], column_scale.layout)
    if out_tiles is None:
        staging = a_tiles  # not used
    else:
        staging = gl.allocate_shared_memory(out_tiles.dtype, [WARPGROUPS, 64, COLUMNS // 2], out_tiles.layout)
    # A warp stores 32 numbers, the first is the tile's.
    next_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    buffers = (a_tiles, b_tiles, row_scales, column_scales, next_tiles, full, empty)
    groups = (offs, experts, tiles_down, tiles_across)
    products = ((a, b, row_scale, column_scale),)
    length = C
    if a_2 is not None:
        products = ((a, b, row_scale, column_scale), (a_2, b_2, row_scale_2, column_scale_2))
        length = 2 * 128 * gl.cdiv(C, 128)
    load = (products, buffers, groups, C, D, scale_rows, scale_stages, taken)
    multiply = (out, buffers, groups, length, D, out_rows)
    gl.static_assert(WARPGROUPS == 2 or WARPGROUPS == 3)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (multiply, out_tiles, staging, bias, 0, WARPGROUPS, K_GROUPED, ZERO_TAIL, BAND)),
                (_multiply, (multiply, out_tiles, staging, bias, 1, WARPGROUPS, K_GROUPED, ZERO_TAIL, BAND)),
                (_load, (load, COPIES, K_GROUPED, BAND)),
            ],
            [4, 1],
            [MULTIPLY_REGISTERS, LOAD_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (multiply, out_tiles, staging, bias, 0, WARPGROUPS, K_GROUPED, ZERO_TAIL, BAND)),
                (_multiply, (multiply, out_tiles, staging, bias, 1, WARPGROUPS, K_GROUPED, ZERO_TAIL, BAND)),
                (_multiply, (multiply, out_tiles, staging, bias, 2, WARPGROUPS, K_GROUPED, ZERO_TAIL, BAND)),
                (_load, (load, COPIES, K_GROUPED, BAND)),
            ],
            [4, 4, 1],
            [MULTIPLY_REGISTERS, MULTIPLY_REGISTERS, LOAD_REGISTERS],
        )


@triton.jit
def _decode_lines(
    scale, out, program, lines, known, blocks, lines_out, stages, line_stride, line_limit, stage_limit,
    ACROSS: tl.constexpr, STEPS: tl.constexpr, ARE_ROWS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """fp32 ``2^(s - 127)`` of LINES lines, rows or columns, and the STEPS scale bytes of a stage. Byte 255 becomes NaN.

    Of several steps the first one's scales have bit i set where steps i and i + 1 have the same scale, in each of 64
    rows or of 4 (groups of 32) columns.

    ARE_ROWS: instead of expert e it is copy e, which holds the rows from e on. Past the last block, and past the first
    ``known`` of the ``lines``: 2^-127, as what it scales is zero, or of no group, on which no bit of a result may
    depend. ACROSS: how the scales lie (``OperandSpec.scales``); else lines are ``line_stride`` apart.
    Nothing for lines and stages at and past the limits.
    """
    chunks = tl.cdiv(lines_out, LINES)
    stage = (program // chunks % stages).to(tl.int64)
    e = (program // chunks // stages).to(tl.int64)
    if (program % chunks * LINES >= line_limit) | (stage >= stage_limit):
        return
    line = (program % chunks).to(tl.int64) * LINES + tl.arange(0, LINES)
    step = tl.arange(0, STEPS)
    block = stage * STEPS + step
    line_in = line + e if ARE_ROWS else line
    if ACROSS:
        stride_k = tl.cdiv(lines, 16) * 16
        source = scale + block[None, :] * stride_k + line_in[:, None]
        stride_e = blocks * stride_k
    else:
        stride_k = 1
        source = scale + block[None, :] + line_in[:, None] * line_stride
        stride_e = lines * line_stride
    if not ARE_ROWS:
        source += e * stride_e
    there = (line_in < known)[:, None]
    s = tl.load(source, mask=there & (block < blocks)[None, :], other=0).to(tl.int32)
    bits = tl.where(s == 255, 0x7FC00000, tl.maximum(s << 23, 0x00400000))
    if STEPS > 1:
        RUN: tl.constexpr = 64 if ARE_ROWS else 4  # what lies in a part, or in a tile
        tl.static_assert(STEPS == 4)
        # A sum takes the scale of its last block. Past the last one there is, that is byte 0: no sum goes on to there,
        # unless its own is.
        later = step[None, :] > 0
        before = tl.load(source - stride_k, mask=there & later & (block <= blocks)[None, :], other=0).to(tl.int32)
        same = tl.min(tl.reshape((later & (s == before)).to(tl.int32), (LINES // RUN, RUN, STEPS)), 1)
        marks = tl.sum(same << step[None, :], 1) >> 1
        marks = tl.reshape(tl.broadcast_to(marks[:, None], (LINES // RUN, RUN)), (LINES,))
        bits |= tl.where((step == 0)[None, :], marks[:, None], 0)
    at = (e * stages + stage) * STEPS * lines_out
    if ARE_ROWS:
        at += line[:, None] * STEPS + step[None, :]
    else:
        at += step[None, :] * lines_out + line[:, None]
    tl.store(out + at, bits, mask=(line < lines_out)[:, None])


@triton.jit(
    do_not_specialize=[
        "row_programs", "rows", "rows_out", "columns", "columns_out", "blocks", "stages", "row_size", "size", "end",
        "groups",
    ]
)  # fmt: skip
def _decode_scales(
    row_scale, column_scale, out, offs,
    line_stride,
    row_programs, rows, rows_out, columns, columns_out, blocks, stages, row_size, size, end, groups,
    ACROSS: tl.constexpr, STEPS: tl.constexpr, K_GROUPED: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """The scales of both operands, the first ``row_programs`` programs those of the rows: see ``decode_scales``. Those
    of no group are left out: of rows, or with K_GROUPED of stages, as many as groups that end at ``offs[-1]`` may fill.
    """
    program = tl.program_id(0)
    row_limit, known_rows = rows_out, rows
    stage_limit = stages
    if offs is not None:
        last = tl.load(offs + groups - 1)
        if K_GROUPED:
            stage_limit = tl.minimum((last + 127 * groups) // 128, stages)
        else:
            row_limit, known_rows = last + (64 if STEPS > 1 else 0), tl.minimum(rows, last)
    if program == 0:
        tl.store(out + size, 0)
        tl.store(out + size + 1, end)
    if program < row_programs:
        _decode_lines(
            row_scale, out, program, rows, known_rows, blocks, rows_out, stages, line_stride, row_limit, stage_limit,
            ACROSS, STEPS, True, LINES,
        )  # fmt: skip
    else:
        _decode_lines(
            column_scale, out + row_size, program - row_programs, columns, columns, blocks, columns_out, stages,
            line_stride, columns_out, stage_limit, ACROSS, STEPS, False, LINES,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """A launch configuration: tiles of ``64 * parts`` rows and 128 columns, ``stages`` in flight.

    ``parts`` are shared out to ``warpgroups``. ``registers`` are for a thread that multiplies and one that loads: the
    warpgroups share the 64 Ki registers of a multiprocessor.
    """

    warpgroups: int
    parts: int
    stages: int
    registers: tuple[int, int]


# Each the fastest of several numbers of warpgroups, parts and stages on an H200.
# Three warpgroups fill each other's gaps; tiles of 192 rows read less of ``b`` than those of 128.
M_GROUPED = Tiles(warpgroups=3, parts=3, stages=4, registers=(160, 32))
# Of groups of few rows. From how many rows on the other is faster has not been timed.
FEW_ROWS = Tiles(warpgroups=2, parts=2, stages=5, registers=(232, 40))
# 256 rows. ptxas overlaps a warpgroup's sums a little, and spills some of what is used per tile.
K_GROUPED = Tiles(warpgroups=2, parts=4, stages=4, registers=(232, 40))


_GEMM = Kernel(_gemm_kernel)
_DECODE_SCALES = Kernel(_decode_scales)


def gemm_m_grouped(
    a: Operand,
    b: Operand,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    zero_tail: bool = True,
    plus: tuple[Operand, Operand] | None = None,
) -> torch.Tensor:
    """``Backend.gemm_m_grouped`` of 1x32 blocks by 32x32 ones, or of 1x128 by 32x128; in bf16 also plus the product of
    two more operands of the same shapes and specs, rounded once.

    Products of a row's and a column's scale below 2^-126 may be taken for zero, those from 2^128 on are infinite.
    """
    few = a.data.shape[0] < 768 * b.data.shape[0]  # on average in a group
    tiles, others = (FEW_ROWS, M_GROUPED) if few else (M_GROUPED, FEW_ROWS)
    out = _empty_m_grouped(a, b, out_dtype)
    if multiply_m_grouped(a, b, offs, bias, out, tiles, zero_tail=zero_tail, plus=plus):
        # What other numbers of tokens will take.
        multiply_m_grouped(a, b, offs, bias, out, others, run=False, zero_tail=zero_tail, plus=plus)
    return out


def gemm_k_grouped(a: Operand, b: Operand, offs: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """``Backend.gemm_k_grouped`` of 1x128 blocks."""
    experts = 1 if offs is None else offs.shape[0]
    out = torch.empty((experts, a.data.shape[0], b.data.shape[0]), dtype=out_dtype, device=a.data.device)
    multiply_k_grouped(a, b, offs, out, K_GROUPED)
    return out


def _empty_m_grouped(a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((a.data.shape[0], b.data.shape[1]), dtype=out_dtype, device=a.data.device)


def multiply_m_grouped(
    a: Operand,
    b: Operand,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_MD: torch.Tensor,
    tiles: Tiles,
    run: bool = True,
    zero_tail: bool = True,
    plus: tuple[Operand, Operand] | None = None,
) -> bool:
    """``gemm_m_grouped`` with given tiles, into ``out_MD``, ``plus`` another product of the same shapes and specs; not
    ``run``: compiles only. Whether the kernel was new."""
    (m, c), d = a.data.shape, b.data.shape[1]
    copies = 4 if a.spec.block_k == STAGE else 1
    products = []
    for pair in ((a, b), plus) if plus else ((a, b),):
        assert [(x.data.shape, x.spec) for x in pair] == [(x.data.shape, x.spec) for x in (a, b)], pair
        scales = decode_scales(*pair, d // BLOCK_SIZE, ceil_div(c, STAGE), copies, end=m, offs=offs)
        products.append(_Product(*pair, scales))
    return _launch(products, out_MD, bias, offs, tiles, k_grouped=False, run=run, zero_tail=zero_tail)


def multiply_k_grouped(a: Operand, b: Operand, offs: torch.Tensor | None, out_ENK: torch.Tensor, tiles: Tiles) -> bool:
    """``gemm_k_grouped`` with given tiles, into ``out_ENK``. Whether the kernel was new."""
    m = a.data.shape[1]
    if m == 0:
        out_ENK.zero_()
    scales = decode_scales(a, b, b.data.shape[0], ceil_div(m, STAGE), copies=1, end=m, offs=offs, k_grouped=True)
    return _launch([_Product(a, b, scales)], out_ENK, None, offs, tiles, k_grouped=True)


class ScaleLayout(NamedTuple):
    """How ``Scales`` lie in their buffer.

    Attributes:
        copies, stages, rows, steps: of the rows' scales; to a multiple of 4, with several steps of 64, and 64 more.
        columns: to a multiple of 4.
        column_lines: experts * stages * steps.
        row_size: elements of the rows' scales.
        size: elements of both.
    """

    copies: int
    stages: int
    rows: int
    steps: int
    columns: int
    column_lines: int
    row_size: int
    size: int


class Scales(NamedTuple):
    """fp32 scales as the GEMM copies them, in one int32 buffer.

    Attributes:
        buffer: first those of the rows, (copies, stages, rows, steps); copy s starts at row s. Then those of the
            columns, (experts * stages * steps, columns). Of several steps the first one's last three bits are marks,
            see ``_decode_lines``. Then 0, a counter, and the number of rows.
        layout: these sizes.
    """

    buffer: torch.Tensor
    layout: ScaleLayout


def decode_scales(
    a: Operand,
    b: Operand,
    columns: int,
    stages: int,
    copies: int,
    end: int,
    offs: torch.Tensor | None = None,
    k_grouped: bool = False,
) -> Scales:
    """The scales of both operands, with ``offs`` those that the groups need. ``columns``: lines of scales of a matrix
    of ``b``; ``end``: of the one group."""
    rows, experts = a.data.shape[0], b.data.shape[0] if b.data.ndim == 3 else 1
    across = a.spec.scales == "mn_major"
    steps, blocks = (1, a.scale.shape[0]) if across else (STAGE // BLOCK_SIZE, a.scale.shape[1])
    groups = 0 if offs is None else offs.shape[0]
    layout, programs, counts = _decoding(
        rows, columns, blocks, copies, stages, steps, experts, end, groups, DECODE_LINES
    )
    buffer = torch.empty(layout.size + 4, dtype=torch.int32, device=a.data.device)
    _DECODE_SCALES.launch(
        programs, (a.scale, b.scale, buffer, offs), (0 if across else blocks,), counts,
        (across, steps, k_grouped, DECODE_LINES), device=buffer.device,
    )  # fmt: skip
    return Scales(buffer, layout)


@lru_cache(maxsize=1024)
def _decoding(
    rows: int,
    columns: int,
    blocks: int,
    copies: int,
    stages: int,
    steps: int,
    experts: int,
    end: int,
    groups: int,
    lines: int,
) -> tuple[ScaleLayout, int, tuple[int, ...]]:
    """Where ``decode_scales`` writes, and the programs, of ``lines`` lines each, and the counts of its launch."""
    # With marks, whole runs, and one more, in which a part that goes on past the last row has its last one: all of its
    # rows that count are in the run before. So no mark depends on how much memory lies behind the last group.
    # Multiples of 4 both: TMA wants the second part to start at 16 bytes too.
    rows_out, columns_out = ceil_to(rows, PART) + PART if steps > 1 else ceil_to(rows, 4), ceil_to(columns, 4)
    row_size, column_lines = copies * stages * rows_out * steps, experts * stages * steps
    if row_size >= 2**31:
        raise ValueError(f"{row_size} row scales, but TMA counts to 2^31: give fewer rows in a call")
    size = row_size + column_lines * columns_out
    layout = ScaleLayout(copies, stages, rows_out, steps, columns_out, column_lines, row_size, size)
    row_programs, column_programs = (
        ceil_div(length, lines) * stages * matrices for length, matrices in ((rows_out, copies), (columns_out, experts))
    )
    counts = row_programs, rows, rows_out, columns, columns_out, blocks, stages, row_size, size, end, groups
    return layout, row_programs + column_programs, counts


class _Product(NamedTuple):
    """Two operands, and the scales of both."""

    a: Operand
    b: Operand
    scales: Scales


class _Plan(NamedTuple):
    """What shapes and dtypes decide of a GEMM's launch: made once, and kept for calls of the same ones."""

    tiles: int  # of the output, at most
    layouts: tuple[TileLayout, ...]  # of both operands, the rows' scales and the columns', and of an output in bf16
    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    constants: tuple


@lru_cache(maxsize=1024)
def _plan(
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    scales: ScaleLayout,
    tiles: Tiles,
    k_grouped: bool,
    zero_tail: bool,
) -> _Plan:
    """``shapes``, ``dtypes``: of ``a``, ``b`` and the output."""
    (a_rows, a_columns), b_shape, (*_, out_rows, d) = shapes
    a_dtype, b_dtype, out_dtype = dtypes
    experts, c = (math.prod(shapes[2][:-2]), 0) if k_grouped else (b_shape[0], a_columns)
    tokens = a_columns if k_grouped else a_rows
    tiles_down, tiles_across = ceil_div(out_rows, PART * tiles.parts), ceil_div(d, COLUMNS)
    count = (tiles_down * experts if k_grouped else tiles_down + experts) * tiles_across
    width = COLUMNS if k_grouped else BLOCK_SIZE // scales.steps
    layouts = (
        TileLayout(a_dtype, (a_rows, a_columns), (PART, STAGE), gluon=True),
        TileLayout(b_dtype, (math.prod(b_shape[:-1]), b_shape[-1]), (COLUMNS, STAGE), gluon=True),
        TileLayout(torch.float32, (scales.row_size,), (PART * scales.steps,), gluon=True),
        TileLayout(
            torch.float32, (scales.column_lines, scales.columns), (scales.steps, width), gluon=True,
            offset=scales.row_size,
        ),
    )  # fmt: skip
    if out_dtype == torch.bfloat16:
        layouts += (TileLayout(out_dtype, (math.prod(shapes[2][:-1]), d), (PART, COLUMNS // 2), gluon=True),)
    constants = (
        scales.steps, scales.copies, k_grouped, zero_tail, tiles.warpgroups, tiles.parts, tiles.stages, BAND,
        tiles.registers[1], tiles.registers[0],
    )  # fmt: skip
    counts = experts, tiles_down, tiles_across, out_rows, scales.rows, scales.stages
    return _Plan(count if tokens else 0, layouts, (c, d), counts, constants)


def _launch(
    products: list[_Product],
    out: torch.Tensor,
    bias: torch.Tensor | None,
    offs: torch.Tensor | None,
    tiles: Tiles,
    *,
    k_grouped: bool,
    run: bool = True,
    zero_tail: bool = True,
) -> bool:
    (a, b, scales), *second = products
    shapes, dtypes = (a.data.shape, b.data.shape, out.shape), (a.data.dtype, b.data.dtype, out.dtype)
    plan = _plan(shapes, dtypes, scales.layout, tiles, k_grouped, zero_tail)
    in_memory = [a.data, b.data, scales.buffer, scales.buffer, out]
    descriptors = tuple(map(descriptor, in_memory, plan.layouts))
    for a_2, b_2, scales_2 in second:
        assert len(descriptors) == 5, "a sum of products is in bf16"
        in_memory = [a_2.data, b_2.data, scales_2.buffer, scales_2.buffer]
        descriptors += tuple(map(descriptor, in_memory, plan.layouts))
    return _GEMM.launch(
        min(plan.tiles, multiprocessors(out.device)) if run else 0,
        (*[None] * (9 - len(descriptors)), out, bias, offs, scales.buffer[scales.layout.size :]),
        plan.sizes, plan.counts, plan.constants, device=out.device, descriptors=descriptors,
    )  # fmt: skip
