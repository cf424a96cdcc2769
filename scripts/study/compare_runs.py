"""Compares TorchTitan runs: loss curves and their difference, tokens/s, memory, and with several seeds a verdict.

    python scripts/study/compare_runs.py OUT/bf16-seed0 OUT/bf16-seed1 OUT/mxfp8-seed0 OUT/mxfp8-seed1 --out OUT

Runs are dump folders with TensorBoard logs, or a losses.csv of an earlier comparison. <name>-seed<k>
are seeds of a group; the first run's group is the baseline. What counts are the final losses (means over the last tenth
of the steps) of pairs with the same seed: equivalent within 0.5%, worse, better, or cannot tell (scripts/README.md has
the tests). Runs of other lengths, models, batches or data are refused. Writes losses.csv, table.csv and losses.png.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from statistics import correlation, fmean, median, stdev
from typing import TYPE_CHECKING

from scripts.progress import ends_in_words
from scripts.result_files import format_table, write_rows
from scripts.study.intervals import critical_t, interval, is_equivalent
from scripts.study.runs import Run, read_losses, read_run, unique_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = 10  # of the window, where there is one pair
FEWEST_CHANGES, TOGETHER = 20, 0.5  # of losses from step to step, and their correlation in a pair

# What must agree for two losses to be comparable: fields of TorchTitan's config.
SAME = "model.name model.flavor training.seq_len training.local_batch_size training.global_batch_size training.dataset "
SAME += "training.dataset_path optimizer.name optimizer.lr"


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """``share`` of the baseline's mean loss, and as many nats: NaN where no run of it has ended."""

    share: float
    nats: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A group against the baseline.

    Attributes:
        differences: of its pairs of runs of which neither has diverged, in nats.
        parts: of a single pair, the differences over the parts of the window.
    """

    differences: list[float]
    text: str
    parts: list[float] = field(default_factory=list)


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
    names = ("loss", "tps", "memory", "held_out")
    cut = {name: {step: value for step, value in getattr(run, name).items() if step <= steps} for name in names}
    return replace(run, **cut)


def common_steps(runs: Sequence[Run]) -> list[int]:
    """The steps that every run logged.

    Raises:
        ValueError: there are none.
    """
    steps = sorted(set.intersection(*(set(run.loss) for run in runs)))
    if not steps:
        raise ValueError(f"{', '.join(run.name for run in runs)} have no logged step in common")
    return steps


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
    return finite_mean(run.loss[step] for step in last_steps(steps, window))


def last_steps(steps: Sequence[int], window: float) -> list[int]:
    """Those in the last ``window`` of the run, a share; at least the last one."""
    return [step for step in steps if step > (1 - window) * steps[-1] or step == steps[-1]]


def parts_of_pair(run: Run, base: Run, steps: Sequence[int]) -> list[float]:
    """The mean of ``run`` minus ``base`` over each of ten parts of the steps, which differ in length by one at most;
    none of fewer than ``2 * PARTS`` steps."""
    ends = [round(i * len(steps) / PARTS) for i in range(PARTS + 1)]
    parts = [steps[begin:end] for begin, end in pairwise(ends)] if len(steps) >= 2 * PARTS else []
    return [fmean(run.loss[step] - base.loss[step] for step in part) for part in parts]


def finite_mean(values: Iterable[float]) -> float:
    """The mean; NaN of no values, or if one of them is not finite."""
    values = list(values)
    return fmean(values) if values and all(map(math.isfinite, values)) else math.nan


def final_losses(group: Sequence[Run], steps: Sequence[int], window: float) -> dict[int | None, float]:
    """By seed, of the runs that have not diverged."""
    losses = {run.seed: final_loss(run, steps, window) for run in group}
    return {seed: loss for seed, loss in losses.items() if math.isfinite(loss)}


def margin_of(baseline: Sequence[Run], steps: Sequence[int], window: float, share: float) -> Margin:
    return Margin(share=share, nats=share * finite_mean(final_losses(baseline, steps, window).values()))


def judge(
    baseline: Sequence[Run], group: Sequence[Run], steps: Sequence[int], window: float, margin: Margin
) -> Verdict:
    """The group against the baseline: pairs of the same seed, of which neither has diverged."""
    name, base_name = group[0].group, baseline[0].group
    shared = {run.seed for run in group} & {run.seed for run in baseline}
    base, own = final_losses(baseline, steps, window), final_losses(group, steps, window)
    differences = [own[pair] - base[pair] for pair in own if pair in base]
    if len(own) < len(group):
        text = diverged(group, own)
    elif len(shared) < 2:
        text = f"none: {base_name} and {name} have {'one seed' if shared else 'no seed'} in common"
    elif len(differences) < 2:
        text = f"none: {base_name} diverged with {'all but one' if differences else 'all'} of the same seeds"
    else:
        text = verdict_on(differences, margin)
    parts = []
    if len(differences) == 1:
        (only,) = base.keys() & own.keys()
        two = (next(run for run in runs if run.seed == only) for runs in (group, baseline))
        parts = parts_of_pair(*two, last_steps(steps, window))
    return Verdict(differences=differences, text=text, parts=parts)


def apart(baseline: Sequence[Run], group: Sequence[Run], steps: Sequence[int]) -> list[str]:
    """A sentence on each pair whose losses do not change together from step to step."""
    sentences = []
    for base, run in product(baseline, group):
        finite = [step for step in steps if math.isfinite(base.loss[step]) and math.isfinite(run.loss[step])]
        changes = [[of.loss[after] - of.loss[before] for before, after in pairwise(finite)] for of in (base, run)]
        if base.seed != run.seed or len(finite) <= FEWEST_CHANGES or any(len(set(one)) == 1 for one in changes):
            continue
        if (together := correlation(*changes)) < TOGETHER:
            sentences.append(
                f"{run.name} and {base.name} have not seen the same batches in the same order, or "
                f"one has gone astray: from step to step their losses change with a correlation of {together:.2f}"
            )
    return sentences


def verdict_on(differences: Sequence[float], margin: Margin) -> str:
    """On two or more paired differences, in nats: two one-sided t tests at 5% within the margin, else a two-sided one.

    The t interval takes pairs as independent and normally distributed, and speaks of other seeds on the same data. Each
    verdict errs once in 20 (equivalent) or 40 times (worse); they are not corrected for the number of groups.
    """
    low, high = interval(differences, 0.95)
    if is_equivalent(differences, margin.nats):
        return f"equivalent within {100 * margin.share:.3g}%{', higher' if low > 0 else ', lower' if high < 0 else ''}"
    return "worse" if low > 0 else "better" if high < 0 else "cannot tell"


def diverged(group: Sequence[Run], ended: dict[int | None, float]) -> str:
    return f"diverged: {len(group) - len(ended)} of {len(group)} runs"


def median_of(values: dict[int, float]) -> float:
    """Median of a scalar, the first logged step (warm-up) left out where there are more; NaN if it was not logged."""
    return median(list(values.values())[1:] or values.values() or [math.nan])


def summary(
    groups: dict[str, list[Run]], verdicts: dict[str, Verdict], window: float, margin: Margin
) -> list[dict[str, object]]:
    """A row for each group, the baseline first, which has no verdict."""
    steps = common_steps([run for group in groups.values() for run in group])
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
            "memory GiB": max((gib for run in group for gib in run.memory.values()), default=None),
        }
        if any(run.held_out for run in group):
            row["held-out loss"] = (
                f"{finite_mean(run.held_out[max(run.held_out)] for run in group if run.held_out):.4f}"
            )
        if name in verdicts:
            differences = verdicts[name].differences
            row |= statistics_of(differences, verdicts[name].parts) | {
                "margin": f"{margin.nats:.4f}",
                "pairs": len(differences),
            }
            row["verdict"] = verdicts[name].text
        elif len(ended) < len(group):
            row["verdict"] = diverged(group, ended)
        rows.append(row)
    return rows


def statistics_of(differences: Sequence[float], parts: Sequence[float]) -> dict[str, str | None]:
    """The columns of a group's paired differences, or of the parts of its only one; None is what too few of them leave
    undefined."""
    row = dict.fromkeys(("difference", "standard error", "95% low", "95% high"))
    if differences:
        row["difference"] = f"{fmean(differences):+.4f}"
    if len(several := parts or differences) > 1:
        low, high = interval(several, 0.95)
        row |= {"standard error": f"{standard_error(several):.4f}", "95% low": f"{low:+.4f}"}
        row["95% high"] = f"{high:+.4f}"
    return row


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of two or more values; NaN if one of them is not finite."""
    return stdev(values) / math.sqrt(len(values)) if all(map(math.isfinite, values)) else math.nan


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
    """One row for each common step: the loss and the tokens per second of every run, and its loss on held-out text
    (TorchTitan's validation) at the steps that have one."""
    rows = []
    for step in common_steps(runs):
        row: dict[str, object] = {"step": step}
        for run in runs:
            row |= {f"{run.name} loss": run.loss[step], f"{run.name} tps": run.tps.get(step)}
            if run.held_out:
                row[f"{run.name} held-out"] = run.held_out.get(step)
        rows.append(row)
    return rows


