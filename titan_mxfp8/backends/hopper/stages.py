"""Device code of the stages in shared memory through which the GEMM kernels pass their operands.

``gemm_kernel.py`` says what a stage holds, and who waits for whom.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from titan_mxfp8.backends.hopper.tile_scheduler import advance, start_position, swizzled_position

# Renamed after Triton 3.6.
_copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def first_slot():
    """Where the first stage lies, and the phase of its barriers: it flips each time that the slots have been used."""
    return gl.to_tensor(0), gl.to_tensor(0)


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def load_stages(given, COPIES: gl.constexpr, K_GROUPED: gl.constexpr, INTERLEAVED: gl.constexpr, GROUP_M: gl.constexpr):
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
    slot, phase = first_slot()
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
                a_column = 2 * k + p * 128 if INTERLEAVED else k
                for i in gl.static_range(PARTS):
                    _copy_in(a, [row + i * 64, a_column], bar, a_tiles.index(slot * PARTS + i))
                    scale_row = (shift * scale_stages + k // 128) * scale_rows + row - shift + i * 64
                    _copy_in(row_scale, [scale_row * STEPS], bar, row_scales.index(slot * PARTS + i))
                _copy_in(b, [column, k], bar, b_tiles.index(slot))
                at = [(scale_base + k // 128) * STEPS, tile_column * (WIDTH if WIDTH == COLUMNS else COLUMNS // 32)]
                _copy_in(column_scale, at, bar, column_scales.index(slot))
                slot, phase = next_slot(slot, phase, STAGES)
        tile = gl.max(next_tile, 0)
        state = advance(tile, state, groups, K_GROUPED, PARTS * 64)


@gluon.jit
def reinterpreted(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory as another tensor."""
    if _REINTERPRET:
        return buffer.reinterpret(dtype, shape, layout)
    else:
        return buffer._reinterpret(dtype, shape, layout)


@gluon.jit
def readable_scales(row_scales, column_scales):
    """TMA copied one row of numbers; what multiplies reads them as rows and steps. Both lie without swizzle."""
    STEPS: gl.constexpr = column_scales.shape[1]
    ROW_MAJOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    row_shape: gl.constexpr = [row_scales.shape[0], 64, STEPS]
    column_shape: gl.constexpr = [column_scales.shape[0] * STEPS, column_scales.shape[2]]
    row_scales = reinterpreted(row_scales, gl.float32, row_shape, ROW_MAJOR)
    return row_scales, reinterpreted(column_scales, gl.float32, column_shape, VECTOR)


@gluon.jit
def next_tile_of(next_tiles, slot):
    """The number that the loading warp left with a stage."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(next_tiles.index(slot).slice(0, 1).load(ONE), 0)


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
def add_stage_of_squares(acc, a, b, zero, row_scales, column_scales, part, slot):
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
def add_stage(acc, a, b, zero, row_scales, column_scales, part, slot):
    """``acc`` plus the sums of a stage, whose columns have a scale each."""
    p = warpgroup_mma_wait(0, deps=(_sums(a, b, 0, zero, False, 1),))
    rows = row_scales.index(part).load(acc.type.layout)
    columns = column_scales.index(slot).load(gl.SliceLayout(0, acc.type.layout))
    return gl.fma(p * rows, columns.expand_dims(0), acc)


@gluon.jit
def product(zero, buffers, length, is_used, slot, phase, WARPGROUP: gl.constexpr):
    """A warpgroup's 64 rows times 128 columns of the product that comes through the stages next, zeros of rows that are
    not used; the number that came with its last stage; and where the stages go on."""
    a_tiles, b_tiles, row_scales, column_scales, next_tiles, full, empty = buffers
    STAGES: gl.constexpr = full.shape[0]
    PARTS: gl.constexpr = a_tiles.shape[0] // STAGES
    acc = zero.reshape((64, 4, 32))
    next_tile = gl.to_tensor(0)
    for k in range(0, length, 128):
        part = slot * PARTS + WARPGROUP
        mbarrier.wait(full.index(slot), phase)
        if is_used:
            a, b = a_tiles.index(part), b_tiles.index(slot)
            acc = add_stage_of_squares(acc, a, b, zero, row_scales, column_scales, part, slot)
        if k + 128 >= length:
            next_tile = next_tile_of(next_tiles, slot)
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    total = gl.convert_layout(acc.reshape(zero.shape), zero.type.layout, assert_trivial=True)
    return total, next_tile, slot, phase


@gluon.jit
def store_rows(value, out, matrix, first_row, row_end, out_rows, column, D):
    """Stores the rows before ``row_end`` from registers."""
    at, inside = _places(value, matrix, first_row, row_end, out_rows, column, D)
    gl.store(out + at, value, mask=inside)


@gluon.jit
def load_rows(like, out, matrix, first_row, row_end, out_rows, column, D):
    """What ``store_rows`` of ``like`` would overwrite."""
    at, inside = _places(like, matrix, first_row, row_end, out_rows, column, D)
    return gl.load(out + at, mask=inside, other=0.0)


@gluon.jit
def _places(like, matrix, first_row, row_end, out_rows, column, D):
    """Where 64 rows lie in the output, and which of it is to be stored."""
    row = first_row + gl.arange(0, 64, gl.SliceLayout(1, like.type.layout))
    at = (matrix.to(gl.int64) * out_rows + row) * D
    inside = (row < row_end).expand_dims(1) & (column < D).expand_dims(0)
    return at.expand_dims(1) + column.expand_dims(0), inside
