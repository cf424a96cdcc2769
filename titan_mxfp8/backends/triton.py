"""The portable backend: Triton kernels for NVIDIA SM80 and newer, AMD gfx942 and gfx950.

Tensor cores that know no scales get the quantised values in bf16 (QDQ); those of SM100 and gfx950 get FP8 and scales.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from titan_mxfp8.backends import Gemm, Plan, reference
from titan_mxfp8.backends.common.gemm import gemm_k_grouped, gemm_m_grouped
from titan_mxfp8.backends.common.quantizers import quantize, quantize_both, requantize
from titan_mxfp8.backends.common.swiglu import swiglu, swiglu_backward
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.format.spec import Operand
from titan_mxfp8.recipe import Recipe

__all__ = ["plan", "quantize", "quantize_both", "requantize", "swiglu", "swiglu_backward"]
__all__ += ["dual_gemm_m_grouped", "gemm_k_grouped", "gemm_m_grouped", "swiglu_gemm_m_grouped"]

swiglu_gemm_m_grouped = None


def plan(recipe: Recipe, hardware: Hardware) -> Plan:
    """``Backend.plan``: FP8 where tensor cores know scales, else the values in bf16."""
    assert recipe.block_k == 32, recipe
    fp8 = reference.plan(recipe, hardware)
    if hardware.mma == "scaled":
        return fp8.map(in_fp8)
    return fp8.map(in_bf16)


def in_fp8(gemm: Gemm) -> Gemm:
    """The same operands, multiplied in FP8; unquantised ones in bf16 in any case."""
    return replace(gemm, mma_dtype="FP8" if gemm.a.is_quantized else "bf16")


def in_bf16(gemm: Gemm) -> Gemm:
    """The same values in bf16."""
    return Gemm(a=replace(gemm.a, stored="bf16"), b=replace(gemm.b, stored="bf16"), mma_dtype="bf16")


def dual_gemm_m_grouped(products: Iterator[tuple[Operand, Operand]], offs: Tensor | None) -> list[Tensor]:
    """``Backend.dual_gemm_m_grouped``, of each product."""
    return [gemm_m_grouped(a, b, offs, None, torch.bfloat16, zero_tail=False) for a, b in products]
