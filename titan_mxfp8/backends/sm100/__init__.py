"""NVIDIA SM100 (B200, GB200): torch's block-scaled GEMMs, on scales that quantisers and SwiGLU write as they read them.

Operands of E4M3 have swizzled scales (``format.swizzle``). E5M2 gradients, which torch's grouped kernels do not take,
keep K-major scales, and their GEMMs are the portable ones. Never run on this hardware: see tests/README.md for what
holds it to the reference without.
"""

from dataclasses import replace

import torch

from titan_mxfp8.backends import Gemm, Plan, triton
from titan_mxfp8.backends.common.quantizers import quantize, quantize_both, requantize
from titan_mxfp8.backends.common.swiglu import swiglu, swiglu_backward
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.backends.sm100.gemm import dual_gemm_m_grouped, gemm_k_grouped, gemm_m_grouped
from titan_mxfp8.recipe import Recipe

__all__ = ["plan", "quantize", "quantize_both", "requantize", "swiglu", "swiglu_backward"]
__all__ += ["dual_gemm_m_grouped", "gemm_k_grouped", "gemm_m_grouped", "swiglu_gemm_m_grouped"]

swiglu_gemm_m_grouped = None


def plan(recipe: Recipe, hardware: Hardware) -> Plan:
    """``Backend.plan``: ``triton``'s, E4M3 with swizzled scales."""
    return triton.plan(recipe, hardware).map(_swizzled)


def _swizzled(gemm: Gemm) -> Gemm:
    if any(spec.elem_dtype != torch.float8_e4m3fn for spec in (gemm.a, gemm.b)):
        return gemm
    return replace(gemm, **{name: replace(getattr(gemm, name), block_mn=1, scales="swizzled") for name in ("a", "b")})
