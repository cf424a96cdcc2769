"""The backend that is the definition: ``format.reference`` quantises, fp32 adds up exact products. Runs anywhere."""

from collections.abc import Iterator

import torch
from torch import Tensor

from titan_mxfp8.backends import Gemm, Plan, SwigluGradients
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.format import reference
from titan_mxfp8.format import swiglu as definition
from titan_mxfp8.format.spec import (
    K_GROUPED_AXES,
    M_GROUPED_AXES,
    UNQUANTIZED,
    Operand,
    OperandSpec,
    check_axes,
    interleave,
    separate,
)
from titan_mxfp8.recipe import Recipe


def plan(recipe: Recipe, hardware: Hardware) -> Plan:
    """FP8 and scales for every GEMM; unquantised bf16 where wgrad is in bf16."""
    x, dy, w = specs(recipe)
    unquantized = Gemm(a=UNQUANTIZED, b=UNQUANTIZED, mma_dtype="bf16")
    if not recipe.quantized:
        return Plan(forward=unquantized, dgrad=unquantized, wgrad=unquantized)
    return Plan(
        forward=Gemm(a=x, b=w, mma_dtype="fp32"),
        dgrad=Gemm(a=dy, b=w, mma_dtype="fp32"),
        wgrad=unquantized if recipe.wgrad == "bf16" else Gemm(a=dy, b=x, mma_dtype="fp32"),
    )


def specs(recipe: Recipe) -> tuple[OperandSpec, OperandSpec, OperandSpec]:
    """Of activations, output gradients and weights, as the recipe defines their values."""
    if not recipe.quantized:
        return UNQUANTIZED, UNQUANTIZED, UNQUANTIZED
    block_k = recipe.block_k
    common = {"rounding": recipe.rounding, "block_k": block_k, "scales": "k_major" if block_k == 32 else "mn_major"}
    squares = recipe.weight_block == "32x32" or block_k == 128
    return (
        OperandSpec(**common),
        OperandSpec(elem_dtype=recipe.grad_dtype, **common),
        OperandSpec(block=recipe.weight_block, block_mn=32 if squares else 1, **common),
    )


quantize = reference.quantize
requantize = reference.requantize
swiglu_gemm_m_grouped = None


def quantize_both(
    x: Tensor, rowwise: OperandSpec, columnwise: OperandSpec, offs: Tensor | None
) -> tuple[Operand, Operand]:
    """``Backend.quantize_both``."""
    of_rows = reference.quantize(x, x.ndim - 1, rowwise, offs if rowwise.grouped_scales else None)
    return of_rows, reference.quantize(x, x.ndim - 2, columnwise, offs)


def gemm_m_grouped(
    a: Operand, b: Operand, offs: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype, zero_tail: bool = True
) -> Tensor:
    """``Backend.gemm_m_grouped``."""
    check_axes(a, b, *M_GROUPED_AXES)
    a_MC, b_EDC = reference.dequantize(a), reference.dequantize(b)
    is_d_major = b.spec.stored == "bf16" and b.axis == 1
    b_ECD = b_EDC if is_d_major else b_EDC.mT
    if offs is None:
        y_MD = a_MC @ b_ECD[0]
        return (y_MD if bias is None else y_MD + bias.float()).to(out_dtype)
    a_MC = a_MC.reshape(-1).view(a_MC.shape)  # torch._grouped_mm heeds the strides of a single row or of none, too
    y_MD = torch._grouped_mm(a_MC, b_ECD, offs=offs)
    row_M = torch.arange(a_MC.shape[0], device=offs.device)
    if bias is not None:
        expert_M = torch.searchsorted(offs, row_M, right=True).clamp(max=offs.numel() - 1)
        y_MD = y_MD + bias.float()[expert_M]
    y_MD = y_MD.to(out_dtype)
    return y_MD.masked_fill_((row_M >= offs[-1])[:, None], 0) if zero_tail else y_MD


