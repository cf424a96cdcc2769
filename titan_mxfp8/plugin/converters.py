"""``quantize.grouped_mm.mx`` and ``quantize.linear.mx``, as TorchTitan's model converters."""

import logging

import torch
from torch import nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.deepseek_v3.infra import parallelize as deepseek_v3
from torchtitan.models.gpt_oss.infra import parallelize as gpt_oss
from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts
from torchtitan.models.llama3.infra import parallelize as llama3
from torchtitan.models.llama4.infra import parallelize as llama4
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.models.qwen3.infra import parallelize as qwen3
from torchtitan.protocols import model_converter

import titan_mxfp8.ops.library  # noqa: F401 - registers torch.ops.titan_mxfp8
from titan_mxfp8 import modules
from titan_mxfp8.modules import telemetry
from titan_mxfp8.plugin import moe
from titan_mxfp8.plugin.checks import check_one_quantisation
from titan_mxfp8.plugin.experts import MXFP8GptOssGroupedExperts, MXFP8GroupedExperts
from titan_mxfp8.plugin.job_config import MXGroupedMM, MXLinear, recipe_of
from titan_mxfp8.plugin.workarounds.activation_checkpointing import keep_saved_outputs
from titan_mxfp8.recipe import GROUPED_MM, LINEAR

logger = logging.getLogger(__name__)


class _Converter(QuantizationConverter):
    config: MXGroupedMM | MXLinear
    # TorchTitan's own is an assertion; this one says what to do
    _validate = staticmethod(check_one_quantisation)

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims):
        super().__init__(job_config, parallel_dims)
        self.health_every = job_config.quantize.health_every
        keep_saved_outputs(job_config)

    def observe(self, model: nn.Module, converted: list[str]) -> None:
        """Prepares the converted modules for ``quantize.health_every`` and ``hopper_rebase_report``."""
        if self.health_every or self.config.hopper_rebase_report:
            telemetry.attach(model, converted)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing: operands are quantised where they are used."""


class GroupedMMConverter(_Converter):
    """Converts the routed experts that ``quantize.grouped_mm.mx.fqns`` names."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims):
        super().__init__(job_config, parallel_dims)
        self.job_config, self.parallel_dims = job_config, parallel_dims
        self.config = job_config.quantize.grouped_mm.mx

    def convert(self, model: nn.Module) -> None:
        converted = modules.convert_experts(
            model,
            recipe=recipe_of(self.config),
            fqns=self.config.fqns,
            backend=self.config.backend,
            requantize_input=self.config.requantize_input,
        )
        if self.config.dispatch != "off":
            moe.dispatch_tokens(model, converted, self.job_config, self.parallel_dims)
        self.observe(model, converted)


class LinearConverter(_Converter):
    """Converts the linears that ``quantize.linear.mx.filter_fqns`` does not name."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims):
        super().__init__(job_config, parallel_dims)
        self.config = job_config.quantize.linear.mx

    def convert(self, model: nn.Module) -> None:
        converted = modules.convert_linears(
            model,
            recipe=recipe_of(self.config),
            filter_fqns=self.config.filter_fqns,
            backend=self.config.backend,
            requantize_input=self.config.requantize_input,
        )
        self.observe(model, converted)


def register() -> None:
    """Puts our converters in the place of TorchTitan's two of the same names.

    TorchTitan registers its own on import and ``register_model_converter`` refuses a second of a name, so the table is
    written to.
    """
    table = model_converter._registry_model_converter_cls
    table[GROUPED_MM] = GroupedMMConverter
    table[LINEAR] = LinearConverter
    modules.EXPERT_CLASSES |= {
        GroupedExperts: MXFP8GroupedExperts,
        GptOssGroupedExperts: MXFP8GptOssGroupedExperts,
    }


def save_gemm_outputs() -> None:
    """Has selective op-level activation checkpointing save the outputs of the MXFP8 GEMMs, in every TorchTitan model.

    Each model has a set of the operators whose outputs are saved, for all others run again in backward. Of TorchTitan's
    own, every second `mm` is left out; of ours none is. The quantised operands are not saved: they are made again from
    the block's inputs, which costs one pass over memory each, where saving them would keep every weight a second time.
    Experts, and a layer that dispatches its own tokens, are one operator: what its backward needs is saved, and nothing
    sent twice.
    """
    ours = torch.ops.titan_mxfp8
    for model in (deepseek_v3, gpt_oss, llama3, llama4, qwen3):
        for operator in (ours.gemm_m_grouped, ours.experts_forward, ours.moe_forward):
            model._op_sac_save_list.add(operator.default)
