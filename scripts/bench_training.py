"""Training throughput of TorchTitan runs that differ in nothing but what is converted.

    python scripts/bench_training.py --ngpu 4 --runs bf16 linears grouped both --out OUT

A run is ``WHAT``, ``WHAT:RECIPE`` or ``WHAT+rebase:RECIPE``. WHAT is bf16, grouped (the routed experts), linears or
both; RECIPE is the TOML's where none is named; ``+rebase`` switches ``hopper_rebase`` on. Each run trains --steps
steps; tokens/s is the median over those after --warmup, memory the peak that the allocator reserved. The files are
written after every run and finished runs in OUT are not run again: a bench that was cut short goes on.

Writes data.csv (a row for each step), table.csv (a row for each run) and env.json.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from runs import TRAIN, Run, ending, launch, read_run, split_flags

from titan_mxfp8.recipe import GROUPED_MM, LINEAR, get_recipe
from titan_mxfp8.testing import environment, format_table, write_results, write_rows

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


def train(name: str, folder: Path, args: argparse.Namespace) -> Run:
    """Runs TorchTitan, unless the folder holds such a run already, and reads the log back.

    Raises:
        ValueError: the run failed; the message holds the end of its log.
    """
    try:
        run = read_run(folder)
        if max(run.loss) == args.steps:
            return dataclasses.replace(run, name=name)
    except ValueError:
        pass  # no such run yet
    folder.mkdir(parents=True, exist_ok=True)
    flags = [f"--job.config_file={args.config}", f"--job.dump_folder={folder}", f"--training.steps={args.steps}"]
    flags += [*flags_of(name), *args.flags]
    flags += ["--metrics.log_freq=1", "--metrics.enable_tensorboard", "--metrics.no-enable_wandb"]
    # Tokenizing in the training process would count as a part of each step.
    flags += ["--training.dataloader.num_workers=1", "--training.dataloader.prefetch_factor=4"]
    log = folder / "log"
    log.unlink(missing_ok=True)  # of an attempt that failed
    if launch(args.ngpu, [*TRAIN, *flags], log).wait():
        raise ValueError(f"run {name} failed, {ending(log)}")
    return dataclasses.replace(read_run(folder), name=name)


def table(runs: list[Run], warmup: int) -> list[dict[str, object]]:
    """A row for each run; ``x`` is the speed-up against the first."""
    rows = []
    for run in runs:
        tps = median(value for step, value in run.tps.items() if step > warmup)
        rows.append(
            {
                "run": run.name,
                "tokens/s (median, per GPU)": round(tps),
                "memory GiB": round(max(run.memory.values()), 2),
                "x": 1.0 if not rows else round(tps / rows[0]["tokens/s (median, per GPU)"], 3),
                "last loss": round(run.loss[max(run.loss)], 4),
            }
        )
    return rows


def write(runs: list[Run], args: argparse.Namespace) -> None:
    """Writes the files of the runs that are finished by now."""
    steps = [
        {"run": run.name, "step": step, "tokens/s": run.tps[step], "memory GiB": run.memory[step], "loss": loss}
        for run in runs
        for step, loss in run.loss.items()
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    described = {"config": str(args.config), "flags": " ".join(args.flags), "processes": str(args.ngpu)}
    write_results(args.out, steps, environment(device) | described)
    write_rows(args.out / "table.csv", table(runs, args.warmup))


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
    started, longest, runs = time.monotonic(), 0.0, []
    try:
        if args.warmup >= args.steps:
            raise ValueError(f"--warmup {args.warmup} leaves nothing of --steps {args.steps}")
        for name in args.runs:
            flags_of(name)
        for name in args.runs:
            begun = time.monotonic()
            if begun - started + longest > args.limit:
                print(f"{name}: not started, the time limit is near; the same command goes on")
                continue
            runs.append(train(name, args.out / "runs" / name.replace(":", "-"), args))
            longest = max(longest, time.monotonic() - begun)
            print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
            write(runs, args)
    except ValueError as error:
        sys.exit(f"bench_training: {error}")
    finally:
        if runs:
            print(format_table(table(runs, args.warmup)))


if __name__ == "__main__":
    main(sys.argv[1:])
