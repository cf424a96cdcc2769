"""NVIDIA SM100 (B200, GB200): torch's block-scaled GEMMs, on scales that quantisers and SwiGLU write as they read them.

Operands of E4M3 have swizzled scales (``format.swizzle``). E5M2 gradients, which torch's grouped kernels do not take,
keep scales in rows, and their GEMMs are the portable ones. Never run on this hardware: see tests/README.md for what
holds it to the reference without.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from titan_mxfp8.backends import Gemm, Plan, SwigluGradients, triton
from titan_mxfp8.backends.common.dequantize import dequantize
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.backends.sm100 import gemm
from titan_mxfp8.backends.sm100 import quantize as swizzled
from titan_mxfp8.backends.sm100 import swiglu as fused
from titan_mxfp8.format.spec import Operand, OperandSpec
from titan_mxfp8.format.swizzle import unswizzle
from titan_mxfp8.recipe import Recipe

gemm_m_grouped = gemm.gemm_m_grouped
gemm_k_grouped = gemm.gemm_k_grouped


def plan(recipe: Recipe, hardware: Hardware) -> Plan:
    """``Backend.plan``: ``triton``'s, E4M3 with swizzled scales."""
    return triton.plan(recipe, hardware).map(_blocked)


def _blocked(gemm: Gemm) -> Gemm:
    if any(spec.elem_dtype != torch.float8_e4m3fn for spec in (gemm.a, gemm.b)):
        return gemm
    return replace(gemm, **{name: replace(getattr(gemm, name), block_mn=1, scales="swizzled") for name in ("a", "b")})


def quantize(x: torch.Tensor, axis: int, spec: OperandSpec, offs: torch.Tensor | None) -> Operand:
    """``Backend.quantize``."""
    return (swizzled if spec.scales == "swizzled" else triton).quantize(x, axis, spec, offs)


def quantize_both(
    x: torch.Tensor, last: OperandSpec, first: OperandSpec, offs: torch.Tensor | None
) -> tuple[Operand, Operand]:
    """``Backend.quantize_both``."""
    if last != first:
        rows = offs if last.grouped_scales else None
        return quantize(x, x.ndim - 1, last, rows), quantize(x, x.ndim - 2, first, offs)
    if last.scales == "swizzled":
        return swizzled.quantize_both(x, last, offs)
    return triton.quantize_both(x, last, first, offs)


def requantize(rows: Operand, axis: int, spec: OperandSpec, offs: torch.Tensor | None) -> Operand:
    """``Backend.requantize``. Along their own axis rows that are rounded alike keep their elements and scales."""
    if rows.spec.scales == "swizzled":
        rows = unswizzle(rows, offs)
    if spec.scales != "swizzled":
        return triton.requantize(rows, axis, spec, offs if axis == 0 else None)
    if axis == 0:
        return swizzled.requantize(rows, spec, offs)
    if rows.spec == _in_rows(spec):
        return swizzled.swizzle_scales(rows, offs)
    return swizzled.quantize(dequantize(rows, torch.float32), 1, spec, offs)


def dual_gemm_m_grouped(products: Iterator[tuple[Operand, Operand]], offs: torch.Tensor | None) -> list[torch.Tensor]:
    """``Backend.dual_gemm_m_grouped``, of each product."""
    return [gemm_m_grouped(a, b, offs, None, torch.bfloat16, zero_tail=False) for a, b in products]


def swiglu(
    gate_MH: torch.Tensor, up_MH: torch.Tensor, limit: float | None, spec: OperandSpec, offs: torch.Tensor | None
) -> Operand:
    """``Backend.swiglu``."""
    return (fused if spec.scales == "swizzled" else triton).swiglu(gate_MH, up_MH, limit, spec, offs)


def swiglu_backward(
    inputs: list[torch.Tensor],
    scores_M: torch.Tensor | None,
    limit: float | None,
    last: OperandSpec,
    first: OperandSpec,
    h_first: OperandSpec,
    offs: torch.Tensor | None,
) -> SwigluGradients:
    """``Backend.swiglu_backward``."""
    is_blocked = "swizzled" in (last.scales, first.scales, h_first.scales)
    kernels = fused if is_blocked else triton
    return kernels.swiglu_backward(inputs, scores_M, limit, last, first, h_first, offs)


def _in_rows(spec: OperandSpec) -> OperandSpec:
    return replace(spec, scales="k_major") if spec.scales == "swizzled" else spec
