"""The grouped GEMMs on Hopper: FP8 tensor cores, whose sums are scaled and added up in fp32 registers.

Hopper's tensor cores (``wgmma``) multiply FP8 but know no scales. So a chain of them sums 32 to 128 products of a row
and a column, and each sum p is added to the output as ``acc += p * (row scale * column scale)``. One FP32 instruction
for each p takes as long as the tensor cores take for 32 products, and power besides, so this decides how fast a variant
can be:

| GEMM      | ``b``  | sums of   | scales of a sum             | FP32 instructions per element of it |
|-----------|--------|-----------|-----------------------------|-------------------------------------|
| m_grouped | 32x32  | 32 to 128 | one per row and 32 columns  | 1                                   |
| m_grouped | 32x128 | 128       | one per row and 32 columns  | 1                                   |
| k_grouped | 1x128  | 128       | one per row, one per column | 2                                   |

Exact operands (32x32) have blocks of 32. A sum goes on over the next block of the stage where its scales are those of
the block before, in all of 64 rows of ``a`` and 128 columns of ``b``: the quantiser sees to it where that changes no
value (``format.reference.coalesce_scales``), ``scales.decode_scales`` looks for it and leaves marks, and each warpgroup
goes by them. The result is exact in any case, but for the bits that tensor cores cut off a sum; so the last bits of a
row depend on which rows are beside it.

``gemm_kernel.py`` is the kernel, ``tile_scheduler.py`` hands out its tiles, ``scales.py`` prepares the scales.
M tokens, N out features, K in features, E experts; C is a contraction axis and D the other one of ``b``.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from titan_mxfp8.backends.common.launch import TileLayout, descriptor
from titan_mxfp8.backends.hardware import multiprocessors
from titan_mxfp8.backends.hopper.gemm_kernel import GEMM
from titan_mxfp8.backends.hopper.scales import PART, STAGE, ScaleLayout, Scales, decode_scales
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import Operand

COLUMNS = 128  # of a tile
DESCRIPTORS = 9  # that the kernel takes at most, as its first arguments
GROUP_M = 8  # rows of tiles that are in flight together, see tile_scheduler.swizzled_position


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


# Each the fastest of several numbers of warpgroups, parts and stages on an H200. On an H100 rows of ``a`` in registers
# with sums of 64 columns, in tiles of 192 x 128, 128 x 256 or 256 x 128, were 2 to 30% slower, and a staging buffer for
# both halves of a store made no difference: power limits it, to 1.4 to 1.5 GHz.
# Three warpgroups fill each other's gaps; tiles of 192 rows read less of ``b`` than those of 128.
M_GROUPED = Tiles(warpgroups=3, parts=3, stages=4, registers=(160, 32))
# Of groups of few rows. From how many rows on the other is faster has not been timed.
FEW_ROWS = Tiles(warpgroups=2, parts=2, stages=5, registers=(232, 40))
# 256 rows. ptxas overlaps a warpgroup's sums a little, and spills some of what is used per tile.
K_GROUPED = Tiles(warpgroups=2, parts=4, stages=4, registers=(232, 40))


def gemm_m_grouped(
    a: Operand,
    b: Operand,
    offs: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    zero_tail: bool = True,
    second: tuple[Operand, Operand] | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """``Backend.gemm_m_grouped`` of 1x32 blocks by 32x32 ones, or of 1x128 by 32x128; in bf16 also plus the product of
    two more operands of the same shapes and specs, rounded once. With given tiles for measurements. ``a`` and that of
    ``second`` may be interleaved (``format.spec``).

    Products of a row's and a column's scale below 2^-126 may be taken for zero, those from 2^128 on are infinite.
    """
    products = []
    for pair in ((a, b), second) if second else ((a, b),):
        assert [(x.data.shape, x.spec) for x in pair] == [(x.data.shape, x.spec) for x in (a, b)], pair
        products.append((*pair, decode_scales(*pair, offs)))
    out = torch.empty((a.data.shape[0], b.data.shape[1]), dtype=out_dtype, device=a.data.device)
    for i, chosen in enumerate((tiles,) if tiles else tiles_for(a, b)):
        if not _launch(products, out, bias, offs, chosen, k_grouped=False, run=i == 0, zero_tail=zero_tail):
            break
    return out


def tiles_for(a: Operand, b: Operand) -> tuple[Tiles, Tiles]:
    """The tiles for so many rows, and those that other numbers of them will take: once the first are compiled, those
    are compiled too."""
    few = a.data.shape[0] < 768 * b.data.shape[0]  # on average in a group
    return (FEW_ROWS, M_GROUPED) if few else (M_GROUPED, FEW_ROWS)


def gemm_k_grouped(
    a: Operand,
    b: Operand,
    offs: Tensor | None,
    out_dtype: torch.dtype,
    add_to: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """``Backend.gemm_k_grouped`` of 1x128 blocks; with given tiles for measurements."""
    (n, m), k, out = a.data.shape, b.data.shape[0], add_to
    if out is None:
        experts = 1 if offs is None else offs.shape[0]
        make = torch.empty if m else torch.zeros
        out = make((experts, n, k), dtype=out_dtype, device=a.data.device)
    scales = decode_scales(a, b, offs, k_grouped=True)
    _launch([(a, b, scales)], out, None, offs, tiles or K_GROUPED, k_grouped=True, add=add_to is not None)
    return out


class LaunchPlan(NamedTuple):
    """What shapes and dtypes decide of a GEMM's launch: made once, and kept for calls of the same ones."""

    tiles: int  # of the output, at most
    layouts: tuple[TileLayout, ...]  # of both operands, the rows' scales and the columns', and of an output in bf16
    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    constants: tuple


