"""Compares TorchTitan runs: loss curves and their difference, tokens/s, memory, and with several seeds a verdict.

Runs named ``<name>-seed<k>`` are seeds of one group; the first run's group is the baseline. A run has the name of its
folder; where two folders have the same name, all runs are named with the folders above. What is compared:

    L(g, s)  mean loss of group g, seed s, over the last tenth of the steps (--window), so batch noise averages out
    D(g)     mean over the seeds that both have of L(g, s) - L(baseline, s): the same seed gives both the same initial
             weights and the same data in the same order
    band     largest |L(baseline, s) - L(baseline, t)| of any two baseline seeds: what another seed does to the baseline

Verdict: D(g) is *inside* if |D(g)| <= band, else *outside, higher* or *outside, lower*. Inside says that changing the
number format moves the final loss no more than changing the seed does; it does not say that the losses are equal, and a
band of few seeds is a coarse ruler. The standard error of D(g) over its seeds stands beside it. A run whose L is not a
finite number has *diverged*, which is the verdict on its group; all numbers are of the runs that have not.

Reads the TensorBoard logs of a dump folder, or wandb's offline log where there are none. Runs of other lengths, models,
batches or data are refused. Writes losses.csv, table.csv and losses.png.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING

from runs import Run, read_run

from titan_mxfp8.testing import format_table, write_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What must agree for two losses to be comparable: the fields of TorchTitan's config, by section.
SAME = {
    "model": ("name", "flavor"),
    "training": ("seq_len", "local_batch_size", "global_batch_size", "dataset", "dataset_path"),
    "optimizer": ("name", "lr"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A group against the baseline; see the module's docstring. None is what too few seeds leave undefined."""

    difference: float | None
    standard_error: float | None
    band: float | None
    text: str


def check_comparable(runs: Sequence[Run]) -> None:
    """Raises ValueError if a run differs from the first one in length, or in a field of ``SAME`` that both saved."""
    first = runs[0]
    for run in runs[1:]:
        for section, keys in SAME.items():
            saved = first.config.get(section), run.config.get(section)
            for key in keys if all(saved) else ():
                if saved[0].get(key) != saved[1].get(key):
                    raise ValueError(
                        f"{first.name} has {section}.{key} = {saved[0].get(key)!r} and {run.name} "
                        f"{saved[1].get(key)!r}: compare runs of the same model on the same data"
                    )
        if max(run.loss) != max(first.loss):
            raise ValueError(
                f"{first.name} ended at step {max(first.loss)} and {run.name} at step {max(run.loss)}: finish the "
                "shorter run, or compare the first steps only with --steps"
            )


def first_steps(run: Run, steps: int) -> Run:
    """The run up to step ``steps``.

    Raises:
        ValueError: it is shorter, or has logged none of them.
    """
    if steps < 1:
        raise ValueError(f"--steps is at least 1, got {steps}")
    if min(run.loss) > steps:
        raise ValueError(f"{run.name} logged its first loss at step {min(run.loss)}, after --steps {steps}")
    if max(run.loss) < steps:
        raise ValueError(f"{run.name} ended at step {max(run.loss)}, before --steps {steps}")
    loss, tps, memory = (
        {step: value for step, value in values.items() if step <= steps} for values in (run.loss, run.tps, run.memory)
    )
    return replace(run, loss=loss, tps=tps, memory=memory)


def common_steps(runs: Sequence[Run]) -> list[int]:
    """The steps that every run logged.

    Raises:
        ValueError: there are none.
    """
    steps = sorted(set.intersection(*(set(run.loss) for run in runs)))
    if not steps:
        raise ValueError(f"{', '.join(run.name for run in runs)} have no logged step in common")
    return steps


