"""What MXFP8 can bring on a GPU, and what it brings: the model is in ``passes.py``.

    python scripts/bench/roofline.py draw results/<folder>    # roofline.csv and pictures of a folder of bench_all.sh's
    python scripts/bench/roofline.py check --out OUT          # predictions beside all trainings in results/

In a picture what is dotted is predicted from the ceilings that the same folder measured, what is solid was measured.
``check`` says of each training what the model says of the same TOML and flags, by the GPU's ceilings and by our
kernels' rates; of the control, ``bf16+dispatch``, 1, as in the model only the number format changes a step.
"""

import argparse
import csv
import itertools
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path

from scripts.bench.passes import (
    MODELS,
    Layer,
    Rates,
    committed_rates,
    passes,
    step_of,
    step_speedup,
)
from scripts.progress import ends_in_words
from scripts.result_files import environment, format_table, read_rows, training_gains, write_results, write_rows
from titan_mxfp8.backends import plan_on
from titan_mxfp8.backends.hardware import CLUSTER_GPUS, Hardware
from titan_mxfp8.recipe import BF16, get_recipe

ROOT = Path(__file__).parents[2]
SHOWN = ("mxfp8", "mxfp8_2d", "mxfp8_2d_rebased")
TOKENS = tuple(half << exponent for exponent in range(9, 18) for half in (2, 3))
EXPERTS = 8
GEMMS = ("forward", "dgrad", "wgrad")
BOTH = "forward + backward"

TICKS = tuple(4**exponent for exponent in range(5, 10))
COLOURS = ("tab:blue", "tab:orange", "tab:green")

Row = dict[str, object]


def measured_rows(folder: Path) -> list[dict[str, str]]:
    """Forward + backward, and passes, of balanced groups of normal numbers with ``EXPERTS`` experts, nothing held."""
    plain = {"groups": "balanced", "G": str(EXPERTS), "data": "normal", "held": "0"}
    return [
        row
        for path in sorted(folder.rglob("data.csv"))
        for row in read_rows(path)
        if row.get("bench") == "kernels" or (row.get("bench") in ("grouped_mm", "scaling") and row["what"] == BOTH)
        if all((row.get(name) or value) == value for name, value in plain.items())
    ]


def gpu_of(folder: Path) -> str:
    """The GPU of a folder's benchmarks, as clusters name it.

    Raises:
        ValueError: none there, or one that is not known.
    """
    for path in sorted(folder.rglob("env.json")):
        words = json.loads(path.read_text()).get("gpu", "").split()
        if words[:1] == ["NVIDIA"] and words[1] in CLUSTER_GPUS:
            return words[1]
    raise ValueError(f"{folder} holds no results of one of {', '.join(CLUSTER_GPUS)}")


def roofline_rows(folder: Path) -> list[Row]:
    """Predicted and measured microseconds of each pass, and of all together, by model, tokens and recipe.

    Raises:
        ValueError: the folder lacks the rates of a GPU.
    """
    gpu = gpu_of(folder)
    hardware, rates = CLUSTER_GPUS[gpu], committed_rates(folder, gpu)
    if rates is None:
        raise ValueError(f"{folder} lacks ceilings: bench_kernels.py --ceilings measures them")
    ceilings, measured = rates[0], measured_rows(folder)
    rows: list[Row] = []
    for n, k in MODELS:
        here = [row for row in measured if (row["N"], row["K"]) == (str(n), str(k))]
        for m in sorted({*TOKENS, *(int(row["M"]) for row in here)}):
            layer = Layer(m=m, n=n, k=k, groups=EXPERTS)
            bf16 = predicted_seconds(BF16.name, hardware, layer, ceilings)
            for recipe in SHOWN:
                found = {row["what"]: row for row in here if (row["M"], row["recipe"]) == (str(m), recipe)}
                for what, seconds in predicted_seconds(recipe, hardware, layer, ceilings).items():
                    row: Row = {"gpu": gpu, "M": m, "N": n, "K": k, "G": EXPERTS, "recipe": recipe, "what": what}
                    row |= {"predicted_us": 1e6 * seconds, "predicted_x": bf16[what] / seconds if what in bf16 else ""}
                    row |= {
                        name: found.get(what, {}).get(name, "") for name in ("p50_us", "x", "gb_per_s", "baseline_us")
                    }
                    rows.append(row | {"ceiling_gb_per_s": ceilings.ceilings["copy"] / 1e9})
    return rows


def predicted_seconds(recipe: str, hardware: Hardware, layer: Layer, rates: Rates) -> dict[str, float]:
    """Of each pass, and of forward + backward."""
    plan = plan_on(get_recipe(recipe), "auto", hardware)
    seconds = {one.name: rates.seconds(recipe, one) for one in passes(get_recipe(recipe), plan, layer)}
    return seconds | {BOTH: sum(seconds.values())}


def break_even(points: Sequence[tuple[int, float]]) -> float | None:
    """The tokens at which a speed-up, of points by tokens, last rises to 1; None where it does not.

    Between the two neighbours it is linear in log tokens: with 0.9 at 1024 and 1.1 at 4096 that is at 2048.
    """
    crossing = [pair for pair in itertools.pairwise(points) if pair[0][1] < 1 <= pair[1][1]]
    if not crossing:
        return None
    (low, below), (high, above) = crossing[-1]
    return low * (high / low) ** ((1 - below) / (above - below))


