"""How TorchTitan gets it: ``[job] custom_config_module = "titan_mxfp8.plugin"`` is all that a TOML needs.

TorchTitan imports this module while it parses the config, before the Trainer exists, and merges ``JobConfig`` into its
own. A config module of your own derives its ``JobConfig`` from this one.

What the import changes in TorchTitan and torch, on every machine:

- ``_registry_model_converter_cls``: TorchTitan's two MX converters refuse GPUs below SM100; ours take their names.
- ``QuantizationConverter._validate``: mixed formats get an error that says what to do (both in converters.py).
- ``ConfigManager._validate_config``: a config that cannot run is refused when it is parsed (config_check.py).
- ``llama4_args``, ``deepseekv3_args``, ``qwen3_args``, ``gptoss_configs``, ``llama3_args``: small flavors (flavors.py).
- ``MetricsProcessor.__init__``, ``MetricsProcessor.should_log``, ``GarbageCollection.run``: health_every (health.py).
- ``WandBLogger.__init__``: a run's name, tags and commit, and offline if wandb cannot start (wandb_run.py).
- ``SAC_IGNORED_OPS``: from torch 2.13 on selective activation checkpointing fails under EP.
- ``_op_sac_save_list``: of five models; selective activation checkpointing saves the outputs of MXFP8 GEMMs too.
- ``_ToTorchTensor.forward``: from torch 2.13 on tensor parallelism with compile loses gradients.
- ``functionalize_rng_ops``: from torch 2.13 on tensor parallelism with compile and activation checkpointing fails.
- ``TokenChoiceTopKRouter.init_weights``: the bias of gpt_oss's router stays uninitialised (all five in compat.py).

With several processes and torch 2.13 or newer, AOTAutograd's cache on disk is off: it mixes up the ranks (compat.py).
With op-level activation checkpointing ``inplace_buffers`` and ``allow_buffer_reuse`` of the inductor are off as soon as
a converter is made: compiled code would overwrite what is saved (compat.py).
The environment variable WANDB_MODE becomes ``offline`` where there is no login to wandb and no choice of a mode.

Where there is no accelerator, so that TorchTitan trains on CPUs (cpu.py):

- ``device_type``, ``device_module``, ``get_device_info``: they are CUDA's, here and in the modules that copied them.
- ``get_peak_flops``: the MFU would be a share of an A100.
- ``torch.histc``: has no CPU kernel for integers.
- ``moe.utils.generate_permute_indices``: Triton only.
- ``FSDPModule.set_gradient_divide_factor``: has FSDP choose a reduction that gloo lacks.
- ``DTensor.normal_``, ``DTensor.uniform_``: every rank would draw the same shard.
- ``profile.__init__``: TorchTitan passes an activity of None.
"""

from titan_mxfp8.plugin import compat, config_check, converters, cpu, flavors, health, wandb_run
from titan_mxfp8.plugin.job_config import JobConfig

__all__ = ["JobConfig"]

converters.register()
config_check.install()
flavors.register_flavors()
health.install()
compat.repair_selective_ac()
compat.save_gemm_outputs()
compat.wait_before_compiled_regions()
compat.save_random_states_before_meshes()
compat.compile_for_own_rank_only()
compat.initialise_router_bias()
compat.default_wandb_offline()
wandb_run.install()
cpu.enable_cpu_training()
