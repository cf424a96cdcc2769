"""Portable Triton kernels: NVIDIA SM80 and newer, AMD gfx942 and gfx950."""

from titan_mxfp8.backends.triton.dequantize import dequantize, quantize_dequantize, quantize_dequantize_both
from titan_mxfp8.backends.triton.gemm import gemm_k_grouped, gemm_m_grouped, wgrad_bf16
from titan_mxfp8.backends.triton.operands import operand_forms, quantize_operand, quantize_operand_both
from titan_mxfp8.backends.triton.pad import pad_token_groups, unpad_token_groups
from titan_mxfp8.backends.triton.quantize import quantize, quantize_both

__all__ = [
    "dequantize",
    "gemm_k_grouped",
    "gemm_m_grouped",
    "operand_forms",
    "pad_token_groups",
    "quantize",
    "quantize_both",
    "quantize_dequantize",
    "quantize_dequantize_both",
    "quantize_operand",
    "quantize_operand_both",
    "unpad_token_groups",
    "wgrad_bf16",
]
