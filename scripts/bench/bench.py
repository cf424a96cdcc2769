"""What the benchmarks of kernels and layers share: flags, how a time is taken, and the columns of their CSVs
(scripts/README.md).

Calls and their baseline take turns, A B C A B C, in blocks of ``--seconds`` of which the first half does not count:
under its power cap a GPU's clock follows the load of the last tenths of a second. A run's first turn is thrown away.
On a CPU: wall clock. Files are written after every comparison, and rows in OUT are not measured again: a run that was
interrupted, as by ``timeout --signal=INT SECONDS``, goes on.
"""

import argparse
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from scripts.bench.problems import GroupedShape, relative_rms
from scripts.progress import progress, say
from scripts.result_files import check_same, environment, format_table, percentiles, read_rows, write_results
from titan_mxfp8.backends import select
from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.format.mx import BLOCK_SIZE
from titan_mxfp8.recipe import get_recipe

Row = dict[str, object]
Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A call: what tells its row from others; floating-point operations, or bytes in and out, for its rate; further
    columns."""

    key: Row
    call: Call
    flops: float = 0
    moved: float = 0
    more: Row = field(default_factory=dict)


class Bench:
    """A run: its rows so far, and its timer. Of several processes the first one prints and writes.

    Attributes:
        identity: the columns that tell a row from others.
        shown: further columns that are printed, all numbers.
        empties_l2: before each call half a gigabyte is read, which empties the L2 of the arguments without leaving it
            dirty and gives the host a lead; it is not timed.
        on_host: the time that counts is the host's, until it has launched everything.
        parts: a time is divided by so many.

    Raises:
        ValueError: OUT holds a run of another commit or machine.
    """

    identity: tuple[str, ...] = ("bench", "M", "N", "K", "G", "groups", "backend", "recipe", "what")
    shown: tuple[str, ...] = ("baseline_us", "p50_us", "tflops", "gb_per_s", "x", "x_min", "x_max")
    empties_l2, on_host, parts = True, False, 1

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.args, self.is_warm = name, args, False
        self.rank, self.ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", 0)) if args.device == "cuda" else None)
        backend = select(args.backend, hardware_of(self.device), get_recipe("mxfp8")).name
        self.env = environment(self.device) | {"command": " ".join(sys.argv), "backend": backend}
        check_same(args.out, self.env, "backend")
        kept = args.out / "data.csv"
        self.rows: list[Row] = [*read_rows(kept)] if kept.is_file() else []
        self.known = set(map(self.name_of, self.rows))

    def run(self, problems: Sequence[object], measure: Callable[..., None], unit: str) -> None:
        """Calls ``measure`` with each problem, and leaves out those that do not fit this GPU's memory; prints all."""
        torch.manual_seed(0)
        bar = progress(len(problems) if self.rank == 0 else 0, self.name, unit)
        try:
            with bar, torch.autograd.set_multithreading_enabled(False):  # as the plugin trains
                for problem in problems:
                    gc.collect()
                    if self.device.type == "cuda":
                        torch.cuda.empty_cache()
                    try:
                        measure(problem)
                    except torch.OutOfMemoryError:
                        if self.ranks > 1:  # the others wait for this one
                            raise
                        say(f"{problem}: left out, it does not fit this GPU's memory")
                    bar.update()
        finally:
            self.write()
            self.say(format_table(list(map(self.printed, self.rows))))

    @cached_property
    def cold(self) -> torch.Tensor:
        """What is read to empty the L2."""
        return torch.ones(1 << 27, dtype=torch.float32, device=self.device)

    def name_of(self, row: Mapping[str, object]) -> tuple[str, ...]:
        """What tells a row from others, in memory and as it is read back."""
        return tuple("" if row.get(name) is None else str(row[name]) for name in self.identity)

    def key(self, **columns: object) -> Row:
        return {"bench": self.name, "backend": self.env["backend"], **columns}

    def is_due(self, key: Row) -> bool:
        return self.name_of(key) not in self.known

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each value the largest on any rank."""
        if self.ranks == 1:
            return list(values)
        together = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(together, op=dist.ReduceOp.MAX)
        return together.tolist()

    def compare(self, entries: Sequence[Entry], base: Call | None = None) -> None:
        """Adds a row for each entry that is due, whose result was compared with the baseline's; without one there is no
        ratio."""
        due = [entry for entry in entries if self.is_due(entry.key)]
        if not due:
            return
        calls = [*([base] if base else []), *(entry.call for entry in due)]
        measured = self._turns(calls, self.args.turns if base else 1)
        for entry, blocks in zip(due, measured[-len(due) :], strict=True):
            row = _measured(entry, blocks, measured[0] if base else None)
            self.rows.append(entry.key | {"control": False} | entry.more | row)
            self.known.add(self.name_of(entry.key))
            self.say(" ".join(f"{name}={value}" for name, value in self.printed(self.rows[-1]).items()))
        self.write()

    def printed(self, row: Row) -> dict[str, str]:
        """What is printed of a row, in memory or read back."""
        names = [name for name in (*self.identity, *self.shown) if name != "bench" and row.get(name) not in (None, "")]
        return {name: f"{float(row[name]):.4g}" if name in self.shown else str(row[name]) for name in names}

    def say(self, text: str) -> None:
        if self.rank == 0:
            say(text)

    def write(self) -> None:
        if self.rank == 0:
            write_results(self.args.out, self.rows, self.env)

    def _turns(self, calls: Sequence[Call], turns: int) -> list[list[list[float]]]:
        """Microseconds of the calls that count, by call and turn."""
        counts = [self._count(call, turns) for call in calls]
        measured: list[list[list[float]]] = [[] for _ in calls]
        for _ in range(turns if self.is_warm else turns + 1):
            for call, count, blocks in zip(calls, counts, measured, strict=True):
                block = self._block(call, count)
                blocks.append(block[len(block) // 2 :])
        self.is_warm = True
        return [blocks[-turns:] for blocks in measured]

    def _count(self, call: Call, turns: int) -> int:
        """Calls that fill a block; the first of them compile."""
        self._block(call, 2)
        begun = time.perf_counter()
        self._block(call, 3)
        each = self.largest([(time.perf_counter() - begun) / 3])[0]  # as many on every rank
        return max(2 * ceil(self.args.repeats / turns), ceil(self.args.seconds / each))

    def _block(self, call: Call, count: int) -> list[float]:
        """Microseconds of so many calls, one after the other; on several ranks those of the slowest."""
        if self.on_host or self.device.type != "cuda":
            times = [self._host_time(call) for _ in range(count)]
        else:
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
            sink = torch.empty((), device=self.device)
            for start, end in events:
                if self.empties_l2:
                    torch.sum(self.cold, 0, out=sink)
                start.record()
                call()
                end.record()
            torch.cuda.synchronize()
            times = [1e3 * start.elapsed_time(end) for start, end in events]
        return self.largest([us / self.parts for us in times])

    def _host_time(self, call: Call) -> float:
        """Microseconds until a call has come back; what it launched is waited for, but not timed."""
        begun = time.perf_counter()
        call()
        us = 1e6 * (time.perf_counter() - begun)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return us


def _measured(entry: Entry, blocks: list[list[float]], base: list[list[float]] | None) -> Row:
    """The measured columns: of an entry's microseconds by turn, and of the baseline's."""
    p20, p50, p80 = (round(us, 3) for us in percentiles([us for block in blocks for us in block]))
    row: Row = {"p20_us": p20, "p50_us": p50, "p80_us": p80}
    rates = {"tflops": entry.flops / p50 / 1e6, "gb_per_s": entry.moved / p50 / 1e3}
    row |= {name: float(f"{rate:.6g}") for name, rate in rates.items() if rate}
    if base:
        ratios = [median(theirs) / median(mine) for theirs, mine in zip(base, blocks, strict=True)]
        row |= {"baseline_us": round(median(us for block in base for us in block), 3)}
        row |= {"x": median(ratios), "x_min": min(ratios), "x_max": max(ratios)}
    return row | {"turns": len(blocks), "repeats": sum(map(len, blocks))}


def largest_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """The largest relative RMS of 8192 neighbouring rows; NaN if one is, which Python's max may lose."""
    parts = (tensor.reshape(-1, tensor.shape[-1]).split(8192) for tensor in (out, ref))
    return torch.tensor([relative_rms(*pair) for pair in zip(*parts, strict=True)]).max().item()


