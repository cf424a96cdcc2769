"""Workarounds of activation checkpointing."""

import torch
import torch.utils.checkpoint


def ignore_profiler_ranges() -> None:
    """Works around: `profiler._record_function_enter_new ... encountered during backward but not found in storage`.

    For: torch 2.13 and newer; torch 2.11 has no such set and does not need it.

    Selective op-level activation checkpointing replays the forward op by op, and counts FSDP's profiler ranges as ops.
    Under EP the experts are an FSDP unit of their own in the checkpointed block, and opens more ranges the second time
    than the first (torchtitan#3427). The ranges compute nothing: SAC may ignore them.
    """
    if hasattr(torch.utils.checkpoint, "SAC_IGNORED_OPS"):
        torch.utils.checkpoint.SAC_IGNORED_OPS.update(
            {
                torch.ops.profiler._record_function_enter.default,
                torch.ops.profiler._record_function_enter_new.default,
                torch.ops.profiler._record_function_exit.default,
                torch.ops.profiler._record_function_exit._RecordFunction,
            }
        )
