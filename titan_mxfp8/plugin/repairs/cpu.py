"""TorchTitan 0.2.2 on a machine without accelerators: what it needs besides titan_mxfp8/repairs/cpu.py."""

import functools

import torchtitan.models.moe.utils as moe_utils
from torchtitan.tools import utils

from titan_mxfp8.repairs.cpu import train_on_cpu


def enable_cpu_training() -> bool:
    """Makes TorchTitan train on CPU if this machine has no accelerator; says whether it did. Safe to call again."""
    return train_on_cpu(utils, permute_tokens_without_triton)


def permute_tokens_without_triton() -> None:
    """Cures: `0 active drivers` from the Triton kernel that orders tokens by expert.

    For: TorchTitan 0.2.2.

    `generate_permute_indices` has a CPU path, but its one caller, `_permute` in moe/utils.py, never asks for it. The
    repair goes to that caller's copy of the name; the function in moe/kernels.py stays as it is.
    """
    moe_utils.generate_permute_indices = functools.partial(moe_utils.generate_permute_indices, use_cpu=True)
