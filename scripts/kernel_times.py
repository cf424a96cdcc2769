"""Where the GPU time of a training step goes: the kernels of TorchTitan's profiler traces, summed by name.

    python scripts/kernel_times.py OUT/profile_traces/iteration_10/rank0_trace.json ... [--top 40] [--out kernels.csv]

Such traces are written with ``--profiling.enable_profiling --profiling.profile_freq=10``. For each trace: the time from
the first kernel to the end of the last one, the time in which at least one ran, and the kernels that took the most.
Kernels on several streams overlap, so their times may add up to more.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from titan_mxfp8.testing import format_table, write_rows

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def read_kernels(trace: Path) -> list[tuple[str, float, float]]:
    """Name, start and end in milliseconds of all that ran on the GPU.

    Raises:
        ValueError: not a profiler's trace, or nothing ran on a GPU in it.
    """
    try:
        found = [
            (event["name"], event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
            for event in json.loads(trace.read_text())["traceEvents"]
            if event.get("ph") == "X" and event.get("cat") in ON_GPU
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{trace} is not a trace of torch.profiler: {error!r}") from None
    if not found:
        raise ValueError(f"{trace}: nothing ran on a GPU")
    return found


def busy(kernels: list[tuple[str, float, float]]) -> float:
    """Milliseconds in which at least one kernel ran."""
    total, until = 0.0, float("-inf")
    for _, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def kernel_table(trace: Path, top: int) -> list[dict[str, object]]:
    """A row for all kernels of a trace, then one for each of the ``top`` that took the most time."""
    kernels = read_kernels(trace)
    times = defaultdict(list)
    for name, start, end in kernels:
        times[name].append(end - start)
    span = max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)
    rows: list[dict[str, object]] = [
        {"trace": str(trace), "kernel": "first to last", "ms": round(span, 2), "count": len(kernels)},
        {"trace": str(trace), "kernel": "any", "ms": round(busy(kernels), 2), "count": len(kernels)},
    ]
    most = sorted(times.items(), key=lambda item: -sum(item[1]))[:top]
    return rows + [
        {"trace": str(trace), "kernel": name, "ms": round(sum(each), 2), "count": len(each)} for name, each in most
    ]


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
