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
from titan_mxfp8.backends import BACKENDS, load, select
from titan_mxfp8.backends.triton.hold import held_multiprocessors
from titan_mxfp8.recipe import RECIPES
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
PLAIN = {"rounding": "rceil", "elem_dtype": torch.float8_e4m3fn}
# Relative RMS between MXFP8 and bf16 results on normal data: 0.037, see tests/test_ops.py.
MAX_ERROR = 0.045
FP8_PEAK_TFLOPS = 1979
HELD = 16  # multiprocessors


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A recipe, exact or rebased, on a backend."""

    recipe: str
    backend: str
    rebase: bool = False
    products: bool = False  # tokens and gradients of products of two normal numbers
    beside: int = 0  # multiprocessors that another kernel holds

    def __str__(self) -> str:
        how = " rebased" * self.rebase + " of products" * self.products
        return f"{self.recipe}{how}{f', {self.beside} held,' if self.beside else ''}"


def make_problem(shape: GroupedShape, spread: Spread, products: bool) -> tuple[torch.Tensor, ...]:
    """x, w, dy in bf16 and offs."""

    def tokens(features: int) -> torch.Tensor:
        x = torch.randn(shape.m, features, dtype=torch.bfloat16, device="cuda")
        return x * torch.randn_like(x) if products else x

    w_ENK = torch.randn(shape.groups, shape.n, shape.k, dtype=torch.bfloat16, device="cuda") / shape.k**0.5
    offs = make_offs(group_sizes(spread, shape.m, shape.groups), "cuda")
    return tokens(shape.k).requires_grad_(), w_ENK.requires_grad_(), tokens(shape.n), offs


def compare(ours: Callable[[], object], bf16: Callable[[], object] | None, flops: float | None) -> Row:
    row: Row = {}
    if bf16 is not None:
        base = do_bench(bf16)
        row |= {"bf16_us": base.p50, "bf16_tflops": flops / base.p50 / 1e6}
    timing = do_bench(ours)
    row |= {"mxfp8_us": timing.p50, "mxfp8_p20": timing.p20, "mxfp8_p80": timing.p80}
    if flops is not None:
        tflops = flops / timing.p50 / 1e6
        row |= {"mxfp8_tflops": tflops, "of_peak": round(tflops / FP8_PEAK_TFLOPS, 4)}
    if bf16 is not None:
        row["speedup"] = base.p50 / timing.p50
    return row


def bench_parts(shape: GroupedShape, spread: Spread, way: Way) -> list[Row]:
    """The three GEMMs on quantised operands, and the quantisation before them; of the weights, that of forward."""
    x, w, dy, offs = (t.detach() for t in make_problem(shape, spread, way.products))
    backend = load(way.backend, x.device)
    block = RECIPES[way.recipe].weight_block
    act_form, weight_form = backend.operand_forms("m_grouped", block, way.rebase, x.device)
    dy_form, x_form = backend.operand_forms("k_grouped", block, way.rebase, x.device)
    tokens = PLAIN | {"block": "1x32", "offs": offs}
    weight = PLAIN | {"block": block, "offs": None, "form": weight_form}
    x_k, x_m = backend.quantize_operand_both(x, forms=(act_form, x_form), **tokens)
    dy_n, dy_m = backend.quantize_operand_both(dy, forms=(act_form, dy_form), **tokens)
    w_k, w_n = (backend.quantize_operand(w, axis, **weight) for axis in (2, 1))
    m_grouped = partial(backend.gemm_m_grouped, bias=None, out_dtype=torch.bfloat16)
    k_grouped = partial(backend.gemm_k_grouped, out_dtype=torch.bfloat16)
    bf16 = partial(torch._grouped_mm, offs=offs)
    flops = 2 * shape.m * shape.n * shape.k
    sums = {
        what: {"sums_a": sums_per_stage(a), "sums_b": sums_per_stage(b)}
        for what, a, b in (("forward GEMM", x_k, w_k), ("dgrad GEMM", dy_n, w_n))
        if weight_form == "even"
    }
    return [
        {"what": f"{way} {what}", **compare(ours, baseline, flops if baseline else None), **sums.get(what, {})}
        for what, ours, baseline in (
            ("forward GEMM", lambda: m_grouped(x_k, w_k.mT, offs), lambda: bf16(x, w.mT)),
            ("dgrad GEMM", lambda: m_grouped(dy_n, w_n, offs), lambda: bf16(dy, w)),
            ("wgrad GEMM", lambda: k_grouped(dy_m.mT, x_m, offs), lambda: bf16(dy.mT, x)),
            ("quantise x", lambda: backend.quantize_operand_both(x, forms=(act_form, x_form), **tokens), None),
            ("quantise dy", lambda: backend.quantize_operand_both(dy, forms=(act_form, dy_form), **tokens), None),
            ("quantise w", lambda: backend.quantize_operand(w, 2, **weight), None),
        )
    ]


def bench_way(shape: GroupedShape, spread: Spread, way: Way) -> list[Row]:
    """Forward alone, and forward + backward."""
    x, w, dy, offs = make_problem(shape, spread, way.products)
    bf16 = partial(torch._grouped_mm, offs=offs)
    mxfp8 = partial(mxfp8_grouped_mm, offs=offs, recipe=way.recipe, backend=way.backend, rebase=way.rebase)

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for data.csv and env.json")
    parser.add_argument("--backend", default="auto", help="auto, or a name of titan_mxfp8.backends")
    parser.add_argument("--quick", action="store_true", help="two shapes in balanced groups, one in zipf's")
    args = parser.parse_args()
    torch.manual_seed(0)
    name = select(args.backend, torch.device("cuda", 0)).name
    rebases = next(row.rebases for row in BACKENDS if row.name == name)
    exact = {recipe: Way(recipe=recipe, backend=name) for recipe in RECIPES}
    rebased = {recipe: Way(recipe=recipe, backend=name, rebase=True) for recipe in RECIPES} if rebases else {}
    products = [Way(recipe=recipe, backend=name, products=True) for recipe in ("mxfp8", "mxfp8_2d")]
    both = (exact["mxfp8"], rebased["mxfp8"]) if rebases else (exact["mxfp8"],)
    ways = [exact[recipe] for recipe in ("mxfp8", "mxfp8_2d", "mxfp8_2d_wgrad_bf16")]
    if not args.quick:
        ways.append(exact["mxfp8_wgrad_bf16"])
    ways += [rebased[recipe] for recipe in ("mxfp8", "mxfp8_2d") if rebased]
    beside = [replace(way, beside=HELD) for way in ways]

    jobs: list[tuple[GroupedShape, Spread, Callable[..., list[Row]], Way]] = []
    for shape in README_SHAPES:
        jobs += [(shape, "balanced", bench_way, way) for way in (*ways, *products, *beside)]
        jobs += [(shape, "balanced", bench_parts, way) for way in (*ways, *products) if "wgrad" not in way.recipe]
    for shape in SMALL_EXPERT_SHAPES:
        jobs += [(shape, "zipf", bench_way, way) for way in (both if args.quick else ways)]
    if not args.quick:
        zipf = (*both, exact["mxfp8_2d_wgrad_bf16"])
        jobs += [(shape, "zipf", bench_way, way) for shape in README_SHAPES for way in zipf]
        jobs += [(shape, "balanced", bench_way, way) for shape in GROUPED_SHAPES for way in zipf]
    rows: list[Row] = []
    for shape, spread, job, way in jobs:
        key = {"backend": name, "M": shape.m, "N": shape.n, "K": shape.k, "G": shape.groups, "groups": spread}
        new = [key | row for row in job(shape, spread, way)]
        print(format_table(new), flush=True)
        rows += new
        torch.cuda.empty_cache()
    write_results(args.out, rows, environment())


if __name__ == "__main__":
    main()
