"""How TorchTitan gets it: ``[job] custom_config_module = "titan_mxfp8.plugin"`` is all that a TOML needs.

TorchTitan imports this module while it parses the config, before the Trainer exists, and merges ``JobConfig`` into its
own. A config module of your own derives its ``JobConfig`` from this one.

What the import changes in TorchTitan and torch, on every machine:

- ``_registry_model_converter_cls``: TorchTitan's two MX converters refuse GPUs below SM100; ours take their names.
- ``_op_sac_save_list``: of five models; selective activation checkpointing saves the outputs of MXFP8 GEMMs too (both
  in converters.py).
- ``ConfigManager._validate_config``: a config that cannot run is refused when it is parsed (checks.py).
- ``ExpertParallel._apply``: layers that dispatch their own tokens need none of its hooks (moe.py).
- ``MetricsProcessor.should_log``: health_every and hopper_rebase_report (telemetry.py).
- ``WandBLogger.__init__``: a run's name, tags and commit, and offline if wandb cannot start (wandb_run.py).

and workarounds (workarounds/, here and in titan_mxfp8/):

- ``SAC_IGNORED_OPS``: from torch 2.13 on selective activation checkpointing fails under EP.
- ``_ToTorchTensor.forward``: from torch 2.13 on tensor parallelism with compile loses gradients.
- ``functionalize_rng_ops``: from torch 2.13 on tensor parallelism with compile and activation checkpointing fails.
- ``TokenChoiceTopKRouter.init_weights``: the bias of gpt_oss's router stays uninitialised.
- ``deepseek_v3.get_train_spec``, ``gpt_oss.get_train_spec``: name no validator, so ``validation.enable`` fails.
- ``Validator.post_dataloading_process``: gives attention masks to models that refuse them.

Backward runs in the thread that calls it: in a thread of its own it makes the host slow (threads.py).
With several processes and torch 2.13 or newer, AOTAutograd's cache on disk is off: it mixes up the ranks.
With op-level activation checkpointing ``inplace_buffers`` and ``allow_buffer_reuse`` of the inductor are off as soon as
a converter is made: compiled code would overwrite what is saved.
The environment variable WANDB_MODE becomes ``offline`` where there is no login to wandb and no choice of a mode.

A parsed config that converts experts hides TorchTitan's warning that they fall back to a loop. One that sets
``model.study_flavors`` adds small flavors to the tables of five models (titan_mxfp8.tools.flavors).

Where there is no accelerator, so that TorchTitan trains on CPUs (cpu.py):

- ``device_type``, ``device_module``, ``get_device_info``: they are CUDA's, here and in the modules that copied them.
- ``get_peak_flops``: the MFU would be a share of an A100.
- ``torch.histc``: has no CPU kernel for integers.
- ``moe.utils.generate_permute_indices``: Triton only.
- ``FSDPModule.set_gradient_divide_factor``: has FSDP choose a reduction that gloo lacks.
- ``DTensor.normal_``, ``DTensor.uniform_``: every rank would draw the same shard.
- ``profile.__init__``: TorchTitan passes an activity of None.
"""

from titan_mxfp8.plugin import checks, converters, moe, telemetry, wandb_run
from titan_mxfp8.plugin.job_config import JobConfig
from titan_mxfp8.plugin.workarounds import apply

__all__ = ["JobConfig"]

converters.register()
converters.save_gemm_outputs()
checks.install()
moe.install()
telemetry.install()
wandb_run.install()
apply()
