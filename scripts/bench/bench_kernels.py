"""Each pass of a grouped GEMM's forward and backward, as each recipe runs it on this machine, against the ceilings.

    python scripts/bench/bench_kernels.py --out results/<date>_<device>_kernels [--quick] [--limit SECONDS]

Ceilings are a copy, a dense bf16 matmul and a dense FP8 one of this run; ``share`` refers to them, and --ceilings
measures nothing else. Passes are those of ``ops/matmul.py``: the quantisers of x, dy and w (again for dgrad, as FSDP
costs; x again of FP8 rows, as ``dispatch`` does) and the GEMMs, against ``torch._grouped_mm``. A GEMM that is further
from bf16's than MXFP8 explains ends the run. Recipe ``bf16`` is the control: our GEMMs on plain bf16 operands.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from scripts.bench.bench import Bench, Call, Entry, Work, parse, parser_of, run
from scripts.bench.bench_grouped_mm import RECIPES, Job, check, make_problem
from scripts.bench.problems import GROUPED_SHAPES, SMALL_EXPERT_SHAPES, GroupedShape, sums_per_stage
from titan_mxfp8.backends import BACKENDS, plan
from titan_mxfp8.format.spec import Operand
from titan_mxfp8.ops import matmul
from titan_mxfp8.ops.experts import row_spec
from titan_mxfp8.recipe import BF16, get_recipe

Tensors = list[torch.Tensor]
GEMMS = ("forward", "dgrad", "wgrad")
QUANTIZERS = ("quantise x", "quantise dy", "quantise w", "quantise w again", "requantise x")


class Passes:
    """The operands of a layer as a recipe wants them, and its passes over them, by the names of the table above."""

    def __init__(self, problem: Sequence[torch.Tensor], recipe_name: str, backend: str) -> None:
        self.x, self.w, self.dy, self.offs = problem
        recipe, device = get_recipe(recipe_name), self.x.device
        self.recipe, self.backend = recipe, backend
        self.plan = plan(recipe, backend, device)
        self.keeps_w = recipe.weight_block == "32x32" and self.plan.dgrad.b.stored != "bf16"

    def quantize_x(self) -> tuple[Operand, Operand]:
        plan = self.plan
        return matmul.quantize_both(self.x, plan.forward.a, plan.wgrad.b, self.offs, self.backend)

    def quantize_dy(self) -> tuple[Operand, Operand]:
        return matmul.quantize_both(self.dy, self.plan.dgrad.a, self.plan.wgrad.a, self.offs, self.backend)

    def quantize_w(self) -> tuple[Operand, ...]:
        plan = self.plan
        if self.keeps_w:
            return matmul.quantize_both(self.w, plan.forward.b, plan.dgrad.b, None, self.backend)
        return (matmul.quantize(self.w, 2, plan.forward.b, None, self.backend),)

    def quantize_w_again(self) -> Operand:
        return matmul.quantize(self.w, 1, self.plan.dgrad.b, None, self.backend)

    def gemm(self, name: str) -> tuple[Call, dict[str, float]]:
        """One of the three, on operands that are made here, and ``sums_a`` and ``sums_b`` where they are coalesced."""
        common = self.offs, torch.bfloat16, self.backend
        if name == "wgrad":
            operands = self.quantize_dy()[1], self.quantize_x()[1]
            return partial(matmul.gemm_k_grouped, *operands, self.dy.shape[0], *common), {}
        if name == "forward":
            operands = self.quantize_x()[0], self.quantize_w()[0]
        else:
            operands = self.quantize_dy()[0], self.quantize_w_again()
        call = partial(matmul.gemm_m_grouped, *operands, self.offs, None, *common[1:])
        if any(operand.spec.stored != "coalesced" for operand in operands):
            return call, {}
        return call, {f"sums_{side}": sums_per_stage(operand) for side, operand in zip("ab", operands, strict=True)}

    def quantizer(self, name: str) -> tuple[Call, Sequence[torch.Tensor]]:
        """One of ``QUANTIZERS``, and what it reads."""
        if name == "requantise x":
            rows = matmul.quantize(self.x, 1, row_spec(self.plan.forward.a), None, self.backend)
            call = partial(matmul.requantize, rows, 0, self.plan.wgrad.b, self.offs, self.backend)
            return call, [rows.data, rows.scale]
        calls = {
            "quantise x": (self.quantize_x, self.x),
            "quantise dy": (self.quantize_dy, self.dy),
            "quantise w": (self.quantize_w, self.w),
            "quantise w again": (self.quantize_w_again, self.w),
        }
        call, tensor = calls[name]
        return call, [tensor]


def tensors_of(value: object) -> list[torch.Tensor]:
    """All tensors in nested lists and tuples, such as operands."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors_of(part)] if isinstance(value, list | tuple) else []


