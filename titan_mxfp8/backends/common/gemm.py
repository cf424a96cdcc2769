"""The portable grouped GEMMs: two persistent kernels, each with three ways to its tensor cores (``hardware.Mma``).

Tensor cores without MX get the dequantised values, which bf16 holds exactly (``OperandSpec.stored``). On an H200 that
is 686 to 768 TFLOP/s, against 170 where the kernel itself multiplied FP8 elements by their scales: see
``results/2026-11-21_h200_triton_grouped_mm``. ``tl.dot_scaled`` is for hardware that decodes the scales: elsewhere
Triton 3.6 to 3.8 emulate it, and get scale bytes 0 and 255 wrong. Where there are no groups either, nor a bias, what is
left is a product of two bf16 matrices, which torch's library does as fast as these kernels or faster (on an H200:
``dense.csv`` of ``results/2026-11-21_h200_hopper``); it gets the large ones.

M tokens, N out features, K in features, E experts; C is a contraction axis and D the other one of ``b``.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_mxfp8.backends import reference
from titan_mxfp8.backends.common.dequantize import dequantize
from titan_mxfp8.backends.common.launch import Kernel, TileLayout, descriptor
from titan_mxfp8.backends.hardware import Mma, hardware_of, multiprocessors
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import Operand, check_k_grouped, check_m_grouped

BAND = 8  # rows of tiles that are in flight together, see _tile_of
_FORMAT = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@triton.jit
def _tile_of(index, tiles_m, tiles_n, BAND: tl.constexpr):
    """Row and column of the ``index``-th tile: down a band of BAND rows, then the band's next column.

    The tiles in flight then share operands, which stay in L2. 3 x 2 tiles, BAND 2: (0, 0) (1, 0) (0, 1) (1, 1) (2, 0)
    (2, 1).
    """
    band = index // (BAND * tiles_n)
    rows = min(tiles_m - band * BAND, BAND)
    inside = index % (BAND * tiles_n)
    return band * BAND + inside % rows, inside // rows


@triton.jit
def _multiply(
    a, a_scale, b, b_scale, a_row, b_row, a_scale_row, b_scale_row, a_mask, b_mask, stride_ac, stride_bc, begin, end,
    SCALED: tl.constexpr, A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """fp32 (BM, BN): BM rows of ``a`` times BN rows of ``b``, over columns ``begin .. end`` of both.

    ``a_row`` and the like are offsets of rows in elements. EVEN: the range is a multiple of BC, no mask along it.
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
        if not EVEN:
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
def _fill_zeros(ptr, begin, end, BLOCK: tl.constexpr):
    """Elements ``begin .. end`` become 0, BLOCK at a time, programs taking turns."""
    at = begin + tl.program_id(0) * BLOCK
    while at < end:
        index = at + tl.arange(0, BLOCK)
        tl.store(ptr + index, tl.zeros((BLOCK,), ptr.dtype.element_ty), mask=index < end)
        at += tl.num_programs(0) * BLOCK


@triton.jit
def _take(taken, THREADS: tl.constexpr):
    """Takes the next tile from a counter; ``_number`` says which one that is.

    So a program that starts late, as a kernel of NCCL has its multiprocessor, leaves its share to the others. One lane
    takes, and the others need not hear of it before ``_number``, as they would of a scalar.
    """
    lane = tl.arange(0, THREADS)
    return tl.atomic_add(taken + 0 * lane, 1, mask=lane == 0, sem="relaxed")


@triton.jit
def _number(count, THREADS: tl.constexpr):
    """The tile that ``_take`` took: the first ones go to the programs without being taken."""
    return tl.num_programs(0) + tl.max(tl.where(tl.arange(0, THREADS) == 0, count, 0), 0)


