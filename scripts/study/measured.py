"""Writes titan_mxfp8/measured.csv, which the doctor reads, from the folders under results/ that count.

    python scripts/study/measured.py            # writes it
    python scripts/study/measured.py --check    # only says whether it is what the folders say; the exit status too

Folders that count are those in bold in results/README.md. A row is how many times bf16's speed a recipe reached on a
GPU: in training (kind ``training``, of bench_training.py with TorchTitan 0.2.2: experts converted, linears too where
no run has experts alone, or with recipe ``bf16`` nothing, the control of the dispatch; ``checkpointing`` is of
activations), or in forward + backward of one grouped GEMM with 8 experts (kind ``grouped_mm``). Of the same thing the
newest folder has its row.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from scripts.bench.roofline import MODELS
from scripts.progress import ends_in_words
from scripts.result_files import env_of, read_rows, steps_of_8, training_gains, write_rows
from scripts.study.conversions import FLOAT8, conversion_of
from scripts.study.runs import value_of
from titan_mxfp8.recipe import BF16, RECIPES

ROOT = Path(__file__).parents[2]
RESULTS, FILE = ROOT / "results", ROOT / "titan_mxfp8" / "measured.csv"
COUNTS = re.compile(r"\*\*`(\d{4}-\d\d-\d\d_\w+)`\*\*")
KEY = ("gpu", "kind", "model", "what", "gpus", "recipe", "dispatch", "graph", "checkpointing")
FIELDS = "model.name", "model.flavor", "activation_checkpoint.mode"

Row = dict[str, str]


def folders(results: Path) -> list[Path]:
    """Those that count, the oldest first, and those of one day as the index has them."""
    named = dict.fromkeys(COUNTS.findall((results / "README.md").read_text()))
    return [results / name for name in sorted(named, key=lambda name: name[: len("2026-11-27")])]


def measured(results: Path) -> list[Row]:
    """All rows, sorted."""
    newest: dict[tuple[str, ...], Row] = {}
    for folder, (pattern, rows_of) in product(folders(results), (("*table.csv", of_training), ("data.csv", of_gemms))):
        for path in sorted(folder.rglob(pattern)):
            if "gpu" in (env := env_of(path)):
                releases = {name: ".".join(env[name].split(".")[:2]) for name in ("torch", "triton")}
                for key, gain in rows_of(path, env):
                    row = dict(zip(KEY, (env["gpu"], *key), strict=True)) | {"x": f"{gain:.2f}", **releases}
                    newest[env["gpu"], *key] = row | {"folder": folder.name}
    return [newest[key] for key in sorted(newest)]


def of_training(path: Path, env: dict[str, str]) -> Iterator[tuple[tuple[str, ...], float]]:
    """The rows of a table.csv of bench_training.py: ``KEY`` behind the GPU, and times bf16's speed."""
    if not {"config", "processes"} <= env.keys() or env.get("torchtitan", "").startswith("0.3"):
        return
    config, flags = ROOT / env["config"], env.get("flags", "").split()
    model, flavor, checkpointing = (value_of(field, config, flags) for field in FIELDS)
    conversions = [(conversion_of(row["run"]), row, gain) for row, gain in training_gains(read_rows(path))]
    quantised = {run.what for run, *_ in conversions if run.recipe not in (BF16.name, FLOAT8)}
    converted = "grouped" if "grouped" in quantised else "both"
    for run, row, gain in conversions:
        if run.recipe != FLOAT8 and (run.recipe == BF16.name or run.what == converted):
            has = ["on" if option in run.options else "off" for option in ("dispatch", "graph")]
            what, recipe = row.get("flavor") or flavor, run.full_recipe or "mxfp8"
            yield ("training", model, what, env["processes"], recipe, *has, checkpointing), gain


def of_gemms(path: Path, env: dict[str, str]) -> Iterator[tuple[tuple[str, ...], float]]:
    """The rows of a data.csv of bench_grouped_mm.py, as those of ``of_training``."""
    for row in steps_of_8(path):
        if row["recipe"] in RECIPES:
            model = MODELS[int(row["N"]), int(row["K"])]
            what = f"{row['M']} x {row['N']} x {row['K']}, {row['G']} experts"
            yield ("grouped_mm", model, what, "1", RECIPES[row["recipe"]].name, "", "", ""), float(row["x"])


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 where it differs")
    args = parser.parse_args(argv)
    with ends_in_words("measured"):
        rows = measured(RESULTS)
        if not args.check:
            write_rows(FILE, rows)
        elif read_rows(FILE) != rows:
            raise ValueError("titan_mxfp8/measured.csv differs from results/; without --check this writes it anew")
    print(f"{len(rows)} rows")


if __name__ == "__main__":
    main(sys.argv[1:])
