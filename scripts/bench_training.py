"""Training throughput of TorchTitan runs that differ in nothing but what is converted.

    python scripts/bench_training.py --ngpu 4 --runs bf16 linears grouped both --out OUT

A run is ``WHAT``, ``WHAT:RECIPE`` or ``WHAT+rebase:RECIPE``. WHAT is bf16, grouped (the routed experts), linears or
both; RECIPE is the TOML's where none is named; ``+rebase`` switches ``hopper_rebase`` on. Each run trains --steps
steps; tokens/s is the median over those after --warmup, memory the peak that the allocator reserved. The files are
written after every run and finished runs in OUT are not run again: a bench that was cut short goes on.

``--flavors 17bx16e_2layers 17bx16e_4layers`` trains each run with each of these flavors instead of the TOML's. Where
they differ in the number of layers, what a layer costs is the difference of the times for a token: embedding, output
and loss, large in a model of few layers, drop out of it.

Writes data.csv (a row for each step), table.csv (a row for each run and flavor), layers.csv (a row for each run, with
--flavors of several numbers of layers) and env.json.
"""

import argparse
import itertools
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from runs import TRAIN, Run, ending, launch, read_run, split_flags

from titan_mxfp8.recipe import GROUPED_MM, LINEAR, get_recipe
from titan_mxfp8.testing import environment, format_table, write_results, write_rows

Bench = dict[tuple[str, str], Run]  # by flavor ("" for the TOML's) and name
CONVERTED_BY = {"bf16": (), "grouped": (GROUPED_MM,), "linears": (LINEAR,), "both": (GROUPED_MM, LINEAR)}


def flags_of(name: str) -> list[str]:
    """TorchTitan's flags for a run's name, such as ``both+rebase:mxfp8_2d``.

    Raises:
        ValueError: a name that is not as the module's docstring says.
    """
    what, _, recipe = name.partition(":")
    what, rebase, _ = what.partition("+rebase")
    if what not in CONVERTED_BY or (what == "bf16" and (recipe or rebase)):
        raise ValueError(f"unknown run {name!r}: WHAT, WHAT:RECIPE or WHAT+rebase:RECIPE, WHAT of {list(CONVERTED_BY)}")
    flags = [f"--model.converters={','.join(CONVERTED_BY[what])}"]
    for converter in CONVERTED_BY[what]:
        if recipe:
            flags.append(f"--{converter}.recipe_name={get_recipe(recipe).name}")
        if rebase:
            flags.append(f"--{converter}.hopper_rebase")
    return flags


def label(flavor: str, name: str) -> str:
    return f"{flavor}-{name}" if flavor else name


def train(flavor: str, name: str, args: argparse.Namespace) -> Run:
    """Runs TorchTitan, unless the folder holds such a run already, and reads the log back.

    Raises:
        ValueError: the run failed; the message holds the end of its log.
    """
    folder = args.out / "runs" / label(flavor, name).replace(":", "-")
    try:
        run = read_run(folder)
        if max(run.loss) == args.steps:
            return run
    except ValueError:
        pass  # no such run yet
    folder.mkdir(parents=True, exist_ok=True)
    flags = [f"--job.config_file={args.config}", f"--job.dump_folder={folder}", f"--training.steps={args.steps}"]
    flags += [*flags_of(name), *([f"--model.flavor={flavor}", "--model.study_flavors"] if flavor else []), *args.flags]
    flags += ["--metrics.log_freq=1", "--metrics.enable_tensorboard", "--metrics.no-enable_wandb"]
    # Tokenizing in the training process would count as a part of each step.
    flags += ["--training.dataloader.num_workers=1", "--training.dataloader.prefetch_factor=4"]
    log = folder / "log"
    log.unlink(missing_ok=True)  # of an attempt that failed
    if launch(args.ngpu, [*TRAIN, *flags], log).wait():
        raise ValueError(f"run {label(flavor, name)} failed, {ending(log)}")
    return read_run(folder)


def table(bench: Bench, warmup: int) -> list[dict[str, object]]:
    """A row for each run; ``x`` is the speed-up against the first of the same flavor."""
    rows, first = [], {}
    for (flavor, name), run in bench.items():
        tps = throughput(run, warmup)
        rows.append(
            ({"flavor": flavor} if flavor else {})
            | {
                "run": name,
                "tokens/s (median, per GPU)": round(tps),
                "memory GiB": round(max(run.memory.values()), 2),
                "x": round(tps / first.setdefault(flavor, tps), 3),
                "last loss": round(run.loss[max(run.loss)], 4),
            }
        )
    return rows