@triton.jit(do_not_specialize=["M", "E"])
def _m_grouped_kernel(
    a, b, a_2, b_2, a_scale, b_scale, bias, out, offs, taken, C, D, M, E,
    MMA: tl.constexpr, A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, SCALE_D: tl.constexpr, D_MAJOR: tl.constexpr,
    EVEN: tl.constexpr, ZERO_TAIL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BAND: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """One program: the output tile of its own number, then others on demand; then blocks of the rows of no group, with
    ZERO_TAIL.

    ``offs = [100, 100, 300]``, D of two tiles, BM 128: group 0 has 1 x 2 tiles, numbers 0 and 1, group 1 none, group 2
    2 x 2, numbers 2 to 5. Of 3 programs the second computes tile 1 and, if it is the second to take another one, tile
    4: rows 100..227 of column tile 1. ``taken``: int32 that is 0, for ``_take``.
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
            tile_m, tile_d = _tile_of(tile - first, tiles_m, tiles_d, BAND)
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
                    MMA == "scaled", A_FORMAT, B_FORMAT, EVEN, BM, BN, BC,
                )  # fmt: skip
            count = _take(taken, THREADS)
            if bias is not None:
                acc += tl.load(bias + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
            out_ptrs = out + row.to(tl.int64)[:, None] * D + col[None, :]
            tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=(row < end)[:, None] & (col < D)[None, :])
            tile = _number(count, THREADS)
        first = last
        start = end
        if MMA != "bf16_tma":
            b += C.to(tl.int64) * D
        if MMA == "scaled":
            b_scale += tl.cdiv(D, SCALE_D).to(tl.int64) * scale_blocks
        if bias is not None:
            bias += D
    if ZERO_TAIL:
        _fill_zeros(out, start.to(tl.int64) * D, (tl.zeros((), tl.int64) + M) * D, 8192)


@triton.jit(do_not_specialize=["M", "blocks", "E"])
def _k_grouped_kernel(
    a, b, a_scale, b_scale, out, offs, taken, N, K, M, blocks, E,
    MMA: tl.constexpr, A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, ALIGNMENT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BAND: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """One program: output tiles as above; each contracts the tokens of its own expert only.

    ``offs = [100, 100, 300]``, ALIGNMENT 32: the groups are 0..127, nothing and 128..351 of the padded axis, zeros in
    the padding; with ALIGNMENT 1, 0..99, nothing and 100..299. The second expert's tiles contract nothing: zeros.
    ``a`` is (M, N) and ``b`` (M, K); TMA descriptors if MMA is ``bf16_tma``. If MMA is ``scaled`` they are FP8 of
    (N, M) and (K, M), and M is 32 times ``blocks``.
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
            tile_n, tile_k = _tile_of(tile - e * tiles_n * tiles_k, tiles_n, tiles_k, BAND)
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
            count = _take(taken, THREADS)
            out_ptrs = out + n.to(tl.int64)[:, None] * K + k[None, :]
            tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])
            tile = _number(count, THREADS)
        start = end
        offset += size
        out += N.to(tl.int64) * K


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """A launch configuration: tiles of (bm, bn), ``bc`` elements of the contraction at a time.

    ``programs`` run on a multiprocessor at once: with two, one stores its tile while the other multiplies.
    """

    bm: int
    bn: int
    bc: int
    warps: int
    stages: int
    programs: int


def _large_and_small(*rows: tuple[int, int, int, int, int, int]) -> tuple[Tiles, Tiles]:
    """Two ``Tiles`` of rows that list their fields."""
    names = ("bm", "bn", "bc", "warps", "stages", "programs")
    large, small = (Tiles(**dict(zip(names, row, strict=True))) for row in rows)
    return large, small


# The large and the small tiles of each way. Those of bf16_tma were chosen on an H200 (results/2026-11-21_h200_triton_
# grouped_mm), the others have never run on their hardware. tests/test_triton_gemm_aot.py holds all to no spills and to
# the shared memory there is (SM89 has 99 KiB, gfx942 64). AMD's scheduler keeps one stage fewer in flight, and spills
# with three.
TILES: dict[Mma, tuple[Tiles, Tiles]] = {
    "scaled": _large_and_small((128, 256, 128, 8, 3, 1), (128, 128, 128, 4, 3, 2)),
    "bf16_tma": _large_and_small((128, 256, 64, 8, 4, 1), (128, 128, 64, 4, 3, 2)),
    "bf16": _large_and_small((128, 128, 64, 8, 3, 1), (64, 128, 64, 4, 3, 2)),
}
AMD_TILES: dict[Mma, tuple[Tiles, Tiles]] = {
    "scaled": _large_and_small((256, 128, 128, 8, 2, 1), (128, 128, 128, 4, 2, 2)),
    "bf16": _large_and_small((128, 256, 64, 8, 2, 1), (128, 128, 64, 8, 2, 2)),
}
# A tile of the weight gradient contracts one group's tokens. With 512 in a group (8 groups) small tiles took 9% less
# time than large ones on an H200, with 1000 (32 groups) as long.
FEW_TOKENS = 768


_M_GROUPED = Kernel(_m_grouped_kernel)
_K_GROUPED = Kernel(_k_grouped_kernel)
_prepared: set[tuple] = set()  # weights by which torch multiplied many tokens


def gemm_m_grouped(
    a: Operand,
    b: Operand,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    zero_tail: bool = True,
) -> torch.Tensor:
    """``Backend.gemm_m_grouped`` of exact operands."""
    check_m_grouped(a, b)
    device = a.data.device
    mma = hardware_of(device).mma
    if mma != "scaled" and offs is None and bias is None and out_dtype == torch.bfloat16:
        a, b = in_bf16(a), in_bf16(b)
        b_CD = b.data[0] if b.axis == 1 else b.data[0].mT
        if _is_many_tiles(a.data.shape[0], b_CD.shape[1], device):
            key = *b_CD.shape, b.axis, device
            if key not in _prepared:  # compiles what fewer tokens will take
                _prepared.add(key)
                multiply_m_grouped(a._replace(data=a.data[:0]), b, None, None, out_dtype, mma)
            return torch.mm(a.data, b_CD)
    return multiply_m_grouped(a, b, offs, bias, out_dtype, mma, zero_tail=zero_tail)


