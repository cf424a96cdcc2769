"""What MXFP8 can bring on a GPU, beside what it brings.

    python scripts/bench/roofline.py passes results/<folder>    # roofline.csv of a folder of bench_all.sh's
    python scripts/bench/roofline.py check --out OUT            # predictions beside all trainings in results/

A pass takes the longer of the time to move its bytes, each input and output once, and the time to multiply. A step has
the passes of its converted layers and what no format changes; communication and the host are left out. ``passes``
predicts passes by tokens from the ceilings that the folder measured, ``check`` trainings by the GPU's ceilings and by
our kernels' rates; of the control, ``bf16+dispatch``, 1, as in the model only the number format changes a step.
"""

import argparse
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import torch

from scripts.bench.problems import GroupedShape
from scripts.progress import ends_in_words
from scripts.result_files import (
    env_of,
    environment,
    format_table,
    gpu_of,
    is_plain,
    read_rows,
    training_gains,
    write_results,
    write_rows,
)
from scripts.study.conversions import FLOAT8, conversion_of
from titan_mxfp8.backends import Plan, plan_on
from titan_mxfp8.backends.hardware import CLUSTER_GPUS, Hardware
from titan_mxfp8.format.spec import OperandSpec
from titan_mxfp8.recipe import BF16, RECIPES, Recipe, get_recipe

if TYPE_CHECKING:
    from titan_mxfp8.tools.dry_run import Report

ROOT = Path(__file__).parents[2]
MODELS = {(8192, 5120): "llama4", (2048, 7168): "deepseek_v3"}  # by N and K of their experts
# Bytes that FSDP on a mesh of one rank reads and writes in a step for each element: before forward and again before
# backward fp32 is cast to bf16, 6, and that copied, 4; of the gradient bf16 is cast to fp32, 6, divided, 8, and copied,
# 8. On an H100 that took 4.3 ms for 277 million elements, 2.7 TB/s (a MoE layer of DeepSeek-V3 16B with EP 2).
FSDP_COPIES = 2 * (6 + 4) + 6 + 8 + 8
CEILINGS = {"copy": "copy", "bf16 matmul": "bf16", "FP8 matmul": "FP8"}  # rows of bench_grouped_mm.py --passes
SHOWN = ("mxfp8", "mxfp8_2d", "mxfp8_2d_rebased")
TOKENS = tuple(half << exponent for exponent in range(9, 18) for half in (2, 3))
EXPERTS = 8
BOTH = "forward + backward"

Row = dict[str, object]


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
        if own := self.own.get((recipe, one.name)):
            return (one.flops or one.moved) / own
        multiplying = one.flops / self.ceilings.get(one.what, self.ceilings["bf16"]) if one.flops else 0
        return max(multiplying, one.moved / self.ceilings["copy"])


def passes(recipe: Recipe, plan: Plan, layer: GroupedShape, keeps_weight: bool = True) -> list[Pass]:
    """Of a layer's forward and backward, by the names that bench_grouped_mm.py gives them. A linear is one group."""
    m, n, k, groups = layer.m, layer.n, layer.k, layer.groups
    x, dy, w = (m, k), (m, n), (groups, n, k)
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
        if written := [_bytes(shape, axis, spec, groups) for axis, spec in ways if spec.is_quantized]:
            found.append(Pass(name=name, moved=2 * prod(shape) + sum(written)))
    # By name: both operands, the axis along which each is multiplied, and the elements of the result.
    gemms = {"forward": (x, 1, w, 2, m * n), "dgrad": (dy, 1, w, 1, m * k), "wgrad": (dy, 0, x, 0, groups * n * k)}
    for name, (a, a_axis, b, b_axis, out) in gemms.items():
        gemm = plan.gemms[name]
        moved = _bytes(a, a_axis, gemm.a, groups) + _bytes(b, b_axis, gemm.b, groups) + 2 * out
        found.append(Pass(name=name, moved=moved, flops=2 * m * n * k, what=gemm.mma_dtype))
    return found


def _bytes(shape: tuple[int, ...], axis: int, spec: OperandSpec, groups: int) -> int:
    """Of an operand as it is stored; of rows that are cut into groups along ``axis``, with their padding."""
    is_ragged = len(shape) == 2 and (axis == 0 or spec.grouped_scales)
    operand = spec.empty(torch.empty(shape, dtype=torch.bfloat16, device="meta"), axis, groups if is_ragged else None)
    return operand.data.nbytes + (0 if operand.scale is None else operand.scale.nbytes)


