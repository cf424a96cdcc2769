"""Grouped GEMMs and forward + backward of the recipes against bf16 ``torch._grouped_mm``, on this machine's GPU.

    python scripts/bench_grouped_mm.py --out results/<date>_<device>_grouped_mm [--backend triton] [--quick]

The baseline is measured anew right before each row: a GPU under its power cap drifts by some per cent. Forward and
backward are all that a training step runs: quantisation, GEMMs, autograd. A recipe whose output or gradients are
further from bf16's than MXFP8 explains ends the run. ``of_peak`` is the share of 1979 TFLOP/s, the dense FP8 peak that
NVIDIA's data sheets state for H100 SXM and H200 SXM, whatever the multiplications run in.

The data are normal numbers, and "of products": tokens and gradients that are products of two normal numbers, as the
input of w2 is a product. How fast Hopper's exact FP8 GEMMs are depends on them (``format.reference.even_out``):
``sums_a`` and ``sums_b`` say in how many sums of 128 products each operand's scales part them, 1 to 4
(``testing.sums_per_stage``).
"16 held": beside another kernel that holds 16 multiprocessors and does nothing else, as kernels of NCCL hold some while
FSDP gathers or scatters. bf16 is beside it too, so ``speedup`` is also how that copes; ``of_peak`` is of the whole GPU.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from titan_mxfp8 import mxfp8_grouped_mm
from titan_mxfp8.backends import BACKENDS, load, plan, select
from titan_mxfp8.backends.common.hold import held_multiprocessors
from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.recipe import get_recipe
from titan_mxfp8.testing import (
    GROUPED_SHAPES,
    README_SHAPES,
    SMALL_EXPERT_SHAPES,
    GroupedShape,
    Spread,
    do_bench,
    environment,
    format_table,
    group_sizes,
    make_offs,
    relative_rms,
    sums_per_stage,
    write_results,
)

Row = dict[str, object]
# Relative RMS between MXFP8 and bf16 results on normal data: 0.037, see tests/test_ops.py.
MAX_ERROR = 0.045
FP8_PEAK_TFLOPS = 1979
HELD = 16  # multiprocessors
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A recipe on a backend."""

    recipe: str
    backend: str
    products: bool = False  # tokens and gradients of products of two normal numbers
    beside: int = 0  # multiprocessors that another kernel holds

    def __str__(self) -> str:
        return f"{self.recipe}{' of products' * self.products}{f', {self.beside} held,' if self.beside else ''}"


def make_problem(shape: GroupedShape, spread: Spread, products: bool) -> tuple[torch.Tensor, ...]:
    """x, w, dy in bf16 and offs."""

    def tokens(features: int) -> torch.Tensor:
        x = torch.randn(shape.m, features, dtype=torch.bfloat16, device=DEVICE)
        return x * torch.randn_like(x) if products else x

    w_ENK = torch.randn(shape.groups, shape.n, shape.k, dtype=torch.bfloat16, device=DEVICE) / shape.k**0.5
    offs = make_offs(group_sizes(spread, shape.m, shape.groups), DEVICE)
    return tokens(shape.k).requires_grad_(), w_ENK.requires_grad_(), tokens(shape.n), offs


def compare(ours: Callable[[], object], bf16: Callable[[], object] | None, flops: float) -> Row:
    """A row; without a baseline the times alone."""
    base = do_bench(bf16) if bf16 else None
    timing = do_bench(ours)
    times = {"mxfp8_us": timing.p50, "mxfp8_p20": timing.p20, "mxfp8_p80": timing.p80}
    if base is None:
        return times
    tflops = flops / timing.p50 / 1e6
    row = {"bf16_us": base.p50, "bf16_tflops": flops / base.p50 / 1e6, **times, "mxfp8_tflops": tflops}
    return row | {"of_peak": round(tflops / FP8_PEAK_TFLOPS, 4), "speedup": base.p50 / timing.p50}