def dual_gemm_m_grouped(
    first: tuple[Operand, Operand], second: tuple[Operand, Operand], offs: torch.Tensor | None
) -> torch.Tensor:
    """The sum of two products of ``gemm_m_grouped``, in bf16, by kernels that use TMA; rows of no group are
    undefined."""
    mma = hardware_of(first[0].data.device).mma
    return multiply_m_grouped(*first, offs, None, torch.bfloat16, mma, zero_tail=False, plus=second)


def gemm_k_grouped(a: Operand, b: Operand, offs: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """``Backend.gemm_k_grouped`` of exact operands, or of unquantised ones.

    For the latter torch's kernel wants another pass over the result for the empty groups. On an H200 this one takes as
    long with 1000 tokens in each of 32 groups or more, 24% longer with 256 in each of 64, 36% with at most 44.
    """
    check_k_grouped(a, b)
    device = a.data.device
    mma = hardware_of(device).mma
    if not a.spec.is_quantized and mma != "bf16_tma":
        return reference.gemm_k_grouped(a, b, offs, out_dtype)
    if mma != "scaled" and offs is None and out_dtype == torch.bfloat16:
        a_MN, b_MK = _tokens_first(a), _tokens_first(b)
        if _is_many_tiles(a_MN.shape[1], b_MK.shape[1], device):
            return torch.mm(a_MN.mT, b_MK)[None]
    return multiply_k_grouped(a, b, offs, out_dtype, mma)


def in_bf16(operand: Operand) -> Operand:
    """An exact operand as values in bf16, the contraction axis last; itself if it is in bf16 already."""
    if operand.spec.stored == "bf16":
        return operand
    values = dequantize(operand)
    return Operand(values, operand.scale, replace(operand.spec, stored="bf16"), values.ndim - 1)


def multiply_m_grouped(
    a: Operand,
    b: Operand,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    mma: Mma,
    tiles: "Tiles | None" = None,
    zero_tail: bool = True,
    plus: tuple[Operand, Operand] | None = None,
) -> torch.Tensor:
    """``gemm_m_grouped`` with a given ``Mma`` and, for measurements, given tiles; with TMA also ``plus`` another
    product of the same shapes."""
    if mma == "scaled" and a.spec.stored == "bf16":
        mma = "bf16"
    if mma != "scaled":
        a, b = in_bf16(a), in_bf16(b)
    pairs = [(a, b)]
    if plus:
        pairs.append((in_bf16(plus[0]), in_bf16(plus[1])))
        assert mma == "bf16_tma", "only kernels that use TMA add up two products"
        assert [(x.data.shape, x.axis) for x in pairs[1]] == [(x.data.shape, x.axis) for x in pairs[0]], plus
    (m, c), experts = a.data.shape, b.data.shape[0]
    d_major = b.spec.stored == "bf16" and b.axis == 1
    d = b.data.shape[2 if d_major else 1]
    device = a.data.device
    out_MD = torch.empty((m, d), dtype=out_dtype, device=device)
    processors = multiprocessors(device)
    taken = torch.zeros(1, dtype=torch.int32, device=device)

    def launch(tiles: Tiles, run: bool) -> bool:
        scales = (a.scale, b.scale) if mma == "scaled" else (None, None)
        matrices, descriptors = (a.data, b.data, None, None), ()
        if mma == "bf16_tma":
            blocks = (tiles.bm, tiles.bc), (1, tiles.bc, tiles.bn) if d_major else (1, tiles.bn, tiles.bc)
            descriptors = tuple(_described(x.data, blocks[i]) for pair in pairs for i, x in enumerate(pair))
            matrices = (None,) * (4 - len(descriptors))
        constants = (
            mma, *_formats(mma, a, b), b.spec.block_mn if mma == "scaled" else 1, d_major, c % tiles.bc == 0, zero_tail,
            tiles.bm, tiles.bn, tiles.bc, BAND, 64 * tiles.warps,
        )  # fmt: skip
        count = (ceil_div(m, tiles.bm) + experts) * ceil_div(d, tiles.bn) if m else 0  # at most
        return _M_GROUPED.launch(
            min(count, processors * tiles.programs) if run else 0,
            (*matrices, *scales, bias, out_MD, offs, taken), (c, d), (m, experts), constants,
            device=device, warps=tiles.warps, stages=tiles.stages, descriptors=descriptors,
        )  # fmt: skip

    if tiles:
        launch(tiles, run=True)
    elif launch(tiles_for(mma, (1, m, d), None, processors), run=True):
        for other in tiles_of(mma):  # what other numbers of tokens will take
            launch(other, run=False)
    return out_MD


def multiply_k_grouped(
    a: Operand,
    b: Operand,
    offs: torch.Tensor | None,
    out_dtype: torch.dtype,
    mma: Mma,
    tiles: "Tiles | None" = None,
) -> torch.Tensor:
    """``gemm_k_grouped`` with a given ``Mma`` and, for measurements, given tiles."""
    alignment = 1 if a.spec.stored == "bf16" else BLOCK_SIZE  # of the groups
    assert a.spec.stored == b.spec.stored, "one operand is padded, the other is not"
    if mma == "scaled" and a.spec.stored == "bf16":
        mma = "bf16"
    if mma == "scaled":
        a_data, b_data = a.data, b.data
        (n, m), k = a_data.shape, b_data.shape[0]
    else:
        a_data, b_data = _tokens_first(a), _tokens_first(b)
        (m, n), k = a_data.shape, b_data.shape[1]
    experts, device = 1 if offs is None else offs.shape[0], a_data.device
    out_ENK = torch.empty((experts, n, k), dtype=out_dtype, device=device)
    if m == 0:
        out_ENK.zero_()
    processors = multiprocessors(device)
    taken = torch.zeros(1, dtype=torch.int32, device=device)

    def launch(tiles: Tiles, run: bool) -> bool:
        scales = (a.scale, b.scale) if mma == "scaled" else (None, None)
        matrices, descriptors = (a_data, b_data), ()
        if mma == "bf16_tma":
            blocks = (tiles.bc, tiles.bm), (tiles.bc, tiles.bn)
            matrices, descriptors = (), tuple(map(_described, (a_data, b_data), blocks))
        constants = (
            mma, *_formats(mma, a, b), alignment,
            tiles.bm, tiles.bn, tiles.bc, BAND, 64 * tiles.warps,
        )  # fmt: skip
        count = experts * ceil_div(n, tiles.bm) * ceil_div(k, tiles.bn) if m else 0
        return _K_GROUPED.launch(
            min(count, processors * tiles.programs) if run else 0,
            (*matrices, *scales, out_ENK, offs, taken), (n, k), (m, m // BLOCK_SIZE, experts), constants,
            device=device, warps=tiles.warps, stages=tiles.stages, descriptors=descriptors,
        )  # fmt: skip

    if tiles:
        launch(tiles, run=True)
    elif launch(tiles_for(mma, (experts, n, k), m // experts, processors), run=True):
        for other in tiles_of(mma):
            launch(other, run=False)
    return out_ENK


def _described(x: torch.Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    return descriptor(x, TileLayout(x.dtype, x.shape, block))


def _is_many_tiles(rows: int, columns: int, device: torch.device) -> bool:
    """Whether an output of this size keeps all multiprocessors busy. With fewer tiles torch's library splits the
    contraction, and by default may add up the parts in bf16; our kernels add up in fp32."""
    return ceil_div(rows, 128) * ceil_div(columns, 128) >= multiprocessors(device)


def _formats(mma: Mma, a: Operand, b: Operand) -> tuple[str, str]:
    """What ``tl.dot_scaled`` is told of the operands."""
    return (_FORMAT[a.spec.elem_dtype], _FORMAT[b.spec.elem_dtype]) if mma == "scaled" else ("bf16", "bf16")


def _tokens_first(operand: Operand) -> torch.Tensor:
    """An operand of wgrad as values in bf16, (M, N)."""
    return operand.data if operand.spec.stored == "bf16" else dequantize(operand).mT.contiguous()


def tiles_of(mma: Mma) -> tuple[Tiles, Tiles]:
    """The large tiles and the small ones."""
    return (AMD_TILES if torch.version.hip else TILES)[mma]


def tiles_for(mma: Mma, out: tuple[int, int, int], tokens: int | None, processors: int) -> Tiles:
    """The large tiles, but the small ones where fewer large ones than ``processors`` would leave some idle, or where a
    tile contracts few tokens.

    Args:
        mma: how tiles are multiplied.
        out: matrices of the output, their rows and columns.
        tokens: in a group, on average, if they are what is contracted; else None.
        processors: multiprocessors of the GPU.

    Nothing is timed in a training step: that would stall the other ranks, and could pick other sums on each.
    """
    large, small = tiles_of(mma)
    matrices, rows, columns = out
    count = matrices * ceil_div(rows, large.bm) * ceil_div(columns, large.bn)
    few = count < processors or (tokens is not None and tokens < FEW_TOKENS)
    return small if few else large
