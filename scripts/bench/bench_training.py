"""Training throughput of TorchTitan runs that differ in nothing but what is converted; either TorchTitan's.

    python scripts/bench/bench_training.py --ngpu 4 --runs bf16 both:mxfp8_2d+dispatch --repeats 3 --out OUT -- FLAGS

A run is WHAT[+rebase][+dispatch][+graph][:RECIPE], WHAT of bf16, grouped (experts), linears or both; what is not named
is off, whatever the TOML says. bf16+dispatch is the control: dispatch, with nothing quantised; bf16+async is TorchTitan
0.3's MinimalAsyncEP; with RECIPE float8 a run is TorchTitan 0.2.2's own FP8, scaled by rows, of torchao. ``x`` is
against the first run of the same repeat. All start from the same weights and data: a run whose first loss is not the
baseline's gets no ``x``. One that fails is a row that says why, and the others go on unless it is the baseline. Either
makes the exit status 1. Writes data.csv (steps), table.csv (runs), with flavors of several numbers of layers layers.csv
(a layer's time), and env.json after every run. Runs in OUT that ended are not run again: it goes on.
"""

import argparse
import itertools
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import harmonic_mean, median

import torch

from scripts.bench.kernel_times import Trace
from scripts.bench.peers import check_torchao, float8_flags
from scripts.progress import ends_in_words, follow, progress, say
from scripts.result_files import (
    SPEED,
    environment,
    format_table,
    installed_version,
    percentiles,
    write_results,
    write_rows,
)
from scripts.study.conversions import FLOAT8, conversion_of
from scripts.study.runs import Run, ending, read_run, split_flags
from scripts.study.starter import Starter
from titan_mxfp8.recipe import GROUPED_MM, LINEAR

# Nats between the first losses of a run and of its baseline, more than twice what rounding did: at most 0.0009 with the
# same seed in models of up to 320M parameters (153 pairs of results/), 0.0038 in DeepSeek-V3 16B of 4 layers. Two of
# its bf16 runs with other weights are further apart in 89% of cases. Trained weights may need another limit.
LOSS_LIMIT = 0.01
TITAN03 = version("torchtitan").startswith("0.3")
PROFILED = 8  # steps of the run with --profile; the last one is in the trace


def flags_of(name: str) -> list[str]:
    """TorchTitan 0.2.2's flags for a run's name."""
    conversion = conversion_of(name)
    if conversion.recipe == FLOAT8:
        return float8_flags(conversion.converters)
    return [f"--model.converters={','.join(conversion.converters)}", *conversion.flags()]


def flags_of_titan03(name: str) -> list[str]:
    """TorchTitan 0.3's flags for a run's name."""
    conversion = conversion_of(name)
    if conversion.recipe == FLOAT8:
        raise ValueError(f"unknown run {name!r}: {FLOAT8} is TorchTitan 0.2.2's")
    common: dict[str, object] = {"recipe": conversion.full_recipe} if conversion.recipe else {}
    dispatch = {"dispatch": "auto" if "dispatch" in conversion.options else "off"}
    overrides = {GROUPED_MM: ("experts", common | dispatch), LINEAR: ("linears", common)}
    chosen = [overrides[converter] for converter in conversion.converters]
    imports = [f"titan_mxfp8.titan03.{module}={json.dumps(override)}" for module, override in chosen]
    flags = ["--override.imports", *imports] if imports else []
    return [*flags, f"--training.{'no_' * ('graph' in conversion.options)}disable_cuda_graphs"]


@dataclass(slots=True, kw_only=True)
class Measured:
    """The repeats of a run, a step of it under the profiler, where that was asked for, and how a repeat failed."""

    repeats: list[Run] = field(default_factory=list)
    profiled: Trace | None = None
    failed: str = ""


Bench = dict[tuple[str, str], Measured]  # by flavor ("" for the TOML's) and name


def label(flavor: str, name: str) -> str:
    return f"{flavor}-{name}" if flavor else name


def folder_of(flavor: str, name: str, suffix: str, args: argparse.Namespace) -> Path:
    return args.out / "runs" / f"{label(flavor, name)}{suffix}".replace(":", "-")


def is_finished(folder: Path, steps: int) -> bool:
    try:
        return max(read_run(folder).loss) == steps
    except ValueError:
        return False  # no such run yet


