"""Grouped GEMMs and forward + backward of the recipes against bf16 ``torch._grouped_mm``, on this machine's GPU.

    python scripts/bench_grouped_mm.py --out results/<date>_<device>_triton_grouped_mm

The baseline is measured anew right before each row: a GPU under its power cap drifts by some per cent. Forward and
backward are all that a training step runs: quantisation, GEMMs, autograd. A recipe whose output or gradients are
further from bf16's than MXFP8 explains ends the run.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from titan_mxfp8 import mxfp8_grouped_mm
from titan_mxfp8.backends import load
from titan_mxfp8.testing import (
    GROUPED_SHAPES,
    README_SHAPES,
    GroupedShape,
    Spread,
    do_bench,
    environment,
    format_table,
    group_sizes,
    make_offs,
    relative_rms,
    write_results,
)

Row = dict[str, object]
PLAIN = {"rounding": "rceil", "elem_dtype": torch.float8_e4m3fn, "block": "1x32"}
# Relative RMS between MXFP8 and bf16 results on normal data: 0.037, see tests/test_ops.py.
MAX_ERROR = 0.045


def make_problem(shape: GroupedShape, spread: Spread) -> tuple[torch.Tensor, ...]:
    """x, w, dy in bf16 and offs."""
    x_MK = torch.randn(shape.m, shape.k, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    w_ENK = torch.randn(shape.groups, shape.n, shape.k, dtype=torch.bfloat16, device="cuda") / shape.k**0.5
    dy_MN = torch.randn(shape.m, shape.n, dtype=torch.bfloat16, device="cuda")
    return x_MK, w_ENK.requires_grad_(), dy_MN, make_offs(group_sizes(spread, shape.m, shape.groups), "cuda")


def compare(ours: Callable[[], object], bf16: Callable[[], object] | None, flops: float | None) -> Row:
    row: Row = {}
    if bf16 is not None:
        base = do_bench(bf16)
        row |= {"bf16_us": base.p50, "bf16_tflops": flops / base.p50 / 1e6}
    timing = do_bench(ours)
    row |= {"mxfp8_us": timing.p50, "mxfp8_p20": timing.p20, "mxfp8_p80": timing.p80}
    if flops is not None:
        row["mxfp8_tflops"] = flops / timing.p50 / 1e6
    if bf16 is not None:
        row["speedup"] = base.p50 / timing.p50
    return row


def bench_parts(shape: GroupedShape, spread: Spread) -> list[Row]:
    """The three GEMMs on quantised operands, and the quantisation before them."""
    x, w, dy, offs = (t.detach() for t in make_problem(shape, spread))
    backend = load("auto", x.device)
    x_k, x_m = backend.quantize_operand_both(x, offs=offs, **PLAIN)
    dy_n, dy_m = backend.quantize_operand_both(dy, offs=offs, **PLAIN)
    w_k, w_n = (backend.quantize_operand(w, axis, offs=None, **PLAIN) for axis in (2, 1))
    m_grouped = partial(backend.gemm_m_grouped, bias=None, out_dtype=torch.bfloat16)
    k_grouped = partial(backend.gemm_k_grouped, out_dtype=torch.bfloat16)
    bf16 = partial(torch._grouped_mm, offs=offs)
    flops = 2 * shape.m * shape.n * shape.k
    return [
        {"what": what, **compare(ours, baseline, flops if baseline else None)}
        for what, ours, baseline in (
            ("forward GEMM", lambda: m_grouped(x_k, w_k.mT, offs), lambda: bf16(x, w.mT)),
            ("dgrad GEMM", lambda: m_grouped(dy_n, w_n, offs), lambda: bf16(dy, w)),
            ("wgrad GEMM", lambda: k_grouped(dy_m.mT, x_m, offs), lambda: bf16(dy.mT, x)),
            ("quantise x", lambda: backend.quantize_operand_both(x, offs=offs, **PLAIN), None),
            ("quantise dy", lambda: backend.quantize_operand_both(dy, offs=offs, **PLAIN), None),
            ("quantise w along K", lambda: backend.quantize_operand(w, 2, offs=None, **PLAIN), None),
            ("quantise w along N", lambda: backend.quantize_operand(w, 1, offs=None, **PLAIN), None),
        )
    ]


def bench_recipe(shape: GroupedShape, spread: Spread, recipe: str) -> list[Row]:
    """Forward alone, and forward + backward."""
    x, w, dy, offs = make_problem(shape, spread)
    bf16 = partial(torch._grouped_mm, offs=offs)
    mxfp8 = partial(mxfp8_grouped_mm, offs=offs, recipe=recipe)

    def step(grouped_mm: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        x.grad = w.grad = None
        y = grouped_mm(x, w.mT)
        y.backward(dy)
        return [y.detach(), x.grad, w.grad]

    for name, ours, theirs in zip(("y", "dx", "dw"), step(mxfp8), step(bf16), strict=True):
        error = max(relative_rms(a, b) for a, b in zip(ours.split(8192), theirs.split(8192), strict=True))
        assert error < MAX_ERROR, f"{shape.name} {recipe}: {name} is off by {error:.3f}"
    flops = 2 * shape.m * shape.n * shape.k
    with torch.no_grad():
        forward = compare(lambda: mxfp8(x, w.mT), lambda: bf16(x, w.mT), flops)
    both = compare(lambda: step(mxfp8), lambda: step(bf16), 3 * flops)
    return [{"what": f"{recipe} forward", **forward}, {"what": f"{recipe} forward + backward", **both}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for data.csv and env.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    jobs: list[tuple[GroupedShape, Spread, Callable[..., list[Row]]]] = []
    for shape in README_SHAPES:
        jobs.append((shape, "balanced", bench_parts))
        for recipe in ("mxfp8", "mxfp8_2d", "mxfp8_wgrad_bf16"):
            jobs.append((shape, "balanced", partial(bench_recipe, recipe=recipe)))
        jobs.append((shape, "zipf", partial(bench_recipe, recipe="mxfp8")))
    jobs += [(shape, "balanced", partial(bench_recipe, recipe="mxfp8")) for shape in GROUPED_SHAPES]
    rows: list[Row] = []
    for shape, spread, job in jobs:
        key = {"M": shape.m, "N": shape.n, "K": shape.k, "G": shape.groups, "groups": spread}
        new = [key | row for row in job(shape, spread)]
        print(format_table(new), flush=True)
        rows += new
        torch.cuda.empty_cache()
    write_results(args.out, rows, environment())


if __name__ == "__main__":
    main()