def bench_parts(shape: GroupedShape, spread: Spread, way: Way) -> list[Row]:
    """The three GEMMs on quantised operands, and the quantisation before them; of the weights, that of forward."""
    x, w, dy, offs = (t.detach() for t in make_problem(shape, spread, way.products))
    gemms, backend = plan(get_recipe(way.recipe), way.backend, DEVICE), load(way.backend, DEVICE)
    quantize_x = partial(backend.quantize_both, x, gemms.forward.a, gemms.wgrad.b, offs)
    quantize_dy = partial(backend.quantize_both, dy, gemms.dgrad.a, gemms.wgrad.a, offs)
    quantize_w = partial(backend.quantize, w, 2, gemms.forward.b, None)
    (x_k, x_m), (dy_n, dy_m), w_k = quantize_x(), quantize_dy(), quantize_w()
    w_n = backend.quantize(w, 1, gemms.dgrad.b, None)
    forward = partial(backend.gemm_m_grouped, x_k, w_k, offs, None, torch.bfloat16)
    dgrad = partial(backend.gemm_m_grouped, dy_n, w_n, offs, None, torch.bfloat16)
    wgrad = partial(backend.gemm_k_grouped, dy_m, x_m, offs, torch.bfloat16)
    bf16 = partial(torch._grouped_mm, offs=offs)
    flops = 2 * shape.m * shape.n * shape.k
    rows = [
        {"what": f"{way} {what}", **compare(ours, baseline, flops)}
        for what, ours, baseline in (
            ("forward GEMM", forward, lambda: bf16(x, w.mT)),
            ("dgrad GEMM", dgrad, lambda: bf16(dy, w)),
            ("wgrad GEMM", wgrad, lambda: bf16(dy.mT, x)),
            ("quantise x", quantize_x, None),
            ("quantise dy", quantize_dy, None),
            ("quantise w", quantize_w, None),
        )
    ]
    for row, a, b in zip(rows, (x_k, dy_n), (w_k, w_n), strict=False):
        if b.spec.stored == "even":
            row |= {"sums_a": sums_per_stage(a), "sums_b": sums_per_stage(b)}
    return rows


def bench_way(shape: GroupedShape, spread: Spread, way: Way) -> list[Row]:
    """Forward alone, and forward + backward."""
    x, w, dy, offs = make_problem(shape, spread, way.products)
    bf16 = partial(torch._grouped_mm, offs=offs)
    mxfp8 = partial(mxfp8_grouped_mm, offs=offs, recipe=way.recipe, backend=way.backend)

    def step(grouped_mm: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        x.grad = w.grad = None
        y = grouped_mm(x, w.mT)
        y.backward(dy)
        return [y.detach(), x.grad, w.grad]

    for name, ours, theirs in zip(("y", "dx", "dw"), step(mxfp8), step(bf16), strict=True):
        error = max(relative_rms(a, b) for a, b in zip(ours.split(8192), theirs.split(8192), strict=True))
        assert error < MAX_ERROR, f"{shape.name} {way}: {name} is off by {error:.3f}"
    flops = 2 * shape.m * shape.n * shape.k
    with held_multiprocessors(way.beside), torch.no_grad():
        forward = compare(lambda: mxfp8(x, w.mT), lambda: bf16(x, w.mT), flops)
    with held_multiprocessors(way.beside):
        both = compare(lambda: step(mxfp8), lambda: step(bf16), 3 * flops)
    return [{"what": f"{way} forward", **forward}, {"what": f"{way} forward + backward", **both}]


Job = tuple[GroupedShape, Spread, Callable[[GroupedShape, Spread, Way], list[Row]], Way]


def jobs(backend: str, rebases: bool, quick: bool) -> list[Job]:
    """What is measured of a backend."""

    def ways(*recipes: str) -> list[Way]:
        return [Way(recipe=name, backend=backend) for name in recipes if rebases or not name.endswith("_rebased")]

    most = ways("mxfp8", "mxfp8_2d", "mxfp8_2d_wgrad_bf16", "mxfp8_rebased", "mxfp8_2d_rebased")
    most += ways("mxfp8_wgrad_bf16") * (not quick)
    both = ways("mxfp8", "mxfp8_rebased")
    products = [replace(way, products=True) for way in ways("mxfp8", "mxfp8_2d")]
    beside = [replace(way, beside=HELD) for way in most]
    chosen: list[Job] = []
    for shape in README_SHAPES:
        chosen += [(shape, "balanced", bench_way, way) for way in (*most, *products, *beside)]
        chosen += [(shape, "balanced", bench_parts, way) for way in (*most, *products) if "wgrad" not in way.recipe]
    for shape in SMALL_EXPERT_SHAPES:
        chosen += [(shape, "zipf", bench_way, way) for way in (both if quick else most)]
    if not quick:
        zipf = [*both, *ways("mxfp8_2d_wgrad_bf16")]
        chosen += [(shape, "zipf", bench_way, way) for shape in README_SHAPES for way in zipf]
        chosen += [(shape, "balanced", bench_way, way) for shape in GROUPED_SHAPES for way in zipf]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for data.csv and env.json")
    parser.add_argument("--backend", default="auto", help="auto, or a name of titan_mxfp8.backends")
    parser.add_argument("--quick", action="store_true", help="two shapes in balanced groups, one in zipf's")
    args = parser.parse_args()
    torch.manual_seed(0)
    name = select(args.backend, hardware_of(DEVICE), get_recipe("mxfp8")).name
    rebases = next(entry.rebases for entry in BACKENDS if entry.name == name)
    rows: list[Row] = []
    for shape, spread, job, way in jobs(name, rebases, args.quick):
        key = {"backend": name, "M": shape.m, "N": shape.n, "K": shape.k, "G": shape.groups, "groups": spread}
        new = [key | row for row in job(shape, spread, way)]
        print(format_table(new), flush=True)
        rows += new
        torch.cuda.empty_cache()
    write_results(args.out, rows, environment())


if __name__ == "__main__":
    main()
