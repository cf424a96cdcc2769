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


Row = dict[str, object]


def label(flavor: str, name: str) -> str:
    return f"{flavor}-{name}" if flavor else name


class Bench:
    """The runs of a call, and what they say so far.

    Attributes:
        runs: by flavor ("" for the TOML's) and name; the first one of a flavor is the baseline of the others.
    """

    def __init__(self, args: argparse.Namespace, runs: dict[tuple[str, str], Measured] | None = None) -> None:
        self.args, self.runs, self.starter = args, runs or {}, Starter(args.ngpu, args.out / "runs")
        self.took: list[tuple[str, str, float]] = []  # flavor, name and seconds of the runs that this call made

    def folder(self, flavor: str, name: str, suffix: str) -> Path:
        return self.args.out / "runs" / f"{label(flavor, name)}{suffix}".replace(":", "-")

    def train(self, flavor: str, name: str, suffix: str, steps: int, *more: str) -> Path:
        """Runs TorchTitan, unless the folder holds such a run already.

        Returns:
            The run's dump folder.

        Raises:
            ValueError: the run failed; the message holds the end of its log.
        """
        folder, config = self.folder(flavor, name, suffix), self.args.config
        if is_finished(folder, steps):
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        # Tokenizing in the training process would count as a part of each step.
        workers = "dataloader.num_workers=1", "dataloader.prefetch_factor=4"
        if TITAN03:
            config = f"{flavor or config}{'_minimal_async_ep' * ('async' in conversion_of(name).options)}"
            flags = ["--module=titan_mxfp8.titan03", f"--config={config}", f"--dump_folder={folder}"]
            flags += [*flags_of_titan03(name), *(f"--{each}" for each in workers)]
        else:
            flags = [f"--job.config_file={config}", f"--job.dump_folder={folder}", *flags_of(name)]
            flags += [f"--model.flavor={flavor}", "--model.study_flavors"] if flavor else []
            flags += [f"--training.{each}" for each in workers]
        flags += [f"--training.steps={steps}", "--debug.seed=0", "--metrics.log_freq=1", "--metrics.enable_tensorboard"]
        flags += ["--metrics.no_enable_wandb", *self.args.flags, *more]
        log = folder / "log"
        log.unlink(missing_ok=True)  # of an attempt that failed
        if follow(self.starter.start(flags, log), log, steps, folder.name):
            raise ValueError(f"run {folder.name} failed, {ending(log)}")
        return folder

    def profile(self, flavor: str, name: str) -> Trace:
        """A step of the first process, from a run of its own: the profiler takes time.

        Raises:
            ValueError: the run failed, or nothing ran on a GPU.
        """
        more = "--profiling.enable_profiling", f"--profiling.profile_freq={PROFILED}"
        folder = self.train(flavor, name, "-profile", PROFILED, *more)
        traces = list(folder.rglob("rank0_trace.json"))
        if not traces:
            raise ValueError(f"{folder} holds no trace of the profiler")
        return Trace(traces[0])

    def refusals(self) -> dict[tuple[str, str], str]:
        """Why runs get no ``x``, by flavor and name."""
        refused: dict[tuple[str, str], str] = {}
        for (flavor, name), measured in self.runs.items():
            if not measured.repeats:
                refused[flavor, name] = measured.failed
                continue
            base_name = next(other for first, other in self.runs if first == flavor)
            losses = [item for run in measured.repeats for item in run.loss.items()]
            infinite = [(step, loss) for step, loss in losses if not math.isfinite(loss)]
            pairs = [
                (run.loss[min(run.loss)], base.loss[min(base.loss)])
                for run, base in zip(measured.repeats, self.runs[flavor, base_name].repeats, strict=False)
            ]
            ours, base = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
            if infinite:
                step, loss = infinite[0]
                refused[flavor, name] = f"its loss at step {step} is {loss}"
            elif (flavor, base_name) in refused:
                refused[flavor, name] = f"of its baseline, {base_name}, {refused[flavor, base_name]}"
            elif abs(ours - base) > self.args.loss_limit:
                refused[flavor, name] = (
                    f"its first loss is {ours:.4f} and that of {base_name} {base:.4f}, further apart than "
                    f"{self.args.loss_limit}: it computes something else, or started from other weights"
                )
        return refused

    def counted(self, measured: Measured) -> list[list[float]]:
        """Tokens per second per GPU of the steps after the warm-up, by repeat."""
        return [[tps for step, tps in run.tps.items() if step > self.args.warmup] for run in measured.repeats]

    def table(self) -> list[Row]:
        """A row for each run; ``x`` is the speed-up against the first of the same flavor, repeat by repeat."""
        rows: list[Row] = []
        refused, first = self.refusals(), {}
        for (flavor, name), measured in self.runs.items():
            row: Row = {"flavor": flavor} if flavor else {}
            if not measured.repeats:
                rows.append(row | {"run": name, "x": None, "no x, as": measured.failed})
                continue
            counted = self.counted(measured)
            speeds = list(map(median, counted))
            p20, _, p80 = (median(values) for values in zip(*map(percentiles, counted), strict=True))
            slowest = max(speed / min(tps) for speed, tps in zip(speeds, counted, strict=True))
            ratios = [ours / base for ours, base in zip(speeds, first.setdefault(flavor, speeds), strict=False)]
            has_x = (flavor, name) not in refused
            row |= {
                "run": name,
                SPEED: round(median(speeds)),
                "tokens/s (p20)": round(p20),
                "tokens/s (p80)": round(p80),
                "tokens/s (mean)": round(median(map(harmonic_mean, counted))),
                "slowest step / median": round(slowest, 2),
                "memory GiB": round(max(max(run.memory.values()) for run in measured.repeats), 2),
                "x": round(median(ratios), 3) if has_x else None,
                "last loss": round(median(run.loss[max(run.loss)] for run in measured.repeats), 4),
            }
            if len(speeds) > 1:
                row |= {"repeats": len(speeds), "tokens/s, range": f"{min(speeds):.0f} to {max(speeds):.0f}"}
                row["x, range"] = f"{min(ratios):.3f} to {max(ratios):.3f}" if has_x else None
            if not has_x:
                row["no x, as"] = refused[flavor, name]
            if measured.failed:
                row["failed"] = measured.failed
            if measured.profiled is not None:
                busy = measured.profiled.busy
                row |= {"GPU busy, profiled": round(measured.profiled.busy_share, 3), "GPU busy, ms": round(busy, 1)}
                if self.args.ngpu == 1:
                    times = [run.seconds.items() for run in measured.repeats]
                    seconds = [time for items in times for step, time in items if step > self.args.warmup]
                    row["GPU busy"] = round(busy / 1e3 / median(seconds), 3)
            rows.append(row)
        return rows

    def layer_table(self) -> list[Row]:
        """What a layer costs, for each model of which there are flavors of several numbers of layers: a row for each
        run that has both the one with the fewest and the one with the most; ``x`` against the model's first run."""
        refused = self.refusals()
        us = {run: 1e6 / median(map(median, self.counted(of))) for run, of in self.runs.items() if of.repeats}
        layers: dict[str, dict[int, str]] = {}
        for flavor, _ in self.runs:
            if found := re.fullmatch(r"(.+)_(\d+)layers", flavor):
                layers.setdefault(found[1], {})[int(found[2])] = flavor
        rows: list[Row] = []
        for model, flavors in layers.items():
            few, many = flavors[min(flavors)], flavors[max(flavors)]
            names = [name for flavor, name in self.runs if flavor == few]
            both = [name for name in names if few != many and (few, name) in us and (many, name) in us]
            cost = {name: (us[many, name] - us[few, name]) / (max(flavors) - min(flavors)) for name in both}
            for name, each in cost.items():
                # Noise can make layers that cost little cost less than nothing.
                known = not {(few, name), (many, name)} & refused.keys() and min(each, cost.get(names[0], 0)) > 0
                x = round(cost[names[0]] / each, 3) if known else None
                rows.append({"model": model, "run": name, "us per token and layer": round(each, 3), "x": x})
        return rows

    def write(self) -> None:
        """Writes the files of the runs that are finished by now."""
        args = self.args
        steps = [
            ({"flavor": flavor} if flavor else {})
            | {"run": name, "repeat": repeat, "step": step}
            | {"tokens/s": run.tps[step], "memory GiB": run.memory[step], "loss": loss}
            for (flavor, name), measured in self.runs.items()
            for repeat, run in enumerate(measured.repeats, 1)
            for step, loss in run.loss.items()
        ]
        described = {"config": str(args.config), "flags": " ".join(args.flags), "processes": str(args.ngpu)}
        described |= {"torchtitan": version("torchtitan")}
        if any(conversion_of(name).recipe == FLOAT8 for _, name in self.runs):
            described |= {"torchao": installed_version("torchao")}
        write_results(args.out, steps, environment("cuda" if torch.cuda.is_available() else "cpu") | described)
        write_rows(args.out / "table.csv", self.table())
        (args.out / "layers.csv").unlink(missing_ok=True)  # of a call with other flavors
        if rows := self.layer_table():
            write_rows(args.out / "layers.csv", rows)

    def expected(self, flavor: str, name: str) -> float:
        """Seconds that a run may take: as its last repeat, or the longest of the flavor so far, or of all. A flavor's
        first run of this call, which compiles, counts while there is no other."""
        of_flavor = [(other, seconds) for own, other, seconds in self.took if own == flavor]
        counted = of_flavor[1:] or of_flavor
        own = [seconds for other, seconds in counted if other == name]
        return own[-1] if own else max((s for _, s in counted or [took[1:] for took in self.took]), default=0.0)

    def measure(self) -> None:
        """Makes the runs that are due, one after the other.

        Raises:
            ValueError: a run failed, or computes something else than its baseline; or it takes what is not installed.
        """
        args = self.args
        if args.repeats < 1:
            raise ValueError(f"--repeats is at least 1, got {args.repeats}")
        if args.warmup >= args.steps:
            raise ValueError(f"--warmup {args.warmup} leaves nothing of --steps {args.steps}")
        for name in args.runs:
            (flags_of_titan03 if TITAN03 else flags_of)(name)
        if any(conversion_of(name).recipe == FLOAT8 for name in args.runs):
            check_torchao()
        started, left = time.monotonic(), set()
        turns = [("", args.steps), *((f"-repeat{turn}", args.steps) for turn in range(2, args.repeats + 1))]
        turns += [("-profile", PROFILED)] if args.profile else []
        runs = list(itertools.product(args.flavors, turns, args.runs))
        bar = progress(len(runs), "bench_training")
        for flavor, (suffix, steps), name in runs:
            run, begun = (flavor, name), time.monotonic()
            finished = is_finished(self.folder(flavor, name, suffix), steps)
            is_late = begun - started + self.expected(flavor, name) > args.limit
            has_baseline = suffix == "-profile" or (flavor, args.runs[0]) not in left
            bar.update()
            if run in self.runs and self.runs[run].failed:
                continue
            if run in left or (not finished and (is_late or not has_baseline)):
                left.add(run)  # for good: repeats are compared with the baseline's in their order
                say(f"{label(flavor, name)}: not started, the time limit is near; the same command goes on")
                continue
            try:
                if suffix == "-profile":
                    self.runs[run].profiled = self.profile(flavor, name)
                else:
                    made = read_run(self.train(flavor, name, suffix, steps))
                    self.runs.setdefault(run, Measured()).repeats.append(made)
            except ValueError as error:
                if name == args.runs[0]:
                    raise
                say(str(error))
                self.runs.setdefault(run, Measured()).failed = str(error).partition(f"; {args.out}")[0]
            if not finished and not self.runs[run].failed:
                self.took.append((flavor, name, time.monotonic() - begun))
                say(f"{label(flavor, name)}: {self.took[-1][-1]:.0f} s")
            self.write()
        bar.close()
        refused = self.refusals()
        reasons = [f"{label(*run)}: no x, as {reason}" for run, reason in refused.items()]
        reasons += [measured.failed for run, measured in self.runs.items() if measured.failed and run not in refused]
        if reasons:
            raise ValueError("\n".join([*reasons, f"{args.out} has all that was measured"]))


def is_finished(folder: Path, steps: int) -> bool:
    try:
        return max(read_run(folder).loss) == steps
    except ValueError:
        return False  # no such run yet


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


def main(argv: Sequence[str]) -> None:
    bench = Bench(parse_arguments(argv))
    try:
        with ends_in_words("bench_training"), bench.starter:
            bench.measure()
    finally:
        for rows in (bench.table(), bench.layer_table()):
            if rows:
                print(format_table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
