# ruff: noqa: E402
"""How many kernels a layer of the code before the redraw compiles with its first tokens, and how many more with other
numbers of them. On a CPU, for sm_90; nothing is compiled, what would be is counted.

    git worktree add OLD eaae8bc && python late_compilations.py OLD    # from this folder

For the code as it is now: tests/test_late_compilation.py.
"""

import sys
from dataclasses import replace
from pathlib import Path

old = Path(sys.argv[1]).resolve()
sys.path[:0] = [str(old), str(Path(__file__).parents[2] / "tests")]

import torch
from aot import specializations

from titan_mxfp8 import backends, mxfp8_grouped_mm, mxfp8_linear
from titan_mxfp8.backends.triton import gemm, operands
from titan_mxfp8.testing import group_sizes, make_offs

assert Path(backends.__file__).is_relative_to(old)
backends.BACKENDS = tuple(replace(row, runs_on=lambda device: True) for row in backends.BACKENDS)
for module in (gemm, operands):
    module.mma_for = lambda device: "bf16_tma"
gemm._processors = lambda device: 2
EXPERTS, N, K = 3, 96, 160
ROWS = (80, 0, 1, 16, 4096, 97, 4999, 767 * EXPERTS, 769 * EXPERTS, 2**15 + 77, 40000)


def run(kind: str, recipe: str, rebase: bool, rows: int, seed: int) -> None:
    x = torch.empty(rows, K, dtype=torch.bfloat16, requires_grad=True)
    w = torch.empty(EXPERTS, N, K, dtype=torch.bfloat16, requires_grad=True)
    options = {"recipe": recipe, "backend": "hopper", "rebase": rebase}
    if kind == "linear":
        y = mxfp8_linear(x, w[0], **options)
    else:
        y = mxfp8_grouped_mm(x, w.mT, make_offs(group_sizes("zipf", rows - rows // 7, EXPERTS, seed)), **options)
    y.backward(torch.empty_like(y))


print("recipe,layer,with the first tokens,later")
for recipe, rebase in (("mxfp8", False), ("mxfp8_2d", False), ("mxfp8_2d", True)):
    for kind in ("grouped", "linear"):
        with specializations("sm_90") as found:
            run(kind, recipe, rebase, 80, 0)
            first = len(found)
            for seed, rows in enumerate(ROWS):
                run(kind, recipe, rebase, rows, seed)
            print(f"{recipe}{'_rebased' * rebase},{kind},{first},{len(found) - first}", flush=True)
