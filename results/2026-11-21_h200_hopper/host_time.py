"""Host time of a rebased GEMM call, without a GPU: Triton's launches return before they reach a driver.

    PYTHONPATH=.:tests python results/2026-11-21_h200_hopper/host_time.py

The least of 9 means over 300 calls, in us, of what Python does: no tensor map is encoded and nothing is launched.
"""

import gc
import time

import torch
from aot import _Driver
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from titan_mxfp8.backends import hopper

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
launch = JITFunction.run


def stop_before_the_driver(self, *args, grid, warmup=False, **kwargs):
    return launch(self, *args, grid=grid, warmup=True, **kwargs)


def quantize(x: torch.Tensor, axis: int, form: str):
    return hopper.quantize_operand(x, axis, rounding="rceil", elem_dtype=E4M3, block="1x32", offs=None, form=form)


def microseconds(call) -> float:
    means = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(300):
            call()
        means.append((time.perf_counter() - start) / 300 * 1e6)
    return min(means)


driver.set_active(_Driver("sm_90"))
JITFunction.run = stop_before_the_driver
torch.set_num_threads(1)
x, w, dy = (torch.zeros(shape, dtype=BF16) for shape in ((64, 512), (256, 512), (64, 256)))
calls = {
    "m_grouped": (hopper.gemm_m_grouped, quantize(x, 1, "1x128"), quantize(w[None], 2, "32x128").mT, {"bias": None}),
    "k_grouped": (hopper.gemm_k_grouped, quantize(dy, 0, "1x128").mT, quantize(x, 0, "1x128"), {}),
}
gc.disable()
print("gemm,us")
for name, (gemm, a, b, kwargs) in calls.items():
    gemm(a, b, None, out_dtype=BF16, **kwargs)  # compiles
    print(f"{name},{microseconds(lambda g=gemm, a=a, b=b, k=kwargs: g(a, b, None, out_dtype=BF16, **k)):.1f}")