def predicted_seconds(
    recipe: Recipe, hardware: Hardware, layer: GroupedShape, rates: Rates, keeps_weight: bool = True, forwards: int = 1
) -> dict[str, float]:
    """Of each pass, and of ``BOTH``; ``forwards``: 2 where checkpointing computes forward again."""
    seconds: dict[str, float] = {}
    for one in passes(recipe, plan_on(recipe, "auto", hardware), layer, keeps_weight):
        times = forwards if one.name in ("quantise x", "quantise w", "forward") else 1
        seconds[one.name] = times * rates.seconds(recipe.name, one)
    return seconds | {BOTH: sum(seconds.values())}


def step_speedup(report: "Report", gpu: str, rates: Rates) -> float:
    """How many times as fast a training step of a dry run is on one GPU as with all of it in bf16.

    Besides the passes of its converted layers a step has all other FLOPs, at bf16's rate; seven times the bytes of the
    parameters for AdamW; twice the bytes that forward saves for backward; in bf16 FSDP's copies of experts that stay
    out of it in MXFP8 (``FSDP_COPIES``). What is read and written in between is left out, and what sends tokens.
    """
    hardware, multiplied, moved = CLUSTER_GPUS[gpu], rates.ceilings["bf16"], rates.ceilings["copy"]
    converted = sum(6 * m * n * k * count for (_, m, n, k, _), count in report.gemms.items())
    # forward is a third of forward and backward
    other_flops = max(0, report.flops_per_token * report.tokens - converted) * (2 + report.forwards) / 3
    # parameter, gradient and both moments are read, all but the gradient written, each as large as the parameters
    other_bytes = 7 * report.memory.parameters + 2 * report.memory.activations
    ours = other_flops / multiplied + other_bytes / moved
    base = ours + FSDP_COPIES * report.out_of_fsdp / moved
    for (recipe, m, n, k, groups), count in report.gemms.items():
        keeps_weight = not report.frees_weights or (groups > 1 and report.out_of_fsdp > 0)
        how = hardware, GroupedShape("", m, n, k, groups), rates, keeps_weight, report.forwards
        ours += count * predicted_seconds(recipe, *how)[BOTH]
        base += count * predicted_seconds(BF16, *how)[BOTH]
    return base / ours


def committed_rates(results: Path, gpu: str) -> tuple[Rates, Rates] | None:
    """The rates of a GPU by committed measurements: its ceilings, and with what our kernels reached in the newest run
    of several shapes, or of one where there is none.

    A ceiling is the fastest of all passes that multiply, or move, the same; of bf16, on plain bf16 operands: on values
    that were quantised to 8 bits a GPU draws less power and is faster, so our own rates may lie above it. None: nothing
    was measured there.
    """
    ceilings: dict[str, float] = {}
    own: dict[tuple[str, str], list[float]] = {}
    for path in sorted(results.rglob("data.csv")):  # the oldest first
        if gpu_of(env_of(path)) != gpu:
            continue
        rows = [row for row in read_rows(path) if row.get("bench") == "kernels" and is_plain(row)]
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
    recipe, name = row.get("recipe", ""), row["what"]
    if name in CEILINGS:
        yield (recipe, name), CEILINGS[name], float(row.get("tflops") or 0) * 1e12 or float(row["gb_per_s"]) * 1e9
    elif recipe in (*RECIPES, BF16.name):
        layer = GroupedShape("", *(int(row[size]) for size in "MNKG"))
        for one in passes(get_recipe(recipe), plan_on(get_recipe(recipe), "auto", hardware), layer):
            if one.name == name and recipe != BF16.name:
                yield (recipe, name), one.what, (one.flops or one.moved) / (float(row["p50_us"]) / 1e6)
            if one.name == name and row["baseline_us"]:
                yield (BF16.name, name), "bf16", one.flops / (float(row["baseline_us"]) / 1e6)