def smoothed(values: Sequence[float]) -> list[float]:
    """Mean over a centred window of a fiftieth of the values, cut at both ends; NaN where one is not finite."""
    half = len(values) // 100
    return [finite_mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def plot(groups: dict[str, list[Run]], path: Path, margin: float, metadata: dict[str, str] | None = None) -> None:
    """Draws losses, raw (pale) and smoothed, and below them how far each group is from the baseline; ``margin`` in
    nats. The picture holds ``metadata``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = common_steps([run for group in groups.values() for run in group])
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 2), constrained_layout=True
    )
    smooth: dict[str, dict[int | None, list[float]]] = {}
    for index, (name, group) in enumerate(groups.items()):
        smooth[name] = {run.seed: smoothed([run.loss[step] for step in steps]) for run in group}
        for run in group:
            top.plot(steps, [run.loss[step] for step in steps], color=f"C{index}", alpha=0.12, linewidth=0.6)
            label = name if run is group[0] else None
            top.plot(steps, smooth[name][run.seed], label=label, **line(index))
    first = next(iter(groups))
    top.set_ylabel("loss (nats per token)")
    top.set_title(title_of(groups), fontsize=11)
    top.legend(title="pale: each step; dark: smoothed")
    plot_differences(bottom, steps, smooth, margin)
    bottom.set(xlabel="step", ylabel=f"loss minus {first}'s")
    bottom.set_title("smoothed, mean over pairs of runs, with its 95% interval; dotted: the margin", fontsize=9)
    figure.savefig(path, dpi=130, metadata=metadata)
    plt.close(figure)


def title_of(groups: dict[str, list[Run]]) -> str:
    """The model, where a run saved its config, and how many runs each group has."""
    runs = [run for group in groups.values() for run in group]
    models = [run.config["model"] for run in runs if run.config.get("model")]
    names = dict.fromkeys(" ".join(str(model[key]) for key in ("name", "flavor") if model.get(key)) for model in models)
    counts = dict.fromkeys(len(group) for group in groups.values())
    said = " to ".join(map(str, sorted({min(counts), max(counts)})))
    return ", ".join([*names, f"{said} run{'s' * (said != '1')} each"])


def line(index: int) -> dict[str, object]:
    """How a group is drawn: matplotlib has ten colours, which come again dashed."""
    return {"color": f"C{index}", "linewidth": 1, "linestyle": "-" if index < 10 else "--"}


def plot_differences(
    axes: "Axes", steps: Sequence[int], smooth: dict[str, dict[int | None, list[float]]], margin: float
) -> None:
    """Each group's mean paired difference from the first one, its 95% interval at each step (pale), and the margin.

    Args:
        smooth: a loss curve for each seed, by group; those that end in NaN are left out.
        margin: in nats. It and the mean differences after the first tenth of the steps set the axis' limits; NaN where
            no run of the first group has ended.
    """
    first, *others = smooth
    ended = {
        name: {pair: curve for pair, curve in curves.items() if math.isfinite(curve[-1])}
        for name, curves in smooth.items()
    }
    edges = [margin]
    for index, name in enumerate(others, 1):
        common = ended[name].keys() & ended[first].keys()
        if not common:
            continue
        pairs = [[a - b for a, b in zip(ended[name][pair], ended[first][pair], strict=True)] for pair in common]
        mean = [finite_mean(values) for values in zip(*pairs, strict=True)]
        edges += mean[len(steps) // 10 :]
        axes.plot(steps, mean, **line(index))
        if len(common) > 1:
            t = critical_t(0.95, len(common) - 1)
            half = [t * standard_error(values) for values in zip(*pairs, strict=True)]
            low, high = ([y + sign * h for y, h in zip(mean, half, strict=True)] for sign in (-1, 1))
            axes.fill_between(steps, low, high, color=f"C{index}", alpha=0.12, linewidth=0)
    axes.axhline(0, color="0.6", linewidth=0.8)
    for y in (-margin, margin):
        axes.axhline(y, color="0.3", linewidth=0.8, linestyle=":")
    limit = 1.5 * max(filter(math.isfinite, map(abs, edges)), default=0)
    if limit > 0:
        axes.set_ylim(-limit, limit)


def read(paths: Sequence[Path]) -> list[Run]:
    """The runs of dump folders and of the losses.csv of earlier comparisons, which stand for folders beside them.

    Raises:
        ValueError: a path is neither, or one is given twice.
    """
    found = []
    for path in paths:
        if path.is_file():
            found += [(path.parent / run.name, run) for run in read_losses(path)]
        else:
            found.append((path, read_run(path)))
    names = unique_names([folder for folder, _ in found])
    return [replace(run, name=name) for (_, run), name in zip(found, names, strict=True)]


def compare(runs: Sequence[Run], out: Path, window: float, share: float) -> None:
    """Prints the tables and writes the files.

    Args:
        share: the margin, as a share of the baseline's mean loss.

    Raises:
        ValueError: the runs cannot be compared.
    """
    check_comparable(runs)
    groups, steps = grouped(runs), common_steps(runs)
    first, *others = groups
    margin = margin_of(groups[first], steps, window, share)
    verdicts = {name: judge(groups[first], groups[name], steps, window, margin) for name in others}
    rows = summary(groups, verdicts, window, margin)
    if len(runs) <= 4:
        print(format_table(loss_table(runs)) + "\n")
    print(format_table(rows))
    print(f"\nfinal loss: nats per token, over the last {100 * window:.3g}% of the steps; x: tokens/s against {first}")
    for name in others:
        for sentence in apart(groups[first], groups[name], steps):
            print(f"\n{sentence}")
    out.mkdir(parents=True, exist_ok=True)
    write_rows(out / "losses.csv", curves(runs))
    write_rows(out / "table.csv", rows)
    wrote = f"wrote {out / 'table.csv'}, {out / 'losses.csv'}"
    if find_spec("matplotlib") is None:
        print(f"{wrote}, no picture: pip install matplotlib")
    else:
        plot(groups, out / "losses.png", margin.nats)
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
    args = parser.parse_args(argv)
    with ends_in_words("compare_runs"):
        if not 0 < args.window <= 1:
            raise ValueError(f"--window is a share of the steps, above 0 and at most 1, got {args.window}")
        if not 0 < args.margin < 1:
            raise ValueError(f"--margin is a share of the loss, above 0 and below 1, got {args.margin}")
        if any(path.resolve() == (args.out / "losses.csv").resolve() for path in args.runs):
            raise ValueError(f"{args.out / 'losses.csv'} would be overwritten: name another --out")
        runs = read(args.runs)
        if args.steps is not None:
            runs = [first_steps(run, args.steps) for run in runs]
        compare(runs, args.out, args.window, args.margin)


if __name__ == "__main__":
    main(sys.argv[1:])
