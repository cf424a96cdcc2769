"""What a layer costs the host: forward + backward of a linear and of a grouped GEMM, eager and compiled, on a GPU.

    python scripts/bench/bench_host.py --out results/<date>_<device>_host

At 256 x 256 x 256 the kernels of a call are over before the next is launched: the time between two calls is the host's.
A call that is timed is 48 layers that nobody waits for, and a row one layer's share. ``layers``: so many are compiled
as one function.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from scripts.bench import bench
from scripts.bench.bench import Call, Entry, parse, parser_of
from scripts.bench.problems import make_offs
from scripts.progress import ends_in_words
from titan_mxfp8 import mxfp8_grouped_mm, mxfp8_linear

SIZE, EXPERTS = 256, 4
RECIPES = ("mxfp8", "mxfp8_2d", "mxfp8_rebased", "mxfp8_2d_rebased", "mxfp8_2d_wgrad_bf16")


class Bench(bench.Bench):
    identity = ("what", "layers", "mode", "recipe")
    empties_l2, on_host, parts = False, True, 48

    def layers_of(self, what: str) -> dict[str, Callable[..., torch.Tensor]]:
        """By recipe: a function of tokens and one weight; ``bf16`` is torch's."""
        if what == "linear":
            return {"bf16": F.linear} | {recipe: partial(mxfp8_linear, recipe=recipe) for recipe in self.args.recipes}
        offs = make_offs([64, 0, 100, 92], self.device)

        def ours(x: torch.Tensor, w: torch.Tensor, recipe: str) -> torch.Tensor:
            return mxfp8_grouped_mm(x, w.mT, offs, recipe=recipe)

        bf16 = {"bf16": lambda x, w: torch._grouped_mm(x, w.mT, offs=offs)}
        return bf16 | {recipe: partial(ours, recipe=recipe) for recipe in self.args.recipes}

    def measure(self, case: tuple[int, str, str]) -> None:
        """The rows of so many linears or grouped GEMMs, one behind the other, eager or compiled."""

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=self.device).mul_(SIZE**-0.5)

        layers, what, mode = case
        shape = (SIZE, SIZE) if what == "linear" else (EXPERTS, SIZE, SIZE)
        params, dy = [normal(SIZE, SIZE), *(normal(*shape) for _ in range(layers))], normal(SIZE, SIZE)
        params = [param.requires_grad_() for param in params]
        torch._dynamo.reset()
        calls: dict[str, Call] = {}
        for recipe, layer in self.layers_of(what).items():
            stack = stacked(layer)
            if mode == "compiled":
                backend = "inductor" if self.device.type == "cuda" else "aot_eager"
                stack = torch.compile(stack, backend=backend, fullgraph=True)
            calls[recipe] = partial(steps, stack, params, dy, self.parts // layers)
        key = self.key(what=what, layers=layers, mode=mode)
        entries = [
            Entry(key=key | {"recipe": recipe}, call=call, more={"control": recipe == "bf16"})
            for recipe, call in calls.items()
        ]
        self.compare(entries, calls["bf16"])


def stacked(layer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Layers one behind the other, as many as there are weights."""

    def stack(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for w in weights:
            x = layer(x, w)
        return x

    return stack


def steps(stack: Callable[..., torch.Tensor], params: Sequence[torch.Tensor], dy: torch.Tensor, count: int) -> None:
    for _ in range(count):
        for param in params:
            param.grad = None
        stack(*params).backward(dy)


def main(argv: Sequence[str]) -> None:
    parser = parser_of(__doc__, RECIPES)
    counts_of_layers = [count for count in range(1, Bench.parts + 1) if Bench.parts % count == 0]
    parser.add_argument("--layers", nargs="+", type=int, choices=counts_of_layers, default=[1, 8], help="[1 8]")
    parser.set_defaults(seconds=0.2)
    args = parse(parser, argv)
    with ends_in_words("bench_host"), torch._dynamo.config.patch(recompile_limit=64):
        host = Bench("host", args)
        host.run([*product(args.layers, ("linear", "grouped"), ("eager", "compiled"))], host.measure, "case")


if __name__ == "__main__":
    main(sys.argv[1:])
