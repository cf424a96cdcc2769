"""Workarounds of torch and wandb, and of what both TorchTitans share. Each says what it cures and which versions it is
for.

``apply`` applies those that depend on nothing but the versions; ``cpu.train_on_cpu`` those of machines without an
accelerator; ``wandb_offline.log_offline_if_the_start_fails`` is called where a run starts to log.
"""

from titan_mxfp8.workarounds import activation_checkpointing, tensor_parallel, threads, wandb_offline


def apply() -> None:
    """Applies the workarounds that every run needs."""
    activation_checkpointing.ignore_profiler_ranges()
    tensor_parallel.wait_before_compiled_regions()
    tensor_parallel.save_random_states_before_meshes()
    tensor_parallel.compile_for_own_rank_only()
    threads.run_backward_in_the_calling_thread()
    wandb_offline.default_wandb_offline()
