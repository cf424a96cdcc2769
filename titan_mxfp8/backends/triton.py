"""The portable backend: Triton kernels for NVIDIA SM80 and newer, AMD gfx942 and gfx950.

Tensor cores that know no scales get the values in bf16; those of SM100 and gfx950 get FP8 and scales.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from titan_mxfp8.backends import Gemm, Plan, reference
from titan_mxfp8.backends.common import dequantize, gemm
from titan_mxfp8.backends.common import quantize as exact
from titan_mxfp8.backends.common import swiglu as fused
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.format.spec import Operand, OperandSpec
from titan_mxfp8.recipe import Recipe

gemm_m_grouped = gemm.gemm_m_grouped
gemm_k_grouped = gemm.gemm_k_grouped
swiglu = fused.swiglu
swiglu_backward = fused.swiglu_backward


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


def quantize(x: torch.Tensor, axis: int, spec: OperandSpec, offs: torch.Tensor | None) -> Operand:
    """``Backend.quantize``."""
    assert spec.block_k == 32 and spec.stored != "coalesced" and spec.scales == "k_major", spec
    if spec.stored == "bf16":
        return dequantize.quantize_dequantize(x, axis, spec, offs)
    return exact.quantize(x, axis, spec, offs)


def requantize(rows: Operand, axis: int, spec: OperandSpec, offs: torch.Tensor | None) -> Operand:
    """``Backend.requantize``."""
    if axis == 1 and spec.stored == "bf16":
        return Operand(dequantize.dequantize(rows), None, spec, 1)
    if axis == 1:
        values = dequantize.dequantize(rows, torch.float32)
        return quantize(values, 1, replace(spec, rounding="rceil"), None)._replace(spec=spec)
    return (dequantize if spec.stored == "bf16" else exact).requantize(rows, spec, offs)


def dual_gemm_m_grouped(products: Iterator[tuple[Operand, Operand]], offs: torch.Tensor | None) -> list[torch.Tensor]:
    """``Backend.dual_gemm_m_grouped``, of each product."""
    return [gemm_m_grouped(a, b, offs, None, torch.bfloat16, zero_tail=False) for a, b in products]


def quantize_both(
    x: torch.Tensor, last: OperandSpec, first: OperandSpec, offs: torch.Tensor | None
) -> tuple[Operand, Operand]:
    """``Backend.quantize_both``."""
    if last == first and last.is_quantized:
        both = dequantize.quantize_dequantize_both if last.stored == "bf16" else exact.quantize_both
        return both(x, last, first, offs)
    return quantize(x, x.ndim - 1, last, None), quantize(x, x.ndim - 2, first, offs)
