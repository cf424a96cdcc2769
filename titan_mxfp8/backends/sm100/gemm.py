"""GEMMs of torch's own block-scaled kernels: ``torch._scaled_grouped_mm`` and, without groups, ``torch._scaled_mm``.

| GEMM           | a                         | b                      | what torch leaves as it is |
|----------------|---------------------------|------------------------|----------------------------|
| forward, dgrad | (M, C), groups of rows    | (E, C, D)              | rows of no group           |
| wgrad          | (N, P), groups of columns | (P, K), groups of rows | empty groups               |

With groups they give bf16, add no bias and want E4M3 on both sides: a bias is added to rounded products, and fp32
outputs and E5M2 go to the portable kernels.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_mxfp8.backends.common import gemm as portable
from titan_mxfp8.backends.common.gemm_kernels import fill_zeros
from titan_mxfp8.backends.common.groups import map_row_blocks
from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.common.swizzled import swizzle_scales
from titan_mxfp8.backends.hardware import multiprocessors
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import K_GROUPED_AXES, M_GROUPED_AXES, Operand, check_axes
from titan_mxfp8.format.swizzle import unswizzle


def gemm_m_grouped(
    a: Operand, b: Operand, offs: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype, zero_tail: bool = True
) -> Tensor:
    """``Backend.gemm_m_grouped``."""
    check_axes(a, b, *M_GROUPED_AXES)
    if not _is_torchs(a, b, offs, out_dtype):
        a, b = _unswizzled(a, offs), _unswizzled(b, None)
        return portable.gemm_m_grouped(a, b, offs, bias, out_dtype, zero_tail)
    a, b = _swizzled(a, offs), _swizzled(b, None)
    if offs is None:
        own = bias is not None and bias.dtype == out_dtype == torch.bfloat16  # what it adds before it rounds
        b = b._replace(data=b.data[0], scale=b.scale[0])
        out_MD = scaled_mm(a, b, bias[0] if own else None, out_dtype)
        return out_MD if bias is None or own else out_MD.add_(bias[0])
    out_MD = scaled_grouped_mm(a, b, offs)
    finish_rows(out_MD, bias, offs, zero_tail)
    return out_MD


def dual_gemm_m_grouped(products: Iterator[tuple[Operand, Operand]], offs: Tensor | None) -> list[Tensor]:
    """``Backend.dual_gemm_m_grouped``, of each product."""
    return [gemm_m_grouped(a, b, offs, None, torch.bfloat16, zero_tail=False) for a, b in products]


def gemm_k_grouped(
    a: Operand, b: Operand, offs: Tensor | None, out_dtype: torch.dtype, add_to: Tensor | None = None
) -> Tensor:
    """``Backend.gemm_k_grouped``."""
    check_axes(a, b, *K_GROUPED_AXES)
    if not a.spec.is_quantized or add_to is not None or not _is_torchs(a, b, offs, out_dtype):
        return portable.gemm_k_grouped(_unswizzled(a, offs), _unswizzled(b, offs), offs, out_dtype, add_to)
    a, b = _swizzled(a, offs), _swizzled(b, offs)
    if offs is None:
        return scaled_mm(a, b, None, out_dtype)[None]
    tokens = a.data.shape[1]
    padded_offs = map_row_blocks(offs, tokens, 0, alignment=BLOCK_SIZE).padded_offs
    out_ENK = scaled_grouped_mm(a, b, padded_offs)
    zero_empty_groups(out_ENK, offs)
    return out_ENK


def scaled_mm(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """(R, D) of dense operands (R, C) and (D, C)."""
    if a.data.numel() == 0:  # torch refuses the strides of an empty matrix
        return torch.zeros((a.data.shape[0], b.data.shape[0]), dtype=out_dtype, device=a.data.device)
    return torch._scaled_mm(a.data, b.data.mT, _e8m0(a), _e8m0(b), bias=bias, out_dtype=out_dtype)


def scaled_grouped_mm(a: Operand, b: Operand, offs: Tensor) -> Tensor:
    """(M, D) in bf16 of (M, C) and (E, D, C); or (E, N, K) of (N, P) and (K, P), cut by ``offs``."""
    if a.data.numel() == 0:
        groups = offs.shape[:1] if b.data.ndim == 2 else ()
        shape = (*groups, a.data.shape[0], b.data.shape[-2])
        return torch.zeros(shape, dtype=torch.bfloat16, device=a.data.device)
    return torch._scaled_grouped_mm(a.data, b.data.mT, _e8m0(a), _e8m0(b), offs=offs, out_dtype=torch.bfloat16)


def _e8m0(operand: Operand) -> Tensor:
    return operand.scale.view(torch.float8_e8m0fnu)


def _is_torchs(a: Operand, b: Operand, offs: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether torch has a kernel for it."""
    are_e4m3 = a.data.dtype == b.data.dtype == torch.float8_e4m3fn
    return are_e4m3 and (offs is None or out_dtype == torch.bfloat16)


