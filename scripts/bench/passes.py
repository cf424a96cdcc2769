"""What MXFP8 can bring at most: the passes of a layer's forward and backward, and the rates of a GPU.

A pass takes the longer of the time to move its bytes, each input and output once, and the time to multiply (the
roofline model). A step has the passes of each converted layer and, besides, what no format changes: all other FLOPs, at
bf16's rate; seven times the bytes of the parameters for AdamW; twice the bytes that forward saves for backward; in bf16
FSDP's copies of experts that stay out of it in MXFP8 (``FSDP_COPIES``). Left out are communication, waiting for the
host, what is read and written in between, and with ``dispatch`` what sends tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import torch

from scripts.result_files import env_of, gpu_of, read_rows
from titan_mxfp8.backends import Plan, plan_on
from titan_mxfp8.backends.hardware import CLUSTER_GPUS, Hardware
from titan_mxfp8.format.spec import OperandSpec
from titan_mxfp8.recipe import BF16, RECIPES, Recipe, get_recipe

if TYPE_CHECKING:
    from titan_mxfp8.tools.dry_run import Report

MODELS = {(8192, 5120): "llama4", (2048, 7168): "deepseek_v3"}  # by N and K of their experts
# Bytes that FSDP on a mesh of one rank reads and writes in a step for each element: before forward and again before
# backward fp32 is cast to bf16, 6, and that copied, 4; of the gradient bf16 is cast to fp32, 6, divided, 8, and copied,
# 8. On an H100 that took 4.3 ms for 277 million elements, 2.7 TB/s (a MoE layer of DeepSeek-V3 16B with EP 2).
FSDP_COPIES = 2 * (6 + 4) + 6 + 8 + 8
CEILINGS = {"copy": "copy", "bf16 matmul": "bf16", "FP8 matmul": "FP8"}  # rows of bench_grouped_mm.py --passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A linear (one expert) or a layer of experts, as one GPU computes it; ``count``: so many of them."""

    m: int
    n: int
    k: int
    groups: int = 1
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """``what`` limits it: ``copy``, or what the tensor cores multiply."""

    name: str
    moved: float
    flops: float = 0
    what: str = "copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a GPU does per second: bytes and FLOPs.

    Attributes:
        ceilings: by ``copy``, ``bf16`` and ``FP8``: the fastest that was measured on this GPU.
        own: by recipe and pass, what our kernels reach; empty for the roofline itself.
    """

    ceilings: Mapping[str, float]
    own: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def seconds(self, recipe: str, one: Pass) -> float:
        """Of a pass: by its own rate where there is one."""
        own = self.own.get((recipe, one.name))
        if own:
            return (one.flops or one.moved) / own
        multiplying = one.flops / self.ceilings.get(one.what, self.ceilings["bf16"]) if one.flops else 0
        return max(multiplying, one.moved / self.ceilings["copy"])


def passes(recipe: Recipe, plan: Plan, layer: Layer, keeps_weight: bool = True) -> list[Pass]:
    """The passes that a plan has, by the names that bench_grouped_mm.py gives them."""
    m, n, k, groups = layer.m, layer.n, layer.k, layer.groups
    x, dy, w, flops = (m, k), (m, n), (groups, n, k), 2 * m * n * k
    keeps = keeps_weight and recipe.weight_block == "32x32" and plan.dgrad.b.stored != "bf16"
    # By name: the tensor, and along which axes it is quantised to what.
    made = {
        "quantise x": (x, ((1, plan.forward.a), (0, plan.wgrad.b))),
        "quantise w": (w, ((2, plan.forward.b), *([(1, plan.dgrad.b)] * keeps))),
        "quantise dy": (dy, ((1, plan.dgrad.a), (0, plan.wgrad.a))),
        "quantise w again": (w, [(1, plan.dgrad.b)] * (not keeps)),
    }
    found = []
    for name, (shape, ways) in made.items():
        written = [_bytes(shape, axis, spec, groups) for axis, spec in ways if spec.is_quantized]
        if written:
            found.append(Pass(name=name, moved=2 * prod(shape) + sum(written)))
    operands = {
        "forward": (_bytes(x, 1, plan.forward.a, groups), _bytes(w, 2, plan.forward.b, groups), m * n),
        "dgrad": (_bytes(dy, 1, plan.dgrad.a, groups), _bytes(w, 1, plan.dgrad.b, groups), m * k),
        "wgrad": (_bytes(dy, 0, plan.wgrad.a, groups), _bytes(x, 0, plan.wgrad.b, groups), groups * n * k),
    }
    for name, (a, b, out) in operands.items():
        mma_dtype = plan.gemms[name].mma_dtype
        found.append(Pass(name=name, moved=a + b + 2 * out, flops=flops, what=mma_dtype))
    return found


def _bytes(shape: tuple[int, ...], axis: int, spec: OperandSpec, groups: int) -> int:
    """Of an operand as it is stored; of rows that are cut into groups along ``axis``, with their padding."""
    is_ragged = len(shape) == 2 and (axis == 0 or spec.grouped_scales)
    operand = spec.empty(torch.empty(shape, dtype=torch.bfloat16, device="meta"), axis, groups if is_ragged else None)
    return operand.data.nbytes + (0 if operand.scale is None else operand.scale.nbytes)


def layer_seconds(
    recipe: Recipe, hardware: Hardware, layer: Layer, rates: Rates, keeps_weight: bool = True, forwards: int = 1
) -> float:
    """Of a layer's forward and backward; ``forwards``: 2 where checkpointing computes it again."""
    plan = plan_on(recipe, "auto", hardware)
    total = 0.0
    for one in passes(recipe, plan, layer, keeps_weight):
        times = forwards if one.name in ("quantise x", "quantise w", "forward") else 1
        total += times * rates.seconds(recipe.name, one)
    return total * layer.count


