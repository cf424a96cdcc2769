"""The backends' functions as custom operators, so that ``torch.compile`` and activation checkpointing see them, and the
same functions on ``MXTensor``.

An operator returns quantised tensors as they lie in memory, FP8 with the quantised axis last; the functions below it
put the axis back as a view. So the fakes need to know shapes, and of the backend only its ``operand_dtype``.
"""

from dataclasses import replace

import torch

from titan_mxfp8 import backends
from titan_mxfp8.format.mx import BLOCK_SIZE, Block, MXTensor, Rounding, ceil_div, ragged_rows
from titan_mxfp8.ops.checks import check_axis, check_offs_values


@torch.library.custom_op("titan_mxfp8::quantize", mutates_args=())
def _quantize(
    x: torch.Tensor,
    axis: int,
    rounding: str,
    elem_dtype: torch.dtype,
    block: str,
    offs: torch.Tensor | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_offs_values(offs, x.shape[axis])
    kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "block": block, "offs": offs}
    return _stored(backends.load(backend, x.device).quantize(x, axis, **kwargs))


@_quantize.register_fake
def _(x, axis, rounding, elem_dtype, block, offs, backend):
    return _empty_stored(x, axis, elem_dtype, block, offs)


@torch.library.custom_op("titan_mxfp8::quantize_operand", mutates_args=())
def _quantize_operand(
    x: torch.Tensor,
    axis: int,
    rounding: str,
    elem_dtype: torch.dtype,
    block: str,
    offs: torch.Tensor | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_offs_values(offs, x.shape[axis])
    kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "block": block, "offs": offs}
    return _stored(backends.load(backend, x.device).quantize_operand(x, axis, **kwargs))


@_quantize_operand.register_fake
def _(x, axis, rounding, elem_dtype, block, offs, backend):
    return _empty_stored(x, axis, _operand_dtype(x, elem_dtype, backend), block, offs)


@torch.library.custom_op("titan_mxfp8::quantize_operand_both", mutates_args=())
def _quantize_operand_both(
    x: torch.Tensor, rounding: str, elem_dtype: torch.dtype, block: str, offs: torch.Tensor | None, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    check_offs_values(offs, x.shape[-2])
    kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "block": block, "offs": offs}
    last, first = backends.load(backend, x.device).quantize_operand_both(x, **kwargs)
    return *_stored(last), *_stored(first)


@_quantize_operand_both.register_fake
def _(x, rounding, elem_dtype, block, offs, backend):
    dtype = _operand_dtype(x, elem_dtype, backend)
    return (
        *_empty_stored(x, x.ndim - 1, dtype, block, None),
        *_empty_stored(x, x.ndim - 2, dtype, block, offs),
    )