def train(flavor: str, name: str, suffix: str, steps: int, args: argparse.Namespace, *more: str) -> Path:
    """Runs TorchTitan, unless the folder holds such a run already.

    Returns:
        The run's dump folder.

    Raises:
        ValueError: the run failed; the message holds the end of its log.
    """
    folder = folder_of(flavor, name, suffix, args)
    if is_finished(folder, steps):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if TITAN03:
        config = f"{flavor or args.config}{'_minimal_async_ep' * ('async' in conversion_of(name).options)}"
        flags = ["--module=titan_mxfp8.titan03", f"--config={config}", f"--dump_folder={folder}"]
        flags += [*flags_of_titan03(name), "--metrics.no_enable_wandb"]
        flags += ["--dataloader.num_workers=1", "--dataloader.prefetch_factor=4"]
    else:
        flags = [f"--job.config_file={args.config}", f"--job.dump_folder={folder}", *flags_of(name)]
        flags += [f"--model.flavor={flavor}", "--model.study_flavors"] if flavor else []
        # Tokenizing in the training process would count as a part of each step.
        flags += ["--training.dataloader.num_workers=1", "--training.dataloader.prefetch_factor=4"]
        flags += ["--metrics.no-enable_wandb"]
    flags += [f"--training.steps={steps}", "--debug.seed=0", "--metrics.log_freq=1", "--metrics.enable_tensorboard"]
    flags += [*args.flags, *more]
    log = folder / "log"
    log.unlink(missing_ok=True)  # of an attempt that failed
    if follow(args.starter.start(flags, log), log, steps, folder.name):
        raise ValueError(f"run {folder.name} failed, {ending(log)}")
    return folder


def profile(flavor: str, name: str, args: argparse.Namespace) -> Trace:
    """A step of the first process, from a run of its own: the profiler takes time.

    Raises:
        ValueError: the run failed, or nothing ran on a GPU.
    """
    more = "--profiling.enable_profiling", f"--profiling.profile_freq={PROFILED}"
    folder = train(flavor, name, "-profile", PROFILED, args, *more)
    traces = list(folder.rglob("rank0_trace.json"))
    if not traces:
        raise ValueError(f"{folder} holds no trace of the profiler")
    return Trace(traces[0])


def refusals(bench: Bench, limit: float = LOSS_LIMIT) -> dict[tuple[str, str], str]:
    """Why runs get no ``x``, by flavor and name; the first run of a flavor is the baseline of the others."""
    refused: dict[tuple[str, str], str] = {}
    for (flavor, name), measured in bench.items():
        if not measured.repeats:
            refused[flavor, name] = measured.failed
            continue
        base_name = next(other for first, other in bench if first == flavor)
        losses = [item for run in measured.repeats for item in run.loss.items()]
        infinite = [(step, loss) for step, loss in losses if not math.isfinite(loss)]
        pairs = [
            (run.loss[min(run.loss)], base.loss[min(base.loss)])
            for run, base in zip(measured.repeats, bench[flavor, base_name].repeats, strict=False)
        ]
        ours, base = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
        if infinite:
            step, loss = infinite[0]
            refused[flavor, name] = f"its loss at step {step} is {loss}"
        elif (flavor, base_name) in refused:
            refused[flavor, name] = f"of its baseline, {base_name}, {refused[flavor, base_name]}"
        elif abs(ours - base) > limit:
            refused[flavor, name] = (
                f"its first loss is {ours:.4f} and that of {base_name} {base:.4f}, further apart than {limit}: it "
                "computes something else, or started from other weights"
            )
    return refused


def table(bench: Bench, warmup: int, processes: int, limit: float = LOSS_LIMIT) -> list[dict[str, object]]:
    """A row for each run; ``x`` is the speed-up against the first of the same flavor, repeat by repeat."""
    rows: list[dict[str, object]] = []
    refused = refusals(bench, limit)
    first: dict[str, list[float]] = {}
    for (flavor, name), measured in bench.items():
        row: dict[str, object] = {"flavor": flavor} if flavor else {}
        if not measured.repeats:
            rows.append(row | {"run": name, "x": None, "no x, as": measured.failed})
            continue
        counted = [[tps for step, tps in run.tps.items() if step > warmup] for run in measured.repeats]
        speeds = [median(tps) for tps in counted]
        p20, _, p80 = (median(values) for values in zip(*map(percentiles, counted), strict=True))
        ratios = [ours / base for ours, base in zip(speeds, first.setdefault(flavor, speeds), strict=False)]
        row |= {
            "run": name,
            SPEED: round(median(speeds)),
            "tokens/s (p20)": round(p20),
            "tokens/s (p80)": round(p80),
            "tokens/s (mean)": round(median(map(harmonic_mean, counted))),
            "slowest step / median": round(
                max(speed / min(tps) for speed, tps in zip(speeds, counted, strict=True)), 2
            ),
            "memory GiB": round(max(max(run.memory.values()) for run in measured.repeats), 2),
            "x": None if (flavor, name) in refused else round(median(ratios), 3),
            "last loss": round(median(run.loss[max(run.loss)] for run in measured.repeats), 4),
        }
        if len(speeds) > 1:
            row |= {
                "repeats": len(speeds),
                "tokens/s, range": f"{min(speeds):.0f} to {max(speeds):.0f}",
                "x, range": None if (flavor, name) in refused else f"{min(ratios):.3f} to {max(ratios):.3f}",
            }
        if (flavor, name) in refused:
            row["no x, as"] = refused[flavor, name]
        if measured.failed:
            row["failed"] = measured.failed
        if measured.profiled is not None:
            busy = measured.profiled.busy
            row |= {"GPU busy, profiled": round(measured.profiled.busy_share, 3), "GPU busy, ms": round(busy, 1)}
            if processes == 1:
                seconds = [time for run in measured.repeats for step, time in run.seconds.items() if step > warmup]
                row["GPU busy"] = round(busy / 1e3 / median(seconds), 3)
        rows.append(row)
    return rows


