"""Workarounds of activation checkpointing."""

from torch._inductor import config as inductor_config
from torchtitan.config import JobConfig


def keep_saved_outputs(job_config: JobConfig) -> None:
    """Works around: wrong gradients, without a word, from compiled op-level activation checkpointing.

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
