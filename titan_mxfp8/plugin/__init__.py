"""How TorchTitan gets it: ``[job] custom_config_module = "titan_mxfp8.plugin"`` is all that a TOML needs.

TorchTitan imports this module while it parses the config, before the Trainer exists, and merges ``JobConfig`` into its
own. A config module of your own derives its ``JobConfig`` from this one. A config without our fields is left alone.

What the import changes in TorchTitan and torch is listed in titan_mxfp8/workarounds, with how to leave workarounds out.
A config that sets ``model.study_flavors`` adds small flavors to the tables of five models (flavors.py).
"""

from titan_mxfp8 import workarounds
from titan_mxfp8.plugin import checks, converters, moe, trainer, wandb_run
from titan_mxfp8.plugin.job_config import JobConfig
from titan_mxfp8.titan import fsdp
from titan_mxfp8.workarounds.patch import around

__all__ = ["JobConfig"]

converters.register()
checks.validate_and_check()
moe.shard_weights_only()
for model in ("llama4", "deepseek_v3", "qwen3", "gpt_oss"):
    around(f"torchtitan.models.{model}.infra.parallelize.apply_fsdp")(fsdp.shard)()
moe.compile_whole_blocks()
workarounds.install()
wandb_run.name_and_start()
trainer.change_steps()
trainer.destroy_graphs()
