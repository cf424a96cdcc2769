"""``quantize.grouped_mm.mx`` and ``quantize.linear.mx``, as TorchTitan's model converters."""

from pkgutil import resolve_name

from torch import nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols import model_converter

from titan_mxfp8 import modules, workarounds
from titan_mxfp8.plugin import moe
from titan_mxfp8.plugin.checks import MODELS, check_converters
from titan_mxfp8.plugin.experts import MXFP8GptOssGroupedExperts, MXFP8GroupedExperts
from titan_mxfp8.plugin.job_config import converter_configs
from titan_mxfp8.recipe import GROUPED_MM, LINEAR
from titan_mxfp8.titan import telemetry
from titan_mxfp8.titan.fields import SAVED


class _Converter(QuantizationConverter):
    name: str
    kind: str
    # TorchTitan's own is an assertion; this one says what to do
    _validate = staticmethod(check_converters)

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims):
        super().__init__(job_config, parallel_dims)
        self.job_config, self.parallel_dims = job_config, parallel_dims
        self.config = converter_configs(job_config)[self.name]
        checkpointing = job_config.activation_checkpoint
        if checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op":
            workarounds.apply("keep_saved_outputs")

    def convert(self, model: nn.Module) -> None:
        config = self.config
        options = {"recipe": config.recipe_name, "rebase": config.hopper_rebase, "backend": config.backend}
        converted = self.convert_modules(model, requantize_input=config.requantize_input, **options)
        health_every = self.job_config.quantize.health_every
        telemetry.attach(model, converted, self.kind, health_every, config.hopper_rebase_report)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing: operands are quantised where they are used."""


class GroupedMMConverter(_Converter):
    """Converts the routed experts that ``quantize.grouped_mm.mx.fqns`` names."""

    name, kind = GROUPED_MM, "experts"

    def convert_modules(self, model: nn.Module, **options: object) -> list[str]:
        converted = modules.convert_experts(model, fqns=self.config.fqns, **options)
        for experts in map(model.get_submodule, converted):
            experts.fsdp_fp8_all_gather = self.config.fsdp_fp8_all_gather
            experts.quantize_weights_once = self.config.quantize_weights_once
            if self.job_config.fault_tolerance.enable:  # TorchFT reduces gradients in a hook of FSDP
                experts.needs_fsdp = "fault_tolerance.enable"
        moe.dispatch_tokens(model, converted, self.job_config, self.parallel_dims)
        return converted


class LinearConverter(_Converter):
    """Converts the linears that ``quantize.linear.mx.filter_fqns`` does not name."""

    name, kind = LINEAR, "linears"

    def convert_modules(self, model: nn.Module, **options: object) -> list[str]:
        return modules.convert_linears(model, filter_fqns=self.config.filter_fqns, **options)


def register() -> None:
    """Puts our converters in the place of TorchTitan's two of the same names, of which ``register_model_converter``
    refuses a second. Has op-level activation checkpointing save the outputs of ``SAVED``, in every TorchTitan model:
    each has a set of such operators, and all others run again in backward."""
    model_converter._registry_model_converter_cls |= {GROUPED_MM: GroupedMMConverter, LINEAR: LinearConverter}
    modules.EXPERT_CLASSES |= {GroupedExperts: MXFP8GroupedExperts, GptOssGroupedExperts: MXFP8GptOssGroupedExperts}
    for model in MODELS:
        resolve_name(f"torchtitan.models.{model}.infra.parallelize")._op_sac_save_list.update(SAVED)
