"""How TorchTitan 0.3 gets it: overrides on the command line, or converters where a config is made in Python.

    --override.imports 'titan_mxfp8.titan03.experts={"recipe": "mxfp8_2d"}' titan_mxfp8.titan03.linears
    model_registry("debugmodel", converters=[MXFP8Experts.Config(recipe="mxfp8_2d"), MXFP8Linears.Config()])

Either changes the model's config in place, so that the model which is built of it is converted: by ``modules``, as with
TorchTitan 0.2.2, with the same parameters, log lines and errors.

What the import changes in TorchTitan and torch, on every machine:

- ``_collect_claims``: an override of a whole model would exclude those of its parts.
- ``MetricsProcessor.should_log``: health_every and hopper_rebase_report.
- ``WandBLogger.__init__``: offline if wandb cannot start.
- ``set_timeout``: torch 2.13 has no such function yet.
- ``SelectiveAC.get_save_ops``: selective activation checkpointing saves the outputs of MXFP8 GEMMs too, and those of
  layers that dispatch their own tokens.

and the workarounds of titan_mxfp8/workarounds, which the plugin for 0.2.2 lists. Where there is no accelerator, so that
TorchTitan trains on CPUs (before the Trainer exists: a config of titan03/config_registry.py, or of yours that imports
this), besides those of titan_mxfp8/workarounds/cpu.py:

- ``attention.varlen_attn``: CUDA only, and flex attention has no backward on CPUs.
"""

from torchtitan.config.override import override
from torchtitan.protocols.model import BaseModel

from titan_mxfp8.titan03.convert import MXFP8Experts, MXFP8Linears, log_telemetry, save_gemm_outputs
from titan_mxfp8.titan03.workarounds import apply

__all__ = ["MXFP8Experts", "MXFP8Linears", "experts", "linears"]


@override(target=BaseModel.Config, description="MXFP8 routed experts")
def experts(model_config: BaseModel.Config, **fields: object) -> BaseModel.Config:
    """Converts routed experts; ``fields`` are those of ``MXFP8Experts.Config``."""
    return MXFP8Experts.Config(**fields).build().convert(model_config)


@override(target=BaseModel.Config, description="MXFP8 linears")
def linears(model_config: BaseModel.Config, **fields: object) -> BaseModel.Config:
    """Converts linears; ``fields`` are those of ``MXFP8Linears.Config``."""
    return MXFP8Linears.Config(**fields).build().convert(model_config)


log_telemetry()
save_gemm_outputs()
apply()
