"""``quantize.grouped_mm.mx`` and ``quantize.linear.mx``, as TorchTitan's model converters."""

import logging

from torch import nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols import model_converter

from titan_mxfp8 import modules
from titan_mxfp8.plugin import compat
from titan_mxfp8.plugin.config_check import check_one_quantisation
from titan_mxfp8.plugin.experts import MXFP8GptOssGroupedExperts, MXFP8GroupedExperts
from titan_mxfp8.plugin.job_config import MXGroupedMM, MXLinear
from titan_mxfp8.recipe import GROUPED_MM, LINEAR

logger = logging.getLogger(__name__)


class _Converter(QuantizationConverter):
    config: MXGroupedMM | MXLinear
    kind: modules.ModuleKind
    steps = 0

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims):
        super().__init__(job_config, parallel_dims)
        compat.keep_saved_outputs(job_config)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Every ``hopper_rebase_report`` steps logs what ``hopper_rebase`` changed. Operands are quantised elsewhere:
        where they are used."""
        self.steps += 1
        if self.config.hopper_rebase_report and self.steps % self.config.hopper_rebase_report == 0:
            for part in model if isinstance(model, list) else [model]:
                if report := modules.rebase_report(part, self.kind):
                    logger.info(f"{report}; the last {self.config.hopper_rebase_report} steps, this process")


class GroupedMMConverter(_Converter):
    """Converts the routed experts that ``quantize.grouped_mm.mx.fqns`` names."""

    kind = "experts"

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims):
        super().__init__(job_config, parallel_dims)
        self.config = job_config.quantize.grouped_mm.mx
        compiled = job_config.compile.enable and "model" in job_config.compile.components
        self.compile_backend = job_config.compile.backend if compiled else None

    def convert(self, model: nn.Module) -> None:
        modules.convert_experts(
            model,
            recipe=self.config.recipe_name,
            fqns=self.config.fqns,
            backend=self.config.backend,
            compile_backend=self.compile_backend,
            rebase=self.config.hopper_rebase,
            count_rebased=self.config.hopper_rebase_report > 0,
        )


class LinearConverter(_Converter):
    """Converts the linears that ``quantize.linear.mx.filter_fqns`` does not name."""

    kind = "linears"

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims):
        super().__init__(job_config, parallel_dims)
        self.config = job_config.quantize.linear.mx

    def convert(self, model: nn.Module) -> None:
        modules.convert_linears(
            model,
            recipe=self.config.recipe_name,
            filter_fqns=self.config.filter_fqns,
            backend=self.config.backend,
            rebase=self.config.hopper_rebase,
            count_rebased=self.config.hopper_rebase_report > 0,
        )


def register() -> None:
    """Puts our converters in the place of TorchTitan's two of the same names.

    TorchTitan registers its own on import and ``register_model_converter`` refuses a second of a name, so the table is
    written to. Its check against mixed formats is an assertion; ours says what to do.
    """
    table = model_converter._registry_model_converter_cls
    table[GROUPED_MM] = GroupedMMConverter
    table[LINEAR] = LinearConverter
    QuantizationConverter._validate = staticmethod(check_one_quantisation)
    modules.EXPERT_CLASSES |= {
        GroupedExperts: MXFP8GroupedExperts,
        GptOssGroupedExperts: MXFP8GptOssGroupedExperts,
    }
