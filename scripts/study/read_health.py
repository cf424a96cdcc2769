"""Gradient norms and health metrics of runs, every so many steps, from their TensorBoard logs: health.csv.

    python scripts/study/read_health.py outputs/study/bf16-seed0 outputs/study/mxfp8_2d-seed0 --out outputs/study

A row stands for the steps since the row before, the last one for those that are left: ``grad_norm`` is the mean norm of
the gradient before clipping, and ``grad_norm max`` the largest. Of what ``quantize.health_every`` and
``hopper_rebase_report`` logged last until then, shares of elements over all converted modules: ``gradients
flushed_to_zero`` is the mean of the modules, with `` max`` behind it the largest, and with `` in`` its module; of the
scales' exponents the smallest and the largest. Empty where nothing was logged, as of bf16. Where two folders have the
same name, all runs are named with the folders above.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from scripts.result_files import write_rows
from scripts.study.runs import read_tensorboard, unique_names

GRAD_NORM = "grad_norm"
HEALTH = "mx_health/"  # operand / metric / module


def rows_of(name: str, scalars: dict[str, dict[int, float]], every: int) -> list[dict[str, object]]:
    """A run's rows, one for every ``every`` steps and one for the rest; ``scalars`` by tag and step."""
    health: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for tag, values in scalars.items():
        if tag.startswith(HEALTH):
            operand, metric, module = tag.removeprefix(HEALTH).split("/", 2)
            health.setdefault((operand, metric), {})[module] = values
    rows = []
    norms = scalars[GRAD_NORM]
    ends = [0, *range(every, max(norms), every), max(norms)]
    for begin, end in pairwise(ends):
        of_steps = [norm for step, norm in norms.items() if begin < step <= end]
        row: dict[str, object] = {"run": name, "step": end}
        if of_steps:
            row |= {"grad_norm": f"{fmean(of_steps):.4g}", "grad_norm max": f"{max(of_steps):.4g}"}
        for (operand, metric), modules in sorted(health.items()):
            row |= over_modules(f"{operand} {metric}", modules, begin, end)
        rows.append(row)
    return rows


def over_modules(column: str, modules: dict[str, dict[int, float]], begin: int, end: int) -> dict[str, object]:
    """The columns of one metric of one operand: each module counts with its last value from after step ``begin`` until
    ``end``."""
    last = {
        module: max((step, value) for step, value in values.items() if begin < step <= end)[1]
        for module, values in modules.items()
        if any(begin < step <= end for step in values)
    }
    if not last:
        return {}
    if column.endswith("_min"):
        return {column: f"{min(last.values()):g}"}
    if column.endswith("_max"):
        return {column: f"{max(last.values()):g}"}
    most = max(last, key=last.__getitem__)
    shares = {column: f"{fmean(last.values()):.3g}", f"{column} max": f"{last[most]:.3g}"}
    return shares | ({f"{column} in": most} if last[most] else {})


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="dump folders of runs")
    parser.add_argument("--every", type=int, default=100, metavar="STEPS", help="[100]")
    parser.add_argument("--out", type=Path, required=True, help="folder of health.csv")
    args = parser.parse_args(argv)
    if args.every < 1:
        parser.error(f"--every is at least 1, got {args.every}")
    rows = []
    try:
        for name, folder in zip(unique_names(args.runs), args.runs, strict=True):
            scalars = read_tensorboard(folder)
            if not scalars.get(GRAD_NORM):
                raise ValueError(f"{folder} holds no TensorBoard log with {GRAD_NORM}: it is no run's dump folder")
            rows += rows_of(name, scalars, args.every)
        args.out.mkdir(parents=True, exist_ok=True)
        write_rows(args.out / "health.csv", rows)
    except (ValueError, OSError) as error:
        sys.exit(f"read_health: {error}")
    print(f"wrote {args.out / 'health.csv'}")


if __name__ == "__main__":
    main(sys.argv[1:])