def layer_table(bench: Bench, warmup: int, limit: float = LOSS_LIMIT) -> list[dict[str, object]]:
    """What a layer costs, for each model of which there are flavors of several numbers of layers: a row for each run
    that has both the one with the fewest and the one with the most; ``x`` against the model's first run."""
    refused = refusals(bench, limit)
    made = {run: measured for run, measured in bench.items() if measured.repeats}
    layers: dict[str, dict[int, str]] = {}
    for flavor, _ in bench:
        if found := re.fullmatch(r"(.+)_(\d+)layers", flavor):
            layers.setdefault(found[1], {})[int(found[2])] = flavor
    rows: list[dict[str, object]] = []
    for model, flavors in layers.items():
        few, many = min(flavors), max(flavors)
        cost = {
            name: (1e6 / throughput(made[flavors[many], name], warmup) - 1e6 / throughput(run, warmup)) / (many - few)
            for (flavor, name), run in made.items()
            if few < many and flavor == flavors[few] and (flavors[many], name) in made
        }
        first = next(name for flavor, name in bench if flavor == flavors[few])
        for name, us in cost.items():
            # Noise can make layers that cost little cost less than nothing.
            known = not {(flavors[few], name), (flavors[many], name)} & refused.keys()
            speedup = round(cost[first] / us, 3) if known and min(us, cost.get(first, 0)) > 0 else None
            rows.append({"model": model, "run": name, "us per token and layer": round(us, 3), "x": speedup})
    return rows


def throughput(measured: Measured, warmup: int) -> float:
    """Tokens per second per GPU: the median over the repeats of their medians over the steps after ``warmup``."""
    return median(median(tps for step, tps in run.tps.items() if step > warmup) for run in measured.repeats)


