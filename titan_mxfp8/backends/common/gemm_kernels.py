"""The persistent kernels of the portable grouped GEMMs. Host code and the variants: ``gemm.py``.

M tokens, N out features, K in features, E experts; C is a contraction axis and D the other one of ``b``.
"""

import triton
import triton.language as tl

from titan_mxfp8.backends.common.launch import Kernel


@triton.jit
def _swizzled_position(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of the ``index``-th tile: down GROUP_M rows, then their next column.

    The tiles in flight then share operands, which stay in L2. 3 x 2 tiles, GROUP_M 2: (0, 0) (1, 0) (0, 1) (1, 1)
    (2, 0) (2, 1).
    """
    swizzle_group = index // (GROUP_M * tiles_n)
    rows = min(tiles_m - swizzle_group * GROUP_M, GROUP_M)
    inside = index % (GROUP_M * tiles_n)
    return swizzle_group * GROUP_M + inside % rows, inside // rows


@triton.jit
def _multiply(
    a, a_scale, b, b_scale, a_row, b_row, a_scale_row, b_scale_row, a_mask, b_mask, stride_ac, stride_bc, begin, end,
    SCALED: tl.constexpr, A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, EVEN_C: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """fp32 (BM, BN): BM rows of ``a`` times BN rows of ``b``, over columns ``begin .. end`` of both.

    ``a_row`` and the like are offsets of rows in elements. EVEN_C: the range is a multiple of BC, no mask along it.
    """
    c = tl.arange(0, BC)
    a_ptrs = a + a_row[:, None] + (begin.to(tl.int64) + c)[None, :] * stride_ac
    b_ptrs = b + b_row[None, :] + (begin.to(tl.int64) + c)[:, None] * stride_bc
    if SCALED:
        s = tl.arange(0, BC // 32)
        a_scale_ptrs = a_scale + a_scale_row[:, None] + (begin // 32 + s)[None, :]
        b_scale_ptrs = b_scale + b_scale_row[:, None] + (begin // 32 + s)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for at in range(begin, end, BC):
        a_inside, b_inside = a_mask[:, None], b_mask[None, :]
        if not EVEN_C:
            a_inside = a_inside & (at + c < end)[None, :]
            b_inside = b_inside & (at + c < end)[:, None]
        a_tile = tl.load(a_ptrs, mask=a_inside, other=0.0)
        b_tile = tl.load(b_ptrs, mask=b_inside, other=0.0)
        if SCALED:
            scale_inside = (at + 32 * s < end)[None, :]
            a_scales = tl.load(a_scale_ptrs, mask=a_mask[:, None] & scale_inside, other=0)
            b_scales = tl.load(b_scale_ptrs, mask=b_mask[:, None] & scale_inside, other=0)
            acc = tl.dot_scaled(a_tile, a_scales, A_FORMAT, b_tile, b_scales, B_FORMAT, acc)
            a_scale_ptrs += BC // 32
            b_scale_ptrs += BC // 32
        else:
            acc = tl.dot(a_tile, b_tile, acc)
        a_ptrs += BC * stride_ac
        b_ptrs += BC * stride_bc
    return acc


@triton.jit
def _multiply_copied(
    acc, a, b, C, row, e, column,
    D_MAJOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """``acc`` plus BM rows of ``a`` from ``row`` on times BN columns of matrix ``e`` of ``b`` from ``column`` on, by
    their descriptors."""
    for c in range(0, C, BC):
        a_tile = a.load([row, c])
        if D_MAJOR:
            acc = tl.dot(a_tile, b.load([e, c, column]).reshape(BC, BN), acc)
        else:
            acc = tl.dot(a_tile, b.load([e, column, c]).reshape(BN, BC).T, acc)
    return acc


@triton.jit
def fill_zeros(ptr, begin, end, BLOCK: tl.constexpr):
    """Elements ``begin .. end`` become 0, BLOCK at a time, programs taking turns."""
    at = begin + tl.program_id(0) * BLOCK
    while at < end:
        index = at + tl.arange(0, BLOCK)
        tl.store(ptr + index, tl.zeros((BLOCK,), ptr.dtype.element_ty), mask=index < end)
        at += tl.num_programs(0) * BLOCK


@triton.jit
def _claim_tile(tile_counter, THREADS: tl.constexpr):
    """Takes the next tile from a counter, as ``hopper/gemm_kernel.py`` says; ``_claimed_tile`` says which one that is.
    One lane takes, and the others need not hear of it before that, as they would of a scalar."""
    lane = tl.arange(0, THREADS)
    return tl.atomic_add(tile_counter + 0 * lane, 1, mask=lane == 0, sem="relaxed")


@triton.jit
def _claimed_tile(count, THREADS: tl.constexpr):
    """The tile that ``_claim_tile`` took: the first ones go to the programs without being taken."""
    return tl.num_programs(0) + tl.max(tl.where(tl.arange(0, THREADS) == 0, count, 0), 0)


@triton.jit(do_not_specialize=["M", "E"])
def _m_grouped_kernel(
    a, b, a_2, b_2, a_scale, b_scale, bias, out, offs, tile_counter, C, D, M, E,
    MMA: tl.constexpr, A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, SCALE_D: tl.constexpr, D_MAJOR: tl.constexpr,
    EVEN_C: tl.constexpr, ZERO_TAIL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, GROUP_M: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """One program: the output tile of its own number, then others on demand; then blocks of the rows of no group, with
    ZERO_TAIL.

    ``offs = [100, 100, 300]``, D of two tiles, BM 128: group 0 has 1 x 2 tiles, numbers 0 and 1, group 1 none, group 2
    2 x 2, numbers 2 to 5. Of 3 programs the second computes tile 1 and, if it is the second to take another one, tile
    4: rows 100..227 of column tile 1. ``tile_counter``: int32 that is 0, for ``_claim_tile``.
    ``a`` is (M, C) and ``b`` (E, D, C), with D_MAJOR (E, C, D); both are TMA descriptors if MMA is ``bf16_tma``.
    ``a_2``, ``b_2``: of a second product, which is added, as descriptors of the same shapes; or None.
    SCALE_D: how many columns of ``b`` share a scale.
    """
    if D_MAJOR:
        stride_bc, stride_bd = D, 1
    else:
        stride_bc, stride_bd = 1, C
    scale_blocks = tl.cdiv(C, 32)
    tiles_d = tl.cdiv(D, BN)
    start = tl.zeros((), tl.int32)
    first = tl.zeros((), tl.int32)
    tile = tl.program_id(0)
    for e in range(E):
        if offs is None:
            end = start + M
        else:
            end = tl.minimum(tl.load(offs + e), M)
        tiles_m = tl.cdiv(end - start, BM)
        last = first + tiles_m * tiles_d
        while tile < last:
            tile_m, tile_d = _swizzled_position(tile - first, tiles_m, tiles_d, GROUP_M)
            row = start + tile_m * BM + tl.arange(0, BM)
            col = tile_d * BN + tl.arange(0, BN)
            if MMA == "bf16_tma":
                acc = tl.zeros((BM, BN), tl.float32)
                acc = _multiply_copied(acc, a, b, C, start + tile_m * BM, e, tile_d * BN, D_MAJOR, BM, BN, BC)
                if a_2 is not None:
                    acc = _multiply_copied(acc, a_2, b_2, C, start + tile_m * BM, e, tile_d * BN, D_MAJOR, BM, BN, BC)
            else:
                acc = _multiply(
                    a, a_scale, b, b_scale,
                    row.to(tl.int64) * C, col.to(tl.int64) * stride_bd,
                    row.to(tl.int64) * scale_blocks, (col // SCALE_D).to(tl.int64) * scale_blocks,
                    row < end, col < D, 1, stride_bc, tl.zeros((), tl.int32), C,
                    MMA == "scaled", A_FORMAT, B_FORMAT, EVEN_C, BM, BN, BC,
                )  # fmt: skip
            count = _claim_tile(tile_counter, THREADS)
            if bias is not None:
                acc += tl.load(bias + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
            out_ptrs = out + row.to(tl.int64)[:, None] * D + col[None, :]
            tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=(row < end)[:, None] & (col < D)[None, :])
            tile = _claimed_tile(count, THREADS)
        first = last
        start = end
        if MMA != "bf16_tma":
            b += C.to(tl.int64) * D
        if MMA == "scaled":
            b_scale += tl.cdiv(D, SCALE_D).to(tl.int64) * scale_blocks
        if bias is not None:
            bias += D
    if ZERO_TAIL:
        fill_zeros(out, start.to(tl.int64) * D, (tl.zeros((), tl.int64) + M) * D, 8192)


@triton.jit(do_not_specialize=["M", "blocks", "E"])
def _k_grouped_kernel(
    a, b, a_scale, b_scale, out, offs, tile_counter, N, K, M, blocks, E,
    MMA: tl.constexpr, A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, ALIGNMENT: tl.constexpr, ADD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, GROUP_M: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """One program: output tiles as above; each contracts the tokens of its own expert only.

    ``offs = [100, 100, 300]``, ALIGNMENT 32: the groups are 0..127, nothing and 128..351 of the padded axis, zeros in
    the padding; with ALIGNMENT 1, 0..99, nothing and 100..299. The second expert's tiles contract nothing: zeros.
    ``a`` is (M, N) and ``b`` (M, K); TMA descriptors if MMA is ``bf16_tma``. If MMA is ``scaled`` they are FP8 of
    (N, M) and (K, M), and M is 32 times ``blocks``. With ADD the output, in fp32, is added to.
    """
    if MMA == "scaled":
        M = blocks * 32  # the compiler sees what divides it
        stride_an, stride_am, stride_bk, stride_bm = M, 1, M, 1
    else:
        stride_an, stride_am, stride_bk, stride_bm = 1, N, 1, K
    tiles_n, tiles_k = tl.cdiv(N, BM), tl.cdiv(K, BN)
    offset = tl.zeros((), tl.int32)
    start = tl.zeros((), tl.int32)
    tile = tl.program_id(0)
    for e in range(E):
        if offs is None:
            size = offset + M
        else:
            size = tl.load(offs + e) - offset
        # at most M; the compiler sees that it is a multiple of ALIGNMENT
        end = start + tl.minimum(tl.cdiv(size, ALIGNMENT), (M - start) // ALIGNMENT) * ALIGNMENT
        last = (e + 1) * tiles_n * tiles_k
        while tile < last:
            tile_n, tile_k = _swizzled_position(tile - e * tiles_n * tiles_k, tiles_n, tiles_k, GROUP_M)
            n = tile_n * BM + tl.arange(0, BM)
            k = tile_k * BN + tl.arange(0, BN)
            if MMA == "bf16_tma":
                acc = tl.zeros((BM, BN), tl.float32)
                whole = start + (end - start) // BC * BC
                if whole < end:  # the rows after them are the next group's
                    inside = (whole + tl.arange(0, BC) < end)[:, None]
                    a_tile = tl.where(inside, a.load([whole, tile_n * BM]), 0.0)
                    b_tile = tl.where(inside, b.load([whole, tile_k * BN]), 0.0)
                    acc = tl.dot(a_tile.T, b_tile, acc)
                for m in range(start, whole, BC):
                    acc = tl.dot(a.load([m, tile_n * BM]).T, b.load([m, tile_k * BN]), acc)
            else:
                acc = _multiply(
                    a, a_scale, b, b_scale,
                    n.to(tl.int64) * stride_an, k.to(tl.int64) * stride_bk,
                    n.to(tl.int64) * blocks, k.to(tl.int64) * blocks,
                    n < N, k < K, stride_am, stride_bm, start, end,
                    MMA == "scaled", A_FORMAT, B_FORMAT, False, BM, BN, BC,
                )  # fmt: skip
            count = _claim_tile(tile_counter, THREADS)
            out_ptrs = out + n.to(tl.int64)[:, None] * K + k[None, :]
            inside = (n < N)[:, None] & (k < K)[None, :]
            if ADD:
                acc += tl.load(out_ptrs, mask=inside, other=0.0)
            tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=inside)
            tile = _claimed_tile(count, THREADS)
        start = end
        offset += size
        out += N.to(tl.int64) * K


M_GROUPED = Kernel(_m_grouped_kernel)
K_GROUPED = Kernel(_k_grouped_kernel)
