"""Forward + backward of one grouped GEMM, all quantisation included, against bf16 ``torch._grouped_mm``.

    python scripts/bench/bench_grouped_mm.py --out results/<date>_<device>_grouped_mm [--quick]

A recipe whose output or gradients are further from bf16's than MXFP8 explains ends the run. Controls are rows too: the
baseline again, the baseline under ``torch.compile``, and recipe ``bf16``, our kernels with nothing quantised. --scaling
varies tokens, experts and spread around each shape instead. --passes times what forward and backward are made of: the
three GEMMs against torch's, the quantisers of x, dy and w, and of w again for dgrad, as FSDP costs; and the ceilings
that roofline.py takes: a copy, and dense matmuls.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.utils._pytree import tree_leaves

from scripts.bench import bench
from scripts.bench.bench import Call, Entry, largest_error, parse, parser_of
from scripts.bench.problems import GROUPED_SHAPES, SMALL_EXPERT_SHAPES, GroupedShape, Spread, group_sizes, make_offs
from scripts.progress import ends_in_words
from titan_mxfp8 import mxfp8_grouped_mm
from titan_mxfp8.backends import BACKENDS, plan_on
from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.ops import matmul
from titan_mxfp8.recipe import BF16, get_recipe

# Relative RMS between MXFP8 and bf16 results on normal data: 0.037, see tests/test_ops.py. bf16 twice: 0.003.
MAX_ERROR = {True: 0.045, False: 0.01}
RECIPES = ("mxfp8", "mxfp8_2d", "mxfp8_2d_rebased", "mxfp8_2d_wgrad_bf16", "mxfp8_rebased")
FEW = RECIPES[:3]
AGAIN, COMPILED = "torch bf16", "torch bf16, compiled"
CONTROLS = (AGAIN, COMPILED, BF16.name)
BOTH = "forward + backward"
GEMMS = ("forward", "dgrad", "wgrad")
QUANTIZERS = ("quantise x", "quantise dy", "quantise w", "quantise w again")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One problem, and who computes it: recipes, or ``CONTROLS``."""

    shape: GroupedShape
    ways: tuple[str, ...]
    spread: Spread = "balanced"

    def __str__(self) -> str:
        return self.shape.name


def make_problem(job: Job, device: torch.device) -> tuple[torch.Tensor, ...]:
    """x (M, K), w (G, N, K), dy (M, N) in bf16 and offs (G,)."""
    shape, randn = job.shape, partial(torch.randn, dtype=torch.bfloat16, device=device)
    x_MK, dy_MN = randn(shape.m, shape.k), randn(shape.m, shape.n)
    w_ENK = randn(shape.groups, shape.n, shape.k) / shape.k**0.5
    offs = make_offs(group_sizes(job.spread, shape.m, shape.groups), device)
    return x_MK.requires_grad_(), w_ENK.requires_grad_(), dy_MN, offs


def step_of(way: str, backend: str, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, offs: torch.Tensor) -> Call:
    """What computes the output and the gradients of x and w_ENK: by a recipe, or by torch itself."""

    def grouped_mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if way in (AGAIN, COMPILED):
            return torch._grouped_mm(x, w.mT, offs=offs)
        return mxfp8_grouped_mm(x, w.mT, offs, recipe=way, backend=backend)

    if way == COMPILED:
        torch.compiler.reset()  # or the sizes of the last problem would become variables
        grouped_mm = torch.compile(grouped_mm, backend="inductor" if offs.is_cuda else "aot_eager")

    def step() -> tuple[torch.Tensor, ...]:
        y = grouped_mm(x, w)
        return y.detach(), *torch.autograd.grad(y, (x, w), dy)

    return step


def passes_of(
    recipe_name: str, backend: str, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, offs: torch.Tensor
) -> dict[str, Call]:
    """Of a recipe's forward and backward: ``QUANTIZERS``, and ``GEMMS`` on operands that are made here."""
    recipe = get_recipe(recipe_name)
    of = plan_on(recipe, backend, hardware_of(x.device))
    keeps = recipe.weight_block == "32x32" and of.dgrad.b.stored != "bf16"
    forward_w_alone = partial(matmul.quantize, w, 2, of.forward.b, None, backend)
    both_w = partial(matmul.quantize_both, w, of.forward.b, of.dgrad.b, None, backend)
    quantizers: dict[str, Call] = {
        "quantise x": partial(matmul.quantize_both, x, of.forward.a, of.wgrad.b, offs, backend),
        "quantise dy": partial(matmul.quantize_both, dy, of.dgrad.a, of.wgrad.a, offs, backend),
        "quantise w": both_w if keeps else forward_w_alone,
        "quantise w again": partial(matmul.quantize, w, 1, of.dgrad.b, None, backend),
    }
    x_1, x_0 = quantizers["quantise x"]()
    dy_1, dy_0 = quantizers["quantise dy"]()
    forward_w = forward_w_alone()
    how = offs, None, torch.bfloat16, backend
    gemms: dict[str, Call] = {
        "forward": partial(matmul.gemm_m_grouped, x_1, forward_w, *how),
        "dgrad": partial(matmul.gemm_m_grouped, dy_1, quantizers["quantise w again"](), *how),
        "wgrad": partial(matmul.gemm_k_grouped, dy_0, x_0, dy.shape[0], offs, torch.bfloat16, backend),
    }
    return gemms | (quantizers if recipe.quantized else {})


def bytes_moved(call: Call, read: torch.Tensor) -> int:
    """Of a quantiser: what it reads and writes. What a GEMM takes unquantised is handed on, not written."""
    written = [tensor for tensor in tree_leaves(call()) if isinstance(tensor, torch.Tensor) and tensor is not read]
    return sum(tensor.nbytes for tensor in (read, *written))


