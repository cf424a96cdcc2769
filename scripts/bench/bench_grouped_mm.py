"""Forward + backward of one grouped GEMM, all quantisation included, against bf16 ``torch._grouped_mm``.

    python scripts/bench/bench_grouped_mm.py --out results/<date>_<device>_grouped_mm [--quick] [--limit SECONDS]

A recipe whose output or gradients are further from bf16's than MXFP8 explains ends the run. Controls are rows too: the
baseline again, the baseline under ``torch.compile``, and recipe ``bf16``, our kernels with nothing quantised. Rows
differ in ``data`` (normal numbers, or products of two), ``groups`` (how tokens are spread) and ``held``
(multiprocessors that another kernel occupies). --scaling varies tokens, experts and spread around each shape instead.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from scripts.bench.bench import Bench, Call, Entry, Row, Work, parse, parser_of, run
from scripts.bench.occupy import occupied_multiprocessors
from scripts.bench.problems import (
    GROUPED_SHAPES,
    SMALL_EXPERT_SHAPES,
    GroupedShape,
    Spread,
    group_sizes,
    make_offs,
    relative_rms,
)
from titan_mxfp8 import mxfp8_grouped_mm
from titan_mxfp8.backends import BACKENDS
from titan_mxfp8.recipe import BF16, get_recipe

# Relative RMS between MXFP8 and bf16 results on normal data: 0.037, see tests/test_ops.py. bf16 twice: 0.003.
MAX_ERROR = {True: 0.045, False: 0.01}
HELD = 16
RECIPES = ("mxfp8", "mxfp8_2d", "mxfp8_2d_rebased", "mxfp8_2d_wgrad_bf16", "mxfp8_rebased")
FEW = RECIPES[:3]
AGAIN, COMPILED = "torch bf16", "torch bf16, compiled"
BOTH, FORWARD = "forward + backward", "forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One problem, and who computes it."""

    shape: GroupedShape
    ways: tuple[str, ...]
    what: str = BOTH
    spread: Spread = "balanced"
    products: bool = False
    held: int = 0


def make_problem(job: Job, device: torch.device) -> tuple[torch.Tensor, ...]:
    """x, w, dy in bf16 and offs."""
    shape = job.shape

    def tokens(features: int) -> torch.Tensor:
        x = torch.randn(shape.m, features, dtype=torch.bfloat16, device=device)
        return x * torch.randn_like(x) if job.products else x

    w_ENK = torch.randn(shape.groups, shape.n, shape.k, dtype=torch.bfloat16, device=device) / shape.k**0.5
    offs = make_offs(group_sizes(job.spread, shape.m, shape.groups), device)
    return tokens(shape.k).requires_grad_(), w_ENK.requires_grad_(), tokens(shape.n), offs


def step(
    grouped_mm: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, what: str
) -> tuple[torch.Tensor, ...]:
    """The output, and with backward the gradients."""
    if what == FORWARD:
        with torch.no_grad():
            return (grouped_mm(x, w),)
    y = grouped_mm(x, w)
    return y.detach(), *torch.autograd.grad(y, (x, w), dy)


