"""How TorchTitan 0.3 gets it: overrides on the command line, or converters where a config is made in Python.

    --override.imports 'titan_mxfp8.titan03.experts={"recipe": "mxfp8_2d"}' titan_mxfp8.titan03.linears
    model_registry("debugmodel", converters=[MXFP8Experts.Config(recipe="mxfp8_2d"), MXFP8Linears.Config()])

Either changes the model's config in place, so that the model which is built of it is converted: by ``modules``, as with
TorchTitan 0.2.2, with the same parameters, log lines and errors.

What the import changes in TorchTitan and torch is listed in titan_mxfp8/workarounds, with how to leave workarounds out.
Where there is no accelerator it has to come before the Trainer exists: in the module that makes the config, as
titan03/config_registry.py does.
"""

from torchtitan.config.override import override
from torchtitan.protocols.model import BaseModel

from titan_mxfp8 import workarounds
from titan_mxfp8.titan import fsdp
from titan_mxfp8.titan03 import convert, cuda_graph
from titan_mxfp8.titan03.convert import MXFP8Experts, MXFP8Linears
from titan_mxfp8.workarounds.patch import around

__all__ = ["MXFP8Experts", "MXFP8Linears", "experts", "linears"]


@override(target=BaseModel.Config, description="MXFP8 routed experts")
def experts(model_config: BaseModel.Config, **fields: object) -> BaseModel.Config:
    """Converts routed experts; ``fields`` are those of ``MXFP8Experts.Config``."""
    return convert.convert_config(MXFP8Experts, model_config, fields)


@override(target=BaseModel.Config, description="MXFP8 linears")
def linears(model_config: BaseModel.Config, **fields: object) -> BaseModel.Config:
    """Converts linears; ``fields`` are those of ``MXFP8Linears.Config``."""
    return convert.convert_config(MXFP8Linears, model_config, fields)


convert.know_the_config()
convert.save_outputs()
cuda_graph.leave_expert_parallelism_to_us()
cuda_graph.capture_where_nothing_waits()
cuda_graph.destroy_graphs()
for user in ("distributed.fsdp", "models.deepseek_v3.mtp", "models.qwen3.parallelize", "models.gpt_oss.parallelize"):
    around(f"torchtitan.{user}.apply_fsdp_to_decoder")(fsdp.shard)()
workarounds.install()