def draw(path: Path) -> list[Path]:
    """The pictures of a roofline.csv, beside it: speed-up of forward + backward and of the GEMMs alone, by tokens."""
    from matplotlib import pyplot

    with path.open(newline="") as file:
        every = list(csv.DictReader(file))
    drawn = []
    for (n, k), model in MODELS.items():
        rows = [row for row in every if (row["N"], row["K"]) == (str(n), str(k))]
        figure, (whole, gemms) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
        figure.suptitle(
            f"A grouped GEMM of {model}: {EXPERTS} experts, N {n} features out, K {k} in, on one {rows[0]['gpu']}. "
            "Solid: measured.\nDotted: predicted from the ceilings, against a bf16 GEMM at its ceiling"
        )
        for recipe, colour in zip(SHOWN, COLOURS, strict=True):
            curve(whole, rows, recipe, BOTH, colour, recipe)
            for column, how in (("predicted_x", "predicted"), ("x", "measured")):
                if pays := break_even(of(rows, recipe, BOTH, column)):
                    label = f"pays from {round(pays, -2):,.0f} tokens, {how}"
                    style = ":" if how == "predicted" else "-"
                    whole.plot((pays, pays), (0, 1), style, color=colour, linewidth=1, label=label)
            for name, style in zip(GEMMS, ("o", "s", "^"), strict=True):
                curve(gemms, rows, recipe, name, colour, f"{recipe} {name}", style)
        for panel, title in ((whole, "forward + backward with quantising"), (gemms, "GEMMs alone")):
            tokens = [int(row["M"]) for row in rows]
            panel.axhline(1, color="black", label="bf16")
            panel.set(title=f"{title}, times bf16's speed", xscale="log", xlabel="tokens", ylim=(0, None))
            panel.set(xlim=(min(tokens) / 1.1, max(tokens)))
            panel.set_xticks(TICKS, [f"{m:,}" for m in TICKS])
            panel.minorticks_off()
            panel.legend(fontsize=7, handlelength=3, loc="lower right")
        drawn.append(path.with_name(f"roofline_{model}.png"))
        figure.savefig(drawn[-1], dpi=110)
        pyplot.close(figure)
    return drawn


def of(rows: Sequence[dict[str, str]], recipe: str, what: str, column: str) -> list[tuple[int, float]]:
    """Tokens and the column's number, where there is one."""
    chosen = (row for row in rows if (row["recipe"], row["what"]) == (recipe, what) and row[column])
    return sorted((int(row["M"]), float(row[column])) for row in chosen)


def curve(
    panel, rows: Sequence[dict[str, str]], recipe: str, what: str, colour: str, label: str, style: str = "o"
) -> None:
    """A dotted line and, where anything was measured, a solid one."""
    for column, line in (("predicted_x", ":"), ("x", f"{style}-")):
        if points := of(rows, recipe, what, column):
            panel.plot(*zip(*points, strict=True), line, color=colour, label=label if column == "x" else None)


def trainings(results: Path) -> Iterator[tuple[Path, dict[str, str], dict[str, str], float]]:
    """Table, environment, row and gain of each training beside bf16's whose config and flags are known."""
    for path in sorted(results.rglob("*table.csv")):
        names = (f"{path.stem.removesuffix('table')}env.json", "env.json", "../env.json")
        env = next(
            (json.loads((path.parent / name).read_text()) for name in names if (path.parent / name).is_file()), {}
        )
        with path.open(newline="") as file:
            gains = training_gains(list(csv.DictReader(file)))
        if "config" in env:
            yield from ((path, env, row, gain) for row, gain in gains if row["run"] != "bf16")


def check(results: Path) -> list[Row]:
    """A row for each of ``trainings`` on a GPU of which there are rates."""
    from scripts.bench.bench_training import flags_of
    from titan_mxfp8.tools.dry_run import dry_run, parse_config
    from titan_mxfp8.tools.memory import GIB

    table: list[Row] = []
    for path, env, row, gain in trainings(results):
        gpu = env.get("gpu", "").removeprefix("NVIDIA ").split(" ")[0]
        rates = committed_rates(results, gpu) if gpu in CLUSTER_GPUS else None
        if rates is None:
            continue
        flags = [*flags_of(row["run"]), *env.get("flags", "").split(), "--cluster.nodes=1", f"--cluster.gpu={gpu}"]
        flags += [f"--cluster.gpus_per_node={env['processes']}"]
        if row.get("flavor"):
            flags += [f"--model.flavor={row['flavor']}", "--model.study_flavors"]
        job_config = parse_config(str(ROOT / env["config"]), flags)
        report = dry_run(job_config, fill=inf)  # it has been trained, so it fits
        roofline, own = (round(step_speedup(step_of(report), gpu, each), 3) for each in rates)
        found: Row = {"folder": path.parent.relative_to(results), "table": path.name, "model": job_config.model.flavor}
        found |= {"GPUs": env["processes"], "run": row["run"], "measured": round(gain, 3)}
        found |= {"by our rates": own, "by the ceilings": roofline}
        table.append(found | {"memory GiB": row["memory GiB"], "estimated GiB": round(report.memory.total / GIB, 2)})
    return table


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="pictures of a folder of results")
    drawing.add_argument("folder", type=Path)
    checking = commands.add_parser("check", help="predictions beside what was measured")
    checking.add_argument("--out", type=Path, help="folder for data.csv and env.json")
    args = parser.parse_args(argv)
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)  # TorchTitan's account of a run that does not happen
    try:
        with ends_in_words("roofline"):
            if args.command == "draw":
                write_rows(args.folder / "roofline.csv", roofline_rows(args.folder))
                print("\n".join(map(str, draw(args.folder / "roofline.csv"))))
                return
            rows = check(ROOT / "results")
            print(format_table(rows))
            if args.out:
                write_results(args.out, rows, environment("cpu"))
    finally:
        logging.disable(disabled)


if __name__ == "__main__":
    main(sys.argv[1:])
