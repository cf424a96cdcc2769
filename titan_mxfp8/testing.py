"""One ruler for tests and benchmarks: shapes, token groups, error metrics, result files."""

import contextlib
import csv
import json
import os
import platform
import random
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Literal

import torch

from titan_mxfp8.format.mx import BLOCK_SIZE, to_blocks
from titan_mxfp8.format.spec import Operand


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedShape:
    """A layer of experts: (m, k) tokens times (groups, n, k) weights."""

    name: str
    m: int
    n: int
    k: int
    groups: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PadShape:
    """(rows, cols) tokens in groups. ``b200_us``: torch / CUDA times that torchao 3998 states, measured on a B200."""

    rows: int
    cols: int
    groups: int
    b200_us: tuple[float, float]


# Experts of Llama4 and DeepSeek-V3 by the number of local ones: the table of torchao's MXFP8 MoE README, whose M is
# 128000, at the 131072 tokens of its kernel figures.
GROUPED_SHAPES = tuple(
    GroupedShape(name=f"{name}_g{groups}", m=131072, n=n, k=k, groups=groups, why=f"{why}, {groups} local experts")
    for groups in (8, 1, 2, 4)
    for name, n, k, why in (("llama4", 8192, 5120, "Llama4"), ("dsv3", 2048, 7168, "DeepSeek-V3: small n"))
)

# Many experts with few features each.
SMALL_EXPERT_SHAPES = (
    GroupedShape(name="dsv3_16b", m=131072, n=1408, k=2048, groups=64, why="DeepSeek-V3 16B experts, 64 on one GPU"),
)

# torchao 3998: the padding that MXFP8 needed without a host sync.
PAD_SHAPES = tuple(
    PadShape(rows=16384, cols=cols, groups=groups, b200_us=b200_us)
    for cols, groups, b200_us in (
        (1536, 1, (436.5, 320.4)),
        (1536, 16, (598.0, 286.3)),
        (2048, 1, (441.9, 292.4)),
        (2048, 16, (585.3, 293.4)),
        (5120, 1, (460.0, 300.0)),
        (5120, 16, (607.2, 296.0)),
        (7168, 1, (465.1, 295.8)),
        (7168, 16, (609.1, 299.0)),
    )
)

Spread = Literal["balanced", "zipf", "empties", "one", "tiny"]
SPREADS: tuple[Spread, ...] = ("balanced", "zipf", "empties", "one", "tiny")


