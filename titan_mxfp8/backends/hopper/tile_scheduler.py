"""The tile scheduler: which output tile comes next. Device code that every role of the GEMM kernel runs for itself."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def start_position():
    """The state that ``advance`` starts from: group -1, which has no tiles."""
    zero = gl.to_tensor(0)
    return zero - 1, zero, zero, zero, zero, zero


@gluon.jit
def advance(tile, state, groups, K_GROUPED: gl.constexpr, TILE_ROWS: gl.constexpr):
    """Advances ``state`` to the group that has ``tile``; the group is ``experts`` when there are no more tiles.

    The state is (group, number of its first tile, number of its tiles, its start and end on the ragged axis, its end in
    ``offs``). ``offs = [100, 100, 300]``, tiles of 128 rows, two tiles across: the groups have 2, 0 and 4 tiles, so
    tile 4 leads to (2, 2, 4, 100, 300, 300). K_GROUPED: the ragged axis is the contracted one, every group that is not
    empty has ``tiles_down * tiles_across`` tiles and starts at a multiple of 128: tile 3 of 2 x 1 leads to
    (2, 2, 2, 128, 384, 300).
    """
    offs, experts, tiles_down, tiles_across = groups
    group, first, count, start, end, stop = state
    while (tile >= first + count) & (group < experts):
        group += 1
        first += count
        start = end
        group_stop = gl.load(offs + gl.minimum(group, experts - 1))
        size = group_stop - stop
        if K_GROUPED:
            stop = group_stop
            end = start + gl.cdiv(size, 128) * 128
            count = gl.where(end > start, tiles_down * tiles_across, 0)
        else:
            stop = group_stop
            end = group_stop
            count = gl.cdiv(size, TILE_ROWS) * tiles_across
    return group, first, count, start, end, stop


@gluon.jit
def swizzled_position(tile, state, tiles_across, GROUP_M: gl.constexpr):
    """Row and column of ``tile`` among its group's, as ``common.gemm_kernels`` has them."""
    _, first, count, _, _, _ = state
    index = tile - first
    swizzle_group = index // (GROUP_M * tiles_across)
    rows = gl.minimum(count // tiles_across - swizzle_group * GROUP_M, GROUP_M)
    inside = index % (GROUP_M * tiles_across)
    return swizzle_group * GROUP_M + inside % rows, inside // rows
