"""What MXFP8 can bring on a GPU, beside what it brings: the model is in ``passes.py``.

    python scripts/bench/roofline.py passes results/<folder>    # roofline.csv of a folder of bench_all.sh's
    python scripts/bench/roofline.py check --out OUT            # predictions beside all trainings in results/

``passes`` predicts the time of each pass by tokens, from the ceilings that the same folder measured. ``check`` says of
each training what the model says of the same TOML and flags, by the GPU's ceilings and by our kernels' rates; of the
control, ``bf16+dispatch``, 1, as in the model only the number format changes a step.
"""

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path

from scripts.bench.passes import MODELS, Layer, Rates, committed_rates, passes, step_speedup
from scripts.progress import ends_in_words
from scripts.result_files import (
    env_of,
    environment,
    format_table,
    gpu_of,
    read_rows,
    training_gains,
    write_results,
    write_rows,
)
from scripts.study.conversions import FLOAT8, conversion_of
from titan_mxfp8.backends import plan_on
from titan_mxfp8.backends.hardware import CLUSTER_GPUS, Hardware
from titan_mxfp8.recipe import BF16, get_recipe

ROOT = Path(__file__).parents[2]
SHOWN = ("mxfp8", "mxfp8_2d", "mxfp8_2d_rebased")
TOKENS = tuple(half << exponent for exponent in range(9, 18) for half in (2, 3))
EXPERTS = 8
BOTH = "forward + backward"


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


def roofline_rows(folder: Path) -> list[Row]:
    """Predicted and measured microseconds of each pass, and of all together, by model, tokens and recipe.

    Raises:
        ValueError: the folder lacks the rates of a GPU that clusters have.
    """
    found = {gpu: rates[0] for gpu in CLUSTER_GPUS if (rates := committed_rates(folder, gpu))}
    if not found:
        known = ", ".join(CLUSTER_GPUS)
        raise ValueError(f"{folder} lacks ceilings of one of {known}: bench_grouped_mm.py --passes measures them")
    gpu, ceilings = next(iter(found.items()))
    hardware, measured = CLUSTER_GPUS[gpu], measured_rows(folder)
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


def trainings(results: Path) -> Iterator[tuple[Path, dict[str, str], dict[str, str], float]]:
    """Table, environment, row and gain of each training of ours beside bf16's whose config and flags are known."""
    for path in sorted(results.rglob("*table.csv")):
        env, gains = env_of(path), training_gains(read_rows(path))
        if env.get("config", "").endswith(".toml"):  # TorchTitan 0.3 has none
            for row, gain in gains:
                run = conversion_of(row["run"])
                if run.converters and run.recipe != FLOAT8:
                    yield path, env, row, gain


def check(results: Path) -> list[Row]:
    """A row for each of ``trainings`` on a GPU of which there are rates."""
    from scripts.bench.bench_training import flags_of
    from titan_mxfp8.tools.dry_run import dry_run, parse_config
    from titan_mxfp8.tools.memory import GIB

    table: list[Row] = []
    for path, env, row, gain in trainings(results):
        gpu = gpu_of(env)
        rates = committed_rates(results, gpu) if gpu in CLUSTER_GPUS else None
        if rates is None:
            continue
        own_flags = [flag for flag in flags_of(row["run"]) if not flag.startswith("--training.cuda_graph")]
        flags = [*own_flags, *env.get("flags", "").split(), "--cluster.nodes=1", f"--cluster.gpu={gpu}"]
        flags += [f"--cluster.gpus_per_node={env['processes']}"]
        if row.get("flavor"):
            flags += [f"--model.flavor={row['flavor']}", "--model.study_flavors"]
        job_config = parse_config(str(ROOT / env["config"]), flags)
        report = dry_run(job_config, fill=inf)  # it has been trained, so it fits
        roofline, own = (round(step_speedup(report, gpu, each), 3) for each in rates)
        found: Row = {"folder": path.parent.relative_to(results), "table": path.name, "model": job_config.model.flavor}
        found |= {"GPUs": env["processes"], "run": row["run"], "measured": round(gain, 3)}
        found |= {"by our rates": own, "by the ceilings": roofline}
        table.append(found | {"memory GiB": row["memory GiB"], "estimated GiB": round(report.memory.total / GIB, 2)})
    return table


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("passes", help="of a folder of results").add_argument("folder", type=Path)
    checking = commands.add_parser("check", help="predictions beside what was measured")
    checking.add_argument("--out", type=Path, help="folder for data.csv and env.json")
    args = parser.parse_args(argv)
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)  # TorchTitan's account of a run that does not happen
    try:
        with ends_in_words("roofline"):
            if args.command == "passes":
                write_rows(args.folder / "roofline.csv", roofline_rows(args.folder))
                print(args.folder / "roofline.csv")
                return
            rows = check(ROOT / "results")
            print(format_table(rows))
            if args.out:
                write_results(args.out, rows, environment("cpu"))
    finally:
        logging.disable(disabled)


if __name__ == "__main__":
    main(sys.argv[1:])