def bf16_gemm(name: str, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """One of the three by torch, of the tensors that nothing has quantised."""
    a, b = {"forward": (x, w.mT), "dgrad": (dy, w), "wgrad": (dy.mT, x)}[name]
    return torch._grouped_mm(a, b, offs=offs)


def measure_shape(bench: Bench, shape: GroupedShape, recipes: Sequence[str]) -> None:
    """The rows of a shape that are due."""
    spread = "zipf" if shape in SMALL_EXPERT_SHAPES else "balanced"
    columns = {"M": shape.m, "N": shape.n, "K": shape.k, "G": shape.groups, "groups": spread}
    due = {}
    for recipe in recipes:
        for name in GEMMS + QUANTIZERS if get_recipe(recipe).quantized else GEMMS:
            key = bench.key(**columns, recipe=recipe, what=name)
            if bench.is_due(key):
                due[recipe, name] = key
    if not due:
        return
    with bench.whatever_fits(shape.name):
        problem = make_problem(Job(shape=shape, ways=(), spread=spread), bench.device)
        problem = [tensor.detach() for tensor in problem]
        passes = {recipe: Passes(problem, recipe, bench.env["backend"]) for recipe, _ in due}
        for gemm in GEMMS:
            base, entries = partial(bf16_gemm, gemm, *problem), []
            for recipe in (recipe for recipe, name in due if name == gemm):
                ours, sums = passes[recipe].gemm(gemm)
                check(f"{shape.name} {gemm}", recipe, [ours()], [base()])
                mma_dtype = getattr(passes[recipe].plan, gemm).mma_dtype
                ceiling = "FP8 matmul" if mma_dtype == "FP8" else "bf16 matmul"
                work = Work(flops=2 * shape.m * shape.n * shape.k, ceiling=ceiling)
                more = {"mma_dtype": mma_dtype, "control": recipe == BF16.name, **sums}
                entries.append(Entry(key=due[recipe, gemm], call=ours, work=work, more=more))
            if entries:
                bench.compare(entries, base)
        for recipe, name in (which for which in due if which[1] in QUANTIZERS):
            call, inputs = passes[recipe].quantizer(name)
            # what a GEMM takes unquantised is handed on, not written
            written = [tensor for tensor in tensors_of(call()) if not any(tensor is given for given in inputs)]
            work = Work(moved=sum(tensor.nbytes for tensor in (*inputs, *written)), ceiling="copy")
            bench.compare([Entry(key=due[recipe, name], call=call, work=work)])


def main(argv: Sequence[str]) -> None:
    shapes = (*GROUPED_SHAPES[:2], *SMALL_EXPERT_SHAPES)
    shapes += tuple(
        replace(shape, m=m, name=f"{shape.name}_{m >> 10}k") for m in (16384, 4096) for shape in GROUPED_SHAPES[:2]
    )
    parser = parser_of(__doc__, shapes, (BF16.name, *RECIPES))
    parser.add_argument("--ceilings", action="store_true", help="measure the ceilings alone")
    args = parse(parser, argv)

    def measure(bench: Bench) -> None:
        bench.measure_ceilings()
        if args.ceilings:
            return
        rebases = next(entry.rebases for entry in BACKENDS if entry.name == bench.env["backend"])
        recipes = [recipe for recipe in args.recipes if rebases or get_recipe(recipe).block_k == 32]
        for shape in bench.each(args.shapes or shapes[: 1 if args.quick else None], "shape"):
            measure_shape(bench, shape, recipes)

    run("kernels", args, measure)


if __name__ == "__main__":
    main(sys.argv[1:])
