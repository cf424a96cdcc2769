"""What a layer costs the host: forward + backward of a linear and of a grouped GEMM, eager and compiled, on a GPU.

    python scripts/bench/bench_host.py --out results/<date>_<device>_host

At 256 x 256 x 256 the kernels of a call are over before the next is launched: the time between two calls is the host's.
All ways are timed in turns, in blocks of calls. A row has the percentiles over the blocks, and the launches, blocks of
memory and operators of one call. ``threads``: where backward runs, in autograd's thread or in the one that calls it, as
the plugin trains. ``layers``: how many a call has, compiled as one function; a row is a layer's share.
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

from scripts.bench.problems import make_offs
from scripts.progress import ends_in_words, progress, say
from scripts.result_files import environment, format_table, write_results
from titan_mxfp8 import mxfp8_grouped_mm, mxfp8_linear

SIZE, EXPERTS = 256, 4
RECIPES = ("mxfp8", "mxfp8_floor", "mxfp8_wgrad_bf16", "mxfp8_2d", "mxfp8_2d_wgrad_bf16", "mxfp8_e5m2_grad")
WAYS = (*((recipe, False) for recipe in RECIPES), *((recipe, True) for recipe in RECIPES))
CALLS, BLOCKS = 48, 12  # layers that a block calls; blocks of each way, the first of which does not count


class CountedOperators(TorchDispatchMode):
    """Counts the operators that reach the dispatcher within."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def problems(layers: int) -> dict[str, tuple[tuple[torch.Tensor, ...], Callable[..., torch.Tensor]]]:
    """For the linear and the grouped GEMM: tokens and the weights of so many layers, which want gradients, and bf16's
    function of tokens and one weight."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(SIZE**-0.5).requires_grad_()

    offs = make_offs([64, 0, 100, 92], "cuda")
    return {
        "linear": ((normal(SIZE, SIZE), *(normal(SIZE, SIZE) for _ in range(layers))), F.linear),
        "grouped": (
            (normal(SIZE, SIZE), *(normal(EXPERTS, SIZE, SIZE) for _ in range(layers))),
            lambda x, w: torch._grouped_mm(x, w.mT, offs=offs),
        ),
    }


def stacked(layer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Layers one behind the other, as many as there are weights."""

    def stack(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for w in weights:
            x = layer(x, w)
        return x

    return stack


def ours(what: str, recipe: str, rebase: bool, offs: torch.Tensor) -> Callable[..., torch.Tensor]:
    if what == "linear":
        return lambda x, w: mxfp8_linear(x, w, recipe=recipe, rebase=rebase)
    return lambda x, w: mxfp8_grouped_mm(x, w.mT, offs, recipe=recipe, rebase=rebase)


def step(stack: Callable[..., torch.Tensor], params: tuple[torch.Tensor, ...], dy: torch.Tensor) -> None:
    for param in params:
        param.grad = None
    stack(*params).backward(dy)


def block_us(call: Callable[[], None], layers: int) -> float:
    """Microseconds for each layer of calls that nobody waits for."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS // layers):
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


def measure(calls: dict[tuple[str, str], Callable[[], None]], layers: int) -> list[dict[str, object]]:
    """A row for each mode and way, of one of its layers."""
    times: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
    for call in calls.values():
        step_twice(call)
    for _ in range(BLOCKS):
        for name, call in calls.items():
            times[name].append(block_us(call, layers))
    rows = []
    for (mode, way), call in calls.items():
        p20, p50, p80 = torch.tensor(times[mode, way][1:]).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
        counted = counts(call) | ({"operators": operators(call)} if mode == "eager" else {})
        row = {"mode": mode, "way": way, "us_p20": p20, "us_p50": p50, "us_p80": p80}
        rows.append(row | {what: count / layers for what, count in counted.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for data.csv and env.json")
    parser.add_argument("--ways", nargs="+", help="such as mxfp8 mxfp8_2d+rebase [all]")
    counts_of_layers = [count for count in range(1, CALLS + 1) if CALLS % count == 0]
    parser.add_argument("--layers", nargs="+", type=int, choices=counts_of_layers, default=[1, 8], help="[1 8]")
    args = parser.parse_args()
    torch.manual_seed(0)
    offs = make_offs([64, 0, 100, 92], "cuda")
    chosen = [way for way in WAYS if not args.ways or name_of(way) in args.ways]
    rows: list[dict[str, object]] = []
    env = environment()
    cases = [(count, what, problem) for count in args.layers for what, problem in problems(count).items()]
    bar = progress(len(cases), "host", "case")
    for count, what, (params, bf16) in cases:
        dy = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
        layers = {"bf16": bf16} | {name_of(way): ours(what, *way, offs) for way in chosen}
        stacks = {name: stacked(layer) for name, layer in layers.items()}
        torch._dynamo.reset()
        with torch._dynamo.config.patch(recompile_limit=64):
            calls = {("eager", name): partial(step, stack, params, dy) for name, stack in stacks.items()}
            for name, stack in stacks.items():
                calls["compiled", name] = partial(step, torch.compile(stack, fullgraph=True), params, dy)
            for threads in ("autograd's", "one"):
                with torch.autograd.set_multithreading_enabled(threads != "one"):
                    timed = measure(calls, count)
                rows += [{"what": what, "layers": count, "threads": threads} | row for row in timed]
                say(format_table(rows[-len(calls) :]))
                write_results(args.out, rows, env)  # a run that is broken off leaves what it has
        bar.update()


def name_of(way: tuple[str, bool]) -> str:
    return f"{way[0]}{'+rebase' * way[1]}"


def step_twice(call: Callable[[], None]) -> None:
    """Compiles."""
    call()
    call()


if __name__ == "__main__":
    with ends_in_words("bench_host", "the files hold what was measured; the same command begins anew"):
        main()
