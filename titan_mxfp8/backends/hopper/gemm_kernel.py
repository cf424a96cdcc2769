"""The kernel of Hopper's grouped GEMMs: what it computes, and the host's side, are in ``gemm.py``.

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

Every role finds its tile by itself (``tile_scheduler.advance``), from the offsets in device memory: groups may end
anywhere, nothing is padded and the host never waits. A tile may read rows of the next group: rows do not mix, and only
the group's own are stored. What the copies read outside a tensor is zero.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.hopper.tile_scheduler import advance, start_position, swizzled_position

# Renamed after Triton 3.6.
_copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _first_slot():
    """Where the first stage lies, and the phase of its barriers: it flips each time that the slots have been used."""
    return gl.to_tensor(0), gl.to_tensor(0)


@gluon.jit
def _next_slot(slot, phase, STAGES: gl.constexpr):
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _load(given, COPIES: gl.constexpr, K_GROUPED: gl.constexpr, GROUP_M: gl.constexpr):
    """The role of the warp that fills the stages, and takes the next tile."""
    products, buffers, groups, C, D, scale_rows, scale_stages, tile_counter = given
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
    state = advance(tile, start_position(), groups, K_GROUPED, PARTS * 64)
    while state[0] < experts:
        # By one lane, as a scalar would go through shared memory, which costs 2 to 3%.
        count = gl.atomic_add(tile_counter + 0 * lane, 0 * lane + 1, mask=lane == 0, sem="relaxed")
        next_tile = gl.where(lane == 0, gl.num_programs(0) + count, 0)
        group, _, _, start, end, _ = state
        tile_row, tile_column = swizzled_position(tile, state, tiles_across, GROUP_M)
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
        # Scales of rows are copied from the copy that starts at this row modulo 4: TMA wants multiples of 16 bytes.
        shift = row % COPIES
        # A second product goes on where the first one ends: its stages are added to the same sums.
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
        state = advance(tile, state, groups, K_GROUPED, PARTS * 64)


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
    at, inside = _places(value, matrix, first_row, row_end, out_rows, column, D)
    gl.store(out + at, value, mask=inside)


@gluon.jit
def _load_rows(like, out, matrix, first_row, row_end, out_rows, column, D):
    """What ``_store`` of ``like`` would overwrite."""
    at, inside = _places(like, matrix, first_row, row_end, out_rows, column, D)
    return gl.load(out + at, mask=inside, other=0.0)


@gluon.jit
def _places(like, matrix, first_row, row_end, out_rows, column, D):
    """Where 64 rows lie in the output, and which of it is to be stored."""
    row = first_row + gl.arange(0, 64, gl.SliceLayout(1, like.type.layout))
    at = (matrix.to(gl.int64) * out_rows + row) * D
    inside = (row < row_end).expand_dims(1) & (column < D).expand_dims(0)
    return at.expand_dims(1) + column.expand_dims(0), inside


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
    ZERO_TAIL: gl.constexpr, ADD: gl.constexpr, GROUP_M: gl.constexpr,
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
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # TMA copied one row of numbers; what multiplies reads them as rows and steps. Both lie without swizzle.
    if _REINTERPRET:
        row_scales = row_scales.reinterpret(gl.float32, [STAGES * PARTS, 64, STEPS], ROW_MAJOR)
        column_scales = column_scales.reinterpret(gl.float32, [STAGES * STEPS, WIDTH], VECTOR)
    else:
        row_scales = row_scales._reinterpret(gl.float32, [STAGES * PARTS, 64, STEPS], ROW_MAJOR)
        column_scales = column_scales._reinterpret(gl.float32, [STAGES * STEPS, WIDTH], VECTOR)
    zero = gl.zeros((64, COLUMNS), gl.float32, MMA)
    slot, phase = _first_slot()
    _, experts, _, tiles_across = groups
    tile = gl.program_id(0)
    state = advance(tile, start_position(), groups, K_GROUPED, PARTS * 64)
    while state[0] < experts:
        group, _, _, start, end, _ = state
        tile_row, tile_column = swizzled_position(tile, state, tiles_across, GROUP_M)
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
                    accs = accs[:i] + (acc,) + accs[i + 1 :]  # noqa: RUF005, no unpacking here
            if k + 128 >= k_length:
                next_tile = gl.max(next_tiles.index(slot).slice(0, 1).load(ONE), 0)
            # All sums of the stage were waited for: nothing reads the slot any more. A wgmma in flight over the back
            # edge of this loop would make ptxas serialise all of them (C7515), and spill.
            mbarrier.arrive(empty.index(slot), count=1)
            slot, phase = _next_slot(slot, phase, STAGES)
        # The loading warp fills the stages of the next tile meanwhile. Whole parts go through shared memory
        # by TMA; others, of which some rows are the next group's, from registers with a mask.
        column = tile_column * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA))
        for i in gl.static_range(OURS):
            total = gl.convert_layout(accs[i].reshape((64, COLUMNS)), MMA, assert_trivial=True)
            if bias is not None:
                total += gl.load(bias + group * D + column, mask=column < D, other=0.0).to(gl.float32).expand_dims(0)
            first_row = row + i * 64
            if ADD:
                total += _load_rows(total, out, matrix, first_row, row_end, out_rows, column, D)
            value = total.to(out.dtype.element_ty)
            if out_tiles is None:
                _store(value, out, matrix, first_row, row_end, out_rows, column, D)
            elif first_row + 64 <= row_end:
                _store_whole(value, out_tiles, staging, matrix * out_rows + first_row, tile_column, WARPGROUP)
            else:
                _store(value, out, matrix, first_row, row_end, out_rows, column, D)
        tile = next_tile
        state = advance(tile, state, groups, K_GROUPED, PARTS * 64)
    if out_tiles is not None:
        tma.store_wait(0)
    program = gl.program_id(0) * WARPGROUPS + WARPGROUP
    programs = gl.num_programs(0) * WARPGROUPS
    if K_GROUPED and not ADD:  # groups without tokens have no tiles
        size = out_rows.to(gl.int64) * D
        start = gl.to_tensor(0)
        for e in range(experts):
            stop = gl.load(groups[0] + e)
            if stop <= start:
                _fill_zeros(out, e * size, (e + 1) * size, program, programs)
            start = stop
    elif not K_GROUPED and ZERO_TAIL:
        _, _, _, _, _, stop = state
        _fill_zeros(out, stop.to(gl.int64) * D, out_rows.to(gl.int64) * D, program, programs)


@gluon.jit(do_not_specialize=["experts", "tiles_down", "tiles_across", "out_rows", "scale_rows", "scale_stages"])
def _gemm_kernel(
    a, b, row_scale, column_scale, out_tiles, a_2, b_2, row_scale_2, column_scale_2, out, bias, offs, tile_counter, C,
    D, experts, tiles_down, tiles_across, out_rows, scale_rows, scale_stages,
    STEPS: gl.constexpr, COPIES: gl.constexpr, K_GROUPED: gl.constexpr, ZERO_TAIL: gl.constexpr,
    ADD: gl.constexpr, WARPGROUPS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr, MULTIPLY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: output tiles, as long as there are any, then its warpgroups' share of what is zero; of the rows of
    no group with ZERO_TAIL. With ADD, and K_GROUPED, the output, in fp32, is added to.

    ``a``: descriptor of (rows, C). ``b``: of (E * D, C), or (D, C) with K_GROUPED. STEPS: sums of a stage.
    ``row_scale``, ``column_scale``: descriptors of what ``decode_scales`` makes. ``out_tiles``: descriptor of ``out``
    for whole parts, or None. ``a_2`` and so on: of a second product of the same shapes, which is added, or None.
    ``tile_counter``: int32 that is 0, how often a next tile was asked for, and behind it, for ``offs`` of None, the
    end of the one group. C: of one product; not used with K_GROUPED, where it depends on the tokens.
    """
    if offs is None:
        offs = tile_counter + 1
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
    load = (products, buffers, groups, C, D, scale_rows, scale_stages, tile_counter)
    multiply = (out, buffers, groups, length, D, out_rows)
    gl.static_assert(WARPGROUPS == 2 or WARPGROUPS == 3)
    # Written twice: what a role is called with may be no variable here, as its constants would be values then.
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (multiply, out_tiles, staging, bias, 0, WARPGROUPS, K_GROUPED, ZERO_TAIL, ADD, GROUP_M)),
                (_multiply, (multiply, out_tiles, staging, bias, 1, WARPGROUPS, K_GROUPED, ZERO_TAIL, ADD, GROUP_M)),
                (_load, (load, COPIES, K_GROUPED, GROUP_M)),
            ],
            [4, 1],
            [MULTIPLY_REGISTERS, LOAD_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (multiply, out_tiles, staging, bias, 0, WARPGROUPS, K_GROUPED, ZERO_TAIL, ADD, GROUP_M)),
                (_multiply, (multiply, out_tiles, staging, bias, 1, WARPGROUPS, K_GROUPED, ZERO_TAIL, ADD, GROUP_M)),
                (_multiply, (multiply, out_tiles, staging, bias, 2, WARPGROUPS, K_GROUPED, ZERO_TAIL, ADD, GROUP_M)),
                (_load, (load, COPIES, K_GROUPED, GROUP_M)),
            ],
            [4, 4, 1],
            [MULTIPLY_REGISTERS, MULTIPLY_REGISTERS, LOAD_REGISTERS],
        )


GEMM = Kernel(_gemm_kernel)
