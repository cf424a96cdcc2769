"""The kernel of Hopper's grouped GEMMs: what it computes, and the host's side, are in ``gemm.py``.

A persistent program per multiprocessor. Its warps have roles, and pass stages of 128 of the contraction through shared
memory. A stage holds the tile's rows of ``a``, in parts of 64, 128 rows of ``b.mT``, and their scales as fp32:

| role                        | waits for       | does                                              | then arrives at |
|-----------------------------|-----------------|---------------------------------------------------|-----------------|
| ``load_stages``, one warp   | ``empty[stage]``| starts the copies (TMA) of the stage              | ``full[stage]`` |
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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.hopper.stages import (
    add_stage,
    add_stage_of_squares,
    copy_out,
    first_slot,
    load_rows,
    load_stages,
    next_slot,
    next_tile_of,
    readable_scales,
    store_rows,
)
from titan_mxfp8.backends.hopper.tile_scheduler import advance, start_position, swizzled_position


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
        copy_out(out_tiles, [first_row, (2 * tile_column + i) * HALF], buffer)


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
    COLUMNS: gl.constexpr = b_tiles.shape[1]
    OURS: gl.constexpr = PARTS // WARPGROUPS
    SQUARES: gl.constexpr = not K_GROUPED
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    row_scales, column_scales = readable_scales(row_scales, column_scales)
    zero = gl.zeros((64, COLUMNS), gl.float32, MMA)
    slot, phase = first_slot()
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
                        acc = add_stage(acc, a, b, zero, row_scales, column_scales, part + i, slot)
                    elif row + i * 64 < row_end:
                        acc = add_stage_of_squares(acc, a, b, zero, row_scales, column_scales, part + i, slot)
                    accs = accs[:i] + (acc,) + accs[i + 1 :]  # noqa: RUF005, no unpacking here
            if k + 128 >= k_length:
                next_tile = next_tile_of(next_tiles, slot)
            # All sums of the stage were waited for: nothing reads the slot any more. A wgmma in flight over the back
            # edge of this loop would make ptxas serialise all of them (C7515), and spill.
            mbarrier.arrive(empty.index(slot), count=1)
            slot, phase = next_slot(slot, phase, STAGES)
        # The loading warp fills the stages of the next tile meanwhile. Whole parts go through shared memory
        # by TMA; others, of which some rows are the next group's, from registers with a mask.
        column = tile_column * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA))
        for i in gl.static_range(OURS):
            total = gl.convert_layout(accs[i].reshape((64, COLUMNS)), MMA, assert_trivial=True)
            if bias is not None:
                total += gl.load(bias + group * D + column, mask=column < D, other=0.0).to(gl.float32).expand_dims(0)
            first_row = row + i * 64
            if ADD:
                total += load_rows(total, out, matrix, first_row, row_end, out_rows, column, D)
            value = total.to(out.dtype.element_ty)
            if out_tiles is None:
                store_rows(value, out, matrix, first_row, row_end, out_rows, column, D)
            elif first_row + 64 <= row_end:
                _store_whole(value, out_tiles, staging, matrix * out_rows + first_row, tile_column, WARPGROUP)
            else:
                store_rows(value, out, matrix, first_row, row_end, out_rows, column, D)
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
    STEPS: gl.constexpr, COPIES: gl.constexpr, K_GROUPED: gl.constexpr, INTERLEAVED: gl.constexpr,
    ZERO_TAIL: gl.constexpr, ADD: gl.constexpr, WARPGROUPS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, LOAD_REGISTERS: gl.constexpr, MULTIPLY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: output tiles, as long as there are any, then its warpgroups' share of what is zero; of the rows of
    no group with ZERO_TAIL. With ADD, and K_GROUPED, the output, in fp32, is added to.

    ``a``: descriptor of (rows, C). ``b``: of (E * D, C), or (D, C) with K_GROUPED. STEPS: sums of a stage.
    ``row_scale``, ``column_scale``: descriptors of what ``decode_scales`` makes. ``out_tiles``: descriptor of ``out``
    for whole parts, or None. ``a_2`` and so on: of a second product of the same shapes, which is added, or None; with
    INTERLEAVED ``a`` and ``a_2`` are one, of (rows, 2 C).
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
                (load_stages, (load, COPIES, K_GROUPED, INTERLEAVED, GROUP_M)),
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
                (load_stages, (load, COPIES, K_GROUPED, INTERLEAVED, GROUP_M)),
            ],
            [4, 4, 1],
            [MULTIPLY_REGISTERS, MULTIPLY_REGISTERS, LOAD_REGISTERS],
        )


GEMM = Kernel(_gemm_kernel)
