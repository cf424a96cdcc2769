"""Repairs of activation checkpointing."""

import torch
import torch.utils.checkpoint
from torch._inductor import config as inductor_config
from torchtitan.config import JobConfig


def ignore_profiler_ranges() -> None:
    """Cures: `profiler._record_function_enter_new ... encountered during backward but not found in storage`.

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


def keep_saved_outputs(job_config: JobConfig) -> None:
    """Cures: wrong gradients, without a word, from compiled op-level activation checkpointing.

    For: all versions. Called by each converter, as it depends on the config.

    TorchTitan compiles the parts of a MoE block one by one, within the checkpointed block. So checkpointing saves the
    outputs of our GEMMs while compiled code runs, which knows nothing of it and writes its next result into the same
    memory: a rotary embedding over the queries that it is made from. The inductor is told to allocate anew instead;
    memory that is free the allocator gives it again. What that costs has not been measured. TorchTitan's own `mm` is
    never saved from within compiled code.
    """
    checkpointing = job_config.activation_checkpoint
    if checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op":
        inductor_config.inplace_buffers = False
        inductor_config.allow_buffer_reuse = False
