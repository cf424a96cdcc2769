"""The grouped problems that tests and benchmarks share: shapes, token groups, and how far a result is off."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class GroupedShape:
    """A layer of experts: (m, k) tokens times (groups, n, k) weights."""

    name: str
    m: int
    n: int
    k: int
    groups: int


# Experts of Llama4 and DeepSeek-V3, whose n is small, by the number of local ones: the table of torchao's MXFP8 MoE
# README, whose m is 128000, at the 131072 tokens of its kernel figures.
GROUPED_SHAPES = tuple(
    GroupedShape(f"{name}_g{groups}", 131072, n, k, groups)
    for groups in (8, 1, 2, 4)
    for name, n, k in (("llama4", 8192, 5120), ("dsv3", 2048, 7168))
)

# Many experts with few features each: those of DeepSeek-V3 16B, all 64 on one GPU.
SMALL_EXPERT_SHAPES = (GroupedShape("dsv3_16b", 131072, 1408, 2048, 64),)

Spread = Literal["balanced", "zipf", "empties", "one", "tiny"]
SPREADS: tuple[Spread, ...] = ("balanced", "zipf", "empties", "one", "tiny")


def group_sizes(spread: Spread, rows: int, groups: int, seed: int = 0) -> list[int]:
    """Sizes of ``groups`` token groups that sum to ``rows`` (``tiny``: to at most that), not aligned to anything.

    - ``balanced``: as even as can be, larger ones first: 10 rows in 4 groups are 3, 3, 2, 2.
    - ``zipf``: group i of a shuffled order gets a share of 1 / (i + 1), as a young router gives.
    - ``empties``: every other group is empty, the first one too, and the last one where that leaves any.
    - ``one``: a middle group has everything.
    - ``tiny``: 0, 1, 44, 0, 1, 44, ... while rows last.
    """
    if spread == "tiny":
        sizes = [(0, 1, 44)[i % 3] for i in range(groups)]
        return [min(size, max(0, rows - sum(sizes[:i]))) for i, size in enumerate(sizes)]
    weights = [1.0] * groups
    if spread == "zipf":
        weights = [1 / (i + 1) for i in range(groups)]
        random.Random(seed).shuffle(weights)
    elif spread == "one":
        weights = [float(i == groups // 2) for i in range(groups)]
    elif spread == "empties" and groups > 1:
        weights = [float(i % 2 and (i < groups - 1 or groups == 2)) for i in range(groups)]
    sizes = [int(rows * weight / sum(weights)) for weight in weights]
    filled = [i for i, weight in enumerate(weights) if weight]
    for i in range(rows - sum(sizes)):
        sizes[filled[i % len(filled)]] += 1
    return sizes


def make_offs(sizes: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """The int32 end offsets of groups of these sizes: ``[2, 0, 3]`` gives ``[2, 2, 5]``."""
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def relative_rms(out: torch.Tensor, ref: torch.Tensor) -> float:
    """``|out - ref| / |ref|`` in fp64; NaN if either holds NaN, 0 if both are zero."""
    out, ref = out.double(), ref.double()
    error, size = (out - ref).norm().item(), ref.norm().item()
    return 0.0 if error == 0 == size else error / size if size else float("inf")


def largest_row_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """The largest ``|out - ref| / |ref|`` of a row in fp64: what one wrong row or tile does not lose among the others.

    NaN if either holds NaN; infinite where a row of zeros has something; 0 without rows.
    """
    out, ref = (t.double().reshape(-1, t.shape[-1]) for t in (out, ref))
    error, size = (out - ref).norm(dim=1), ref.norm(dim=1)
    relative = torch.where((error == 0) & (size == 0), 0.0, error / size)
    return relative.max().item() if relative.numel() else 0.0
