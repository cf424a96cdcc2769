"""What MXFP8 can bring on a GPU, and what it brings: the model is in ``passes.py``.

    python scripts/bench/roofline.py measure --out OUT         # the GPU's ceilings: a copy, dense bf16 and FP8 matmuls
    python scripts/bench/roofline.py draw results/<folder>           # pictures of a folder of bench_all.sh's
    python scripts/bench/roofline.py predict CONFIG.toml --gpu H200  # the step of a training
    python scripts/bench/roofline.py check --out OUT           # predictions beside the measured trainings
    python scripts/bench/roofline.py layers CSV ... --gpu H200 --out OUT    # bounds beside measured MoE layers

``draw`` writes roofline.csv and, for each model's experts, a picture of it with five panels: speed-up of forward +
backward by tokens, with the tokens from which MXFP8 pays (``break_even``); GB/s of the quantisers of tokens; of
weights; speed-up of the GEMMs alone; time by pass. Coloured and dotted: predicted from the ceilings that the same
folder measured, against a bf16 GEMM at its ceiling; as torch's is slower, what is measured may lie above. Solid:
measured, as is what the title of a panel calls dashed. Black: as fast as bf16, or as a copy.

``check`` writes data.csv: for each training of bench_training.py in results/ its gain, and what the model says of the
same TOML and flags as they are today, by the GPU's ceilings and by our kernels' rates (``committed_rates``). Of the
control, ``bf16+dispatch``, it says 1: in the model only the number format changes a step. What the control gains is
what the model leaves out of every run with ``dispatch``. Beside them the memory that was reserved, and what
``tools/memory.py`` estimates.

``layers`` takes tables of bench_moe_layer.py and says of each way that dispatches MXFP8 rows how fast it could be at
most (``moe_passes``), in times bf16's step that was measured beside it: with all passes at the GPU's ceilings, and with
the GEMMs at our kernels' rates and all else at the ceilings. A goal above the second takes faster GEMMs, whatever is
done about the rest. ``gemms_ms`` is what the GEMMs alone take at our rates, which are means over the shapes that were
measured.
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
    MoELayer,
    Rates,
    committed_rates,
    moe_passes,
    passes,
    step_of,
    step_speedup,
)
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
        raise ValueError(f"{folder} lacks ceilings: scripts/bench/bench_kernels.py measures them")
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
    """The pictures of a roofline.csv, beside it."""
    from matplotlib import pyplot

    with path.open(newline="") as file:
        every = list(csv.DictReader(file))
    drawn = []
    for (n, k), model in MODELS.items():
        rows = [row for row in every if (row["N"], row["K"]) == (str(n), str(k))]
        figure, grid = pyplot.subplots(2, 3, figsize=(17, 9), layout="constrained")
        *panels, unused = grid.flatten()
        unused.remove()
        figure.suptitle(
            f"A grouped GEMM of {model}: {EXPERTS} experts, N {n} features out, K {k} in, on one {rows[0]['gpu']}. "
            "Solid: measured.\nDotted: predicted from the ceilings, against a bf16 GEMM at its ceiling"
        )
        for recipe, colour in zip(SHOWN, COLOURS, strict=True):
            curve(panels[0], rows, recipe, BOTH, "predicted_x", "x", colour, recipe)
            for column, line, how in (("predicted_x", ":", "predicted"), ("x", "-", "measured")):
                if pays := break_even(of(rows, recipe, BOTH, column)):
                    label = f"pays from {round(pays, -2):,.0f} tokens, {how}"
                    panels[0].plot((pays, pays), (0, 1), line, color=colour, linewidth=1, label=label)
            for panel, names in (
                (panels[1], ("quantise x", "quantise dy")),
                (panels[2], ("quantise w", "quantise w again")),
            ):
                for name, style in zip(names, ("o-", "s--"), strict=True):
                    points = of(rows, recipe, name, "gb_per_s")
                    if points:
                        panel.plot(*zip(*points, strict=True), style, color=colour, label=f"{recipe} {name}")
            for name, style in zip(GEMMS, ("o", "s", "^"), strict=True):
                curve(panels[3], rows, recipe, name, "predicted_x", "x", colour, f"{recipe} {name}", style)
        titles = {
            panels[0]: "forward + backward with quantising, times bf16's speed",
            panels[1]: "quantise tokens, GB/s (x solid, dy dashed)",
            panels[2]: "quantise weights, GB/s (w again dashed)",
            panels[3]: "GEMMs alone, times bf16's speed",
        }
        for panel, title in titles.items():
            in_gb_per_s = panel in panels[1:3]
            if in_gb_per_s and not panel.lines:
                title += ": not measured"
            height, label = (float(rows[0]["ceiling_gb_per_s"]), "a copy") if in_gb_per_s else (1, "bf16")
            panel.axhline(height, linestyle=":", color="black", label=label)
            tokens = [int(row["M"]) for row in rows]
            panel.set(title=title, xscale="log", xlabel="tokens", xlim=(min(tokens) / 1.1, max(tokens)), ylim=(0, None))
            panel.set_xticks(TICKS, [f"{m:,}" for m in TICKS])
            panel.minorticks_off()
            panel.legend(fontsize=7, handlelength=3, loc="lower right")
        bars(panels[4], rows)
        drawn.append(path.with_name(f"roofline_{model}.png"))
        figure.savefig(drawn[-1], dpi=110)
        pyplot.close(figure)
    return drawn


def of(rows: Sequence[dict[str, str]], recipe: str, what: str, column: str) -> list[tuple[int, float]]:
    """Tokens and the column's number, where there is one."""
    chosen = (row for row in rows if (row["recipe"], row["what"]) == (recipe, what) and row[column])
    return sorted((int(row["M"]), float(row[column])) for row in chosen)