def _swizzled(operand: Operand, offs: Tensor | None) -> Operand:
    return operand if operand.spec.scales == "swizzled" else swizzle_scales(operand, offs)


def _unswizzled(operand: Operand, offs: Tensor | None) -> Operand:
    """For the portable kernels: plain torch, as few operands come here."""
    return unswizzle(operand, offs) if operand.spec.scales == "swizzled" else operand


def finish_rows(out_MD: Tensor, bias_ED: Tensor | None, offs: Tensor, zero_tail: bool) -> None:
    """Adds the bias of its group to each row and, with ``zero_tail``, fills the rows of no group with zeros."""
    rows, features = out_MD.shape
    device, counts = out_MD.device, (rows, offs.shape[0])
    if bias_ED is not None:
        programs = ceil_div(rows, 64) * ceil_div(features, 128)
        _add_bias.launch(programs, (out_MD, bias_ED, offs), (features,), counts, (64, 128, 32), device=device)
    if zero_tail:
        _zero_tail.launch(multiprocessors(device), (out_MD, offs), (features,), counts, (8192,), device=device)


def zero_empty_groups(out_ENK: Tensor, offs: Tensor) -> None:
    """Fills the matrices of groups without tokens with zeros; the others cost a look at ``offs``."""
    size = out_ENK[0].numel()
    programs = offs.shape[0] * min(ceil_div(size, 8192), 64)
    _zero_empty.launch(programs, (out_ENK, offs), (size,), (offs.shape[0],), (8192,), device=out_ENK.device)


@Kernel
@triton.jit(do_not_specialize=["rows", "groups"])
def _add_bias(
    out, bias, offs, features, rows, groups, ROWS: tl.constexpr, COLS: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """One program: ROWS rows of COLS columns."""
    col_tiles = tl.cdiv(features, COLS)
    row = tl.program_id(0) // col_tiles * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) % col_tiles * COLS + tl.arange(0, COLS)
    group = tl.zeros((ROWS,), tl.int32)  # groups that end at or before the row
    for first in range(0, groups, GROUPS):
        g = first + tl.arange(0, GROUPS)
        end = tl.load(offs + g, mask=g < groups, other=0x7FFFFFFF)
        group += tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1)
    inside = ((row < rows) & (group < groups))[:, None] & (col < features)[None, :]
    at = out + row.to(tl.int64)[:, None] * features + col[None, :]
    added = tl.load(bias + group[:, None] * features + col[None, :], mask=inside, other=0.0).to(tl.float32)
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32) + added
    tl.store(at, value.to(out.dtype.element_ty), mask=inside)


@Kernel
@triton.jit(do_not_specialize=["rows", "groups"])
def _zero_tail(out, offs, features, rows, groups, BLOCK: tl.constexpr):
    """Programs take turns at BLOCK elements behind the last group."""
    fill_zeros(out, tl.load(offs + groups - 1).to(tl.int64) * features, rows.to(tl.int64) * features, BLOCK)


@Kernel
@triton.jit(do_not_specialize=["groups"])
def _zero_empty(out, offs, size, groups, BLOCK: tl.constexpr):
    """Programs of one group, one in ``groups``, take turns at BLOCK elements of its matrix if it has no tokens."""
    group = tl.program_id(0) % groups
    start = tl.load(offs + group - 1, mask=group > 0, other=0)
    if tl.load(offs + group) <= start:
        at = tl.program_id(0) // groups * BLOCK
        out += group.to(tl.int64) * size
        while at < size:
            index = at + tl.arange(0, BLOCK)
            tl.store(out + index, tl.zeros((BLOCK,), out.dtype.element_ty), mask=index < size)
            at += tl.num_programs(0) // groups * BLOCK
