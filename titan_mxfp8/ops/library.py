"""The backends' functions as custom operators, so that ``torch.compile`` and activation checkpointing see them, and the
same functions on ``MXTensor``.

An operator returns quantised tensors as they lie in memory, FP8 with the quantised axis last; the functions below it
put the axis back as a view. A ``form`` (``format.mx.Form``) is all that the fakes need to know beside shapes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import register_flop_formula

from titan_mxfp8 import backends
from titan_mxfp8.format.mx import (
    BLOCK_SIZE,
    REBASED,
    REBASED_SIZE,
    SQUARES,
    Block,
    Form,
    MXTensor,
    Rounding,
    ceil_div,
    ragged_rows,
    stored_across,
)
from titan_mxfp8.ops.checks import check_axis, check_offs_values

_LIBRARY = torch.library.Library("titan_mxfp8", "FRAGMENT")


def _operator(function: Callable[..., object]) -> OpOverload:
    """Makes ``function``, whose name begins with an underscore, an operator of that name without it.

    As ``torch.library.custom_op`` does, without its checks on each call, which take time. Nothing differentiates these
    operators: ``autograd.Function``s call them.
    """
    name = function.__name__.removeprefix("_")
    schema = torch.library.infer_schema(function, mutates_args=())
    _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.titan_mxfp8, name).default


@_operator
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


@torch.library.register_fake(_quantize)
def _(x, axis, rounding, elem_dtype, block, offs, backend):
    return _empty_stored(x, axis, elem_dtype, block, offs, "mx")


@_operator
def _quantize_operand(
    x: torch.Tensor,
    axis: int,
    rounding: str,
    elem_dtype: torch.dtype,
    block: str,
    offs: torch.Tensor | None,
    form: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_offs_values(offs, x.shape[axis])
    kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "block": block, "offs": offs, "form": form}
    return _stored(backends.load(backend, x.device).quantize_operand(x, axis, **kwargs))


@torch.library.register_fake(_quantize_operand)
def _(x, axis, rounding, elem_dtype, block, offs, form, backend):
    return _empty_stored(x, axis, elem_dtype, block, offs, form)


@_operator
def _quantize_operand_both(
    x: torch.Tensor,
    rounding: str,
    elem_dtype: torch.dtype,
    block: str,
    offs: torch.Tensor | None,
    last_form: str,
    first_form: str,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    check_offs_values(offs, x.shape[-2])
    kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "block": block, "offs": offs}
    last, first = backends.load(backend, x.device).quantize_operand_both(x, forms=(last_form, first_form), **kwargs)
    return *_stored(last), *_stored(first)


@torch.library.register_fake(_quantize_operand_both)
def _(x, rounding, elem_dtype, block, offs, last_form, first_form, backend):
    return (
        *_empty_stored(x, x.ndim - 1, elem_dtype, block, None, last_form),
        *_empty_stored(x, x.ndim - 2, elem_dtype, block, offs, first_form),
    )


@_operator
def _gemm_m_grouped(
    a_qdata: torch.Tensor,
    a_scale: torch.Tensor,
    b_qdata: torch.Tensor,
    b_scale: torch.Tensor,
    a_block: str,
    b_block: str,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    check_offs_values(offs, a_qdata.shape[0])
    a = MXTensor(a_qdata, a_scale, 1, a_block, out_dtype)
    b = MXTensor(b_qdata, b_scale, 1, b_block, out_dtype)
    # An autocast region would run the reference's fp32 matmuls in bf16.
    with torch.autocast(a_qdata.device.type, enabled=False):
        return backends.load(backend, a_qdata.device).gemm_m_grouped(a, b, offs, bias=bias, out_dtype=out_dtype)


@torch.library.register_fake(_gemm_m_grouped)
def _(a_qdata, a_scale, b_qdata, b_scale, a_block, b_block, offs, bias, out_dtype, backend):
    return a_qdata.new_empty((a_qdata.shape[0], b_qdata.shape[2]), dtype=out_dtype)


@_operator
def _gemm_k_grouped(
    a_qdata: torch.Tensor,
    a_scale: torch.Tensor,
    b_qdata: torch.Tensor,
    b_scale: torch.Tensor,
    block: str,
    offs: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    check_offs_values(offs, None)
    a = MXTensor(a_qdata, a_scale, 1, block, out_dtype)
    b = MXTensor(b_qdata, b_scale, 0, block, out_dtype)
    with torch.autocast(a_qdata.device.type, enabled=False):
        return backends.load(backend, a_qdata.device).gemm_k_grouped(a, b, offs, out_dtype=out_dtype)


@torch.library.register_fake(_gemm_k_grouped)
def _(a_qdata, a_scale, b_qdata, b_scale, block, offs, out_dtype, backend):
    groups = 1 if offs is None else offs.shape[0]
    return a_qdata.new_empty((groups, a_qdata.shape[0], b_qdata.shape[1]), dtype=out_dtype)


@_operator
def _wgrad_bf16(dy_MN: torch.Tensor, x_MK: torch.Tensor, offs: torch.Tensor | None, backend: str) -> torch.Tensor:
    check_offs_values(offs, dy_MN.shape[0])
    with torch.autocast(dy_MN.device.type, enabled=False):
        return backends.load(backend, dy_MN.device).wgrad_bf16(dy_MN.contiguous(), x_MK.contiguous(), offs)


@torch.library.register_fake(_wgrad_bf16)
def _(dy_MN, x_MK, offs, backend):
    groups = 1 if offs is None else offs.shape[0]
    return dy_MN.new_empty((groups, dy_MN.shape[1], x_MK.shape[1]))


# What torch's FLOP counter, and the AC modes that weigh by it, know of the GEMMs: two for each product of elements, as
# if every row belonged to a group; nothing for the scales.
@register_flop_formula([torch.ops.titan_mxfp8.gemm_m_grouped, torch.ops.titan_mxfp8.gemm_k_grouped])
def _(a_shape, a_scale_shape, b_shape, *args, **kwargs) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[-1]


@register_flop_formula(torch.ops.titan_mxfp8.wgrad_bf16)
def _(dy_shape, x_shape, *args, **kwargs) -> int:
    return 2 * dy_shape[0] * dy_shape[1] * x_shape[1]


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


@torch.compiler.assume_constant_result
def operand_forms(
    gemm: Literal["m_grouped", "k_grouped"], weight_block: Block, rebase: bool, device: torch.device, backend: str
) -> tuple[Form, Form]:
    """``format.reference.operand_forms`` of the chosen backend.

    Raises:
        ValueError: ``rebase`` with a backend that cannot.
    """
    backends.select(backend, device, rebase)
    return backends.load(backend, device).operand_forms(gemm, weight_block, rebase, device)


def quantize_operand(
    x: torch.Tensor,
    axis: int,
    *,
    rounding: Rounding,
    elem_dtype: torch.dtype,
    block: Block,
    offs: torch.Tensor | None,
    form: Form,
    backend: str,
    changed: torch.Tensor | None = None,
) -> MXTensor:
    """``format.reference.quantize_operand`` through the chosen backend; not as an operator where ``changed`` counts."""
    if changed is not None:
        kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "block": block, "offs": offs, "form": form}
        return backends.load(backend, x.device).quantize_operand(x, axis, changed=changed, **kwargs)
    stored = _quantize_operand(x, axis, rounding, elem_dtype, block, offs, form, backend)
    return _from_stored(*stored, axis, _block(block, form), x.dtype)


def quantize_operand_both(
    x: torch.Tensor,
    *,
    rounding: Rounding,
    elem_dtype: torch.dtype,
    block: Block,
    offs: torch.Tensor | None,
    forms: tuple[Form, Form],
    backend: str,
    changed: torch.Tensor | None = None,
) -> tuple[MXTensor, MXTensor]:
    """``format.reference.quantize_operand_both`` through the chosen backend; likewise."""
    kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "block": block, "offs": offs}
    if changed is not None:
        return backends.load(backend, x.device).quantize_operand_both(x, forms=forms, changed=changed, **kwargs)
    if block == "32x32" and forms == ("bf16", "bf16"):  # both would hold the same values in the same order
        last = quantize_operand(x, x.ndim - 1, form="bf16", backend=backend, **kwargs)
        return last, replace(last, axis=x.ndim - 2)
    stored = _quantize_operand_both(x, rounding, elem_dtype, block, offs, *forms, backend)
    return (
        _from_stored(*stored[:2], x.ndim - 1, _block(block, forms[0]), x.dtype),
        _from_stored(*stored[2:], x.ndim - 2, _block(block, forms[1]), x.dtype),
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
    return _gemm_m_grouped(a.qdata, a.scale, b.qdata, b.scale, a.block, b.block, offs, bias, out_dtype, backend)


def gemm_k_grouped(
    a: MXTensor, b: MXTensor, offs: torch.Tensor | None, *, out_dtype: torch.dtype, backend: str
) -> torch.Tensor:
    """``format.reference.gemm_k_grouped`` through the chosen backend.

    Raises:
        ValueError: an operand that was not quantised along the contraction axis.
    """
    check_axis("a", a, 1)
    check_axis("b", b, 0)
    return _gemm_k_grouped(a.qdata, a.scale, b.qdata, b.scale, a.block, offs, out_dtype, backend)


def wgrad_bf16(dy_MN: torch.Tensor, x_MK: torch.Tensor, offs: torch.Tensor | None, *, backend: str) -> torch.Tensor:
    """``format.reference.wgrad_bf16`` through the chosen backend, of operands that are rounded to bf16."""
    return _wgrad_bf16(dy_MN.bfloat16(), x_MK.bfloat16(), offs, backend)


def _stored(mx: MXTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """qdata and scale as they lie in memory."""
    if mx.is_dequantized or mx.axis == mx.qdata.ndim - 1:
        return mx.qdata, mx.scale
    return mx.qdata.movedim(mx.axis, -1), mx.scale.movedim(mx.axis, -1)


def _from_stored(
    qdata: torch.Tensor, scale: torch.Tensor, axis: int, block: Block, orig_dtype: torch.dtype
) -> MXTensor:
    if qdata.dtype != torch.bfloat16 and axis != qdata.ndim - 1:
        qdata, scale = qdata.movedim(-1, axis), scale.movedim(-1, axis)
    return MXTensor(qdata, scale, axis, block, orig_dtype)


def _block(block: Block, form: Form) -> Block:
    """What blocks of ``block`` are in this form."""
    return form if form in REBASED else block


def _empty_stored(
    x: torch.Tensor, axis: int, elem_dtype: torch.dtype, block: Block, offs: torch.Tensor | None, form: Form
) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty qdata and scale as they lie in memory."""
    if form == "bf16":
        return x.new_empty(x.shape, dtype=torch.bfloat16), x.new_empty(0, dtype=torch.uint8)
    *rest, length = x.movedim(axis, -1).shape
    per_scale = REBASED_SIZE if form in REBASED else BLOCK_SIZE
    if offs is not None:
        length = ragged_rows(length, offs.shape[0], per_scale)
    qdata = x.new_empty((*rest, length), dtype=elem_dtype)
    if _block(block, form) in SQUARES:
        rest[-1] = ceil_div(rest[-1], BLOCK_SIZE)
    shape = *rest, ceil_div(length, per_scale)
    if form in ("mx", "even"):
        return qdata, x.new_empty(shape, dtype=torch.uint8)
    return qdata, x.new_empty(stored_across(*shape), dtype=torch.uint8).narrow(-1, 0, rest[-1]).mT
