"""NVIDIA SM90 (H100, H200): Gluon GEMMs whose tensor cores multiply FP8 and know no scales.

| recipe               | forward, dgrad                                                              | wgrad          |
|----------------------|-----------------------------------------------------------------------------|----------------|
| exact, 1x32 weights  | the values in bf16                                                          | bf16           |
| exact, 32x32 weights | FP8 coalesced: sums scaled per 64 or 128 where scales can be equal, else 32  | bf16           |
| rebased              | FP8, sums scaled per 128                                                    | FP8, per 128   |

Values in bf16 go to the portable GEMMs (``common.gemm``). With 1x32 blocks on both sides, sums of 32 would need two
FP32 instructions each, and scales could be equal in far fewer places.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from titan_mxfp8.backends import Gemm, Plan, SwigluGradients, reference, triton
from titan_mxfp8.backends.common import gemm as portable
from titan_mxfp8.backends.common import swiglu as fused
from titan_mxfp8.backends.common.dequantize import dequantize
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.backends.hopper import gemm
from titan_mxfp8.backends.hopper import quantize as hopper
from titan_mxfp8.format.spec import Operand, OperandSpec, check_k_grouped, check_m_grouped
from titan_mxfp8.recipe import Recipe

swiglu = fused.swiglu


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


def quantize(x: torch.Tensor, axis: int, spec: OperandSpec, offs: torch.Tensor | None) -> Operand:
    """``Backend.quantize``."""
    return (hopper if _is_own(spec) else triton).quantize(x, axis, spec, offs)


def requantize(rows: Operand, axis: int, spec: OperandSpec, offs: torch.Tensor | None) -> Operand:
    """``Backend.requantize``."""
    if not _is_own(spec):
        return triton.requantize(rows, axis, spec, offs)
    if axis == 1:
        values = dequantize(rows, torch.float32)
        return quantize(values, 1, replace(spec, rounding="rceil"), None)._replace(spec=spec)
    return hopper.requantize(rows, spec, offs)


def quantize_both(
    x: torch.Tensor, last: OperandSpec, first: OperandSpec, offs: torch.Tensor | None
) -> tuple[Operand, Operand]:
    """``Backend.quantize_both``."""
    if last == first and _is_own(last):
        return hopper.quantize_both(x, last, first, offs)
    if not _is_own(last) and not _is_own(first):
        return triton.quantize_both(x, last, first, offs)
    return quantize(x, x.ndim - 1, last, None), quantize(x, x.ndim - 2, first, offs)  # nothing makes both in one read


def _is_own(spec: OperandSpec) -> bool:
    """Whether the quantisers of this folder make it, not the portable ones."""
    return spec.stored == "coalesced" or spec.block_k == 128


def gemm_m_grouped(
    a: Operand,
    b: Operand,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    zero_tail: bool = True,
) -> torch.Tensor:
    """``Backend.gemm_m_grouped``. FP8 of 1x32 blocks by 1x32 ones, as of activations that came quantised, goes through
    bf16.

    Raises:
        ValueError: blocks of ``a`` and ``b`` that do not belong together.
    """
    kernels = gemm if _is_fp8(a, b) else portable
    return kernels.gemm_m_grouped(a, b, offs, bias, out_dtype, zero_tail)


def dual_gemm_m_grouped(products: Iterator[tuple[Operand, Operand]], offs: torch.Tensor | None) -> list[torch.Tensor]:
    """``Backend.dual_gemm_m_grouped``: one sum.

    Raises:
        ValueError: as ``gemm_m_grouped``.
    """
    first, second = products
    if not _is_fp8(*first):
        return [portable.dual_gemm_m_grouped(first, second, offs)]
    return [gemm.gemm_m_grouped(*first, offs, None, torch.bfloat16, zero_tail=False, plus=second)]


def _is_fp8(a: Operand, b: Operand) -> bool:
    """Whether FP8 tensor cores multiply them. Raises ValueError of blocks that do not belong together."""
    check_m_grouped(a, b)
    blocks = a.spec.scale_block, b.spec.scale_block
    if "bf16" in (a.spec.stored, b.spec.stored) or blocks == ("1x32", "1x32"):
        return False
    if blocks not in (("1x32", "32x32"), ("1x128", "32x128")):
        raise ValueError(
            f"cannot multiply blocks of {blocks[0]} by blocks of {blocks[1]}: quantise both operands as plan() says"
        )
    return True


def gemm_k_grouped(a: Operand, b: Operand, offs: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """``Backend.gemm_k_grouped``. FP8 that is not rebased goes through bf16, as on other tensor cores.

    Raises:
        ValueError: only one operand is rebased.
    """
    check_k_grouped(a, b)
    if a.spec.block_k != b.spec.block_k:
        raise ValueError(
            f"cannot multiply blocks of {a.spec.scale_block} by blocks of {b.spec.scale_block}: quantise both operands "
            "as plan() says"
        )
    return (portable if a.spec.block_k == 32 else gemm).gemm_k_grouped(a, b, offs, out_dtype)


def swiglu_backward(
    inputs: list[torch.Tensor],
    scores_M: torch.Tensor | None,
    limit: float | None,
    last: OperandSpec,
    first: OperandSpec,
    h_first: OperandSpec,
    offs: torch.Tensor | None,
) -> SwigluGradients:
    """``Backend.swiglu_backward``. What is rebased along both axes goes through bf16: on an H200, 131072 x 2048, one
    kernel that made everything from the three inputs took 3.4 ms."""
    if first.block_k != 128:
        return fused.swiglu_backward(inputs, scores_M, limit, last, first, h_first, offs)
    dgate, dup, sh, dscores = fused.gradients(inputs, scores_M, limit, offs)
    dgate_rowwise, dgate_columnwise = hopper.quantize_groups(dgate, last, first, offs)
    del dgate
    dup_rowwise, dup_columnwise = hopper.quantize_groups(dup, last, first, offs)
    del dup
    _, sh_columnwise = hopper.quantize_groups(sh, None, h_first, offs)
    return SwigluGradients(dgate_rowwise, dup_rowwise, dgate_columnwise, dup_columnwise, sh_columnwise, dscores)
