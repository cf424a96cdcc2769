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
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from scripts.result_files import format_table, write_rows

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
STEP = "user_annotation"
ON_HOST = ("cpu_op", STEP)
LAUNCHES = ("cuda_runtime", "cuda_driver")
NO_OPERATOR = "between operators"


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
    return _trace_of(_events(path), path)


def _trace_of(events: "list[_Event]", path: Path) -> Trace:
    kernels = [event.span for event in events if event.category in ON_GPU]
    if not kernels:
        raise ValueError(f"{path}: nothing ran on a GPU")
    steps = [event.span for event in events if event.is_step] or kernels
    name = f"{len(steps)} steps" if steps is not kernels else "first to last"
    return Trace(kernels, Span(name, min(span.start for span in steps), max(span.end for span in steps)))


class _Event(NamedTuple):
    """A span of a trace with its category and thread. ``correlation``: a number that a launch and its kernel
    share."""

    span: Span
    category: str
    thread: object
    correlation: object

    @property
    def is_step(self) -> bool:
        return self.category == STEP and self.span.name.startswith("ProfilerStep")


def _events(path: Path) -> list[_Event]:
    """In the order of their start, and the longest first."""

    def event(of: dict[str, Any]) -> _Event:
        span = Span(of["name"], of["ts"] / 1e3, (of["ts"] + of["dur"]) / 1e3)
        return _Event(span, of["cat"], of.get("tid"), of.get("args", {}).get("correlation"))

    try:
        events = [
            event(of)
            for of in json.loads(path.read_text())["traceEvents"]
            if of.get("ph") == "X" and of.get("cat") in (*ON_GPU, *ON_HOST, *LAUNCHES)
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a trace of torch.profiler: {error!r}") from None
    return sorted(events, key=lambda event: (event.span.start, -event.span.end))


def _doing(spans: list[Span]) -> list[tuple[float, str]]:
    """What a thread of the host does from when on, by its spans, which are nested: the outermost and the innermost."""
    doing: list[tuple[float, str]] = [(-math.inf, NO_OPERATOR)]
    within: list[Span] = []

    def note(at: float) -> None:
        names = list(dict.fromkeys((within[0].name, within[-1].name))) if within else [NO_OPERATOR]
        doing.append((max(at, doing[-1][0]), " > ".join(names)))

    for span in [*spans, Span("", math.inf, math.inf)]:
        while within and within[-1].end <= span.start:
            end = within.pop().end
            note(end)
        within.append(span)
        note(span.start)
    return doing


def idle_table(path: Path, top: int) -> list[dict[str, object]]:
    """First a row for all the time in which nothing ran on the GPU. Then one for the part in which what ran next was
    launched already, and for each thing that the host did in the rest, until that began; the ``top`` longest.

    Raises:
        ValueError: as ``read_trace``.
    """
    events = _events(path)
    steps = _trace_of(events, path).steps
    launches = {event.correlation: event for event in events if event.category in LAUNCHES}
    launches.pop(None, None)
    spans: dict[object, list[Span]] = defaultdict(list)
    for event in events:
        if event.category in ON_HOST and not event.is_step:
            spans[event.thread].append(event.span)
    doing = {launch.thread: _doing(spans[launch.thread]) for launch in launches.values()}

    def parts(start: float, kernel: _Event) -> Iterator[tuple[str, float]]:
        launch = launches.get(kernel.correlation)
        if launch is None:
            yield "not known", kernel.span.start - start
            return
        if launch.span.start <= start:
            yield "launched before", kernel.span.start - start
            return
        by_thread = doing[launch.thread]
        launched = min(launch.span.start, kernel.span.start)  # the clocks of host and GPU differ a little
        at = bisect_right(by_thread, start, key=itemgetter(0)) - 1
        while at + 1 < len(by_thread) and by_thread[at + 1][0] <= launched:
            if by_thread[at + 1][0] > start:
                yield by_thread[at][1], by_thread[at + 1][0] - start
            at, start = at + 1, by_thread[at + 1][0]
        if kernel.span.start > start:
            yield by_thread[at][1], kernel.span.start - start

    gaps: dict[str, list[float]] = defaultdict(list)
    until, count = steps.start, 0
    for kernel in events:
        if kernel.category in ON_GPU and kernel.span.start < steps.end:
            if kernel.span.start > until:
                count += 1
                for name, time in parts(until, kernel):
                    gaps[name].append(time)
            until = max(until, kernel.span.end)
    if until < steps.end:
        count += 1
        gaps["until the step is over"].append(steps.end - until)
    rows = [("idle", sum(map(sum, gaps.values())), count)]
    most = sorted(gaps.items(), key=lambda item: -sum(item[1]))[:top]
    rows += [(name, sum(each), len(each)) for name, each in most]
    return [{"trace": str(path), "while": name, "ms": round(ms, 2), "count": count} for name, ms, count in rows]


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
    parser.add_argument("--idle", action="store_true", help="what the GPU waited for")
    args = parser.parse_args(argv)
    try:
        tables = [(idle_table if args.idle else kernel_table)(trace, args.top) for trace in args.traces]
    except ValueError as error:
        sys.exit(f"kernel_times: {error}")
    for rows in tables:
        print(rows[0]["trace"])
        what = "while" if args.idle else "kernel"
        print(format_table([{"ms": row["ms"], "count": row["count"], what: row[what][:110]} for row in rows]))
    if args.out:
        write_rows(args.out, [row for rows in tables for row in rows])


if __name__ == "__main__":
    main(sys.argv[1:])
