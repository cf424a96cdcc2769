"""Where the GPU time of a training step goes: the kernels of TorchTitan's profiler traces, summed by name.

    python scripts/bench/kernel_times.py OUT/profile_traces/iteration_10/rank0_trace.json --top 40 --out kernels.csv

Traces are written with --profiling.enable_profiling --profiling.profile_freq=10 --metrics.log_freq=1. For each: the
time of its steps, in how much of it at least one kernel ran, and the kernels that took the most; on several streams
they overlap. --idle tells instead what the host was doing while nothing ran (outermost > innermost operator), in the
thread that launched what ran next. The profiler makes the host late, so there is more of it than without.
"""

import argparse
import json
import math
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from scripts.progress import ends_in_words
from scripts.result_files import format_table, write_rows

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cpu_op", "user_annotation")
LAUNCHES = ("cuda_runtime", "cuda_driver")
NO_OPERATOR = "between operators"

Row = dict[str, object]


class Event(NamedTuple):
    """Something that ran, and when, in milliseconds. ``correlation``: a number that a launch and its kernel share."""

    name: str
    start: float
    end: float
    category: str
    thread: object = None
    correlation: object = None


class Trace:
    """All that ran, in the order of its start.

    Attributes:
        kernels: on the GPU.
        steps: how many there were, or that the trace names none.
        start, end: of the steps, or of the kernels where it names none.
        gaps: from when to when of the steps nothing ran, and what ran then; nothing where the steps were over.

    Raises:
        ValueError: not a trace of ``torch.profiler``, or nothing ran on a GPU in it.
    """

    def __init__(self, path: Path) -> None:
        self.events: list[Event] = []
        try:
            for of in json.loads(path.read_text())["traceEvents"]:
                if of.get("ph") == "X" and of.get("cat") in (*ON_GPU, *ON_HOST, *LAUNCHES):
                    start, correlation = of["ts"] / 1e3, of.get("args", {}).get("correlation")
                    end = start + of["dur"] / 1e3
                    self.events.append(Event(of["name"], start, end, of["cat"], of.get("tid"), correlation))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is not a trace of torch.profiler: {type(error).__name__}: {error}") from None
        self.events.sort(key=lambda event: (event.start, -event.end))
        self.kernels = [event for event in self.events if event.category in ON_GPU]
        if not self.kernels:
            raise ValueError(f"{path}: nothing ran on a GPU")
        steps = [event for event in self.events if event.name.startswith("ProfilerStep")]
        self.steps = f"{len(steps)} steps" if steps else "first to last"
        self.start = until = min(event.start for event in steps or self.kernels)
        self.end = max(event.end for event in steps or self.kernels)
        self.gaps: list[tuple[float, float, Event | None]] = []
        for kernel in [*self.kernels, None]:
            start = min(kernel.start, self.end) if kernel else self.end
            if until < start:
                self.gaps.append((until, start, kernel if kernel and kernel.start < self.end else None))
            until = max(until, kernel.end) if kernel else until

    def doing(self, thread: object) -> list[tuple[float, str]]:
        """What a thread of the host does from when on: its outermost and its innermost operator."""
        doing, within = [(-math.inf, NO_OPERATOR)], []

        def note(at: float) -> None:
            names = dict.fromkeys((within[0].name, within[-1].name)) if within else [NO_OPERATOR]
            doing.append((max(at, doing[-1][0]), " > ".join(names)))

        operators = [event for event in self.events if event.category in ON_HOST and event.thread == thread]
        for event in [*operators, Event("", math.inf, math.inf, "")]:
            if event.name.startswith("ProfilerStep"):
                continue
            while within and within[-1].end <= event.start:
                note(within.pop().end)
            within.append(event)
            note(event.start)
        return doing

    def waits(self) -> Iterator[tuple[str, float]]:
        """What the host did in each part of each gap, until what ran next was launched, and how long."""
        launches = {event.correlation: event for event in self.events if event.category in LAUNCHES}
        launches.pop(None, None)
        doing = {thread: self.doing(thread) for thread in {launch.thread for launch in launches.values()}}
        for start, end, kernel in self.gaps:
            launch = launches.get(kernel.correlation) if kernel else None
            if kernel is None:
                yield "until the step is over", end - start
            elif launch is None:
                yield "not known", end - start
            elif launch.start <= start:
                yield "launched before", end - start
            else:
                timeline, at = doing[launch.thread], itemgetter(0)
                launched = min(launch.start, end)  # the clocks of host and GPU differ a little
                parts = timeline[bisect_right(timeline, start, key=at) - 1 : bisect_right(timeline, launched, key=at)]
                for (begin, name), (until, _) in pairwise([*parts, (end, "")]):
                    if until > max(begin, start):
                        yield name, until - max(begin, start)


def kernel_table(path: Path, top: int, *, idle: bool = False) -> list[Row]:
    """A row for the steps of a trace, one for the time in which any kernel ran, then one for each of the ``top`` that
    took the most. With ``idle`` one for all the time in which nothing ran on the GPU, then one for the part in which
    what ran next was launched already, and for each thing that the host did in the rest, until that began; the ``top``
    longest. Raises ValueError as ``Trace`` does."""
    trace, times = Trace(path), defaultdict(list)
    for name, time in trace.waits() if idle else ((kernel.name, kernel.end - kernel.start) for kernel in trace.kernels):
        times[name].append(time)
    total, waited = trace.end - trace.start, sum(end - start for start, end, _ in trace.gaps)
    rows = [("idle", waited, len(trace.gaps))]
    if not idle:
        count = len(trace.kernels)
        rows = [(trace.steps, total, count), (f"any ({1 - waited / total:.1%})", total - waited, count)]
    most = sorted(times.items(), key=lambda item: -sum(item[1]))[:top]
    rows += [(name, sum(each), len(each)) for name, each in most]
    what = "while" if idle else "kernel"
    return [{"trace": str(path), what: name, "ms": round(ms, 2), "count": count} for name, ms, count in rows]


def shown(rows: Sequence[Row], what: str = "kernel") -> str:
    """As a table, names shortened."""
    return format_table([{"ms": row["ms"], "count": row["count"], what: row[what][:110]} for row in rows])


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--top", type=int, default=40, help="kernels of each trace [40]")
    parser.add_argument("--out", type=Path, help="a CSV of the same rows")
    parser.add_argument("--idle", action="store_true", help="what the GPU waited for")
    args = parser.parse_args(argv)
    with ends_in_words("kernel_times"):
        tables = [kernel_table(trace, args.top, idle=args.idle) for trace in args.traces]
        for rows in tables:
            print(f"{rows[0]['trace']}\n{shown(rows, 'while' if args.idle else 'kernel')}")
        if args.out:
            write_rows(args.out, [row for rows in tables for row in rows])


if __name__ == "__main__":
    main(sys.argv[1:])
