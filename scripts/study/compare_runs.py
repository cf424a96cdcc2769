"""Compares TorchTitan runs: loss curves and their difference, tokens/s, memory, and with several seeds a verdict.

    python scripts/study/compare_runs.py OUT/bf16-seed0 OUT/bf16-seed1 OUT/mxfp8-seed0 OUT/mxfp8-seed1 --out OUT

Runs are dump folders with TensorBoard logs, or a losses.csv of an earlier comparison. <name>-seed<k>
are seeds of a group; the first run's group is the baseline. What counts are the final losses (means over the last tenth
of the steps) of pairs with the same seed: equivalent within 0.5%, worse, better, or cannot tell (scripts/README.md has
the tests). Runs of other lengths, models, batches or data are refused. Writes losses.csv, table.csv and losses.png.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from importlib.util import find_spec
from itertools import chain, product
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

import mpmath
import numpy as np
import pandas as pd

from scripts.progress import ends_in_words
from scripts.result_files import format_table, write_rows
from scripts.study.runs import SCALARS, Run, read_losses, read_run, read_tensorboard, unique_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS = 10  # of the window, where there is one pair
FEWEST_CHANGES, TOGETHER = 20, 0.5  # of losses from step to step, and their correlation in a pair

# What must agree for two losses to be comparable: fields of TorchTitan's config.
SAME = "model.name model.flavor training.seq_len training.local_batch_size training.global_batch_size training.dataset "
SAME += "training.dataset_path optimizer.name optimizer.lr"


class Comparison:
    """Groups of runs, of which the first is the baseline.

    Attributes:
        steps: those that every run logged.
        window: those whose mean loss is a run's final loss: in the last ``window`` of the run, a share; at least one.
        losses, smooth: by group, a row for each of the steps and a column for each seed, in words: as logged, NaN where
            that is not finite, and ``smoothed``.
        final: by group and seed, of the runs that have not diverged: with a finite loss at each step of the window.
        share, margin: of the baseline's mean final loss, and as many nats: NaN where no run of it has ended.

    Raises:
        ValueError: the runs have no logged step in common, or two are the same seed of a group.
    """

    def __init__(self, runs: Sequence[Run], window: float = 0.1, share: float = 0.005) -> None:
        self.groups: dict[str, list[Run]] = {}
        for run in runs:
            group = self.groups.setdefault(run.group, [])
            if twins := [other.name for other in group if other.seed == run.seed]:
                raise ValueError(f"{twins[0]} and {run.name} are both seed {run.seed} of {run.group}: leave one out")
            group.append(run)
        self.share, self.first = share, runs[0].group
        self.steps = sorted(set.intersection(*(set(run.loss) for run in runs)))
        if not self.steps:
            raise ValueError(f"{', '.join(run.name for run in runs)} have no logged step in common")
        self.window = [step for step in self.steps if step > (1 - window) * self.steps[-1] or step == self.steps[-1]]
        self.losses: dict[str, pd.DataFrame] = {}
        for name, group in self.groups.items():
            losses = pd.DataFrame({str(run.seed): run.loss for run in group}).loc[self.steps]
            self.losses[name] = losses.where(np.isfinite(losses))
        self.final = {name: of.loc[self.window].mean(skipna=False).dropna() for name, of in self.losses.items()}
        self.margin = share * self.final[self.first].mean()
        self.smooth = {name: smoothed(of) for name, of in self.losses.items()}

    def diverged(self, name: str) -> str:
        """How many runs of a group have diverged, in words; empty if none has."""
        count, left = len(self.groups[name]), len(self.final[name])
        return f"diverged: {count - left} of {count} runs" if left < count else ""

    def differences(self, name: str) -> pd.Series:
        """Of a group's final losses from the baseline's, in nats, by seed: of pairs of which neither has diverged."""
        return (self.final[name] - self.final[self.first]).dropna()

    def judge(self, name: str) -> str:
        """The verdict on a group: by pairs of the same seed, of which neither has diverged."""
        shared = self.losses[name].columns.intersection(self.losses[self.first].columns)
        differences = self.differences(name)
        if text := self.diverged(name):
            return text
        if len(shared) < 2:
            return f"none: {self.first} and {name} have {'one seed' if len(shared) else 'no seed'} in common"
        if len(differences) < 2:
            return f"none: {self.first} diverged with {'all but one' if len(differences) else 'all'} of the same seeds"
        return verdict_on(differences, self.margin, self.share)

    def parts(self, name: str, seed: str) -> list[float]:
        """The mean difference of a pair over each of ten parts of the window, which differ in length by one step at
        most; none of fewer than ``2 * PARTS`` steps."""
        pair = (self.losses[name][seed] - self.losses[self.first][seed])[self.window].to_numpy()
        ends = [round(i * len(pair) / PARTS) for i in range(1, PARTS)]
        return [part.mean() for part in np.split(pair, ends)] if len(pair) >= 2 * PARTS else []

    def apart(self) -> Iterator[str]:
        """A sentence on each pair whose losses do not change together from step to step."""
        first, *others = self.groups.values()
        for run, base in product(chain(*others), first):
            if run.seed == base.seed:
                pair = pd.concat([self.losses[of.group][str(of.seed)] for of in (run, base)], axis=1)
                changes = pair.dropna().diff().dropna()
                together = changes.corr().iloc[0, 1]  # NaN where a loss does not change
                if len(changes) >= FEWEST_CHANGES and together < TOGETHER:
                    yield (
                        f"{run.name} and {base.name} have not seen the same batches in the same order, or one has gone "
                        f"astray: from step to step their losses change with a correlation of {together:.2f}"
                    )

    def summary(self) -> list[dict[str, object]]:
        """A row for each group, the baseline first, which has no verdict."""
        base_tps = fmean(median_of(run.tps) for run in self.groups[self.first])
        rows = []
        for name, group in self.groups.items():
            tps = fmean(median_of(run.tps) for run in group)
            row: dict[str, object] = {
                "run": name,
                "seeds": len(group),
                "steps": self.steps[-1],
                "final loss": f"{self.final[name].mean():.4f}",
                "tokens/s": tps,
                "x": round(tps / base_tps, 3) if base_tps else None,
                "memory GiB": max((gib for run in group for gib in run.memory.values()), default=None),
            }
            if held_out := [run.held_out[max(run.held_out)] for run in group if run.held_out]:
                row["held-out loss"] = f"{fmean(held_out):.4f}"
            if name != self.first:
                row |= self.statistics(name)
                row |= {"margin": f"{self.margin:.4f}", "pairs": len(self.differences(name))}
                row["verdict"] = self.judge(name)
            elif text := self.diverged(name):
                row["verdict"] = text
            rows.append(row)
        return rows

    def statistics(self, name: str) -> dict[str, str | None]:
        """The columns of a group's paired differences, of which one has the interval of the window's parts; and how far
        apart the smoothed losses of any pair are at most. None: what too few pairs leave undefined."""
        row = dict.fromkeys(("difference", "standard error", "95% low", "95% high", "largest difference"))
        largest = (self.smooth[name] - self.smooth[self.first]).abs().max(axis=None)
        if math.isfinite(largest):
            row["largest difference"] = f"{largest:.4f}"
        several = differences = self.differences(name)
        if len(differences):
            row["difference"] = f"{differences.mean():+.4f}"
        if len(differences) == 1:
            several = self.parts(name, differences.index[0])
        if len(several) > 1:
            low, high = interval(several, 0.95)
            row |= {"standard error": f"{standard_error(several):.4f}", "95% low": f"{low:+.4f}"}
            row["95% high"] = f"{high:+.4f}"
        return row

    def figure(self) -> "Figure":
        """Losses, raw (pale) and smoothed, and below them how far each group is from the baseline."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 7), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for index, (name, losses) in enumerate(self.losses.items()):
            top.plot(self.steps, losses, color=f"C{index}", alpha=0.12, linewidth=0.6)
            labels = [name] + [None] * (losses.shape[1] - 1)
            top.plot(self.steps, self.smooth[name], label=labels, **line(index))
        top.set_ylabel("loss (nats per token)")
        top.set_title(title_of(self.groups), fontsize=11)
        top.legend(title="pale: each step; dark: smoothed")
        self.plot_differences(bottom)
        bottom.set(xlabel="step", ylabel=f"loss minus {self.first}'s")
        several = any(len(group) > 1 for group in self.groups.values())
        what = "mean over pairs of runs, with its" if several else "with the smoothed steps', not other seeds',"
        bottom.set_title(f"smoothed, {what} 95% interval; dotted: the margin", fontsize=9)
        return figure

    def plot_differences(self, axes: "Axes") -> None:
        """Each group's mean paired difference from the first one, its 95% interval at each step (pale), and the margin.
        Curves that end in NaN are left out; the first tenth of the steps does not set the axis' limits."""
        ended = {name: curves.loc[:, curves.iloc[-1].notna()] for name, curves in self.smooth.items()}
        edges = [self.margin]
        for index, (name, curves) in enumerate(ended.items()):
            pairs = (curves - ended[self.first]).dropna(axis=1, how="all")
            if not index or pairs.empty:
                continue
            mean = pairs.mean(axis=1, skipna=False)
            edges += mean[len(self.steps) // 10 :].tolist()
            axes.plot(self.steps, mean, **line(index))
            axes.fill_between(self.steps, *self.band(name, pairs), color=f"C{index}", alpha=0.12, linewidth=0)
        axes.axhline(0, color="0.6", linewidth=0.8)
        for y in (-self.margin, self.margin):
            axes.axhline(y, color="0.3", linewidth=0.8, linestyle=":")
        limit = 1.5 * max(filter(math.isfinite, map(abs, edges)), default=0)
        if limit > 0:
            axes.set_ylim(-limit, limit)

    def band(self, name: str, pairs: pd.DataFrame) -> tuple[np.ndarray | pd.Series, np.ndarray | pd.Series]:
        """The 95% interval of a group's mean difference at each step, of smoothed ``pairs``. That of one pair is of the
        steps that were smoothed, taken as independent: another seed's difference need not lie in it."""
        if pairs.shape[1] > 1:
            return interval(pairs.to_numpy().T, 0.95)
        mean = pairs.iloc[:, 0]
        steps = (self.losses[name] - self.losses[self.first])[mean.name].rolling(**window_of(mean))
        error = steps.std() / steps.count() ** 0.5  # pandas 2's sem() takes one step too few
        half = error * steps.count().map(lambda count: critical_t(0.95, max(1, int(count) - 1)))
        return mean - half, mean + half


def smoothed(losses: pd.DataFrame) -> pd.DataFrame:
    """The mean over a centred window of a fiftieth of the rows, cut at both ends; NaN where one of them is NaN."""
    window = window_of(losses)
    return losses.rolling(**window).mean().where(losses.isna().rolling(**window).max() == 0)


def window_of(rows: pd.DataFrame | pd.Series) -> dict[str, object]:
    """A centred fiftieth of the rows, as ``rolling`` takes it."""
    return {"window": 2 * (len(rows) // 100) + 1, "center": True, "min_periods": 1}


def check_comparable(runs: Sequence[Run]) -> None:
    """Raises ValueError if a run differs from the first one in length, or in a field of ``SAME`` that both saved."""
    first = runs[0]
    for run in runs[1:]:
        for section, key in (name.split(".") for name in SAME.split()):
            saved = first.config.get(section), run.config.get(section)
            if all(saved) and saved[0].get(key) != saved[1].get(key):
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
    """The run up to step ``steps``. Raises ValueError if it is shorter, or has logged none of them."""
    if not min(run.loss) <= steps <= max(run.loss):
        raise ValueError(f"{run.name} has losses of steps {min(run.loss)} to {max(run.loss)}, and --steps is {steps}")
    cut = {name: {step: value for step, value in getattr(run, name).items() if step <= steps} for name in SCALARS}
    return replace(run, **cut)


def verdict_on(differences: Sequence[float], margin: float, share: float) -> str:
    """On two or more paired differences: two one-sided t tests at 5% within the margin, in nats and as a ``share`` of
    the baseline's loss, else a two-sided one.

    The two find a mean within the margin exactly where its 90% interval lies there (TOST; Schuirmann, J. Pharmacokinet.
    Biopharm. 15, 1987). The t interval takes pairs as independent and normally distributed, and speaks of other seeds
    on the same data. Each verdict errs once in 20 (equivalent) or 40 times (worse); they are not corrected for the
    number of groups.
    """
    low, high = interval(differences, 0.95)
    least, most = interval(differences, 0.90)
    if -margin <= least and most <= margin:
        return f"equivalent within {100 * share:.3g}%{', higher' if low > 0 else ', lower' if high < 0 else ''}"
    return "worse" if low > 0 else "better" if high < 0 else "cannot tell"


@cache
def critical_t(confidence: float, freedom: int) -> float:
    """The t with P(abs(T) < t) = ``confidence``, between 0 and 1: 12.706 for 0.95 and 1 degree of freedom.

    T**2 / (freedom + T**2) has a Beta distribution (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.1).
    """
    share = mpmath.findroot(
        lambda x: mpmath.betainc(0.5, freedom / 2, 0, x, regularized=True) - confidence, (0, 1), solver="bisect"
    )
    return float(mpmath.sqrt(freedom * share / (1 - share)))


def interval(values: Sequence[float] | np.ndarray, confidence: float) -> tuple[np.ndarray, np.ndarray]:
    """The t interval of the mean of two or more independent, normally distributed values, of (values, ...) over the
    first axis: its ends; NaN if one of the values is NaN."""
    mean, half = np.mean(values, axis=0), critical_t(confidence, len(values) - 1) * standard_error(values)
    return mean - half, mean + half


def standard_error(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Of the mean of two or more values, of (values, ...) over the first axis; NaN if one of the values is NaN."""
    return np.std(np.asarray(values), axis=0, ddof=1) / math.sqrt(len(values))


def median_of(values: dict[int, float]) -> float:
    """Median of a scalar, the first logged step (warm-up) left out where there are more; NaN if it was not logged."""
    return median(list(values.values())[1:] or values.values() or [math.nan])


def loss_table(runs: Sequence[Run], steps: Sequence[int]) -> list[dict[str, object]]:
    """Losses at twelve of these steps, evenly spaced, with the last one, and their difference from the first run."""
    rows, (base, *others) = [], runs
    for step in sorted({steps[round(place)] for place in np.linspace(0, len(steps) - 1, 12)}):
        row: dict[str, object] = {"step": step} | {run.name: f"{run.loss[step]:.4f}" for run in runs}
        rows.append(row | {f"{r.name} - {base.name}": f"{r.loss[step] - base.loss[step]:+.4f}" for r in others})
    return rows


def curves(runs: Sequence[Run], steps: Sequence[int]) -> list[dict[str, object]]:
    """One row for each of these steps, and for each with a loss on held-out text (TorchTitan's validation), which need
    not be one that is logged: the loss and the tokens per second of every run, and its loss on held-out text."""
    columns: dict[str, dict[int, float]] = {}
    for run in runs:
        columns |= {f"{run.name} loss": run.loss, f"{run.name} tps": run.tps}
        columns |= {f"{run.name} held-out": run.held_out} if run.held_out else {}
    steps = sorted({*steps, *chain.from_iterable(run.held_out for run in runs)})
    return [{"step": step} | {name: of.get(step) for name, of in columns.items()} for step in steps]


def tag_table(folders: Sequence[Path], patterns: Sequence[str]) -> list[dict[str, object]]:
    """By pattern and group of runs: how all values of the TensorBoard scalars that match are spread, over all steps.
    Raises ValueError if no run has a scalar that matches a pattern."""
    rows, scalars = [], {folder: read_tensorboard(folder) for folder in folders}
    for pattern in patterns:
        values: dict[str, list[float]] = {}
        for folder, of in scalars.items():
            found = [value for tag, steps in of.items() if fnmatch(tag, pattern) for value in steps.values()]
            values.setdefault(re.sub(r"-seed\d+$", "", folder.name), []).extend(found)
        if not any(values.values()):
            tags = sorted({tag.split("/layers.")[0] for of in scalars.values() for tag in of})
            raise ValueError(f"--tags {pattern}: no run has such a scalar; there are {', '.join(tags)}")
        for group, found in values.items():
            if found:
                row = {"tag": pattern, "run": group, "values": len(found), "mean": f"{fmean(found):.4g}"}
                rows.append(row | {"median": f"{median(found):.4g}", "largest": f"{max(found):.4g}"})
    return rows


def title_of(groups: dict[str, list[Run]]) -> str:
    """The model, where a run saved its config, and how many runs each group has."""
    runs = [run for group in groups.values() for run in group]
    models = [run.config["model"] for run in runs if run.config.get("model")]
    names = dict.fromkeys(" ".join(str(model[key]) for key in ("name", "flavor") if model.get(key)) for model in models)
    counts = [len(group) for group in groups.values()]
    said = " to ".join(map(str, sorted({min(counts), max(counts)})))
    return ", ".join([*names, f"{said} run{'s' * (said != '1')} each"])


def line(index: int) -> dict[str, object]:
    """How a group is drawn: matplotlib has ten colours, which come again dashed."""
    return {"color": f"C{index}", "linewidth": 1, "linestyle": "-" if index < 10 else "--"}


def read(paths: Sequence[Path]) -> list[Run]:
    """The runs of dump folders and of the losses.csv of earlier comparisons, which stand for folders beside them.
    Raises ValueError if a path is neither, or one is given twice."""
    found = []
    for path in paths:
        if path.is_file():
            found += [(path.parent / run.name, run) for run in read_losses(path)]
        else:
            found.append((path, read_run(path)))
    names = unique_names([folder for folder, _ in found])
    return [replace(run, name=name) for (_, run), name in zip(found, names, strict=True)]


def check_shares(window: float, margin: float) -> None:
    """Raises ValueError of values that ``--window`` and ``--margin`` cannot have."""
    if not 0 < window <= 1:
        raise ValueError(f"--window is a share of the steps, above 0 and at most 1, got {window}")
    if not 0 < margin < 1:
        raise ValueError(f"--margin is a share of the loss, above 0 and below 1, got {margin}")


def compare(runs: Sequence[Run], out: Path, window: float, share: float) -> None:
    """Prints the tables and writes the files. Raises ValueError if the runs cannot be compared."""
    check_comparable(runs)
    comparison = Comparison(runs, window, share)
    rows = comparison.summary()
    if len(runs) <= 4:
        print(format_table(loss_table(runs, comparison.steps)) + "\n")
    print(format_table(rows))
    print(f"\nfinal loss: nats per token, over the last {100 * window:.3g}% of the steps; x: tokens/s against", end=" ")
    print(comparison.first, *comparison.apart(), sep="\n\n")
    out.mkdir(parents=True, exist_ok=True)
    write_rows(out / "losses.csv", curves(runs, comparison.steps))
    write_rows(out / "table.csv", rows)
    wrote = f"wrote {out / 'table.csv'}, {out / 'losses.csv'}"
    if find_spec("matplotlib") is None:
        print(f"{wrote}, no picture: pip install matplotlib")
    else:
        comparison.figure().savefig(out / "losses.png", dpi=130)
        print(f"{wrote} and {out / 'losses.png'}")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    help_text = "dump folder of a run, or a losses.csv; the first run is the baseline"
    add("runs", nargs="+", type=Path, metavar="RUN", help=help_text)
    add("--out", type=Path, default=Path("."), help="folder for the files [.]")
    add("--window", type=float, default=0.1, help="share of the steps, at the end, that the final loss averages [0.1]")
    add("--margin", type=float, default=0.005, help="difference that counts as none, a share of the loss [0.005]")
    add("--steps", type=int, help="compare the first STEPS steps only, of runs of any length")
    help_text = "patterns of TensorBoard scalars, as 'mx_health/*/flushed_to_zero/*': tags.csv says how they are spread"
    add("--tags", nargs="+", default=[], metavar="TAG", help=help_text)
    args = parser.parse_args(argv)
    with ends_in_words("compare_runs"):
        check_shares(args.window, args.margin)
        if any(path.resolve() == (args.out / "losses.csv").resolve() for path in args.runs):
            raise ValueError(f"{args.out / 'losses.csv'} would be overwritten: name another --out")
        runs = read(args.runs)
        if args.steps is not None:
            runs = [first_steps(run, args.steps) for run in runs]
        tags = tag_table([path for path in args.runs if path.is_dir()], args.tags)
        compare(runs, args.out, args.window, args.margin)
        if tags:
            write_rows(args.out / "tags.csv", tags)


if __name__ == "__main__":
    main(sys.argv[1:])