def curve(
    panel,
    rows: Sequence[dict[str, str]],
    recipe: str,
    what: str,
    predicted: str,
    measured: str,
    colour: str,
    label: str,
    style: str = "o",
) -> None:
    """A dotted line and, where anything was measured, a solid one."""
    for column, line in ((predicted, ":"), (measured, f"{style}-")):
        if points := of(rows, recipe, what, column):
            panel.plot(*zip(*points, strict=True), line, color=colour, label=label if column == measured else None)


def bars(panel, rows: Sequence[dict[str, str]]) -> None:
    """Milliseconds by pass at the most tokens of which all was measured, a bar for bf16 and for each recipe."""
    tokens = [m for m, _ in of(rows, SHOWN[-1], "wgrad", "p50_us")]
    if not tokens:
        panel.set(title="time by pass: not measured")
        return
    here = [row for row in rows if row["M"] == str(tokens[-1]) and row["p50_us"] and row["what"] != BOTH]
    heights = {
        "bf16": {row["what"]: row["baseline_us"] for row in here if row["recipe"] == SHOWN[-1] and row["baseline_us"]}
    }
    heights |= {recipe: {row["what"]: row["p50_us"] for row in here if row["recipe"] == recipe} for recipe in SHOWN}
    names = list(dict.fromkeys(row["what"] for row in here))
    bottom = dict.fromkeys(heights, 0.0)
    for name in names:
        ms = [float(heights[recipe].get(name) or 0) / 1e3 for recipe in heights]
        panel.bar(list(heights), ms, bottom=list(bottom.values()), label=name)
        bottom = {recipe: at + height for (recipe, at), height in zip(bottom.items(), ms, strict=True)}
    panel.set(title=f"milliseconds by pass, {tokens[-1]} tokens")
    panel.tick_params(axis="x", labelrotation=20)
    panel.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1)).set_in_layout(False)  # the sixth place is free


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


def bounds(path: Path, gpu: str, results: Path) -> list[Row]:
    """A row for each way of a table of bench_moe_layer.py that dispatches MXFP8 rows; rates are those in ``results``.

    Raises:
        ValueError: no such table, or no rates of this GPU.
    """
    rates = committed_rates(results, gpu)
    if rates is None:
        raise ValueError(f"{results} has no rates that were measured on {gpu}")
    ceilings, own = rates
    gemms = Rates(ceilings=ceilings.ceilings, own={key: rate for key, rate in own.own.items() if key[1] in GEMMS})
    try:
        return [row for each in read_rows(path) for row in _bounds_of(each, gpu, ceilings, gemms)]
    except (OSError, UnicodeDecodeError, KeyError) as error:
        raise ValueError(f"{path} is no table of bench_moe_layer.py: {error!r}") from error


