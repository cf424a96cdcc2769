"""Where the GPU time of a training step goes: the kernels of TorchTitan's profiler traces, summed by name.

    python scripts/kernel_times.py OUT/profile_traces/iteration_10/rank0_trace.json ... [--top 40] [--out kernels.csv]

Such traces are written with ``--profiling.enable_profiling --profiling.profile_freq=10``. For each trace: the time of
its steps (``ProfilerStep`` in it; without one, from the first kernel to the end of the last), in how much of it at
least one kernel ran, and the kernels that took the most. With ``--metrics.log_freq=1`` each step waits for its own
kernels, else they may run in the next one. Kernels on several streams overlap: their times may add up to more.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from titan_mxfp8.testing import format_table, write_rows

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
STEP = "user_annotation"


class Span(NamedTuple):
    """Something that ran, and when, in milliseconds."""

    name: str
    start: float
    end: float


class Trace(NamedTuple):
    """All that ran on the GPU, in the order of its start, and the time of the steps."""

    kernels: list[Span]
    steps: Span

    @property
    def busy(self) -> float:
        """Milliseconds of the steps in which at least one kernel ran."""
        total, until = 0.0, self.steps.start
        for _, start, end in self.kernels:
            end = min(end, self.steps.end)
            total += max(0.0, end - max(start, until))
            until = max(until, end)
        return total

    @property
    def busy_share(self) -> float:
        """``busy`` as a share of the steps' time."""
        return self.busy / (self.steps.end - self.steps.start)


def read_trace(path: Path) -> Trace:
    """Reads a trace of ``torch.profiler``.

    Raises:
        ValueError: not a profiler's trace, or nothing ran on a GPU in it.
    """
    try:
        spans = [
            (event.get("cat"), Span(event["name"], event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3))
            for event in json.loads(path.read_text())["traceEvents"]
            if event.get("ph") == "X" and event.get("cat") in (*ON_GPU, STEP)
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a trace of torch.profiler: {error!r}") from None
    kernels = sorted((span for category, span in spans if category in ON_GPU), key=lambda span: span.start)
    if not kernels:
        raise ValueError(f"{path}: nothing ran on a GPU")
    steps = [span for category, span in spans if category == STEP and span.name.startswith("ProfilerStep")] or kernels
    name = f"{len(steps)} steps" if steps is not kernels else "first to last"
    return Trace(kernels, Span(name, min(span.start for span in steps), max(span.end for span in steps)))


def kernel_table(path: Path, top: int) -> list[dict[str, object]]:
    """A row for the steps of a trace, one for the time in which any kernel ran, then one for each of the ``top`` that
    took the most."""
    trace = read_trace(path)
    times = defaultdict(list)
    for name, start, end in trace.kernels:
        times[name].append(end - start)
    most = sorted(times.items(), key=lambda item: -sum(item[1]))[:top]
    rows = [
        (trace.steps.name, trace.steps.end - trace.steps.start, len(trace.kernels)),
        (f"any ({trace.busy_share:.1%})", trace.busy, len(trace.kernels)),
        *((name, sum(each), len(each)) for name, each in most),
    ]
    return [{"trace": str(path), "kernel": name, "ms": round(ms, 2), "count": count} for name, ms, count in rows]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--top", type=int, default=40, help="kernels of each trace [40]")
    parser.add_argument("--out", type=Path, help="a CSV of the same rows")
    args = parser.parse_args(argv)
    try:
        tables = [kernel_table(trace, args.top) for trace in args.traces]
    except ValueError as error:
        sys.exit(f"kernel_times: {error}")
    for rows in tables:
        print(rows[0]["trace"])
        print(format_table([{"ms": row["ms"], "count": row["count"], "kernel": row["kernel"][:110]} for row in rows]))
    if args.out:
        write_rows(args.out, [row for rows in tables for row in rows])


if __name__ == "__main__":
    main(sys.argv[1:])
