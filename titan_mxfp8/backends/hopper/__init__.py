"""NVIDIA SM90 (H100, H200): Gluon GEMMs whose tensor cores multiply FP8 and know no scales.

| recipe               | forward, dgrad                                                              | wgrad          |
|----------------------|-----------------------------------------------------------------------------|----------------|
| exact, 1x32 weights  | the quantised values in bf16 (QDQ)                                          | bf16           |
| exact, 32x32 weights | FP8 coalesced: sums scaled per 64 or 128 where scales can be equal, else 32  | bf16           |
| rebased              | FP8, sums scaled per 128                                                    | FP8, per 128   |

Values in bf16 go to the portable GEMMs (``common.gemm``). With 1x32 blocks on both sides, sums of 32 would need two
FP32 instructions each, and scales could be equal in far fewer places.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from triton import knobs

from titan_mxfp8.backends import Gemm, Plan, SwigluGradients, reference, triton
from titan_mxfp8.backends.common import gemm as portable
from titan_mxfp8.backends.common import quantizers
from titan_mxfp8.backends.common import swiglu as portable_swiglu
from titan_mxfp8.backends.common.quantizers import quantize, quantize_both
from titan_mxfp8.backends.common.swiglu import swiglu
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.backends.hopper import gemm, requantize_rows, swiglu_gemm, swiglu_gradients
from titan_mxfp8.format.spec import K_GROUPED_AXES, M_GROUPED_AXES, Operand, OperandSpec, check_axes
from titan_mxfp8.logs import log_once
from titan_mxfp8.recipe import Recipe

logger = logging.getLogger(__name__)

__all__ = ["plan", "quantize", "quantize_both", "requantize", "swiglu", "swiglu_backward"]
__all__ += ["dual_gemm_m_grouped", "gemm_k_grouped", "gemm_m_grouped", "swiglu_gemm_m_grouped"]


def plan(recipe: Recipe, hardware: Hardware) -> Plan:
    """``Backend.plan``: the table above."""
    fp8 = reference.plan(recipe, hardware)
    if recipe.block_k == 128:
        return fp8.map(triton.in_fp8)
    if recipe.weight_block == "32x32":
        return Plan(forward=_coalesced(fp8.forward), dgrad=_coalesced(fp8.dgrad), wgrad=triton.in_bf16(fp8.wgrad))
    return fp8.map(triton.in_bf16)


def _coalesced(gemm: Gemm) -> Gemm:
    return Gemm(a=replace(gemm.a, stored="coalesced"), b=replace(gemm.b, stored="coalesced"), mma_dtype="FP8")


def requantize(
    rows: Operand, axis: int, spec: OperandSpec, offs: Tensor | None, places: Tensor | None = None
) -> Operand:
    """``Backend.requantize``: rebased rows along the tokens by a kernel of their own, where Triton compiles."""
    if axis == 0 and not knobs.runtime.interpret and requantize_rows.takes(rows, spec):
        return requantize_rows.requantize(rows, spec, offs, places)
    return quantizers.requantize(rows, axis, spec, offs, places)


def swiglu_backward(
    inputs: list[Tensor], scores_M: Tensor | None, limit: float | None, plan: Plan, offs: Tensor | None
) -> SwigluGradients:
    """``Backend.swiglu_backward``: rebased gradients by one kernel, or where Triton interprets, which cannot run it, by
    the definition."""
    if any(spec.block_k == 32 for spec in (plan.dgrad.a, plan.wgrad.a, plan.wgrad.b)):
        kernels = portable_swiglu
    else:
        kernels = reference if knobs.runtime.interpret else swiglu_gradients
    return kernels.swiglu_backward(inputs, scores_M, limit, plan, offs)


def gemm_m_grouped(
    a: Operand, b: Operand, offs: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype, zero_tail: bool = True
) -> Tensor:
    """``Backend.gemm_m_grouped``. FP8 of 1x32 blocks by 1x32 ones, as of activations that came quantised, goes through
    bf16. Raises ValueError: blocks of ``a`` and ``b`` that do not belong together."""
    kernels = gemm if _is_fp8(a, b) else portable
    return kernels.gemm_m_grouped(a, b, offs, bias, out_dtype, zero_tail)


def dual_gemm_m_grouped(products: Iterator[tuple[Operand, Operand]], offs: Tensor | None) -> list[Tensor]:
    """``Backend.dual_gemm_m_grouped``: one sum. Raises ValueError as ``gemm_m_grouped``."""
    first, second = products
    if not _is_fp8(*first):
        return [portable.multiply_m_grouped(*first, offs, None, torch.bfloat16, "bf16_tma", None, False, second)]
    return [gemm.gemm_m_grouped(*first, offs, None, torch.bfloat16, zero_tail=False, second=second)]


def swiglu_gemm_m_grouped(
    a: Operand,
    w1: Operand,
    w3: Operand,
    biases: tuple[Tensor | None, Tensor | None],
    limit: float | None,
    spec: OperandSpec,
    offs: Tensor | None,
) -> tuple[Tensor, Tensor, Operand] | None:
    """``Backend.swiglu_gemm_m_grouped`` of rebased operands, without biases or a limit, where features are whole blocks
    of 128. The log says, once, where it was used and where not."""
    hidden = w1.data.shape[1]
    obstacles = {
        "their operands are not rebased": spec.block_k != 128 or not _is_fp8(a, w1),
        "their SwiGLU is clamped": limit is not None,
        "they have biases": biases != (None, None),
        "these are not whole blocks of 128": hidden % 128 != 0,
    }
    obstacle = next((reason for reason, holds in obstacles.items() if holds), "")
    own = f"in a kernel of its own, as {obstacle}" if obstacle else "in the GEMM that makes its inputs"
    log_once(logger, f"MXFP8: SwiGLU of experts with {hidden} hidden features is computed {own}")
    return None if obstacle else swiglu_gemm.swiglu_gemm(a, w1, w3, spec, offs)


def _is_fp8(a: Operand, b: Operand) -> bool:
    """Whether FP8 tensor cores multiply them. Raises ValueError of blocks that do not belong together."""
    check_axes(a, b, *M_GROUPED_AXES)
    blocks = a.spec.scale_block, b.spec.scale_block
    if "bf16" in (a.spec.stored, b.spec.stored) or blocks == ("1x32", "1x32"):
        return False
    if blocks not in (("1x32", "32x32"), ("1x128", "32x128")):
        raise ValueError(
            f"cannot multiply blocks of {blocks[0]} by blocks of {blocks[1]}: quantise both operands as plan() says"
        )
    return True


def gemm_k_grouped(
    a: Operand, b: Operand, offs: Tensor | None, out_dtype: torch.dtype, add_to: Tensor | None = None
) -> Tensor:
    """``Backend.gemm_k_grouped``. FP8 that is not rebased goes through bf16, as on other tensor cores. Raises
    ValueError: only one operand is rebased."""
    check_axes(a, b, *K_GROUPED_AXES)
    if a.spec.block_k != b.spec.block_k:
        raise ValueError(
            f"cannot multiply blocks of {a.spec.scale_block} by blocks of {b.spec.scale_block}: quantise both operands "
            "as plan() says"
        )
    return (portable if a.spec.block_k == 32 else gemm).gemm_k_grouped(a, b, offs, out_dtype, add_to)
