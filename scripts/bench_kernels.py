"""Each pass of a grouped GEMM's forward and backward, as each recipe runs it on this machine, against the ceilings.

    python scripts/bench_kernels.py --out results/<date>_<device>_kernels [--quick] [--limit SECONDS]

How a time is taken and most columns: ``bench.py``. First the machine's ceilings, at its power cap: a copy, a dense bf16
matmul and a dense FP8 one, which ``share`` of the other rows refers to. Then for each shape and recipe the passes that
``ops/matmul.py`` runs, on the operands that the chosen backend's plan wants, in the form that it wants them:

| what                  | pass                                                                                         |
|-----------------------|----------------------------------------------------------------------------------------------|
| quantise x, dy        | along both axes, or along the features alone where the weight gradient takes bf16            |
| quantise w            | for forward, and for dgrad too where that is kept                                            |
| quantise w again      | for dgrad, in backward; where it was kept: what FSDP costs                                   |
| forward, dgrad, wgrad | the GEMMs, against ``torch._grouped_mm`` in bf16                                             |
| requantise x          | FP8 rows that arrived along the features, for the weight gradient: with ``dispatch``         |

The data are normal numbers. Of exact FP8 GEMMs on Hopper ``sums_a`` and ``sums_b`` say in how many sums of 128 products
the scales of each operand part them, 1 to 4 (``testing.sums_per_stage``). A GEMM whose result is further from bf16's
than MXFP8 explains ends the run. Recipe ``bf16`` is the control: our GEMMs on plain bf16 operands.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from bench import Bench, Call, Work, parse, parser_of, run
from bench_grouped_mm import RECIPES, Job, check, make_problem

from titan_mxfp8.backends import BACKENDS, plan
from titan_mxfp8.format.spec import Operand, spec_of
from titan_mxfp8.ops import library, matmul
from titan_mxfp8.ops.experts import row_spec
from titan_mxfp8.recipe import BF16, get_recipe
from titan_mxfp8.testing import GROUPED_SHAPES, SMALL_EXPERT_SHAPES, GroupedShape, sums_per_stage

Tensors = list[torch.Tensor]


class Passes:
    """The operands of a layer as a recipe wants them, and its passes over them, by the names of the table above."""

    def __init__(self, problem: Sequence[torch.Tensor], recipe_name: str, backend: str) -> None:
        self.x, self.w, self.dy, self.offs = (tensor.detach() for tensor in problem)
        recipe, device = get_recipe(recipe_name), self.x.device
        self.recipe, self.backend = recipe, backend
        self.plan = plan(recipe, backend, device)
        self.specs = matmul.Specs(*matmul.specs_of(recipe.key, backend, device))
        self.keeps_w = recipe.weight_block == "32x32" and spec_of(self.specs.w_dgrad).stored != "bf16"
        # Made once, for the GEMMs. A pass that is timed makes its own.
        self.x_forward, self.x_wgrad = self.quantize_x()
        self.dy_dgrad, self.dy_wgrad = self.quantize_dy()
        self.w_forward = self.quantize_w()[: self._tensors(self.specs.w_forward)]
        self.w_dgrad = self.quantize_w_again()

    def quantize_x(self) -> tuple[Tensors, Tensors]:
        return matmul.quantize_input(self.x, self.offs, self.specs.x_forward, self.specs.x_wgrad, self.backend)

    def quantize_dy(self) -> tuple[Tensors, Tensors]:
        return matmul.quantize_input(self.dy, self.offs, self.specs.dy_dgrad, self.specs.dy_wgrad, self.backend)

    def quantize_w(self) -> Tensors:
        if self.keeps_w:
            return library.quantize_both(self.w, self.specs.w_forward, self.specs.w_dgrad, None, self.backend)
        return library.quantize(self.w, 2, self.specs.w_forward, None, self.backend)

    def quantize_w_again(self) -> Tensors:
        return library.quantize(self.w, 1, self.specs.w_dgrad, None, self.backend)

    def requantize(self, rows: Operand) -> Tensors:
        key = rows.spec.key
        return library.requantize(rows.data, rows.scale, key, 0, self.specs.x_wgrad, self.offs, self.backend)

    def gemm(self, name: str) -> torch.Tensor:
        """One of the three, in bf16."""
        out, specs, offs = torch.bfloat16, self.specs, self.offs
        if name == "forward":
            return matmul.forward(
                self.x_forward, specs.x_forward, self.w_forward, specs.w_forward, offs, None, out, self.backend
            )
        if name == "dgrad":
            return matmul.dgrad(self.dy_dgrad, specs.dy_dgrad, self.w_dgrad, specs.w_dgrad, offs, out, self.backend)
        rows = self.dy.shape[0]
        return matmul.wgrad(self.dy_wgrad, specs.dy_wgrad, self.x_wgrad, specs.x_wgrad, rows, offs, out, self.backend)

    def bf16(self, name: str) -> torch.Tensor:
        """The same by torch, of the tensors that nothing has quantised."""
        x, w, dy = self.x, self.w, self.dy
        a, b = {"forward": (x, w.mT), "dgrad": (dy, w), "wgrad": (dy.mT, x)}[name]
        return torch._grouped_mm(a, b, offs=self.offs)

    def quantizers(self) -> Iterator[tuple[str, Call, Sequence[torch.Tensor]]]:
        """Name, call, and what it reads."""
        yield "quantise x", self.quantize_x, [self.x]
        yield "quantise dy", self.quantize_dy, [self.dy]
        yield "quantise w", self.quantize_w, [self.w]
        yield "quantise w again", self.quantize_w_again, [self.w]
        spec = row_spec(self.plan.forward.a)
        quantized = library.quantize(self.x, 1, spec.key, None, self.backend)
        rows = Operand(quantized[0], quantized[1], spec, 1)
        yield "requantise x", partial(self.requantize, rows), quantized

    def sums(self, name: str) -> dict[str, float]:
        """``sums_a`` and ``sums_b`` of exact FP8 operands on Hopper."""
        if name == "wgrad":
            return {}
        pairs = {
            "forward": ((self.x_forward, self.specs.x_forward, 1), (self.w_forward, self.specs.w_forward, 2)),
            "dgrad": ((self.dy_dgrad, self.specs.dy_dgrad, 1), (self.w_dgrad, self.specs.w_dgrad, 1)),
        }[name]
        operands = [Operand(tensors[0], tensors[-1], spec_of(key), axis) for tensors, key, axis in pairs]
        if any(operand.spec.stored != "even" for operand in operands):
            return {}
        return {f"sums_{side}": sums_per_stage(operand) for side, operand in zip("ab", operands, strict=True)}

    def _tensors(self, key: str) -> int:
        return 1 if spec_of(key).stored == "bf16" else 2


def tensors_of(value: object) -> list[torch.Tensor]:
    """All tensors in nested lists and tuples."""
    return [value] if isinstance(value, torch.Tensor) else [tensor for part in value for tensor in tensors_of(part)]


def measure_shape(bench: Bench, shape: GroupedShape, recipe: str) -> None:
    """The rows of a shape and a recipe that are due."""
    names = ["forward", "dgrad", "wgrad"]
    if get_recipe(recipe).quantized:
        names += ["quantise x", "quantise dy", "quantise w", "quantise w again", "requantise x"]
    spread = "zipf" if shape in SMALL_EXPERT_SHAPES else "balanced"
    columns = {"M": shape.m, "N": shape.n, "K": shape.k, "G": shape.groups, "groups": spread, "recipe": recipe}
    keys = {name: bench.key(**columns, what=name) for name in names}
    due = {name: key for name, key in keys.items() if bench.is_due(key)}
    if not due:
        return
    with bench.whatever_fits(f"{shape.name} {recipe}"):
        passes = Passes(
            make_problem(Job(shape=shape, ways=(), spread=spread), bench.device), recipe, bench.env["backend"]
        )
        control = {"control": recipe == BF16.name}
        for name in (name for name in due if name in ("forward", "dgrad", "wgrad")):
            ours, base = partial(passes.gemm, name), partial(passes.bf16, name)
            check(f"{shape.name} {name}", recipe, [ours()], [base()])
            multiplies = getattr(passes.plan, name).multiplies
            ceiling = "FP8 matmul" if multiplies == "FP8" else "bf16 matmul"
            work = Work(flops=2 * shape.m * shape.n * shape.k, ceiling=ceiling)
            bench.compare(due[name], ours, base, work, multiplies=multiplies, **control, **passes.sums(name))
        for name, call, inputs in passes.quantizers() if get_recipe(recipe).quantized else ():
            if name in due:
                # what a GEMM takes unquantised is handed on, not written
                written = [tensor for tensor in tensors_of(call()) if not any(tensor is given for given in inputs)]
                moved = sum(tensor.nbytes for tensor in (*inputs, *written))
                bench.compare(due[name], call, None, Work(moved=moved, ceiling="copy"))


def main(argv: Sequence[str]) -> None:
    shapes = (*GROUPED_SHAPES[:2], *SMALL_EXPERT_SHAPES)
    shapes += tuple(
        replace(shape, m=m, name=f"{shape.name}_{m >> 10}k") for m in (16384, 4096) for shape in GROUPED_SHAPES[:2]
    )
    args = parse(parser_of(__doc__, shapes, (BF16.name, *RECIPES)), argv)

    def measure(bench: Bench) -> None:
        bench.measure_ceilings()
        rebases = next(entry.rebases for entry in BACKENDS if entry.name == bench.env["backend"])
        for shape in args.shapes or shapes[: 1 if args.quick else None]:
            for recipe in args.recipes:
                if rebases or get_recipe(recipe).scale_span == 32:
                    measure_shape(bench, shape, recipe)

    run("kernels", args, measure)


if __name__ == "__main__":
    main(sys.argv[1:])
