"""Repairs of torch, TorchTitan and wandb. Each says what it cures and which versions it is for.

``repair`` applies those that depend on nothing but the versions. The rest are called where the config is known:
``keep_saved_outputs`` by the converters, ``hide_grouped_mm_warning`` when a config is parsed,
``log_offline_if_the_start_fails`` by ``wandb_run.py``. ``tests/test_repairs.py`` shows each symptom without its repair.
"""

from titan_mxfp8.plugin.repairs import activation_checkpointing, cpu, moe, tensor_parallel, threads, wandb_offline


def repair() -> None:
    """Applies the repairs that every run needs, and those of machines without an accelerator where there is none."""
    activation_checkpointing.ignore_profiler_ranges()
    tensor_parallel.wait_before_compiled_regions()
    tensor_parallel.save_random_states_before_meshes()
    tensor_parallel.compile_for_own_rank_only()
    moe.initialise_router_bias()
    threads.run_backward_in_the_calling_thread()
    wandb_offline.default_wandb_offline()
    cpu.enable_cpu_training()
