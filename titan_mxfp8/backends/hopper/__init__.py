"""Gluon GEMMs for NVIDIA SM90 (H100, H200), and the quantisers that feed them."""

from titan_mxfp8.backends.hopper.gemm import gemm_k_grouped, gemm_m_grouped
from titan_mxfp8.backends.hopper.operands import operand_forms, quantize_operand, quantize_operand_both
from titan_mxfp8.backends.triton import quantize, quantize_both, wgrad_bf16

__all__ = [
    "gemm_k_grouped",
    "gemm_m_grouped",
    "operand_forms",
    "quantize",
    "quantize_both",
    "quantize_operand",
    "quantize_operand_both",
    "wgrad_bf16",
]
