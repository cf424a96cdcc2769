"""The scales of Hopper's GEMMs as fp32, in the layouts that single copies of TMA want.

``decode_scales`` prepares them, however they lie: a copy must start at a multiple of 16 bytes, but a group at any row.
Exact: the four scales of a row's stage are side by side, 16 bytes. Rebased: the rows' scales are stored four times,
shifted by 0 to 3 rows, and one of the four fits any start.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div, ceil_to
from titan_mxfp8.format.spec import Operand

STAGE = 128  # of the contraction: what a stage of the GEMM holds
PART = 64  # rows of a tile that one wgmma multiplies
DECODE_MN = 512  # rows or columns whose scales a program decodes


@triton.jit
def _decode_operand(
    scale, out, program, mn, known, blocks, mn_out, stages, mn_stride, mn_limit, stage_limit,
    MN_MAJOR: tl.constexpr, STEPS: tl.constexpr, ARE_ROWS: tl.constexpr, BLOCK_MN: tl.constexpr,
):  # fmt: skip
    """fp32 ``2^(s - 127)`` of BLOCK_MN rows or columns, and the STEPS scale bytes of a stage. Byte 255 becomes NaN.

    Of several steps the first one's scales have bit i set where steps i and i + 1 have the same scale, in each of 64
    rows or of 4 (groups of 32) columns.

    ARE_ROWS: instead of expert e it is copy e, which holds the rows from e on. Past the last block, and past the first
    ``known`` of the ``mn``: 2^-127, as what it scales is zero, or of no group, on which no bit of a result may
    depend. MN_MAJOR: how the scales lie (``OperandSpec.scales``); else rows or columns are ``mn_stride`` apart.
    Nothing is stored at and past the limits of rows or columns, and of stages.
    """
    chunks = tl.cdiv(mn_out, BLOCK_MN)
    stage = (program // chunks % stages).to(tl.int64)
    e = (program // chunks // stages).to(tl.int64)
    if (program % chunks * BLOCK_MN >= mn_limit) | (stage >= stage_limit):
        return
    i_mn = (program % chunks).to(tl.int64) * BLOCK_MN + tl.arange(0, BLOCK_MN)
    step = tl.arange(0, STEPS)
    block = stage * STEPS + step
    mn_in = i_mn + e if ARE_ROWS else i_mn
    if MN_MAJOR:
        stride_k = tl.cdiv(mn, 16) * 16
        source = scale + block[None, :] * stride_k + mn_in[:, None]
        stride_e = blocks * stride_k
    else:
        stride_k = 1
        source = scale + block[None, :] + mn_in[:, None] * mn_stride
        stride_e = mn * mn_stride
    if not ARE_ROWS:
        source += e * stride_e
    there = (mn_in < known)[:, None]
    s = tl.load(source, mask=there & (block < blocks)[None, :], other=0).to(tl.int32)
    bits = tl.where(s == 255, 0x7FC00000, tl.maximum(s << 23, 0x00400000))
    if STEPS > 1:
        RUN: tl.constexpr = 64 if ARE_ROWS else 4  # what lies in a part, or in a tile
        tl.static_assert(STEPS == 4)
        # A sum takes the scale of its last block. Past the last one there is, that is byte 0: no sum goes on to there,
        # unless its own is.
        later = step[None, :] > 0
        before = tl.load(source - stride_k, mask=there & later & (block <= blocks)[None, :], other=0).to(tl.int32)
        same = tl.min(tl.reshape((later & (s == before)).to(tl.int32), (BLOCK_MN // RUN, RUN, STEPS)), 1)
        marks = tl.sum(same << step[None, :], 1) >> 1
        marks = tl.reshape(tl.broadcast_to(marks[:, None], (BLOCK_MN // RUN, RUN)), (BLOCK_MN,))
        bits |= tl.where((step == 0)[None, :], marks[:, None], 0)
    at = (e * stages + stage) * STEPS * mn_out
    if ARE_ROWS:
        at += i_mn[:, None] * STEPS + step[None, :]
    else:
        at += step[None, :] * mn_out + i_mn[:, None]
    tl.store(out + at, bits, mask=(i_mn < mn_out)[:, None])


@Kernel
@triton.jit(
    do_not_specialize=[
        "row_programs", "rows", "rows_out", "columns", "columns_out", "blocks", "stages", "row_size", "size", "end",
        "groups",
    ]
)  # fmt: skip
def _decode_scales(
    row_scale, column_scale, out, offs,
    mn_stride,
    row_programs, rows, rows_out, columns, columns_out, blocks, stages, row_size, size, end, groups,
    MN_MAJOR: tl.constexpr, STEPS: tl.constexpr, K_GROUPED: tl.constexpr, BLOCK_MN: tl.constexpr,
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
        _decode_operand(
            row_scale, out, program, rows, known_rows, blocks, rows_out, stages, mn_stride, row_limit, stage_limit,
            MN_MAJOR, STEPS, True, BLOCK_MN,
        )  # fmt: skip
    else:
        _decode_operand(
            column_scale, out + row_size, program - row_programs, columns, columns, blocks, columns_out, stages,
            mn_stride, columns_out, stage_limit, MN_MAJOR, STEPS, False, BLOCK_MN,
        )  # fmt: skip


class ScaleLayout(NamedTuple):
    """How ``Scales`` lie in their buffer."""

    copies: int  # of the rows' scales, as are stages, rows and steps
    stages: int
    rows: int  # to a multiple of 4; with several steps to one of 64, and 64 more
    steps: int
    columns: int  # to a multiple of 4
    column_rows: int  # experts * stages * steps
    row_size: int  # elements of the rows' scales
    size: int  # elements of both


class Scales(NamedTuple):
    """fp32 scales as the GEMM copies them, in one int32 buffer.

    Attributes:
        buffer: first those of the rows, (copies, stages, rows, steps); copy s starts at row s. Then those of the
            columns, (experts * stages * steps, columns). Of several steps the first one's last three bits are marks,
            see ``_decode_operand``. Then 0, a counter, and the number of rows.
        layout: these sizes.
    """

    buffer: Tensor
    layout: ScaleLayout


def decode_scales(
    a: Operand, b: Operand, offs: Tensor | None, k_grouped: bool = False, with_rows: bool = True
) -> Scales:
    """The scales of both operands, with ``offs`` those that the groups need; not ``with_rows``: of ``b`` alone,
    rebased."""
    a_rows, (*experts, b_rows, length) = a.data.shape[0], b.data.shape
    mn_major = a.spec.scales == "mn_major"
    steps, blocks = (1, a.scale.shape[0]) if mn_major else (STAGE // BLOCK_SIZE, a.scale.shape[1])
    copies = 4 if mn_major and not k_grouped else 1
    layout, programs, counts = _decoding(
        a_rows if with_rows else 0, b_rows // b.spec.block_mn, blocks, copies, ceil_div(length, STAGE), steps,
        math.prod(experts), DECODE_MN,
    )  # fmt: skip
    counts = *counts, length if k_grouped else a_rows, 0 if offs is None else offs.shape[0]
    buffer = torch.empty(layout.size + 4, dtype=torch.int32, device=a.data.device)
    _decode_scales.launch(
        programs, (a.scale, b.scale, buffer, offs), (0 if mn_major else blocks,), counts,
        (mn_major, steps, k_grouped, DECODE_MN), device=buffer.device,
    )  # fmt: skip
    return Scales(buffer, layout)


@lru_cache(maxsize=1024)
def _decoding(
    rows: int, columns: int, blocks: int, copies: int, stages: int, steps: int, experts: int, mn: int
) -> tuple[ScaleLayout, int, tuple[int, ...]]:
    """Where ``decode_scales`` writes, and the programs, of ``mn`` rows or columns each, and the first counts of its
    launch."""
    # With marks, whole runs, and one more, in which a part that goes on past the last row has its last one: all of its
    # rows that count are in the run before. So no mark depends on how much memory lies behind the last group.
    # Multiples of 4 both: TMA wants the second part to start at 16 bytes too.
    rows_out, columns_out = ceil_to(rows, PART) + PART if steps > 1 else ceil_to(rows, 4), ceil_to(columns, 4)
    row_size, column_rows = copies * stages * rows_out * steps, experts * stages * steps
    if row_size >= 2**31:
        raise ValueError(f"{row_size} row scales, but TMA counts to 2^31: give fewer rows in a call")
    size = row_size + column_rows * columns_out
    layout = ScaleLayout(copies, stages, rows_out, steps, columns_out, column_rows, row_size, size)
    row_programs, column_programs = (
        ceil_div(length, mn) * stages * matrices for length, matrices in ((rows_out, copies), (columns_out, experts))
    )
    counts = row_programs, rows, rows_out, columns, columns_out, blocks, stages, row_size, size
    return layout, row_programs + column_programs, counts