def unique_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, all with as many of the folders above as it takes to tell them apart.

    Raises:
        ValueError: a folder is given twice.
    """
    paths = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, paths, strict=True):
        if paths.count(path) > 1:
            raise ValueError(f"{folder} is given twice")
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each group, groups in order of appearance.

    Raises:
        ValueError: two runs are the same seed of a group.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        group = groups.setdefault(run.group, [])
        for other in group:
            if other.seed == run.seed:
                raise ValueError(f"{other.name} and {run.name} are both seed {run.seed} of {run.group}: leave one out")
        group.append(run)
    return groups


def final_loss(run: Run, steps: Sequence[int], window: float) -> float:
    """Mean loss over the steps in the last ``window`` of the run, a share; at least over the last logged step.

    NaN if one of these losses is not a finite number: the run has diverged.
    """
    return finite_mean(run.loss[step] for step in steps if step > (1 - window) * steps[-1] or step == steps[-1])


def finite_mean(values: Iterable[float]) -> float:
    """The mean; NaN of no values, or if one of them is not finite."""
    values = list(values)
    return fmean(values) if values and all(map(math.isfinite, values)) else math.nan


def final_losses(group: Sequence[Run], steps: Sequence[int], window: float) -> dict[int | None, float]:
    """By seed, of the runs that have not diverged."""
    losses = {run.seed: final_loss(run, steps, window) for run in group}
    return {seed: loss for seed, loss in losses.items() if math.isfinite(loss)}


def judge(baseline: Sequence[Run], group: Sequence[Run], steps: Sequence[int], window: float) -> Verdict:
    """The statistic of the module's docstring.

    Raises:
        ValueError: the two have no seed in common.
    """
    name, base_name = group[0].group, baseline[0].group
    seeds, base_seeds = ([run.seed for run in runs] for runs in (group, baseline))
    if not set(seeds) & set(base_seeds):
        raise ValueError(f"{name} and {base_name} have no seed in common ({sorted(seeds)} and {sorted(base_seeds)})")
    base, own = final_losses(baseline, steps, window), final_losses(group, steps, window)
    differences = [own[seed] - base[seed] for seed in own if seed in base]
    difference = fmean(differences) if differences else None
    error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
    band = max((abs(a - b) for a, b in combinations(base.values(), 2)), default=None)
    if len(own) < len(group):
        text = diverged(group, own)
    elif difference is None:
        text = f"none: {base_name} diverged with the same seeds"
    elif band is None:
        text = f"none: {base_name} has one seed{'' if len(baseline) == 1 else ' that ended'}"
    else:
        text = "inside" if abs(difference) <= band else f"outside, {'higher' if difference > 0 else 'lower'}"
    return Verdict(difference=difference, standard_error=error, band=band, text=text)


def diverged(group: Sequence[Run], ended: dict[int | None, float]) -> str:
    return f"diverged: {len(group) - len(ended)} of {len(group)} runs"


def median_of(values: dict[int, float]) -> float:
    """Median of a scalar, the first logged step (warm-up) left out where there are more; NaN if it was not logged."""
    return median(list(values.values())[1:] or values.values() or [math.nan])


def summary(groups: dict[str, list[Run]], window: float) -> list[dict[str, object]]:
    """A row for each group, the baseline first."""
    runs = [run for group in groups.values() for run in group]
    steps = common_steps(runs)
    baseline = next(iter(groups.values()))
    base_tps = fmean(median_of(run.tps) for run in baseline)
    rows = []
    for name, group in groups.items():
        tps = fmean(median_of(run.tps) for run in group)
        ended = final_losses(group, steps, window)
        row: dict[str, object] = {
            "run": name,
            "seeds": len(group),
            "steps": steps[-1],
            "final loss": f"{finite_mean(ended.values()):.4f}",
            "tokens/s": tps,
            "x": round(tps / base_tps, 3) if base_tps else None,
            "memory GiB": max(max(run.memory.values(), default=math.nan) for run in group),
        }
        if group is baseline and len(ended) < len(group):
            row |= dict.fromkeys(("difference", "standard error", "band")) | {"verdict": diverged(group, ended)}
        elif group is not baseline:
            verdict = judge(baseline, group, steps, window)
            row |= {
                "difference": None if verdict.difference is None else f"{verdict.difference:+.4f}",
                "standard error": None if verdict.standard_error is None else f"{verdict.standard_error:.4f}",
                "band": None if verdict.band is None else f"{verdict.band:.4f}",
                "verdict": verdict.text,
            }
        rows.append(row)
    return rows


def loss_table(runs: Sequence[Run], count: int = 12) -> list[dict[str, object]]:
    """Losses at evenly spaced common steps, the last one included, and the difference from the first run."""
    steps = common_steps(runs)
    rows = []
    for step in sorted({steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)}):
        row: dict[str, object] = {"step": step} | {run.name: f"{run.loss[step]:.4f}" for run in runs}
        for run in runs[1:]:
            row[f"{run.name} - {runs[0].name}"] = f"{run.loss[step] - runs[0].loss[step]:+.4f}"
        rows.append(row)
    return rows


def curves(runs: Sequence[Run]) -> list[dict[str, object]]:
    """One row for each common step: the loss and the tokens per second of every run."""
    rows = []
    for step in common_steps(runs):
        row: dict[str, object] = {"step": step}
        for run in runs:
            row |= {f"{run.name} loss": run.loss[step], f"{run.name} tps": run.tps.get(step)}
        rows.append(row)
    return rows


def smoothed(values: Sequence[float]) -> list[float]:
    """Mean over a centred window of a fiftieth of the values, cut at both ends; NaN where one is not finite."""
    half = len(values) // 100
    return [finite_mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def plot(groups: dict[str, list[Run]], path: Path) -> None:
    """Draws losses, raw (pale) and smoothed, and below them how far each group is from the baseline."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = common_steps([run for group in groups.values() for run in group])
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 2), constrained_layout=True
    )
    smooth: dict[str, list[list[float]]] = {}
    for index, (name, group) in enumerate(groups.items()):
        smooth[name] = [smoothed([run.loss[step] for step in steps]) for run in group]
        for run, line in zip(group, smooth[name], strict=True):
            top.plot(steps, [run.loss[step] for step in steps], color=f"C{index}", alpha=0.12, linewidth=0.6)
            top.plot(steps, line, color=f"C{index}", linewidth=1, label=name if run is group[0] else None)
    top.set_ylabel("loss (nats per token)")
    top.legend()
    plot_differences(bottom, steps, smooth)
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=130)


