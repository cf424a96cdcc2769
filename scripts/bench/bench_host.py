"""What a layer costs the host: forward + backward of a linear and of a grouped GEMM, eager and compiled, on a GPU.

    python scripts/bench/bench_host.py --out results/<date>_<device>_host

At 256 x 256 x 256 the kernels of a call are over before the next is launched: the time between two calls is the host's.
All ways are timed in turns, in blocks of calls; a row has the percentiles over the blocks. Backward runs in the thread
that calls it, as the plugin trains. ``layers``: so many are in a call, compiled as one function; a row is one's share.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from scripts.bench.problems import make_offs
from scripts.progress import ends_in_words, progress, say
from scripts.result_files import environment, format_table, percentiles, write_results
from titan_mxfp8 import mxfp8_grouped_mm, mxfp8_linear

SIZE, EXPERTS = 256, 4
RECIPES = ("mxfp8", "mxfp8_2d", "mxfp8_rebased", "mxfp8_2d_rebased", "mxfp8_2d_wgrad_bf16")
CALLS, BLOCKS = 48, 12  # layers that a block calls; blocks of each way, the first of which does not count

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(SIZE**-0.5).requires_grad_()


def layers_of(what: str, recipes: Sequence[str]) -> dict[str, Layer]:
    """By way: bf16's function of tokens and one weight, and ours."""
    if what == "linear":
        return {"bf16": F.linear} | {recipe: partial(mxfp8_linear, recipe=recipe) for recipe in recipes}
    offs = make_offs([64, 0, 100, 92], "cuda")

    def ours(x: torch.Tensor, w: torch.Tensor, recipe: str) -> torch.Tensor:
        return mxfp8_grouped_mm(x, w.mT, offs, recipe=recipe)

    bf16 = {"bf16": lambda x, w: torch._grouped_mm(x, w.mT, offs=offs)}
    return bf16 | {recipe: partial(ours, recipe=recipe) for recipe in recipes}


def stacked(layer: Layer) -> Callable[..., torch.Tensor]:
    """Layers one behind the other, as many as there are weights."""

    def stack(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for w in weights:
            x = layer(x, w)
        return x

    return stack


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


def measure(calls: dict[tuple[str, str], Callable[[], None]], layers: int) -> list[dict[str, object]]:
    """A row for each mode and way, of one of its layers."""
    for call in calls.values():
        call()  # compiles forward and backward
        call()
    times: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
    for _ in range(BLOCKS):
        for name, call in calls.items():
            times[name].append(block_us(call, layers))
    columns = ("us_p20", "us_p50", "us_p80")
    return [
        {"mode": mode, "way": way} | dict(zip(columns, percentiles(blocks[1:]), strict=True))
        for (mode, way), blocks in times.items()
    ]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for data.csv and env.json")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, help=f"[{' '.join(RECIPES)}]")
    counts_of_layers = [count for count in range(1, CALLS + 1) if CALLS % count == 0]
    parser.add_argument("--layers", nargs="+", type=int, choices=counts_of_layers, default=[1, 8], help="[1 8]")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []
    env = environment()
    cases = [(count, what) for count in args.layers for what in ("linear", "grouped")]
    bar = progress(len(cases), "host", "case")
    for count, what in cases:
        shape = (SIZE, SIZE) if what == "linear" else (EXPERTS, SIZE, SIZE)
        params, dy = (normal(SIZE, SIZE), *(normal(*shape) for _ in range(count))), normal(SIZE, SIZE).detach()
        stacks = {way: stacked(layer) for way, layer in layers_of(what, args.recipes).items()}
        torch._dynamo.reset()
        with torch._dynamo.config.patch(recompile_limit=64), torch.autograd.set_multithreading_enabled(False):
            calls = {("eager", way): partial(step, stack, params, dy) for way, stack in stacks.items()}
            for way, stack in stacks.items():
                calls["compiled", way] = partial(step, torch.compile(stack, fullgraph=True), params, dy)
            rows += [{"what": what, "layers": count} | row for row in measure(calls, count)]
        say(format_table(rows[-len(calls) :]))
        write_results(args.out, rows, env)  # a run that is broken off leaves what it has
        bar.update()


if __name__ == "__main__":
    with ends_in_words("bench_host", "the files hold what was measured; the same command begins anew"):
        main(sys.argv[1:])