def group_sizes(spread: Spread, rows: int, groups: int, seed: int = 0) -> list[int]:
    """Sizes of ``groups`` token groups that sum to ``rows`` (``tiny``: to at most that), not aligned to anything.

    - ``balanced``: as even as can be, larger ones first: 10 rows in 4 groups are 3, 3, 2, 2.
    - ``zipf``: group i of a shuffled order gets a share of 1 / (i + 1), as a young router gives.
    - ``empties``: every other group is empty, the first one too, and the last one where that leaves any.
    - ``one``: a middle group has everything.
    - ``tiny``: 0, 1, 44, 0, 1, 44, ... while rows last.
    """
    rng = random.Random(seed)
    if spread == "tiny":
        sizes, left = [], rows
        for i in range(groups):
            sizes.append(min((0, 1, 44)[i % 3], left))
            left -= sizes[-1]
        return sizes
    if spread == "zipf":
        weights = [1 / (i + 1) for i in range(groups)]
        rng.shuffle(weights)
    elif spread == "one":
        weights = [float(i == groups // 2) for i in range(groups)]
    elif spread == "empties" and groups > 1:
        weights = [float(i % 2) for i in range(groups)]
        if groups > 2:
            weights[-1] = 0.0
    else:
        weights = [1.0] * groups
    total = sum(weights)
    sizes = [int(rows * weight / total) for weight in weights]
    filled = [i for i, weight in enumerate(weights) if weight]
    for i in range(rows - sum(sizes)):
        sizes[filled[i % len(filled)]] += 1
    return sizes


def make_offs(sizes: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """The int32 end offsets of groups of these sizes: ``[2, 0, 3]`` gives ``[2, 2, 5]``."""
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def relative_rms(out: torch.Tensor, ref: torch.Tensor) -> float:
    """``|out - ref| / |ref|`` in fp64; NaN if either holds NaN, 0 if both are zero."""
    out, ref = out.double(), ref.double()
    error, size = (out - ref).norm().item(), ref.norm().item()
    return 0.0 if error == 0 == size else error / size if size else float("inf")


def largest_row_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """The largest ``|out - ref| / |ref|`` of a row in fp64: what one wrong row or tile does not lose among the others.

    NaN if either holds NaN; infinite where a row of zeros has something; 0 without rows.
    """
    out, ref = (t.double().reshape(-1, t.shape[-1]) for t in (out, ref))
    error, size = (out - ref).norm(dim=1), ref.norm(dim=1)
    relative = torch.where((error == 0) & (size == 0), 0.0, error / size)
    return relative.max().item() if relative.numel() else 0.0


def sums_per_stage(operand: Operand) -> float:
    """Of an operand of Hopper's exact FP8 GEMM: in how many sums its scales allow 128 products to be added up, 1 to 4.

    A sum ends where a block's scale differs from the next one's, along the contraction axis, in any of 64 tokens (1x32
    blocks) or 128 features (32x32). The mean over the operand; the GEMM heeds the scales of both of its operands.
    """
    scale = operand.scale.float()
    stages = to_blocks(scale, scale.ndim - 1, 128 // BLOCK_SIZE)
    ends = (stages[..., 1:] != stages[..., :-1]).float()
    lines = 128 // BLOCK_SIZE if operand.spec.block == "32x32" else 64
    return 1 + to_blocks(ends, ends.ndim - 3, lines).amax(-3).sum(-1).mean().item()


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Within, ``torch.empty``, ``empty_like`` and ``new_empty`` give 0xFF bytes: NaN in every float type here."""
    shipped = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def poison(out: torch.Tensor) -> torch.Tensor:
        out.untyped_storage().fill_(0xFF)
        return out

    torch.empty = lambda *args, **kwargs: poison(shipped[0](*args, **kwargs))
    torch.empty_like = lambda *args, **kwargs: poison(shipped[1](*args, **kwargs))
    torch.Tensor.new_empty = lambda *args, **kwargs: poison(shipped[2](*args, **kwargs))
    try:
        yield
    finally:
        torch.empty, torch.empty_like, torch.Tensor.new_empty = shipped


def percentiles(values: Sequence[float]) -> list[float]:
    """The 20th, the 50th and the 80th."""
    shares = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    return torch.tensor(values, dtype=torch.float64).quantile(shares).tolist()


def environment(device: torch.device | str = "cuda") -> dict[str, str]:
    """What a number was measured with."""
    env = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "commit": _output("git", "rev-parse", "HEAD"),
        "uncommitted_changes": str(bool(_output("git", "status", "--porcelain"))),
        "date": time.strftime("%Y-%m-%d"),
    }
    if torch.device(device).type == "cuda":
        env["gpu"] = torch.cuda.get_device_name()
        env["cuda"] = str(torch.version.cuda or torch.version.hip)
        env["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        ptxas = os.environ.get("TRITON_PTXAS_PATH")
        env["ptxas"] = _output(ptxas, "--version").split("\n")[-1] if ptxas else "Triton's own"
    else:
        env["cpu"] = platform.machine()
    return env


def installed_version(module: str) -> str:
    """Version of the distribution that brings a module, empty where none does: Triton's is another one on AMD."""
    return next((version(name) for name in packages_distributions().get(module, ())), "")


def write_results(folder: Path, rows: Sequence[dict[str, object]], env: dict[str, str]) -> None:
    """Writes ``data.csv`` and ``env.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "data.csv", rows)
    (folder / "env.json").write_text(json.dumps(env, indent=2) + "\n")


def write_rows(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Writes a CSV with a column for each key of any row, in order of appearance."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


# What scripts/bench_grouped_mm.py wrote into its column ``what`` up to 2026-11-22.
EARLIER_WHAT = re.compile(
    r"(?P<recipe>mxfp8\w*)(?P<rebased> rebased|\+rebase)?(?P<products> of products)?(, (?P<held>\d+) held,)? "
    r"(?P<what>.+)"
)


def read_bench(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV of scripts/bench_grouped_mm.py, bench_kernels.py or bench_moe_layer.py; of an earlier one with
    today's columns."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if "bf16_ms" in row:  # of bench_moe_layer.py up to 2026-11-25
            earlier = {"p20_us": "p20", "p50_us": "ms", "p80_us": "p80", "baseline_us": "bf16_ms"}
            row |= {name: str(1e3 * float(row[old])) for name, old in earlier.items()}
        found = EARLIER_WHAT.fullmatch(row["what"]) if "speedup" in row else None
        if found:
            what = found["what"].removesuffix(" GEMM")
            is_kernel = what != found["what"] or what.startswith("quantise")
            row |= {"bench": "kernels" if is_kernel else "grouped_mm", "what": what, "held": found["held"] or "0"}
            row |= {"recipe": found["recipe"] + ("_rebased" if found["rebased"] else ""), "control": "False"}
            row |= {"data": "products" if found["products"] else "normal", "x": row["speedup"]}
            row |= {"baseline_us": row["bf16_us"], "p50_us": row["mxfp8_us"], "tflops": row["mxfp8_tflops"]}
    return rows


SPEED = "tokens/s (median, per GPU)"  # of a row of scripts/bench_training.py's table.csv


def training_gains(rows: Sequence[Mapping[str, str]]) -> Iterator[tuple[Mapping[str, str], float]]:
    """Rows of a table.csv of scripts/bench_training.py, with how many times as fast as bf16 of their flavor they train.

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

    lines = [columns, ["---"] * len(columns), *([cell(row.get(column)) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _output(*command: str) -> str:
    """What a command prints, or ``unavailable`` (a copied tree has no git, an AMD machine no nvidia-smi)."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unavailable"