def dual_gemm_m_grouped(products: Iterator[tuple[Operand, Operand]], offs: Tensor | None) -> list[Tensor]:
    """``Backend.dual_gemm_m_grouped``."""
    (a, b), (a_2, b_2) = products
    pairs = zip(separate(a, a_2), (b, b_2), strict=True)
    return [gemm_m_grouped(a, b, offs, None, torch.bfloat16, zero_tail=False) for a, b in pairs]


def gemm_k_grouped(
    a: Operand, b: Operand, offs: Tensor | None, out_dtype: torch.dtype, add_to: Tensor | None = None
) -> Tensor:
    """``Backend.gemm_k_grouped``. Unquantised operands are multiplied as they are, in bf16."""
    check_axes(a, b, *K_GROUPED_AXES)
    if not a.spec.is_quantized:
        out_ENK = multiply_bf16(a.data, b.data, offs)
    else:
        a_NM, b_KM = reference.dequantize(a), reference.dequantize(b)
        if a.spec.stored == "bf16":
            a_NM, b_KM = a_NM.mT, b_KM.mT
        if offs is None:
            out_ENK = (a_NM @ b_KM.mT).unsqueeze(0)
        elif a_NM.shape[1] == 0:  # torch._grouped_mm refuses the strides of an empty matrix
            out_ENK = a_NM.new_zeros((offs.shape[0], a_NM.shape[0], b_KM.shape[0]))
        else:
            ends_E = offs if a.spec.stored == "bf16" else reference.padded_ends(offs, a.spec.block_k)
            out_ENK = torch._grouped_mm(a_NM, b_KM.mT, offs=ends_E)
    return out_ENK.to(out_dtype) if add_to is None else add_to.add_(out_ENK)


def swiglu(gate_MH: Tensor, up_MH: Tensor, limit: float | None, spec: OperandSpec, offs: Tensor | None) -> Operand:
    """``Backend.swiglu``."""
    return quantize(definition.forward(gate_MH, up_MH, limit), 1, spec, offs if spec.grouped_scales else None)


def swiglu_backward(
    inputs: list[Tensor], scores_M: Tensor | None, limit: float | None, plan: Plan, offs: Tensor | None
) -> SwigluGradients:
    """``Backend.swiglu_backward``."""
    dgate, dup, sh, dscores = definition.backward(*inputs, scores_M, limit)
    (dgate_rowwise, dgate_columnwise), (dup_rowwise, dup_columnwise) = (
        quantize_both(t, plan.dgrad.a, plan.wgrad.a, offs) for t in (dgate, dup)
    )
    *_, u = inputs
    inputs.clear()
    match plan.in_u(u.shape[1] % 128 == 0):
        case "dgate_dup":
            both = interleave(dgate_rowwise, dup_rowwise)
            data = u.view(dgate_rowwise.data.dtype).copy_(both[0].data)
            dgate_rowwise, dup_rowwise = (x._replace(data=data) for x in both)
        case "dgate":
            dgate_columnwise = dgate_columnwise._replace(data=u.copy_(dgate_columnwise.data))
            if not plan.dgrad.a.is_quantized:
                dgate_rowwise = dgate_rowwise._replace(data=u)
    return SwigluGradients(
        dgate_rowwise, dup_rowwise, dgate_columnwise, dup_columnwise, quantize(sh, 0, plan.wgrad.b, offs), dscores
    )


def multiply_bf16(dy_MN: Tensor, x_MK: Tensor, offs: Tensor | None) -> Tensor:
    """The weight gradient from unquantised bf16 operands: (E, N, K) in bf16, 0 for an empty group."""
    if offs is None:
        return (dy_MN.mT @ x_MK).unsqueeze(0)
    if dy_MN.shape[0] == 0:  # torch._grouped_mm refuses the strides of an empty matrix
        return dy_MN.new_zeros((offs.shape[0], dy_MN.shape[1], x_MK.shape[1]))
    dy_MN, x_MK = (t.reshape(-1).view(t.shape) for t in (dy_MN, x_MK))  # it heeds the strides of a single row too
    dw_ENK = torch._grouped_mm(dy_MN.mT, x_MK, offs=offs)
    empty_E = offs.diff(prepend=offs.new_zeros(1)) == 0  # torch may leave these uninitialised
    return dw_ENK.masked_fill_(empty_E[:, None, None], 0)