def step_speedup(report: "Report", gpu: str, rates: Rates) -> float:
    """How many times as fast a training step of a dry run is on one GPU as with all of it in bf16."""
    hardware, multiplied, moved = CLUSTER_GPUS[gpu], rates.ceilings["bf16"], rates.ceilings["copy"]
    converted = sum(6 * m * n * k * count for (_, m, n, k, _), count in report.gemms.items())
    # forward is a third of forward and backward
    other_flops = max(0, report.flops_per_token * report.tokens - converted) * (2 + report.forwards) / 3
    # parameter, gradient and both moments are read, all but the gradient written, each as large as the parameters
    other_bytes = 7 * report.memory.parameters + 2 * report.memory.activations
    ours = other_flops / multiplied + other_bytes / moved
    base = ours + FSDP_COPIES * report.out_of_fsdp / moved
    for (recipe, m, n, k, groups), count in report.gemms.items():
        layer = Layer(m=m, n=n, k=k, groups=groups, count=count)
        keeps_weight = not report.frees_weights or (groups > 1 and report.out_of_fsdp > 0)
        ours += layer_seconds(recipe, hardware, layer, rates, keeps_weight, report.forwards)
        base += layer_seconds(BF16, hardware, layer, rates, keeps_weight, report.forwards)
    return base / ours


def kernel_rows(results: Path, gpu: str) -> Iterator[list[dict[str, str]]]:
    """The rows of passes that were measured on a GPU, of each CSV under ``results``, the oldest first."""
    for path in sorted(results.rglob("data.csv")):
        if gpu_of(env_of(path)) == gpu:
            rows = [row for row in read_rows(path) if row.get("bench") == "kernels" and row.get("data") != "products"]
            if rows:
                yield rows


def committed_rates(results: Path, gpu: str) -> tuple[Rates, Rates] | None:
    """The rates of a GPU by committed measurements: its ceilings, and with what our kernels reached in the newest run
    of several shapes, or of one where there is none.

    A ceiling is the fastest of all passes that multiply, or move, the same; of bf16, on plain bf16 operands: on values
    that were quantised to 8 bits a GPU draws less power and is faster, so our own rates may lie above it. None: nothing
    was measured there.
    """
    ceilings: dict[str, float] = {}
    own: dict[tuple[str, str], list[float]] = {}
    for rows in kernel_rows(results, gpu):
        shapes = {(row["N"], row["K"]) for row in rows if row["what"] not in CEILINGS}
        is_newer = len(shapes) > 1 or (bool(shapes) and not own)
        own = {} if is_newer else own
        for row in rows:
            for name, what, rate in _rates_of(row, CLUSTER_GPUS[gpu]):
                if is_newer:
                    own.setdefault(name, []).append(rate)
                if what != "bf16" or name[0] not in RECIPES:
                    ceilings[what] = max(rate, ceilings.get(what, 0))
    if not {"copy", "bf16", "FP8"} <= ceilings.keys():
        return None
    return Rates(ceilings=ceilings), Rates(ceilings=ceilings, own={name: mean(every) for name, every in own.items()})


def _rates_of(row: Mapping[str, str], hardware: Hardware) -> Iterator[tuple[tuple[str, str], str, float]]:
    """Recipe and pass, what limits it, and bytes or FLOPs a second: of a row and, as bf16's, of its baseline."""
    recipe, name, seconds = row.get("recipe", ""), row["what"], float(row["p50_us"]) / 1e6
    if name in CEILINGS:
        work = float(row["tflops"]) * 1e12 if row.get("tflops") else float(row["gb_per_s"]) * 1e9
        yield (recipe, name), CEILINGS[name], work
        return
    if recipe not in RECIPES and recipe != BF16.name:
        return
    layer = Layer(m=int(row["M"]), n=int(row["N"]), k=int(row["K"]), groups=int(row["G"]))
    plan = plan_on(get_recipe(recipe), "auto", hardware)
    for one in passes(get_recipe(recipe), plan, layer):
        if one.name == name and recipe != BF16.name:
            yield (recipe, name), one.what, (one.flops or one.moved) / seconds
        if one.name == name and row["baseline_us"]:
            yield (BF16.name, name), "bf16", one.flops / (float(row["baseline_us"]) / 1e6)