def roofline_rows(folder: Path) -> list[Row]:
    """Predicted and measured microseconds of each pass, and of all together, by model, tokens and recipe; measured of
    balanced groups of normal numbers with ``EXPERTS`` experts, nothing held. Raises ValueError if the folder lacks the
    rates of a GPU that clusters have."""
    found = {gpu: rates[0] for gpu in CLUSTER_GPUS if (rates := committed_rates(folder, gpu))}
    if not found:
        known = ", ".join(CLUSTER_GPUS)
        raise ValueError(f"{folder} lacks ceilings of one of {known}: bench_grouped_mm.py --passes measures them")
    gpu, ceilings = next(iter(found.items()))
    measured: dict[tuple[str, ...], dict[str, str]] = {}
    for row in (row for path in sorted(folder.rglob("data.csv")) for row in filter(is_plain, read_rows(path))):
        kind, groups = row.get("bench"), (row.get("groups") or "balanced", row.get("G") or str(EXPERTS))
        is_one = kind == "kernels" or (kind in ("grouped_mm", "scaling") and row["what"] == BOTH)
        if is_one and groups == ("balanced", str(EXPERTS)):
            measured[row["N"], row["K"], row["M"], row["recipe"], row["what"]] = row
    rows: list[Row] = []
    for n, k in MODELS:
        of_model = {int(m) for *sizes, m, _, _ in measured if sizes == [str(n), str(k)]}
        for m in sorted({*TOKENS, *of_model}):
            how = CLUSTER_GPUS[gpu], GroupedShape("", m, n, k, EXPERTS), ceilings
            bf16 = predicted_seconds(BF16, *how)
            for recipe in SHOWN:
                for what, seconds in predicted_seconds(get_recipe(recipe), *how).items():
                    beside = measured.get((str(n), str(k), str(m), recipe, what), {})
                    row: Row = {"gpu": gpu, "M": m, "N": n, "K": k, "G": EXPERTS, "recipe": recipe, "what": what}
                    row |= {"predicted_us": 1e6 * seconds, "predicted_x": bf16[what] / seconds if what in bf16 else ""}
                    row |= {name: beside.get(name, "") for name in ("p50_us", "x", "gb_per_s", "baseline_us")}
                    rows.append(row | {"ceiling_gb_per_s": ceilings.ceilings["copy"] / 1e9})
    return rows


def trainings(results: Path) -> Iterator[tuple[Path, dict[str, str], dict[str, str], float]]:
    """Table, environment, row and gain of each training of ours beside bf16's whose config and flags are known."""
    for path in sorted(results.rglob("*table.csv")):
        env, gains = env_of(path), training_gains(read_rows(path))
        if env.get("config", "").endswith(".toml"):  # TorchTitan 0.3 has none
            for row, gain in gains:
                run = conversion_of(row["run"])
                if run.converters and run.recipe != FLOAT8:
                    yield path, env, row, gain


def check(results: Path) -> list[Row]:
    """A row for each of ``trainings`` on a GPU of which there are rates."""
    from scripts.bench.bench_training import flags_of
    from titan_mxfp8.tools.dry_run import dry_run, parse_config
    from titan_mxfp8.tools.memory import GIB

    table: list[Row] = []
    for path, env, row, gain in trainings(results):
        gpu = gpu_of(env)
        rates = committed_rates(results, gpu) if gpu in CLUSTER_GPUS else None
        if rates is None:
            continue
        flags = [*flags_of(row["run"]), *env.get("flags", "").split(), "--cluster.nodes=1", f"--cluster.gpu={gpu}"]
        flags += [f"--cluster.gpus_per_node={env['processes']}"]
        if row.get("flavor"):
            flags += [f"--model.flavor={row['flavor']}", "--model.study_flavors"]
        job_config = parse_config(str(ROOT / env["config"]), flags)
        report = dry_run(job_config, fill=inf)  # it has been trained, so it fits
        roofline, own = (round(step_speedup(report, gpu, each), 3) for each in rates)
        found: Row = {"folder": path.parent.relative_to(results), "table": path.name, "model": job_config.model.flavor}
        found |= {"GPUs": env["processes"], "run": row["run"], "measured": round(gain, 3)}
        found |= {"by our rates": own, "by the ceilings": roofline}
        table.append(found | {"memory GiB": row["memory GiB"], "estimated GiB": round(report.memory.total / GIB, 2)})
    return table


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("passes", help="of a folder of results").add_argument("folder", type=Path)
    checking = commands.add_parser("check", help="predictions beside what was measured")
    checking.add_argument("--out", type=Path, help="folder for data.csv and env.json")
    args = parser.parse_args(argv)
    with ends_in_words("roofline"):
        if args.command == "passes":
            write_rows(args.folder / "roofline.csv", roofline_rows(args.folder))
            print(args.folder / "roofline.csv")
            return
        logging.disable(logging.ERROR)  # TorchTitan's account of a run that does not happen
        rows = check(ROOT / "results")
        print(format_table(rows))
        if args.out:
            write_results(args.out, rows, environment("cpu"))


if __name__ == "__main__":
    main(sys.argv[1:])