def _bounds_of(row: dict[str, str], gpu: str, ceilings: Rates, gemms: Rates) -> Iterator[Row]:
    recipe, _, way = row["way"].partition(" ")
    if way in ("", "off") or recipe == BF16.name:  # TorchTitan's dispatch, and the control
        return
    tokens, top_k, ranks = (int(row[name]) for name in ("tokens", "top_k", "ranks"))
    layer = MoELayer(
        tokens=tokens,
        rows=tokens * top_k,
        dim=int(row["D"]),
        hidden=int(row["H"]),
        experts=int(row["experts"]) // ranks,
        shared=int(row["shared"]),
    )
    bf16, ms = (float(row[name]) / 1e3 for name in ("baseline_us", "p50_us"))
    found = moe_passes(get_recipe(recipe), plan_on(get_recipe(recipe), "auto", CLUSTER_GPUS[gpu]), layer)
    at_ceilings, with_gemms = (1e3 * sum(rates.seconds(recipe, one) for one in found) for rates in (ceilings, gemms))
    multiplying = 1e3 * sum(gemms.seconds(recipe, one) for one in found if one.flops)
    yield {"layer": row["layer"], "ranks": ranks, "way": row["way"], "bf16_ms": round(bf16, 1), "ms": round(ms, 1)} | {
        "gemms_ms": round(multiplying, 1),
        "x": round(float(row["x"]), 2),
        "x, our GEMMs": round(bf16 / with_gemms, 2),
        "x, ceilings": round(bf16 / at_ceilings, 2),
    }


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("measure", help="a GPU's ceilings; flags as bench_kernels.py has them")
    drawing = commands.add_parser("draw", help="pictures of a folder of results")
    drawing.add_argument("folder", type=Path)
    predicting = commands.add_parser("predict", help="the step of a training; flags of TorchTitan's")
    predicting.add_argument("config", type=Path)
    predicting.add_argument("--gpu", required=True, choices=CLUSTER_GPUS)
    checking = commands.add_parser("check", help="predictions beside what was measured")
    bounding = commands.add_parser("layers", help="bounds beside measured MoE layers")
    bounding.add_argument("tables", nargs="+", type=Path, metavar="CSV", help="of bench_moe_layer.py")
    bounding.add_argument("--gpu", required=True, choices=CLUSTER_GPUS)
    help_text = "where passes and ceilings were measured [results: the newest passes, and all ceilings]"
    bounding.add_argument("--rates", type=Path, default=ROOT / "results", metavar="FOLDER", help=help_text)
    for command in (checking, bounding):
        command.add_argument("--out", type=Path, help="folder for data.csv and env.json")
    return parser.parse_known_args(argv)


def main(argv: Sequence[str]) -> None:
    args, flags = parse_arguments(argv)
    if flags and args.command in ("draw", "check", "layers"):
        sys.exit(f"roofline: unknown arguments {' '.join(flags)}")
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)  # TorchTitan's account of a run that does not happen
    try:
        if args.command == "measure":
            from scripts.bench.bench import Bench, parse, parser_of, run

            run("kernels", parse(parser_of(__doc__), flags), Bench.measure_ceilings)
        elif args.command == "draw":
            write_rows(args.folder / "roofline.csv", roofline_rows(args.folder))
            print("\n".join(map(str, draw(args.folder / "roofline.csv"))))
        elif args.command == "predict":
            from scripts.check_configs import predicted
            from titan_mxfp8.tools.dry_run import dry_run, parse_config

            report = dry_run(parse_config(str(args.config), [f"--cluster.gpu={args.gpu}", *flags]))
            print(f"{args.config}: {predicted(report)}")
        else:
            if args.command == "check":
                rows = check(ROOT / "results")
            else:
                rows = [{"table": path} | row for path in args.tables for row in bounds(path, args.gpu, args.rates)]
            print(format_table(rows))
            if args.out:
                write_results(args.out, rows, environment("cpu"))
    except ValueError as error:
        sys.exit(f"roofline: {error}")
    finally:
        logging.disable(disabled)


if __name__ == "__main__":
    main(sys.argv[1:])