def function_of(way: str, offs: torch.Tensor, backend: str) -> Callable[..., torch.Tensor]:
    """What computes (M, N) from x and w_ENK: a recipe, or torch itself."""

    def theirs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, w.mT, offs=offs)

    def ours(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return mxfp8_grouped_mm(x, w.mT, offs, recipe=way, backend=backend)

    if way == COMPILED:
        torch.compiler.reset()  # or the sizes of the last problem would become variables
        return torch.compile(theirs, backend="inductor" if offs.is_cuda else "aot_eager")
    return theirs if way == AGAIN else ours


def check(name: str, way: str, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    """Raises ValueError where 8192 rows of a result are further from bf16's than the format explains."""
    allowed = MAX_ERROR[way not in (AGAIN, COMPILED, BF16.name)]
    for of, *both in zip(("y", "dx", "dw"), ours, theirs, strict=False):
        parts = (tensor.reshape(-1, tensor.shape[-1]).split(8192) for tensor in both)
        error = max(relative_rms(*pair) for pair in zip(*parts, strict=True))
        if not error < allowed:
            raise ValueError(f"{name} {way}: {of} is off by {error:.3f} from bf16's, more than {allowed}")


def measure_job(bench: Bench, job: Job) -> None:
    """The rows of a job that are due."""
    shape, backend = job.shape, bench.env["backend"]
    columns: Row = {"M": shape.m, "N": shape.n, "K": shape.k, "G": shape.groups, "groups": job.spread}
    columns |= {"data": "products" if job.products else "normal", "held": job.held, "what": job.what}
    keys = {way: bench.key(**columns, recipe=way) for way in job.ways}
    due = [way for way, key in keys.items() if bench.is_due(key)]
    if not due:
        return
    beside = partial(occupied_multiprocessors, job.held, looks=1 << 25)
    work = Work(flops=(1 if job.what == FORWARD else 3) * 2 * shape.m * shape.n * shape.k)
    with bench.whatever_fits(f"{shape.name} {job.what}"):
        x, w, dy, offs = make_problem(job, bench.device)
        base: Call = partial(step, function_of(AGAIN, offs, backend), x, w, dy, job.what)
        entries = []
        for way in due:
            ours: Call = partial(step, function_of(way, offs, backend), x, w, dy, job.what)
            check(shape.name, way, ours(), base())
            control = {"control": way in (AGAIN, COMPILED, BF16.name)}
            entries.append(Entry(key=keys[way], call=ours, work=work, more=control))
        bench.compare(entries, base, beside=beside)


def jobs(args: argparse.Namespace, rebases: bool) -> Iterator[Job]:
    """What is measured, that which matters most first: the limit may cut off the rest."""

    def ways(*recipes: str) -> tuple[str, ...]:
        chosen = [name for name in recipes if name in args.recipes]
        return tuple(name for name in chosen if rebases or get_recipe(name).block_k == 32)

    controls = (AGAIN, COMPILED, BF16.name)
    shapes = args.shapes or GROUPED_SHAPES
    if args.scaling:
        yield from scaling(args.shapes or (*GROUPED_SHAPES[:2], *SMALL_EXPERT_SHAPES), (BF16.name, *ways(*FEW)))
        return
    first = [shape for shape in shapes if args.shapes or shape.groups == 8]
    for shape in first:
        yield Job(shape=shape, ways=(*controls, *(ways(*args.recipes))))
    for shape in shapes[len(first) :] if not args.quick else ():
        yield Job(shape=shape, ways=(BF16.name, *ways(*FEW)))
    if args.shapes or args.quick:
        return
    for shape in SMALL_EXPERT_SHAPES:
        yield Job(shape=shape, ways=(*controls, *ways(*args.recipes)), spread="zipf")
    for shape in first:
        yield Job(shape=shape, ways=(BF16.name, *ways("mxfp8", "mxfp8_2d")), products=True)
        yield Job(shape=shape, ways=(BF16.name, *ways(*FEW)), what=FORWARD)
    for shape in first:
        yield Job(shape=shape, ways=(BF16.name, *ways(*FEW)), held=HELD)


def scaling(shapes: Sequence[GroupedShape], ways: tuple[str, ...]) -> Iterator[Job]:
    """Around each shape: other numbers of tokens, of experts at its number of tokens, and other spreads."""
    for halvings in range(9):
        yield from (Job(shape=replace(shape, m=2 * shape.m >> halvings), ways=ways) for shape in shapes)
    for groups in (1, 4, 16, 64, 256):
        for shape in shapes:
            # weights and their gradients, in bf16 and quantised, are 6 bytes an element: 64 experts of Llama4 are 16 GB
            if groups * shape.n * shape.k <= 4e9:
                yield Job(shape=replace(shape, groups=groups), ways=ways)
    for spread in ("zipf", "empties", "one"):
        yield from (Job(shape=shape, ways=ways, spread=spread) for shape in shapes)


def main(argv: Sequence[str]) -> None:
    parser = parser_of(__doc__, (*GROUPED_SHAPES, *SMALL_EXPERT_SHAPES), RECIPES)
    parser.add_argument("--scaling", action="store_true", help="other tokens, experts and spreads around each shape")
    args = parse(parser, argv)

    def measure(bench: Bench) -> None:
        rebases = next(entry.rebases for entry in BACKENDS if entry.name == bench.env["backend"])
        with torch.autograd.set_multithreading_enabled(False):  # as the plugin trains
            for job in bench.each(jobs(args, rebases), "job"):
                measure_job(bench, job)

    run("scaling" if args.scaling else "grouped_mm", args, measure)


if __name__ == "__main__":
    main(sys.argv[1:])