@torch.library.custom_op("titan_mxfp8::gemm_m_grouped", mutates_args=())
def _gemm_m_grouped(
    a_qdata: torch.Tensor,
    a_scale: torch.Tensor,
    b_qdata: torch.Tensor,
    b_scale: torch.Tensor,
    b_block: str,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    check_offs_values(offs, a_qdata.shape[0])
    a = MXTensor(a_qdata, a_scale, 1, "1x32", out_dtype)
    b = MXTensor(b_qdata, b_scale, 1, b_block, out_dtype)
    # An autocast region would run the reference's fp32 matmuls in bf16.
    with torch.autocast(a_qdata.device.type, enabled=False):
        return backends.load(backend, a_qdata.device).gemm_m_grouped(a, b, offs, bias=bias, out_dtype=out_dtype)


@_gemm_m_grouped.register_fake
def _(a_qdata, a_scale, b_qdata, b_scale, b_block, offs, bias, out_dtype, backend):
    return a_qdata.new_empty((a_qdata.shape[0], b_qdata.shape[2]), dtype=out_dtype)


@torch.library.custom_op("titan_mxfp8::gemm_k_grouped", mutates_args=())
def _gemm_k_grouped(
    a_qdata: torch.Tensor,
    a_scale: torch.Tensor,
    b_qdata: torch.Tensor,
    b_scale: torch.Tensor,
    offs: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    check_offs_values(offs, None)
    a = MXTensor(a_qdata, a_scale, 1, "1x32", out_dtype)
    b = MXTensor(b_qdata, b_scale, 0, "1x32", out_dtype)
    with torch.autocast(a_qdata.device.type, enabled=False):
        return backends.load(backend, a_qdata.device).gemm_k_grouped(a, b, offs, out_dtype=out_dtype)


@_gemm_k_grouped.register_fake
def _(a_qdata, a_scale, b_qdata, b_scale, offs, out_dtype, backend):
    groups = 1 if offs is None else offs.shape[0]
    return a_qdata.new_empty((groups, a_qdata.shape[0], b_qdata.shape[1]), dtype=out_dtype)


def quantize(
    x: torch.Tensor,
    axis: int,
    *,
    rounding: Rounding,
    elem_dtype: torch.dtype,
    block: Block,
    offs: torch.Tensor | None,
    backend: str,
) -> MXTensor:
    """``format.reference.quantize`` through the chosen backend."""
    return _from_stored(*_quantize(x, axis, rounding, elem_dtype, block, offs, backend), axis, block, x.dtype)


def quantize_operand(
    x: torch.Tensor,
    axis: int,
    *,
    rounding: Rounding,
    elem_dtype: torch.dtype,
    block: Block,
    offs: torch.Tensor | None,
    backend: str,
) -> MXTensor:
    """``quantize`` for the GEMMs of this backend: FP8, or the dequantised values where it multiplies those."""
    return _from_stored(*_quantize_operand(x, axis, rounding, elem_dtype, block, offs, backend), axis, block, x.dtype)


def quantize_operand_both(
    x: torch.Tensor,
    *,
    rounding: Rounding,
    elem_dtype: torch.dtype,
    block: Block,
    offs: torch.Tensor | None,
    backend: str,
) -> tuple[MXTensor, MXTensor]:
    """``format.reference.quantize_both`` for the GEMMs of this backend."""
    if block == "32x32" and _operand_dtype(x, elem_dtype, backend) == torch.bfloat16:
        # Both would hold the same values in the same order.
        kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "block": block, "offs": offs, "backend": backend}
        last = quantize_operand(x, x.ndim - 1, **kwargs)
        return last, replace(last, axis=x.ndim - 2)
    last_q, last_s, first_q, first_s = _quantize_operand_both(x, rounding, elem_dtype, block, offs, backend)
    return (
        _from_stored(last_q, last_s, x.ndim - 1, block, x.dtype),
        _from_stored(first_q, first_s, x.ndim - 2, block, x.dtype),
    )


def gemm_m_grouped(
    a: MXTensor,
    b: MXTensor,
    offs: torch.Tensor | None,
    *,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    """``format.reference.gemm_m_grouped`` through the chosen backend.

    Raises:
        ValueError: an operand that was not quantised along the contraction axis.
    """
    check_axis("a", a, 1)
    check_axis("b", b, 1)
    return _gemm_m_grouped(a.qdata, a.scale, b.qdata, b.scale, b.block, offs, bias, out_dtype, backend)


def gemm_k_grouped(
    a: MXTensor, b: MXTensor, offs: torch.Tensor | None, *, out_dtype: torch.dtype, backend: str
) -> torch.Tensor:
    """``format.reference.gemm_k_grouped`` through the chosen backend.

    Raises:
        ValueError: an operand that was not quantised along the contraction axis.
    """
    check_axis("a", a, 1)
    check_axis("b", b, 0)
    return _gemm_k_grouped(a.qdata, a.scale, b.qdata, b.scale, offs, out_dtype, backend)


@torch.compiler.assume_constant_result
def _operand_dtype(x: torch.Tensor, elem_dtype: torch.dtype, backend: str) -> torch.dtype:
    return backends.load(backend, x.device).operand_dtype(elem_dtype, x.device)


def _stored(mx: MXTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """qdata and scale as they lie in memory."""
    if mx.is_dequantized:
        return mx.qdata, mx.scale
    return mx.qdata.movedim(mx.axis, -1), mx.scale.movedim(mx.axis, -1)


def _from_stored(
    qdata: torch.Tensor, scale: torch.Tensor, axis: int, block: Block, orig_dtype: torch.dtype
) -> MXTensor:
    if qdata.dtype != torch.bfloat16:
        qdata, scale = qdata.movedim(-1, axis), scale.movedim(-1, axis)
    return MXTensor(qdata, scale, axis, block, orig_dtype)


def _empty_stored(
    x: torch.Tensor, axis: int, dtype: torch.dtype, block: Block, offs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty qdata of ``dtype`` and scale as they lie in memory."""
    if dtype == torch.bfloat16:
        return x.new_empty(x.shape, dtype=dtype), x.new_empty(0, dtype=torch.uint8)
    *rest, length = x.movedim(axis, -1).shape
    if offs is not None:
        length = ragged_rows(length, offs.shape[0])
    scale_rest = [*rest[:-1], ceil_div(rest[-1], BLOCK_SIZE)] if block == "32x32" else rest
    return (
        x.new_empty((*rest, length), dtype=dtype),
        x.new_empty((*scale_rest, ceil_div(length, BLOCK_SIZE)), dtype=torch.uint8),
    )
