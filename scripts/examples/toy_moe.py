"""The toy MoE: does training survive outliers? Every recipe against bf16, with gates, in seconds.

    python scripts/examples/toy_moe.py --out outputs/toy_moe

512 tokens, randn with 0.5% of the elements 100 times as large, go through experts of two layers and learn the outputs
of a fixed random layer by SGD, as ALTO tests its MXFP8 grouped GEMM. Gates, exit status 1 if one fails: the loss is
finite; its mean over the last fifth of the steps is below 0.9 times that of the first, and below 2 times bf16's last.
"""

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F

from scripts.bench.problems import make_offs
from scripts.result_files import environment, format_table, write_results
from titan_mxfp8 import mxfp8_grouped_mm
from titan_mxfp8.backends import BACKENDS, select
from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.recipe import RECIPES

TOKENS, FEATURES, STEPS, LEARNING_RATE = 4 * 128, 128, 100, 0.5
OUTLIER_SHARE, OUTLIER_FACTOR = 0.005, 100.0


def make_problem(experts: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Tokens sorted by expert, the targets, the groups' end offsets, and the weights to start from; drawn on the CPU,
    so that every device trains on the same numbers."""
    generator = torch.Generator().manual_seed(experts)
    randn = partial(torch.randn, generator=generator)
    x_MK = randn(TOKENS, FEATURES)
    outlier_MK = torch.rand(TOKENS, FEATURES, generator=generator) < OUTLIER_SHARE
    x_MK = torch.where(outlier_MK, OUTLIER_FACTOR * x_MK, x_MK)
    expert_M = (x_MK @ randn(FEATURES, experts)).argmax(1)
    expert_M, order_M = expert_M.sort(stable=True)
    x_MK = x_MK[order_M]
    teacher_EKN = randn(experts, FEATURES, FEATURES) / math.sqrt(FEATURES)
    target_MN = torch.einsum("mk,mkn->mn", x_MK, teacher_EKN[expert_M])
    problem = {
        "x": x_MK.bfloat16(),
        "target": target_MN,
        "offs": make_offs(torch.bincount(expert_M, minlength=experts).tolist()),
        "w1": randn(experts, FEATURES, FEATURES) / math.sqrt(FEATURES),
        "w2": randn(experts, FEATURES, FEATURES) / math.sqrt(FEATURES),
    }
    return {name: tensor.to(device) for name, tensor in problem.items()}


def train(problem: dict[str, torch.Tensor], grouped_mm: Callable) -> list[float]:
    """The loss of each step: mean squared error, relative to the target's mean square."""
    weights = [problem[name].clone().requires_grad_() for name in ("w1", "w2")]
    optimizer = torch.optim.SGD(weights, lr=LEARNING_RATE)
    size = problem["target"].square().mean()
    losses = []
    for _ in range(STEPS):
        w1, w2 = (weight.bfloat16().mT for weight in weights)
        h = F.silu(grouped_mm(problem["x"], w1, offs=problem["offs"]))
        y = grouped_mm(h, w2, offs=problem["offs"])
        loss = (y.float() - problem["target"]).square().mean() / size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def gates(losses: list[float], bf16_losses: list[float]) -> dict[str, object]:
    """The three gates' figures, and whether all hold."""
    fifth = STEPS // 5
    first, last, bf16_last = fmean(losses[:fifth]), fmean(losses[-fifth:]), fmean(bf16_losses[-fifth:])
    finite = all(map(math.isfinite, losses))
    return {
        "finite": finite,
        "last / first 20%": last / first,
        "last 20% / bf16": last / bf16_last,
        "passed": finite and last < 0.9 * first and last < 2 * bf16_last,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for data.csv and env.json")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    backend = select("auto", hardware_of(device), RECIPES["mxfp8"]).name
    rebases = next(entry.rebases for entry in BACKENDS if entry.name == backend)
    recipes = [recipe.name for recipe in dict.fromkeys(RECIPES.values()) if rebases or recipe.block_k == 32]
    curves, verdicts = [], []
    for experts in (2, 4):
        problem = make_problem(experts, device)
        losses = {"bf16": train(problem, torch._grouped_mm)}
        for recipe in recipes:
            losses[recipe] = train(problem, partial(mxfp8_grouped_mm, recipe=recipe))
        for recipe, each in losses.items():
            key = {"experts": experts, "recipe": recipe}
            verdicts.append(key | gates(each, losses["bf16"]))
            curves += [key | {"step": step, "loss": loss} for step, loss in enumerate(each, 1)]
    print(f"backend {backend} on {device}\n\n{format_table(verdicts)}")
    if args.out:
        more = {"backend": backend, "threads": str(torch.get_num_threads())}
        write_results(args.out, curves, environment(device) | more)
    if not all(verdict["passed"] for verdict in verdicts):
        sys.exit("toy_moe: a gate failed")


if __name__ == "__main__":
    main()
