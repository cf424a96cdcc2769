"""Time of the reference backend against bf16 ``torch._grouped_mm`` on the CPU, forward + backward, in one run.

The reference is the definition of the format and what a machine without accelerators trains with: this is its cost.

    (. scripts/setup.sh && python scripts/bench_reference.py)   # with the allocator's settings of train.sh
"""

import argparse
from pathlib import Path

import torch

from titan_mxfp8 import RECIPES, mxfp8_grouped_mm
from titan_mxfp8.testing import Timing, do_bench, environment, format_table, group_sizes, make_offs, write_results

TOKENS, N, K, EXPERTS = 4096, 512, 256, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for data.csv and env.json")
    args = parser.parse_args()

    rows = [row for spread in ("balanced", "zipf") for row in measure(spread)]
    env = environment("cpu") | {"threads": str(torch.get_num_threads())}
    print(f"forward + backward, T={TOKENS} N={N} K={K} E={EXPERTS}, {env['threads']} threads")
    print(format_table(rows))
    if args.out:
        write_results(args.out, rows, env)


def measure(spread: str) -> list[dict[str, object]]:
    """A row for bf16 and one for each recipe, on token groups of this spread."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, K, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(EXPERTS, N, K, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(TOKENS, N, dtype=torch.bfloat16)
    offs = make_offs(group_sizes(spread, TOKENS, EXPERTS))

    def bf16() -> None:
        torch.autograd.grad(torch._grouped_mm(x, w.mT, offs=offs), (x, w), dy)

    def mxfp8(recipe: str) -> None:
        y = mxfp8_grouped_mm(x, w.mT, offs, recipe=recipe, backend="reference")
        torch.autograd.grad(y, (x, w), dy)

    baseline = do_bench(bf16, warmup_ms=300, rep_ms=1500)
    rows = [row(spread, "bf16 torch._grouped_mm", baseline, baseline)]
    for recipe in sorted({recipe.name for recipe in RECIPES.values()}):
        timing = do_bench(lambda recipe=recipe: mxfp8(recipe), warmup_ms=300, rep_ms=1500)
        rows.append(row(spread, recipe, timing, baseline))
    return rows


def row(spread: str, provider: str, timing: Timing, baseline: Timing) -> dict[str, object]:
    times = {"p20_us": timing.p20, "p50_us": timing.p50, "p80_us": timing.p80}
    return {"groups": spread, "provider": provider, **times, "times_bf16": timing.p50 / baseline.p50}


if __name__ == "__main__":
    main()
