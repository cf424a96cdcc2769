"""Files of results: what the benchmarks write, and how it is read back."""

import csv
import io
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path

import torch


def percentiles(values: Sequence[float]) -> list[float]:
    """The 20th, the 50th and the 80th."""
    shares = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    return torch.tensor(values, dtype=torch.float64).quantile(shares).tolist()


def environment(device: torch.device | str = "cuda") -> dict[str, str]:
    """What a number was measured with. ``MEASURED_COMMIT`` names the commit of a tree that came without its history."""
    commit = os.environ.get("MEASURED_COMMIT")
    env = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "commit": commit or _output("git", "rev-parse", "HEAD"),
        "uncommitted_changes": "unknown" if commit else str(bool(_output("git", "status", "--porcelain"))),
        "date": time.strftime("%Y-%m-%d"),
    }
    if torch.device(device).type == "cuda":
        env["gpu"] = torch.cuda.get_device_name()
        env["cuda"] = str(torch.version.cuda or torch.version.hip)
        env["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        if torch.version.cuda:
            from titan_mxfp8.backends.common.assembler import ptxas

            env["ptxas"] = ptxas(torch.cuda.get_device_capability()).version
    else:
        env["cpu"] = platform.machine()
    return env


def installed_version(module: str) -> str:
    """Version of the distribution that brings a module, empty where none does: Triton's is another one on AMD."""
    return next((version(name) for name in packages_distributions().get(module, ())), "")


def check_same(folder: Path, env: Mapping[str, str], *more: str) -> None:
    """Raises ValueError if a folder was measured with something else: its env.json has another commit, machine or torch
    than ``env``, or differs in ``more``."""
    path = folder / "env.json"
    earlier = json.loads(path.read_text()) if path.is_file() else env
    for fact in ("commit", "gpu", "cpu", "torch", *more):
        if earlier.get(fact) != env.get(fact):
            was, found = (of.get(fact) or "none" for of in (earlier, env))
            raise ValueError(f"{folder} holds a run with {fact} {was}, and this one has {found}: give another --out")


def write_results(folder: Path, rows: Sequence[dict[str, object]], env: dict[str, str]) -> None:
    """Writes ``data.csv`` and ``env.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "data.csv", rows)
    write_json(folder / "env.json", env)


def write_rows(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Writes a CSV with a column for each key of any row, in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with io.StringIO(newline="") as text:
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        _write(path, text.getvalue())


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Writes a JSON file."""
    _write(path, json.dumps(content, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    """All of it or nothing, if the disk is full or this process is killed."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    os.replace(new, path)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV; those of bench_moe_layer.py up to 2026-11-25 with the columns of today."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if "bf16_ms" in row:
            earlier = {"p20_us": "p20", "p50_us": "ms", "p80_us": "p80", "baseline_us": "bf16_ms"}
            row |= {name: str(1e3 * float(row[old])) for name, old in earlier.items()}
    return rows


def is_plain(row: Mapping[str, str]) -> bool:
    """Whether a row of bench_grouped_mm.py is of normal numbers, with nothing held: older files have others too."""
    return (row.get("held") or "0", row.get("data") or "normal") == ("0", "normal")


def steps_of_8(path: Path) -> Iterator[dict[str, str]]:
    """The rows of bench_grouped_mm.py's forward + backward of 8 experts that get as many tokens each."""
    for row in filter(is_plain, read_rows(path)):
        kind = row.get("bench"), row.get("what"), row.get("G"), row.get("groups")
        if kind == ("grouped_mm", "forward + backward", "8", "balanced"):
            yield row


def env_of(path: Path) -> dict[str, str]:
    """The environment of a CSV: ``training_env.json`` of ``training_table.csv``, or env.json beside it, or nothing."""
    found = (path.with_name(f"{path.stem.removesuffix('table')}env.json"), path.with_name("env.json"))
    return next((json.loads(file.read_text()) for file in found if file.is_file()), {})


def gpu_of(env: Mapping[str, str]) -> str:
    """Its short name: ``H100`` of NVIDIA H100 80GB HBM3; empty where there was none."""
    return env.get("gpu", "").removeprefix("NVIDIA ").partition(" ")[0]


SPEED = "tokens/s (median, per GPU)"  # of a row of scripts/bench/bench_training.py's table.csv


def training_gains(rows: Sequence[Mapping[str, str]]) -> Iterator[tuple[Mapping[str, str], float]]:
    """Rows of a table.csv of bench_training.py, with how many times as fast as bf16 of their flavor they train.

    That is of ``x``, the median of ratios of runs of the same turn, and not a ratio of medians of ``SPEED``. ``x`` is
    against the first run: if that has 1.0 and bf16 0.8, the gains are 1.25 and 1. None where bf16 is not among the
    rows, the table is another one, or bench_training.py refused a run its ``x``.
    """
    rows = [row for row in rows if SPEED in row and row["x"]]
    bf16 = {row.get("flavor"): float(row["x"]) for row in rows if row["run"] == "bf16"}
    for row in rows:
        if row.get("flavor") in bf16:
            yield row, float(row["x"]) / bf16[row.get("flavor")]


def format_table(rows: Sequence[dict[str, object]]) -> str:
    """The rows as a Markdown table; floats get three significant digits, or all digits before the point."""
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value: object) -> str:
        if isinstance(value, float):
            return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
        return "" if value is None else str(value)

    lines = [columns, *([cell(row.get(column)) for column in columns] for row in rows)]
    head, *body = (f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in line)}|" for line in lines)
    return "\n".join([head, f"|{'---|' * len(columns)}", *body])


def _output(*command: str) -> str:
    """What a command prints, run in this repository wherever the script was called from; or ``unavailable`` (a copied
    tree has no git, an AMD machine no nvidia-smi)."""
    folder = Path(__file__).parent
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unavailable"