@lru_cache(maxsize=1024)
def plan_launch(
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    scales: ScaleLayout,
    tiles: Tiles,
    k_grouped: bool,
    zero_tail: bool,
    add: bool,
) -> LaunchPlan:
    """``shapes``, ``dtypes``: of ``a``, ``b`` and the output."""
    (a_rows, a_columns), b_shape, (*_, out_rows, d) = shapes
    a_dtype, b_dtype, out_dtype = dtypes
    experts, c = (math.prod(shapes[2][:-2]), 0) if k_grouped else (b_shape[0], b_shape[-1])
    tokens = a_columns if k_grouped else a_rows
    tiles_down, tiles_across = ceil_div(out_rows, PART * tiles.parts), ceil_div(d, COLUMNS)
    count = (tiles_down * experts if k_grouped else tiles_down + experts) * tiles_across
    width = COLUMNS if k_grouped else BLOCK_SIZE // scales.steps
    layouts = (
        TileLayout(a_dtype, (a_rows, a_columns), (PART, STAGE), gluon=True),
        TileLayout(b_dtype, (math.prod(b_shape[:-1]), b_shape[-1]), (COLUMNS, STAGE), gluon=True),
        TileLayout(torch.float32, (scales.row_size,), (PART * scales.steps,), gluon=True),
        TileLayout(
            torch.float32, (scales.column_rows, scales.columns), (scales.steps, width), gluon=True,
            offset=scales.row_size,
        ),
    )  # fmt: skip
    if out_dtype == torch.bfloat16:
        layouts += (TileLayout(out_dtype, (math.prod(shapes[2][:-1]), d), (PART, COLUMNS // 2), gluon=True),)
    constants = (
        scales.steps, scales.copies, k_grouped, a_columns > b_shape[-1], zero_tail, add, tiles.warpgroups, tiles.parts,
        tiles.stages, GROUP_M, tiles.registers[1], tiles.registers[0],
    )  # fmt: skip
    counts = experts, tiles_down, tiles_across, out_rows, scales.rows, scales.stages
    return LaunchPlan(count if tokens else 0, layouts, (c, d), counts, constants)


def _launch(
    products: list[tuple[Operand, Operand, Scales]],
    out: Tensor,
    bias: Tensor | None,
    offs: Tensor | None,
    tiles: Tiles,
    *,
    k_grouped: bool,
    run: bool = True,
    zero_tail: bool = True,
    add: bool = False,
) -> bool:
    """Returns whether the kernel was new. It takes descriptors of a product (two operands and the scales of both), of
    an output in bf16, and of a second product."""
    a, b, scales = products[0]
    shapes, dtypes = (a.data.shape, b.data.shape, out.shape), (a.data.dtype, b.data.dtype, out.dtype)
    plan = plan_launch(shapes, dtypes, scales.layout, tiles, k_grouped, zero_tail, add)
    memory = [(a.data, b.data, scales.buffer, scales.buffer) for a, b, scales in products]
    memory[0] += (out,)
    assert len(products) == 1 or len(plan.layouts) == 5, "a sum of products is in bf16"
    descriptors = [
        descriptor(x, layout) for tensors in memory for x, layout in zip(tensors, plan.layouts, strict=False)
    ]
    absent = [None] * (DESCRIPTORS - len(descriptors))
    return GEMM.launch(
        min(plan.tiles, multiprocessors(out.device)) if run else 0,
        (*absent, out, bias, offs, scales.buffer[scales.layout.size :]),
        plan.sizes, plan.counts, plan.constants, device=out.device, descriptors=tuple(descriptors),
    )  # fmt: skip
