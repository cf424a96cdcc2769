"""Linears on one GPU: bf16, and the dequantised MXFP8 values by torch's matrix product and by the package's own kernel.

PYTHONPATH=. python results/2026-11-21_h200_hopper/dense.py
"""

import torch

from titan_mxfp8.backends import hopper
from titan_mxfp8.backends.triton import gemm as portable
from titan_mxfp8.testing import do_bench

BF16 = torch.bfloat16
SHAPES = (
    *((m, 8192, 5120) for m in (1, 64, 512, 4096, 16384, 32768, 131072)),
    *((16384, n, k) for n, k in ((5120, 8192), (5120, 5120), (2816, 2048), (3072, 2048))),
)


def quantize(x: torch.Tensor, axis: int, form: str):
    return hopper.quantize_operand(
        x, axis, rounding="rceil", elem_dtype=torch.float8_e4m3fn, block="1x32", offs=None, form=form
    )


def own(a, b, k_grouped: bool) -> torch.Tensor:
    if k_grouped:
        return portable.multiply_k_grouped(a, b, None, BF16, "bf16_tma")
    return portable.multiply_m_grouped(a, b, None, None, BF16, "bf16_tma")


def rebased(a, b, k_grouped: bool) -> torch.Tensor:
    if k_grouped:
        return hopper.gemm_k_grouped(a, b, None, out_dtype=BF16)
    return hopper.gemm_m_grouped(a, b, None, bias=None, out_dtype=BF16)


def operands(gemm: str, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, form: str, weight_form: str):
    if gemm == "fwd":
        return quantize(x, 1, form), quantize(w[None], 2, weight_form).mT
    if gemm == "dgrad":
        return quantize(dy, 1, form), quantize(w[None], 1, weight_form)
    return quantize(dy, 0, form).mT, quantize(x, 0, form)


def compare(gemm: str, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> None:
    (m, k), n, wgrad = x.shape, w.shape[0], gemm == "wgrad"
    left, right = {"fwd": (x, w.T), "dgrad": (dy, w), "wgrad": (dy.T, x)}[gemm]
    a, b = operands(gemm, x, w, dy, "bf16", "bf16")
    fp8 = operands(gemm, x, w, dy, "1x128", "32x128")
    matrix = b.qdata if wgrad else b.qdata[0]
    calls = {
        "bf16 mm": lambda: left @ right,
        "values, mm": lambda: a.qdata @ matrix,
        "values, mm, fp32 sums": lambda: a.qdata @ matrix,
        "values, own kernel": lambda: own(a, b, wgrad),
        "bf16 mm again": lambda: left @ right,
        "rebased": lambda: rebased(*fp8, wgrad),
    }
    for label, call in calls.items():
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = "fp32" not in label
        us = do_bench(call, warmup_ms=15, rep_ms=80, min_reps=5).p50
        print(m, n, k, gemm, label, f"{us:.0f} us" if m <= 512 else f"{2 * m * n * k / us / 1e6:.0f} TFLOP/s")


for m, n, k in SHAPES:
    tokens, grads = torch.randn(m, k, dtype=BF16, device="cuda"), torch.randn(m, n, dtype=BF16, device="cuda")
    weight = torch.randn(n, k, dtype=BF16, device="cuda") / k**0.5
    for name in ("fwd", "dgrad", "wgrad"):
        compare(name, tokens, weight, grads)
