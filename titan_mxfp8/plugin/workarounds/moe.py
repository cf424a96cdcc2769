"""Workarounds of TorchTitan's MoE layers."""

import logging

import torch
from torchtitan.models.moe.moe import TokenChoiceTopKRouter
from torchtitan.tools.logging import logger

from titan_mxfp8.workarounds.patch import is_patched, patch_of


def initialise_router_bias() -> None:
    """Works around: other routing from run to run, or NaN, in models whose router has a bias, as gpt_oss.

    For: TorchTitan 0.2.2.

    It builds models on meta and initialises the router's weight but not its bias, which keeps whatever the
    memory held. Here it starts from 0.
    """
    init_weights = TokenChoiceTopKRouter.init_weights
    if is_patched(init_weights):
        return

    @patch_of(init_weights)
    def init_weights_and_bias(self: TokenChoiceTopKRouter, init_std: float) -> None:
        init_weights(self, init_std)
        if self.gate.bias is not None:
            torch.nn.init.zeros_(self.gate.bias)

    TokenChoiceTopKRouter.init_weights = init_weights_and_bias


class _NoGroupedMMWarning(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Failed to use grouped mm")


_no_warning = _NoGroupedMMWarning()


def hide_grouped_mm_warning(hide: bool) -> None:
    """Works around: the warning `Failed to use grouped mm, which is only supported on SM90 or later` beside experts
    that work.

    For: TorchTitan 0.2.2, on anything below SM90.

    Converted experts never take the loop that the warning is about. Called for each parsed config: ``hide`` says
    whether it converts experts.
    """
    if hide:
        logger.addFilter(_no_warning)  # not a second time
    else:
        logger.removeFilter(_no_warning)