def write(bench: Bench, args: argparse.Namespace) -> None:
    """Writes the files of the runs that are finished by now."""
    steps = [
        ({"flavor": flavor} if flavor else {})
        | {"run": name, "repeat": repeat, "step": step}
        | {"tokens/s": run.tps[step], "memory GiB": run.memory[step], "loss": loss}
        for (flavor, name), measured in bench.items()
        for repeat, run in enumerate(measured.repeats, 1)
        for step, loss in run.loss.items()
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    described = {"config": str(args.config), "flags": " ".join(args.flags), "processes": str(args.ngpu)}
    described |= {"torchtitan": version("torchtitan")}
    if any(conversion_of(name).recipe == FLOAT8 for _, name in bench):
        described |= {"torchao": installed_version("torchao")}
    write_results(args.out, steps, environment(device) | described)
    write_rows(args.out / "table.csv", table(bench, args.warmup, args.ngpu, args.loss_limit))
    (args.out / "layers.csv").unlink(missing_ok=True)  # of a call with other flavors
    if rows := layer_table(bench, args.warmup, args.loss_limit):
        write_rows(args.out / "layers.csv", rows)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    config = Path("train_configs/llama4_17bx16e_2layers_1x4.toml")
    add("--config", type=Path, default=config, help="a TOML; of TorchTitan 0.3 a function [%(default)s]")
    add("--runs", nargs="+", default=["bf16", "linears", "grouped", "both"], help="[bf16 linears grouped both]")
    add("--flavors", nargs="+", default=[""], metavar="FLAVOR", help="model flavors [the TOML's]")
    add("--ngpu", type=int, default=4, help="processes, one per GPU [4]")
    add("--steps", type=int, default=30, help="[30]")
    add("--warmup", type=int, default=10, help="first steps that do not count: compilation, autotuning [10]")
    add("--repeats", type=int, default=1, help="times that each run is made, in turns with the others [1]")
    add("--profile", action="store_true", help="in a run of its own: in how much of a step the GPU is busy")
    help_text = "a run whose first loss is further from the baseline's gets no x [%(default)s]"
    add("--loss-limit", type=float, default=LOSS_LIMIT, metavar="NATS", help=help_text)
    add("--quick", action="store_true", help="16 steps, of which the last 8 count, once")
    help_text = "start no run that would end later, were it as long as its last repeat, or as the longest run so far"
    add("--limit", type=float, default=float("inf"), metavar="SECONDS", help=help_text)
    add("--out", type=Path, default=Path("outputs/bench_training"), help="[%(default)s]")
    own, flags = split_flags(argv)
    args = parser.parse_args(own, argparse.Namespace(flags=flags))
    if args.quick:
        args.steps, args.warmup, args.repeats = 16, 8, 1
    return args


def measure(args: argparse.Namespace, bench: Bench) -> None:
    """Makes the runs that are due, one after the other, into ``bench``.

    Raises:
        ValueError: a run failed, or computes something else than its baseline; or it takes what is not installed.
    """
    if args.repeats < 1:
        raise ValueError(f"--repeats is at least 1, got {args.repeats}")
    if args.warmup >= args.steps:
        raise ValueError(f"--warmup {args.warmup} leaves nothing of --steps {args.steps}")
    for name in args.runs:
        (flags_of_titan03 if TITAN03 else flags_of)(name)
    if any(conversion_of(name).recipe == FLOAT8 for name in args.runs):
        check_torchao()
    started, left = time.monotonic(), set()
    took: dict[tuple[str, str], float] = {}  # seconds, without each flavor's first run of this call, which compiles
    compiled: dict[str, float] = {}
    turns = [*range(1, args.repeats + 1), *(["profile"] if args.profile else [])]
    runs = list(itertools.product(args.flavors, turns, args.runs))
    with progress(len(runs), "bench_training") as bar:
        for flavor, turn, name in runs:
            run, begun = (flavor, name), time.monotonic()
            suffix, steps = f"-repeat{turn}" if turn != 1 else "", args.steps
            if turn == "profile":
                suffix, steps = "-profile", PROFILED
            finished = is_finished(folder_of(flavor, name, suffix, args), steps)
            others = [seconds for (of, _), seconds in took.items() if of == flavor]
            expected = took.get(run, max(others, default=compiled.get(flavor, max(compiled.values(), default=0.0))))
            is_late = begun - started + expected > args.limit
            has_baseline = turn == "profile" or (flavor, args.runs[0]) not in left
            bar.update()
            if run in bench and bench[run].failed:
                continue
            if run in left or (not finished and (is_late or not has_baseline)):
                left.add(run)  # for good: repeats are compared with the baseline's in their order
                say(f"{label(flavor, name)}: not started, the time limit is near; the same command goes on")
                continue
            try:
                if turn == "profile":
                    bench[run].profiled = profile(flavor, name, args)
                else:
                    made = read_run(train(flavor, name, suffix, steps, args))
                    bench.setdefault(run, Measured()).repeats.append(made)
            except ValueError as error:
                if name == args.runs[0]:
                    raise
                say(str(error))
                bench.setdefault(run, Measured()).failed = str(error).partition(f"; {args.out}")[0]
            if not finished and not bench[run].failed:
                seconds = time.monotonic() - begun
                say(f"{label(flavor, name)}: {seconds:.0f} s")
                if flavor in compiled:
                    took[run] = seconds
                else:
                    compiled[flavor] = seconds
            write(bench, args)
    refused = refusals(bench, args.loss_limit)
    reasons = [f"{label(*run)}: no x, as {reason}" for run, reason in refused.items()]
    reasons += [measured.failed for run, measured in bench.items() if measured.failed and run not in refused]
    if reasons:
        raise ValueError("\n".join([*reasons, f"{args.out} has all that was measured"]))


def main(argv: Sequence[str]) -> None:
    args, bench = parse_arguments(argv), {}
    try:
        with ends_in_words("bench_training"), Starter(args.ngpu, args.out / "runs") as args.starter:
            measure(args, bench)
    finally:
        limit = args.loss_limit
        for rows in (table(bench, args.warmup, args.ngpu, limit), layer_table(bench, args.warmup, limit)):
            if rows:
                print(format_table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
