"""Training throughput of TorchTitan runs that differ in nothing but what is converted; either TorchTitan's.

    python scripts/bench/bench_training.py --ngpu 4 --runs bf16 both+dispatch:mxfp8_2d --repeats 3 --out OUT -- FLAGS

A run is WHAT[+rebase][+dispatch][+graph][:RECIPE], WHAT of bf16, grouped (experts), linears or both; what is not named
is off, whatever the TOML says. bf16+dispatch is the control: dispatch, with nothing quantised; bf16+async is TorchTitan
0.3's MinimalAsyncEP; with RECIPE float8 a run is TorchTitan 0.2.2's own FP8, scaled by rows, of torchao. ``x`` is
against the first run of the same repeat. All start from the same weights and data: a run whose first loss is not the
baseline's gets no ``x``. One that fails is a row that says why, and the others go on unless it is the baseline. Either
makes the exit status 1. Writes data.csv (steps), table.csv (runs), with flavors of several numbers of layers layers.csv
(a layer's time), and env.json after every run. Runs in OUT that ended are not run again: it goes on, but with no other
commit, config or flags. For traces, which kernel_times.py reads, flags behind ``--`` switch the profiler on.
"""

import argparse
import itertools
import json
import math
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import harmonic_mean, median

import torch

from scripts.bench.peers import check_torchao, float8_flags
from scripts.progress import ends_in_words, follow, progress, say
from scripts.result_files import (
    SPEED,
    check_same,
    environment,
    format_table,
    installed_version,
    percentiles,
    write_results,
    write_rows,
)
from scripts.study.conversions import FLOAT8, conversion_of
from scripts.study.runs import Run, ending, field_of, read_run, split_flags
from scripts.study.starter import Starter
from titan_mxfp8.recipe import GROUPED_MM, LINEAR

# Nats between the first losses of a run and of its baseline, more than twice what rounding did: at most 0.0009 with the
# same seed in models of up to 320M parameters (153 pairs of results/), 0.0038 in DeepSeek-V3 16B of 4 layers. Two of
# its bf16 runs with other weights are further apart in 89% of cases. Trained weights may need another limit.
LOSS_LIMIT = 0.01
TITAN03 = version("torchtitan").startswith("0.3")

Row = dict[str, object]


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
    chosen = (overrides[converter] for converter in conversion.converters)
    imports = [f"titan_mxfp8.titan03.{module}={json.dumps(override)}" for module, override in chosen]
    flags = ["--override.imports", *imports] if imports else []
    return [*flags, f"--training.{'no_' * ('graph' in conversion.options)}disable_cuda_graphs"]


def label(flavor: str, name: str) -> str:
    return f"{flavor}-{name}" if flavor else name