class Bench(bench.Bench):
    def compare_with_torch(self, job: Job, what: str, calls: dict[str, Call], base: Call, gemms: int) -> None:
        """The rows of calls, by way, that are due; they have so many GEMMs. Raises ValueError if 8192 rows of a result
        are further from the baseline's than the format explains."""
        shape, entries = job.shape, []
        for way, call in calls.items():
            key = self.key_of(job, way, what)
            if not self.is_due(key):
                continue
            allowed = MAX_ERROR[way not in CONTROLS]
            for of, ours, theirs in zip(("y", "dx", "dw"), tree_leaves(call()), tree_leaves(base()), strict=False):
                if not (error := largest_error(ours, theirs)) < allowed:
                    raise ValueError(f"{job} {what} {way}: {of} is off by {error:.3f} from bf16's, more than {allowed}")
            flops = 2 * gemms * shape.m * shape.n * shape.k
            entries.append(Entry(key=key, call=call, flops=flops, more={"control": way in CONTROLS}))
        self.compare(entries, base)

    def key_of(self, job: Job, way: str, what: str) -> bench.Row:
        shape = job.shape
        sizes = {"M": shape.m, "N": shape.n, "K": shape.k, "G": shape.groups, "groups": job.spread}
        return self.key(**sizes, recipe=way, what=what)

    def measure(self, job: Job) -> None:
        """The rows of a job that are due."""
        problem, backend = make_problem(job, self.device), self.env["backend"]
        steps = {way: step_of(way, backend, *problem) for way in job.ways}
        self.compare_with_torch(job, BOTH, steps, step_of(AGAIN, backend, *problem), 3)

    def measure_passes(self, job: Job) -> None:
        """The passes of a job's recipes that are due."""
        x, w, dy, offs = (tensor.detach() for tensor in make_problem(job, self.device))
        calls = {recipe: passes_of(recipe, self.env["backend"], x, w, dy, offs) for recipe in job.ways}
        for gemm, operands in zip(GEMMS, ((x, w.mT), (dy, w), (dy.mT, x)), strict=True):
            ours = {recipe: of[gemm] for recipe, of in calls.items()}
            self.compare_with_torch(job, gemm, ours, partial(torch._grouped_mm, *operands, offs=offs), 1)
        read = dict(zip(QUANTIZERS, (x, dy, w, w), strict=True))
        for recipe, of in calls.items():
            for name in (name for name in QUANTIZERS if name in of):
                moved = bytes_moved(of[name], read[name])
                self.compare([Entry(key=self.key_of(job, recipe, name), call=of[name], moved=moved)])

    def measure_ceilings(self) -> None:
        """Adds a row for a copy, and for dense matmuls of normal numbers, so large that a card is at its power cap."""
        size = 8192 if self.device.type == "cuda" else 64
        a, b = (torch.randn(2 * size, size, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        product = a @ b.T
        copied = torch.empty_like(product)
        calls: dict[str, Call] = {"copy": lambda: copied.copy_(product), "bf16 matmul": lambda: a @ b.T}
        hardware = hardware_of(self.device)
        if hardware.capability >= (8, 9) if hardware.capability else hardware.arch in ("cpu", "gfx950"):
            a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=self.device)
            fp8 = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
            calls["FP8 matmul"] = lambda: torch._scaled_mm(a8, b8.T, **fp8)
        for what, call in calls.items():
            key = self.key(M=2 * size, N=2 * size, K=size, recipe="torch", what=what)
            work = {"moved": 4 * product.numel()} if what == "copy" else {"flops": 8 * size**3}
            self.compare([Entry(key=key, call=call, more={"control": True}, **work)])


def jobs(shapes: Sequence[GroupedShape] | None, recipes: Sequence[str], quick: bool = False) -> Iterator[Job]:
    """What is measured, that which matters most first: a run may be cut short."""
    few = (BF16.name, *(name for name in recipes if name in FEW))
    asked = [shape for shape in shapes or GROUPED_SHAPES if shapes or shape.groups == 8]
    for shape in asked:
        yield Job(shape=shape, ways=(*CONTROLS, *recipes))
    if not shapes and not quick:
        for shape in SMALL_EXPERT_SHAPES:
            yield Job(shape=shape, ways=(*CONTROLS, *recipes), spread="zipf")
        for shape in GROUPED_SHAPES[len(asked) :]:
            yield Job(shape=shape, ways=few)


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
    parser = parser_of(__doc__, RECIPES, (*GROUPED_SHAPES, *SMALL_EXPERT_SHAPES))
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--scaling", action="store_true", help="other tokens, experts and spreads around each shape")
    kinds.add_argument("--passes", action="store_true", help="each GEMM and each quantiser alone")
    args = parse(parser, argv)
    with ends_in_words("bench_grouped_mm"):
        run = Bench("scaling" if args.scaling else "kernels" if args.passes else "grouped_mm", args)
        rebases = next(entry.rebases for entry in BACKENDS if entry.name == run.env["backend"])
        recipes = tuple(name for name in args.recipes if rebases or get_recipe(name).block_k == 32)
        shapes = args.shapes or (*GROUPED_SHAPES[:2], *SMALL_EXPERT_SHAPES)
        if args.scaling:
            todo = [*scaling(shapes, (BF16.name, *(name for name in recipes if name in FEW)))]
        elif args.passes:
            ways = tuple(dict.fromkeys((BF16.name, *recipes)))
            todo = [Job(shape=shape, ways=ways, spread="zipf" if shape.groups > 8 else "balanced") for shape in shapes]
            run.measure_ceilings()
        else:
            todo = [*jobs(args.shapes, recipes, args.quick)]
        run.run(todo, run.measure_passes if args.passes else run.measure, "job")


if __name__ == "__main__":
    main(sys.argv[1:])