def parse_shape(text: str, known: Sequence[GroupedShape]) -> GroupedShape:
    """A shape by its name, or by its numbers: ``4096,512,256,8``."""
    named = {shape.name: shape for shape in known}
    if re.fullmatch(r"[1-9]\d*(,[1-9]\d*){3}", text):
        shape = GroupedShape(text, *map(int, text.split(",")))
        if shape.n % BLOCK_SIZE or shape.k % BLOCK_SIZE:
            raise argparse.ArgumentTypeError(f"{text}: N and K are multiples of {BLOCK_SIZE}, the blocks of MXFP8")
        return shape
    if text not in named:
        names = ", ".join(named)
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: M,N,K,G such as 4096,512,256,8, or one of {names}")
    return named[text]


def parser_of(doc: str, recipes: Sequence[str], shapes: Sequence[GroupedShape] = ()) -> argparse.ArgumentParser:
    """The flags that all benchmarks of kernels have; ``--shapes`` and ``--backend`` where there are shapes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for data.csv and env.json; rows that it holds are kept")
    add("--quick", action="store_true", help="less, in 2 short turns: for a first look, or a test")
    if shapes:
        names = ", ".join(shape.name for shape in shapes)
        help_text = f"of {names}, or M,N,K,G [all that the benchmark lists]"
        add("--shapes", nargs="+", type=lambda text: parse_shape(text, shapes), metavar="SHAPE", help=help_text)
        add("--backend", help="auto, or a name of titan_mxfp8.backends [auto]")
    add("--recipes", nargs="+", default=list(recipes), metavar="RECIPE", help=f"[{' '.join(recipes)}]")
    add("--turns", type=int, default=3, help="blocks of each call that count [3]")
    add("--seconds", type=float, default=1.0, help="of a block, half of which counts [%(default)s]")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try it, MoE layers at small sizes [cuda]")
    parser.set_defaults(backend="auto", quick_seconds=0.3)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, ``--quick`` and the values checked. ``repeats``: calls that count, at least."""
    args = parser.parse_args(argv)
    args.repeats = 4 if args.quick else 20
    if args.quick:
        args.turns, args.seconds = min(args.turns, 2), min(args.seconds, args.quick_seconds)
    if args.turns < 1:
        parser.error(f"--turns is at least 1, got {args.turns}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU: --device cpu tries the script, with small --shapes where it has shapes")
    try:
        for recipe in args.recipes:
            get_recipe(recipe)
    except ValueError as error:
        parser.error(str(error))
    return args