def layer_table(bench: Bench, warmup: int) -> list[dict[str, object]]:
    """What a layer costs, for each model of which there are flavors of several numbers of layers: a row for each run
    that has both the one with the fewest and the one with the most; ``x`` against the model's first run."""
    layers: dict[str, dict[int, str]] = {}
    for flavor, _ in bench:
        if found := re.fullmatch(r"(.+)_(\d+)layers", flavor):
            layers.setdefault(found[1], {})[int(found[2])] = flavor
    rows: list[dict[str, object]] = []
    for model, flavors in layers.items():
        few, many = min(flavors), max(flavors)
        cost = {
            name: (1e6 / throughput(bench[flavors[many], name], warmup) - 1e6 / throughput(run, warmup)) / (many - few)
            for (flavor, name), run in bench.items()
            if few < many and flavor == flavors[few] and (flavors[many], name) in bench
        }
        first = next(name for flavor, name in bench if flavor == flavors[few])
        for name, us in cost.items():
            # Noise can make layers that cost little cost less than nothing.
            speedup = round(cost[first] / us, 3) if min(us, cost.get(first, 0)) > 0 else None
            rows.append({"model": model, "run": name, "us per token and layer": round(us, 3), "x": speedup})
    return rows


def throughput(run: Run, warmup: int) -> float:
    """Tokens per second per GPU, the median of the steps after the first ``warmup``."""
    return median(value for step, value in run.tps.items() if step > warmup)


def write(bench: Bench, args: argparse.Namespace) -> None:
    """Writes the files of the runs that are finished by now."""
    steps = [
        ({"flavor": flavor} if flavor else {})
        | {"run": name, "step": step, "tokens/s": run.tps[step], "memory GiB": run.memory[step], "loss": loss}
        for (flavor, name), run in bench.items()
        for step, loss in run.loss.items()
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    described = {"config": str(args.config), "flags": " ".join(args.flags), "processes": str(args.ngpu)}
    write_results(args.out, steps, environment(device) | described)
    write_rows(args.out / "table.csv", table(bench, args.warmup))
    (args.out / "layers.csv").unlink(missing_ok=True)  # of a call with other flavors
    if rows := layer_table(bench, args.warmup):
        write_rows(args.out / "layers.csv", rows)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--config",
        type=Path,
        default=Path("train_configs/llama4_17bx16e_2layers_1x4.toml"),
        metavar="TOML",
        help="[%(default)s]",
    )
    add("--runs", nargs="+", default=["bf16", "linears", "grouped", "both"], help="[bf16 linears grouped both]")
    add("--flavors", nargs="+", default=[""], metavar="FLAVOR", help="model flavors [the TOML's]")
    add("--ngpu", type=int, default=4, help="processes, one per GPU [4]")
    add("--steps", type=int, default=30, help="[30]")
    add("--warmup", type=int, default=10, help="first steps that do not count: compilation, autotuning [10]")
    add(
        "--limit",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="start no run that would end later than this",
    )
    add("--out", type=Path, default=Path("outputs/bench_training"), help="[%(default)s]")
    own, flags = split_flags(argv)
    return parser.parse_args(own, argparse.Namespace(flags=flags))


def main(argv: Sequence[str]) -> None:
    args = parse_arguments(argv)
    started, longest = time.monotonic(), 0.0
    bench: Bench = {}
    try:
        if args.warmup >= args.steps:
            raise ValueError(f"--warmup {args.warmup} leaves nothing of --steps {args.steps}")
        for name in args.runs:
            flags_of(name)
        for flavor, name in itertools.product(args.flavors, args.runs):
            begun = time.monotonic()
            if begun - started + longest > args.limit:
                print(f"{label(flavor, name)}: not started, the time limit is near; the same command goes on")
                continue
            bench[flavor, name] = train(flavor, name, args)
            longest = max(longest, time.monotonic() - begun)
            print(f"{label(flavor, name)}: {time.monotonic() - begun:.0f} s", flush=True)
            write(bench, args)
    except ValueError as error:
        sys.exit(f"bench_training: {error}")
    finally:
        for rows in (table(bench, args.warmup), layer_table(bench, args.warmup)):
            if rows:
                print(format_table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
