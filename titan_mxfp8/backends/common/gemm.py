"""The portable grouped GEMMs: two persistent kernels (``gemm_kernels.py``), each in three variants (``hardware.Mma``).

Tensor cores without MX get the dequantised values, which bf16 holds exactly (``OperandSpec.stored``). On an H200 that
is 686 to 768 TFLOP/s, against 170 where the kernel itself multiplied FP8 elements by their scales: see
``results/2026-11-21_h200_triton_grouped_mm``. ``tl.dot_scaled`` is for hardware that decodes the scales: elsewhere
Triton 3.6 to 3.8 emulate it, and get scale bytes 0 and 255 wrong. Where there are no groups either, nor a bias, what is
left is a product of two bf16 matrices, which torch's library does as fast as these kernels or faster (on an H200:
``dense.csv`` of ``results/2026-11-21_h200_hopper``); it gets the large ones.

M tokens, N out features, K in features, E experts; C is a contraction axis and D the other one of ``b``.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_mxfp8.backends import reference
from titan_mxfp8.backends.common.dequantize import dequantize
from titan_mxfp8.backends.common.gemm_kernels import K_GROUPED, M_GROUPED
from titan_mxfp8.backends.common.launch import TileLayout, descriptor
from titan_mxfp8.backends.hardware import Mma, hardware_of, multiprocessors
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import K_GROUPED_AXES, M_GROUPED_AXES, Operand, check_axes

GROUP_M = 8  # rows of tiles that are in flight together, see gemm_kernels
_FORMAT = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class Tiles(NamedTuple):
    """A launch configuration: tiles of (bm, bn), ``bc`` elements of the contraction at a time.

    ``programs`` run on a multiprocessor at once: with two, one stores its tile while the other multiplies.
    """

    bm: int
    bn: int
    bc: int
    warps: int
    stages: int
    programs: int


# The large and the small tiles of each variant. Those of bf16_tma were chosen on an H200 (``results/``,
# 2026-11-21_h200_triton_grouped_mm), the others have never run on their hardware. tests/test_triton_gemm_aot.py holds
# all to no spills and to the shared memory there is (SM89 has 99 KiB, gfx942 64). AMD's scheduler keeps one stage
# fewer in flight, and spills with three.
TILES: dict[Mma, tuple[Tiles, Tiles]] = {
    "scaled": (Tiles(128, 256, 128, 8, 3, 1), Tiles(128, 128, 128, 4, 3, 2)),
    "bf16_tma": (Tiles(128, 256, 64, 8, 4, 1), Tiles(128, 128, 64, 4, 3, 2)),
    "bf16": (Tiles(128, 128, 64, 8, 3, 1), Tiles(64, 128, 64, 4, 3, 2)),
}
AMD_TILES: dict[Mma, tuple[Tiles, Tiles]] = {
    "scaled": (Tiles(256, 128, 128, 8, 2, 1), Tiles(128, 128, 128, 4, 2, 2)),
    "bf16": (Tiles(128, 256, 64, 8, 2, 1), Tiles(128, 128, 64, 8, 2, 2)),
}
# A tile of the weight gradient contracts one group's tokens. With 512 in a group (8 groups) small tiles took 9% less
# time than large ones on an H200, with 1000 (32 groups) as long.
FEW_TOKENS = 768


_prepared: set[tuple] = set()  # weights by which torch multiplied many tokens


def gemm_m_grouped(
    a: Operand, b: Operand, offs: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype, zero_tail: bool = True
) -> Tensor:
    """``Backend.gemm_m_grouped`` of exact operands."""
    check_axes(a, b, *M_GROUPED_AXES)
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


def gemm_k_grouped(
    a: Operand, b: Operand, offs: Tensor | None, out_dtype: torch.dtype, add_to: Tensor | None = None
) -> Tensor:
    """``Backend.gemm_k_grouped`` of exact operands, or of unquantised ones.

    For the latter torch's kernel wants another pass over the result for the empty groups. On an H200 this one takes as
    long with 1000 tokens in each of 32 groups or more, 24% longer with 256 in each of 64, 36% with at most 44.
    Elsewhere than on SM90 and SM100 (and in builds for AMD with CK) torch has none: its host waits for the offsets,
    which no CUDA graph can hold.
    """
    check_axes(a, b, *K_GROUPED_AXES)
    device = a.data.device
    hardware = hardware_of(device)
    mma = hardware.mma
    major, _ = hardware.capability or (0, 0)
    if not a.spec.is_quantized and (major == 10 or (offs is None and mma != "bf16_tma")):
        return reference.gemm_k_grouped(a, b, offs, out_dtype, add_to)
    if mma != "scaled" and offs is None and out_dtype == torch.bfloat16:
        a, b = _tokens_first(a), _tokens_first(b)
        if _is_many_tiles(a.data.shape[1], b.data.shape[1], device):
            return torch.mm(a.data.mT, b.data)[None]
    return multiply_k_grouped(a, b, offs, out_dtype, mma, add_to=add_to)


def in_bf16(operand: Operand) -> Operand:
    """An exact operand as values in bf16, the contraction axis last; itself if it is in bf16 already."""
    if operand.spec.stored == "bf16":
        return operand
    values = dequantize(operand)
    return Operand(values, None, replace(operand.spec, stored="bf16"), values.ndim - 1)


def multiply_m_grouped(
    a: Operand,
    b: Operand,
    offs: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    mma: Mma,
    tiles: Tiles | None = None,
    zero_tail: bool = True,
    second: tuple[Operand, Operand] | None = None,
) -> Tensor:
    """``gemm_m_grouped`` with a given ``Mma`` and, for measurements, given tiles; with TMA also plus a ``second``
    product of the same shapes."""
    if mma == "scaled" and a.spec.stored == "bf16":
        mma = "bf16"
    products = [(a, b), second] if second else [(a, b)]
    if mma != "scaled":
        products = [(in_bf16(a), in_bf16(b)) for a, b in products]
    a, b = products[0]
    if second:
        assert mma == "bf16_tma", "only kernels that use TMA add up two products"
        assert [(x.data.shape, x.axis) for x in products[1]] == [(x.data.shape, x.axis) for x in (a, b)], second
    (m, c), experts, device = a.data.shape, b.data.shape[0], a.data.device
    d_major = b.spec.stored == "bf16" and b.axis == 1  # b is (E, C, D), and not (E, D, C)
    d = b.data.shape[2 if d_major else 1]
    out_MD = torch.empty((m, d), dtype=out_dtype, device=device)
    tile_counter = torch.zeros(1, dtype=torch.int32, device=device)
    scales = (a.scale, b.scale) if mma == "scaled" else (None, None)
    matrices, descriptors = (a.data, b.data, None, None), ()
    for which, chosen in enumerate(_tiles_in_turn(tiles, mma, (1, m, d), None, device)):
        if mma == "bf16_tma":
            blocks = (chosen.bm, chosen.bc), (1, chosen.bc, chosen.bn) if d_major else (1, chosen.bn, chosen.bc)
            descriptors = tuple(_described(x.data, blocks[i]) for product in products for i, x in enumerate(product))
            matrices = (None,) * (4 - len(descriptors))
        constants = (
            mma, *_formats(mma, a, b), b.spec.block_mn if mma == "scaled" else 1, d_major, c % chosen.bc == 0,
            zero_tail, chosen.bm, chosen.bn, chosen.bc, GROUP_M, 64 * chosen.warps,
        )  # fmt: skip
        count = (ceil_div(m, chosen.bm) + experts) * ceil_div(d, chosen.bn) if m else 0  # at most
        is_new = M_GROUPED.launch(
            min(count, multiprocessors(device) * chosen.programs) if which == 0 else 0,
            (*matrices, *scales, bias, out_MD, offs, tile_counter), (c, d), (m, experts), constants,
            device=device, warps=chosen.warps, stages=chosen.stages, descriptors=descriptors,
        )  # fmt: skip
        if not is_new:
            break
    return out_MD


def multiply_k_grouped(
    a: Operand,
    b: Operand,
    offs: Tensor | None,
    out_dtype: torch.dtype,
    mma: Mma,
    tiles: Tiles | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """``gemm_k_grouped`` with a given ``Mma`` and, for measurements, given tiles."""
    alignment = 1 if a.spec.stored == "bf16" else BLOCK_SIZE  # of the groups
    assert a.spec.stored == b.spec.stored, "one operand is padded, the other is not"
    if mma == "scaled" and a.spec.stored == "bf16":
        mma = "bf16"
    if mma == "scaled":
        (n, m), k = a.data.shape, b.data.shape[0]  # of m tokens, with the padding of operands that have it
    else:
        a, b = _tokens_first(a), _tokens_first(b)
        (m, n), k = a.data.shape, b.data.shape[1]
    experts, device = 1 if offs is None else offs.shape[0], a.data.device
    out_ENK = torch.empty((experts, n, k), dtype=out_dtype, device=device) if add_to is None else add_to
    if m == 0 and add_to is None:
        out_ENK.zero_()
    tile_counter = torch.zeros(1, dtype=torch.int32, device=device)
    scales = (a.scale, b.scale) if mma == "scaled" else (None, None)
    matrices, descriptors = (a.data, b.data), ()
    for which, chosen in enumerate(_tiles_in_turn(tiles, mma, (experts, n, k), m // experts, device)):
        if mma == "bf16_tma":
            descriptors = _described(a.data, (chosen.bc, chosen.bm)), _described(b.data, (chosen.bc, chosen.bn))
            matrices = ()
        constants = (
            mma, *_formats(mma, a, b), alignment, add_to is not None,
            chosen.bm, chosen.bn, chosen.bc, GROUP_M, 64 * chosen.warps,
        )  # fmt: skip
        count = experts * ceil_div(n, chosen.bm) * ceil_div(k, chosen.bn) if m else 0
        is_new = K_GROUPED.launch(
            min(count, multiprocessors(device) * chosen.programs) if which == 0 else 0,
            (*matrices, *scales, out_ENK, offs, tile_counter), (n, k), (m, m // BLOCK_SIZE, experts), constants,
            device=device, warps=chosen.warps, stages=chosen.stages, descriptors=descriptors,
        )  # fmt: skip
        if not is_new:
            break
    return out_ENK


def _tiles_in_turn(
    tiles: Tiles | None, mma: Mma, out: tuple[int, int, int], tokens: int | None, device: torch.device
) -> tuple[Tiles, ...]:
    """The tiles given, or else those that fit best (``tiles_for``) and the others. The first are launched; once they
    are compiled, other numbers of tokens will take the others, so those are compiled too."""
    if tiles:
        return (tiles,)
    best = tiles_for(mma, out, tokens, multiprocessors(device))
    return best, *(other for other in tiles_of(mma) if other is not best)


def _described(x: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    return descriptor(x, TileLayout(x.dtype, x.shape, block))


def _is_many_tiles(rows: int, columns: int, device: torch.device) -> bool:
    """Whether an output of this size keeps all multiprocessors busy. With fewer tiles torch's library splits the
    contraction, and by default may add up the parts in bf16; our kernels add up in fp32."""
    return ceil_div(rows, 128) * ceil_div(columns, 128) >= multiprocessors(device)


def _formats(mma: Mma, a: Operand, b: Operand) -> tuple[str, str]:
    """What ``tl.dot_scaled`` is told of the operands."""
    return (_FORMAT[a.spec.elem_dtype], _FORMAT[b.spec.elem_dtype]) if mma == "scaled" else ("bf16", "bf16")


def _tokens_first(operand: Operand) -> Operand:
    """An operand of wgrad as values in bf16, (M, N); itself if it is that already."""
    if operand.spec.stored == "bf16":
        return operand
    return Operand(dequantize(operand).mT.contiguous(), None, replace(operand.spec, stored="bf16"), 0)


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