def plot_differences(axes: "Axes", steps: Sequence[int], smooth: dict[str, list[list[float]]]) -> None:
    """Each group's mean difference from the first one, and around zero the range that the seeds of the first span.

    Args:
        smooth: a loss curve for each seed, by group; those that end in NaN are left out. The first tenth of the steps
            has no say in the axis' limits.
    """
    first, *others = smooth
    ended = {name: [curve for curve in curves if math.isfinite(curve[-1])] for name, curves in smooth.items()}
    mean = {name: [finite_mean(values) for values in zip(*curves, strict=True)] for name, curves in ended.items()}
    drawn = []
    if len(ended[first]) > 1:
        spread = [max(values) - min(values) for values in zip(*ended[first], strict=True)]
        axes.fill_between(steps, [-y for y in spread], spread, color="0.85", label=f"{first} seed to seed")
        axes.legend()
        drawn.append(spread)
    for index, name in enumerate(others, 1):
        if not mean[first] or not mean[name]:
            continue  # all have diverged
        drawn.append([value - reference for value, reference in zip(mean[name], mean[first], strict=True)])
        axes.plot(steps, drawn[-1], color=f"C{index}", linewidth=1)
    axes.axhline(0, color="0.6", linewidth=0.8)
    ends = [abs(y) for curve in drawn for y in curve[len(steps) // 10 :]]
    limit = 1.5 * max(filter(math.isfinite, ends), default=0)
    if limit > 0:
        axes.set_ylim(-limit, limit)
    axes.set_ylabel(f"minus {first}")


def compare(runs: Sequence[Run], out: Path, window: float) -> None:
    """Prints the tables and writes the files.

    Raises:
        ValueError: the runs cannot be compared.
    """
    check_comparable(runs)
    groups = grouped(runs)
    rows = summary(groups, window)
    if len(runs) <= 4:
        print(format_table(loss_table(runs)) + "\n")
    print(format_table(rows))
    out.mkdir(parents=True, exist_ok=True)
    write_rows(out / "losses.csv", curves(runs))
    write_rows(out / "table.csv", rows)
    wrote = f"wrote {out / 'table.csv'}, {out / 'losses.csv'}"
    if find_spec("matplotlib") is None:
        print(f"{wrote}, no picture: pip install matplotlib")
    else:
        plot(groups, out / "losses.png")
        print(f"{wrote} and {out / 'losses.png'}")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="dump folder of a run; the first is the baseline")
    add("--out", type=Path, default=Path("."), help="folder for the files [.]")
    add("--window", type=float, default=0.1, help="share of the steps, at the end, that the final loss averages [0.1]")
    add("--steps", type=int, help="compare the first STEPS steps only, of runs of any length")
    args = parser.parse_args(argv)
    try:
        if not 0 < args.window <= 1:
            raise ValueError(f"--window is a share of the steps, above 0 and at most 1, got {args.window}")
        names = unique_names(args.runs)
        runs = [replace(read_run(folder), name=name) for folder, name in zip(args.runs, names, strict=True)]
        if args.steps is not None:
            runs = [first_steps(run, args.steps) for run in runs]
        compare(runs, args.out, args.window)
    except ValueError as error:
        sys.exit(f"compare_runs: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
