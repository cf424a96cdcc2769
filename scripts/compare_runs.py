"""Losses of TorchTitan runs side by side, from their TensorBoard logs: a table, a CSV, and a picture of the curves."""

import argparse
import csv
import sys
from dataclasses import dataclass
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

LOSS = "loss_metrics/global_avg_loss"
THROUGHPUT = "throughput(tps)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Scalars by step: mean loss in nats per token, and tokens per second per device."""

    name: str
    loss: dict[int, float]
    tps: dict[int, float]


def read_run(folder: Path) -> Run:
    """Reads the newest TensorBoard log below a run's dump folder.

    Raises:
        ValueError: no log there, or one without losses.
    """
    logs = sorted(folder.rglob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime)
    if not logs:
        raise ValueError(f"{folder} holds no TensorBoard log: train with metrics.enable_tensorboard = true")
    log = EventAccumulator(str(logs[-1]), size_guidance={"scalars": 0}).Reload()
    if LOSS not in log.Tags()["scalars"]:
        raise ValueError(f"{logs[-1]} holds no {LOSS}: the run ended before its first log")
    loss, tps = ({event.step: event.value for event in log.Scalars(tag)} for tag in (LOSS, THROUGHPUT))
    return Run(name=folder.name, loss=loss, tps=tps)


def common_steps(runs: list[Run]) -> list[int]:
    """The steps that every run logged.

    Raises:
        ValueError: there are none.
    """
    steps = sorted(set.intersection(*(set(run.loss) for run in runs)))
    if not steps:
        raise ValueError(f"{', '.join(run.name for run in runs)} have no logged step in common")
    return steps


def loss_table(runs: list[Run], rows: int = 12) -> str:
    """Losses at evenly spaced common steps, the last one included, and the difference from the first run."""
    steps = common_steps(runs)
    picked = sorted({steps[round(i * (len(steps) - 1) / max(1, rows - 1))] for i in range(rows)})
    names = [run.name for run in runs] + [f"{run.name} - {runs[0].name}" for run in runs[1:]]
    width = max(12, *(len(name) + 2 for name in names))
    lines = ["  step" + "".join(f"{name:>{width}}" for name in names)]
    for step in picked:
        losses = [run.loss[step] for run in runs]
        cells = [f"{loss:{width}.4f}" for loss in losses] + [f"{loss - losses[0]:+{width}.4f}" for loss in losses[1:]]
        lines.append(f"{step:6}" + "".join(cells))
    return "\n".join(lines)


def median_tps(run: Run) -> float:
    """Median tokens per second, the first logged step (warm-up) left out where there are more."""
    values = sorted(list(run.tps.values())[1:] or run.tps.values())
    return values[len(values) // 2]


def write_csv(runs: list[Run], path: Path) -> None:
    """One row for each common step: the loss and the tokens per second of every run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *(f"{run.name} {what}" for run in runs for what in ("loss", "tps"))])
        for step in common_steps(runs):
            writer.writerow([step, *(value[step] for run in runs for value in (run.loss, run.tps))])


def plot(runs: list[Run], path: Path) -> None:
    """Draws the loss curves, and below them the difference from the first run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = common_steps(runs)
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 1), constrained_layout=True
    )
    for index, run in enumerate(runs):
        top.plot(steps, [run.loss[step] for step in steps], label=run.name, color=f"C{index}", linewidth=1.2)
        if index:
            gap = [run.loss[step] - runs[0].loss[step] for step in steps]
            bottom.plot(steps, gap, color=f"C{index}", linewidth=1)
    bottom.axhline(0, color="0.6", linewidth=0.8)
    top.set_ylabel("loss (nats per token)")
    bottom.set_ylabel(f"minus {runs[0].name}")
    bottom.set_xlabel("step")
    top.legend()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="dump folder of a run; the first is the baseline"
    )
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for losses.csv and losses.png [.]")
    args = parser.parse_args()
    try:
        runs = [read_run(folder) for folder in args.runs]
        print(loss_table(runs))
    except ValueError as error:
        sys.exit(f"compare_runs: {error}")
    for run in runs:
        print(f"{run.name}: {len(run.loss)} steps logged, median {median_tps(run):,.0f} tokens/s per device")
    args.out.mkdir(parents=True, exist_ok=True)
    write_csv(runs, args.out / "losses.csv")
    plot(runs, args.out / "losses.png")
    print(f"wrote {args.out / 'losses.csv'} and {args.out / 'losses.png'}")


if __name__ == "__main__":
    main()
