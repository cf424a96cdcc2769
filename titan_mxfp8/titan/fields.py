"""What the fields of both adapters have in common: types, and rules that need no TorchTitan."""

from typing import Any, Literal

import torch

import titan_mxfp8.ops.library  # noqa: F401 - registers torch.ops.titan_mxfp8
from titan_mxfp8.recipe import BF16, Recipe

Dispatch = Literal["off", "auto", "collective", "symmetric"]
Once = Literal["off", "on", "auto"]  # of quantize_weights_once
# Whose outputs op-level activation checkpointing saves. Quantised operands are made again from the block's inputs,
# which costs one pass over memory each, where saving them would keep every weight a second time. Experts, and a layer
# that dispatches its own tokens, are one operator in forward: what its backward needs is saved, and nothing sent twice.
# topk chooses a token's experts, and computed again it might choose others (``workarounds.pytorch.route_tokens_once``).
OPERATORS = torch.ops.titan_mxfp8
SAVED = {OPERATORS.gemm_m_grouped.default, OPERATORS.experts_forward.default, torch.ops.aten.topk.default}


def compiles_model(config: Any) -> bool:
    """Whether TorchTitan, with this whole config, compiles the model's blocks, and not only the loss."""
    return config.compile.enable and "model" in config.compile.components


def check_fields(recipe: Recipe, kind: str, dispatches: bool, health_every: int, hopper_rebase_report: int) -> None:
    """Raises ValueError: a period below 0; a report on rebasing with a recipe that is not rebased; recipe ``bf16``, the
    control of the dispatch, where nothing dispatches. ``kind`` is what is converted, in words."""
    for name, steps in (("health_every", health_every), ("hopper_rebase_report", hopper_rebase_report)):
        if steps < 0:
            raise ValueError(f"{name} is a number of steps, or 0 for never, got {steps}")
    if hopper_rebase_report and recipe.block_k == 32:
        raise ValueError(
            f"hopper_rebase_report says what rebasing changes: it takes a recipe that is rebased, not {recipe.name!r}"
        )
    if recipe == BF16 and not dispatches:
        raise ValueError(
            f"recipe {BF16.name!r} is the control of dispatch: without it, leave the {kind} out of the conversion"
        )
