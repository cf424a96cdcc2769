"""What one call costs the host: forward + backward of a linear and of a grouped GEMM, eager and compiled, on a GPU.

    python scripts/bench_host.py --out results/<date>_<device>_host

At 256 x 256 x 256 the kernels of a call are over before the next one is launched: the time between two calls is the
host's. Every way is timed in turns with the others, in blocks of calls; a row has the percentiles over the blocks, and
the kernels that one call launches, the blocks of memory that it takes and the operators that reach the dispatcher
(eager), forward and backward together. ``threads``: where backward runs, in autograd's own thread as torch has it, or
in the one that calls it, as the plugin trains (``titan_mxfp8/repairs/threads.py``).
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from titan_mxfp8 import mxfp8_grouped_mm, mxfp8_linear
from titan_mxfp8.testing import environment, format_table, make_offs, write_results

SIZE, EXPERTS = 256, 4
RECIPES = ("mxfp8", "mxfp8_floor", "mxfp8_wgrad_bf16", "mxfp8_2d", "mxfp8_2d_wgrad_bf16", "mxfp8_e5m2_grad")
WAYS = (*((recipe, False) for recipe in RECIPES), *((recipe, True) for recipe in RECIPES))
CALLS, BLOCKS = 50, 12  # calls of a block; blocks of each way, the first of which does not count


class CountedOperators(TorchDispatchMode):
    """Counts the operators that reach the dispatcher within."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def problems() -> dict[str, tuple[tuple[torch.Tensor, ...], Callable[..., torch.Tensor]]]:
    """For the linear and the grouped GEMM: the tensors that want gradients, and bf16's function of them."""
    x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    w = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    w3 = torch.randn(EXPERTS, SIZE, SIZE, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    offs = make_offs([64, 0, 100, 92], "cuda")
    return {
        "linear": ((x, w), F.linear),
        "grouped": ((x, w3), lambda x, w: torch._grouped_mm(x, w.mT, offs=offs)),
    }


def ours(what: str, recipe: str, rebase: bool, offs: torch.Tensor) -> Callable[..., torch.Tensor]:
    if what == "linear":
        return lambda x, w: mxfp8_linear(x, w, recipe=recipe, rebase=rebase)
    return lambda x, w: mxfp8_grouped_mm(x, w.mT, offs, recipe=recipe, rebase=rebase)


def step(layer: Callable[..., torch.Tensor], params: tuple[torch.Tensor, ...], dy: torch.Tensor) -> None:
    for param in params:
        param.grad = None
    layer(*params).backward(dy)


def block_us(call: Callable[[], None]) -> float:
    """Microseconds between calls that nobody waits for."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * spent / CALLS


def counts(call: Callable[[], None]) -> dict[str, int]:
    """What one call launches, takes and calls."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        call()
        torch.cuda.synchronize()
    launches = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in trace.events())
    return {"launches": launches, "allocations": allocations}


def operators(call: Callable[[], None]) -> int:
    with CountedOperators() as counted:
        call()
    return counted.calls


def measure(calls: dict[str, Callable[[], None]], mode: str) -> list[dict[str, object]]:
    """A row for each way."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        step_twice(call)
    for _ in range(BLOCKS):
        for name, call in calls.items():
            times[name].append(block_us(call))
    rows = []
    for name, call in calls.items():
        p20, p50, p80 = torch.tensor(times[name][1:]).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
        row = {"way": name, "us_p20": p20, "us_p50": p50, "us_p80": p80} | counts(call)
        rows.append(row | ({"operators": operators(call)} if mode == "eager" else {}))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for data.csv and env.json")
    parser.add_argument("--ways", nargs="+", help="such as mxfp8 mxfp8_2d+rebase [all]")
    args = parser.parse_args()
    torch.manual_seed(0)
    offs = make_offs([64, 0, 100, 92], "cuda")
    chosen = [way for way in WAYS if not args.ways or name_of(way) in args.ways]
    rows: list[dict[str, object]] = []
    for what, (params, bf16) in problems().items():
        dy = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
        layers = {"bf16": bf16} | {name_of(way): ours(what, *way, offs) for way in chosen}
        for mode in ("eager", "compiled"):
            torch._dynamo.reset()
            compiled = {n: torch.compile(f, fullgraph=True) if mode == "compiled" else f for n, f in layers.items()}
            calls = {name: partial(step, layer, params, dy) for name, layer in compiled.items()}
            with torch._dynamo.config.patch(recompile_limit=64):
                for threads in ("autograd's", "one"):
                    with torch.autograd.set_multithreading_enabled(threads != "one"):
                        of_mode = measure(calls, mode)
                    rows += [{"what": what, "mode": mode, "threads": threads} | row for row in of_mode]
                    print(format_table(rows[-len(calls) :]), flush=True)
    write_results(args.out, rows, environment())


def name_of(way: tuple[str, bool]) -> str:
    return f"{way[0]}{'+rebase' * way[1]}"


def step_twice(call: Callable[[], None]) -> None:
    """Compiles."""
    call()
    call()


if __name__ == "__main__":
    main()
