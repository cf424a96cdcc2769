"""Linears from one row to many against bf16, on this machine's GPU, as a training step calls them.

    python scripts/bench_linear.py --out results/<date>_<device>_linear

Forward and backward with all quantisation, through autograd; the baseline is measured anew right before each row. With
few rows the host is what takes the time: the kernels of a call are over before the next one is launched.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from titan_mxfp8 import mxfp8_linear
from titan_mxfp8.testing import do_bench, environment, format_table, write_results

ROWS = (1, 64, 512, 4096, 16384)
LAYERS = ((8192, 5120), (2816, 2048))  # features out and in: Llama4's feed-forward, DeepSeek-V3 16B's shared experts
WAYS = (("mxfp8", False), ("mxfp8_2d", False), ("mxfp8", True), ("mxfp8_2d", True))


def step(linear: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> None:
    x.grad = w.grad = None
    linear(x, w).backward(dy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for data.csv and env.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []
    for n, k in LAYERS:
        w = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16().requires_grad_()
        for m in ROWS:
            x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            dy = torch.randn(m, n, dtype=torch.bfloat16, device="cuda")
            for recipe, rebase in WAYS:
                mxfp8 = partial(mxfp8_linear, recipe=recipe, rebase=rebase)
                key = {"M": m, "N": n, "K": k, "way": f"{recipe}{' rebased' if rebase else ''}"}
                for what, call in (
                    ("forward", lambda f, x=x, w=w: f(x.detach(), w.detach())),
                    ("forward + backward", lambda f, x=x, w=w, dy=dy: step(f, x, w, dy)),
                ):
                    base, ours = do_bench(partial(call, F.linear)), do_bench(partial(call, mxfp8))
                    times = {"bf16_us": base.p50, "mxfp8_us": ours.p50, "speedup": base.p50 / ours.p50}
                    rows.append(key | {"what": what} | times)
            print(format_table(rows[-2 * len(WAYS) :]), flush=True)
    write_results(args.out, rows, environment())


if __name__ == "__main__":
    main()
