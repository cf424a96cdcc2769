"""How TorchTitan gets it: ``[job] custom_config_module = "titan_mxfp8.plugin"`` is all that a TOML needs.

TorchTitan imports this module while it parses the config, before the Trainer exists, and merges ``JobConfig`` into its
own.
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
compat.initialise_router_bias()
compat.default_wandb_offline()
wandb_run.install()
cpu.enable_cpu_training()
