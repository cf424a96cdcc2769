"""TorchTitan 0.2.2 on a machine without accelerators: what it needs besides titan_mxfp8/workarounds/cpu.py."""

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torchtitan.models.moe.utils as moe_utils
from torchtitan.tools import utils

from titan_mxfp8.workarounds.cpu import train_on_cpu


def enable_cpu_training() -> bool:
    """Makes TorchTitan train on CPU if this machine has no accelerator; says whether it did. Safe to call again."""
    own = permute_tokens_without_triton, count_integers_with_histc, profile_without_device_activity
    return train_on_cpu(utils, *own)


def permute_tokens_without_triton() -> None:
    """Works around: `0 active drivers` from the Triton kernel that orders tokens by expert.

    For: TorchTitan 0.2.2.

    `generate_permute_indices` has a CPU path, but its one caller, `_permute` in moe/utils.py, never asks for it. The
    workaround goes to that caller's copy of the name; the function in moe/kernels.py stays as it is.
    """
    moe_utils.generate_permute_indices = functools.partial(moe_utils.generate_permute_indices, use_cpu=True)


def count_integers_with_histc() -> None:
    """Works around: `"histogram_cpu" not implemented for 'Long'` in the MoE router and reorderer.

    For: TorchTitan 0.2.2, torch up to 2.15.

    They call `torch.histc(...)`, so the name in the torch module is the only place. float64 counts exactly to 2**53.
    """
    histc = torch.histc

    @functools.wraps(histc)
    def histc_of_integers_too(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if input.device.type != "cpu" or input.is_floating_point():
            return histc(input, *args, **kwargs)
        return histc(input.double(), *args, **kwargs).to(input.dtype)  # CUDA, too, answers in the input's dtype

    torch.histc = histc_of_integers_too


def profile_without_device_activity() -> None:
    """Works around: profiling.enable_profiling dies, as TorchTitan passes [CPU, None] where there is no CUDA or XPU.

    For: TorchTitan 0.2.2.

    TorchTitan calls `torch.profiler.profile(...)`; the constructor is repaired, so the class stays the same object.
    """
    init = torch.profiler.profile.__init__

    @functools.wraps(init)
    def init_with_known_activities(self: torch.profiler.profile, *, activities: Iterable | None = None, **kwargs: Any):
        if activities is not None:
            activities = [activity for activity in activities if activity is not None]
        init(self, activities=activities, **kwargs)

    torch.profiler.profile.__init__ = init_with_known_activities