class Bench:
    """The runs of a call, and what they say so far.

    Attributes:
        runs: the repeats, by flavor ("" for the TOML's) and name; the first one of a flavor is the baseline of others.
        failed: how a repeat failed, by the same.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.starter = args, Starter(args.ngpu, args.out / "runs")
        self.runs: dict[tuple[str, str], list[Run]] = {}
        self.failed: dict[tuple[str, str], str] = {}

    def train(self, flavor: str, name: str, suffix: str) -> Run:
        """Runs TorchTitan, unless OUT holds such a run already. Raises ValueError if the run failed; the message holds
        the end of its log."""
        args, config = self.args, self.args.config
        folder = args.out / "runs" / f"{label(flavor, name)}{suffix}".replace(":", "-")
        with suppress(ValueError):  # no such run yet
            run = read_run(folder)
            if max(run.loss) == args.steps:
                return run
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
        flags += [f"--training.steps={args.steps}", "--debug.seed=0", "--metrics.log_freq=1"]
        flags += ["--metrics.enable_tensorboard", "--metrics.no_enable_wandb", *args.flags]
        log = folder / "log"
        log.unlink(missing_ok=True)  # of an attempt that failed
        if follow(self.starter.start(flags, log), log, args.steps, folder.name):
            raise ValueError(f"run {folder.name} failed, {ending(log)}")
        return read_run(folder)

    def refusal(self, flavor: str, name: str) -> str:
        """Why a run gets no ``x``; empty where it gets one."""
        repeats, base_name = self.runs[flavor, name], next(other for first, other in self.runs if first == flavor)
        if not repeats:
            return self.failed[flavor, name]
        for step, loss in (item for run in repeats for item in run.loss.items()):
            if not math.isfinite(loss):
                return f"its loss at step {step} is {loss}"
        if base_name != name and (reason := self.refusal(flavor, base_name)):
            return f"of its baseline, {base_name}, {reason}"
        pairs = zip(repeats, self.runs[flavor, base_name], strict=False)
        losses = [(run.loss[min(run.loss)], base.loss[min(base.loss)]) for run, base in pairs]
        ours, base = max(losses, key=lambda pair: abs(pair[0] - pair[1]))
        if abs(ours - base) <= self.args.loss_limit:
            return ""
        apart = f"its first loss is {ours:.4f} and that of {base_name} {base:.4f}, further apart than"
        return f"{apart} {self.args.loss_limit}: it computes something else, or started from other weights"

    def counted(self, repeats: Sequence[Run]) -> list[list[float]]:
        """Tokens per second per GPU of the steps after the warm-up, by repeat."""
        return [[tps for step, tps in run.tps.items() if step > self.args.warmup] for run in repeats]

    def table(self) -> list[Row]:
        """A row for each run; ``x`` is the speed-up against the first of the same flavor, repeat by repeat."""
        rows: list[Row] = []
        first: dict[str, list[float]] = {}
        for (flavor, name), repeats in self.runs.items():
            refused = self.refusal(flavor, name)
            row: Row = ({"flavor": flavor} if flavor else {}) | {"run": name}
            if repeats:
                counted = self.counted(repeats)
                speeds = list(map(median, counted))
                p20, _, p80 = (median(values) for values in zip(*map(percentiles, counted), strict=True))
                slowest = max(speed / min(tps) for speed, tps in zip(speeds, counted, strict=True))
                ratios = [ours / base for ours, base in zip(speeds, first.setdefault(flavor, speeds), strict=False)]
                row |= {
                    SPEED: round(median(speeds)),
                    "tokens/s (p20)": round(p20),
                    "tokens/s (p80)": round(p80),
                    "tokens/s (mean)": round(median(map(harmonic_mean, counted))),
                    "slowest step / median": round(slowest, 2),
                    "memory GiB": round(max(max(run.memory.values()) for run in repeats), 2),
                    "x": None if refused else round(median(ratios), 3),
                    "last loss": round(median(run.loss[max(run.loss)] for run in repeats), 4),
                }
            if len(repeats) > 1:
                row |= {"repeats": len(repeats), "tokens/s, range": f"{min(speeds):.0f} to {max(speeds):.0f}"}
                row["x, range"] = None if refused else f"{min(ratios):.3f} to {max(ratios):.3f}"
            if refused:
                row |= {"x": None, "no x, as": refused}
            if repeats and (flavor, name) in self.failed:
                row["failed"] = self.failed[flavor, name]
            rows.append(row)
        return rows

    def layer_table(self) -> list[Row]:
        """What a layer costs, for each model of which there are flavors of several numbers of layers: a row for each
        run that has both the one with the fewest and the one with the most; ``x`` against the model's first run."""
        us = {run: 1e6 / median(map(median, self.counted(of))) for run, of in self.runs.items() if of}
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
                is_noise = min(each, cost.get(names[0], 0)) <= 0
                has_none = is_noise or self.refusal(few, name) or self.refusal(many, name)
                x = None if has_none else round(cost[names[0]] / each, 3)
                rows.append({"model": model, "run": name, "us per token and layer": round(each, 3), "x": x})
        return rows

    def environment(self) -> dict[str, str]:
        """What env.json says."""
        args = self.args
        described = {"config": str(args.config), "flags": " ".join(args.flags), "processes": str(args.ngpu)}
        described["torchtitan"] = version("torchtitan")
        if any(conversion_of(name).recipe == FLOAT8 for _, name in self.runs):
            described["torchao"] = installed_version("torchao")
        return environment("cuda" if torch.cuda.is_available() else "cpu") | described

    def write(self) -> None:
        """Writes the files of the runs that are finished by now."""
        args = self.args
        steps = [
            ({"flavor": flavor} if flavor else {})
            | {"run": name, "repeat": repeat, "step": step}
            | {"tokens/s": run.tps[step], "memory GiB": run.memory[step], "loss": loss}
            for (flavor, name), repeats in self.runs.items()
            for repeat, run in enumerate(repeats, 1)
            for step, loss in run.loss.items()
        ]
        write_results(args.out, steps, self.environment())
        write_rows(args.out / "table.csv", self.table())
        (args.out / "layers.csv").unlink(missing_ok=True)  # of a call with other flavors
        if rows := self.layer_table():
            write_rows(args.out / "layers.csv", rows)

    def measure(self) -> None:
        """Makes the runs that are due, one after the other. Raises ValueError if one failed, or computes something else
        than its baseline, or takes what is not installed, or if OUT holds runs of another commit, machine or flags."""
        args = self.args
        if args.repeats < 1:
            raise ValueError(f"--repeats is at least 1, got {args.repeats}")
        if args.warmup >= args.steps:
            raise ValueError(f"--warmup {args.warmup} leaves nothing of --steps {args.steps}")
        if "training.steps" in map(field_of, args.flags):
            raise ValueError("--training.steps behind -- would override --steps: use that one")
        for flag, names in (("--runs", args.runs), ("--flavors", args.flavors)):
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"{flag} has {twice[0]} twice: --repeats makes every run several times")
        for name in args.runs:
            (flags_of_titan03 if TITAN03 else flags_of)(name)
        if any(conversion_of(name).recipe == FLOAT8 for name in args.runs):
            check_torchao()
        check_same(args.out, self.environment(), "torchtitan", "config", "flags", "processes")
        turns = ["", *(f"-repeat{turn}" for turn in range(2, args.repeats + 1))]
        runs = list(itertools.product(args.flavors, turns, args.runs))
        with progress(len(runs), "bench_training") as bar:
            for flavor, turn, name in runs:
                bar.update()
                if (flavor, name) in self.failed:
                    continue
                try:
                    made = [self.train(flavor, name, turn)]
                except ValueError as error:
                    if name == args.runs[0]:
                        raise
                    say(str(error))
                    self.failed[flavor, name], made = str(error).partition(f"; {args.out}")[0], []
                self.runs.setdefault((flavor, name), []).extend(made)
                self.write()
        reasons = [f"{label(*run)}: no x, as {why}" for run in self.runs if (why := self.refusal(*run))]
        reasons += [why for run, why in self.failed.items() if not self.refusal(*run)]
        if reasons:
            raise ValueError("\n".join([*reasons, f"{args.out} has all that was measured"]))


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
    help_text = "a run whose first loss is further from the baseline's gets no x [%(default)s]"
    add("--loss-limit", type=float, default=LOSS_LIMIT, metavar="NATS", help=help_text)
    add("--out", type=Path, default=Path("outputs/bench_training"), help="[%(default)s]")
    own, flags = split_flags(argv)
    return parser.parse_args(own, argparse.Namespace(flags=flags))


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
