"""The MXFP8 classes of TorchTitan 0.3's own modules."""

from functools import cache

import torch
from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from titan_mxfp8.modules import ConvertedModule, MXFP8Linear
from titan_mxfp8.ops.experts import Weights
from titan_mxfp8.titan.dispatch import interleaved, local


class MXFP8TitanLinear(MXFP8Linear, Linear):
    """Takes the place of the class of a ``Linear``."""


class MXFP8ScaledBiasRowwiseLinear(MXFP8Linear, ScaledBiasRowwiseLinear):
    """Takes the place of the class of a ``ScaledBiasRowwiseLinear``, gpt_oss's: each TP rank adds its share of bias."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = local(self.weight), local(self.bias)
        return self.mxfp8_linear(input, weight, bias / self.tp_degree)


LINEAR_CLASSES = {Linear: MXFP8TitanLinear, ScaledBiasRowwiseLinear: MXFP8ScaledBiasRowwiseLinear}


class _MXFP8Seam(ConvertedModule):
    """Mixed into an expert class: TorchTitan's own forward calls this for each of its GEMMs."""

    def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return self.mxfp8_grouped_mm(A, B_t, offs)


class MXFP8GroupedExperts(_MXFP8Seam, GroupedExperts):
    """Takes the place of the class of a ``GroupedExperts``."""

    needs_fsdp = ""
    gathers = "w1_EFD", "w3_EFD", "w2_EDF"

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """TorchTitan's, unless FSDP has gathered the weights in FP8, which that could not read."""
        if not self.gathered:
            return super().forward(x_RD, num_tokens_per_expert_E)
        offs = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        y = self.mxfp8_experts(x_RD.bfloat16(), local_parameters(self), offs, gathered=self.gathered)
        return y.type_as(x_RD)


def local_parameters(experts: GroupedExperts) -> Weights:
    """This rank's, as they are: fp32 too is quantised in one pass. They get the gradients of what was gathered in FP8,
    too."""
    if not isinstance(experts, GptOssGroupedExperts):
        return Weights(local(experts.w1_EFD), local(experts.w3_EFD), local(experts.w2_EDF))
    (w1, w3), (b1, b3) = interleaved(local(experts.mlp1_weight_EGD)), interleaved(local(experts.mlp1_bias_EG))
    return Weights(w1, w3, local(experts.mlp2_weight_EDF), b1, b3, local(experts.mlp2_bias_ED))


@cache
def expert_class(cls: type[GroupedExperts]) -> type[GroupedExperts]:
    """The class that takes the place of ``cls``: ``GroupedExperts``, gpt_oss's, or one of the user's."""
    if cls is GroupedExperts:
        return MXFP8GroupedExperts
    members = {"needs_fsdp": ""} if cls is GptOssGroupedExperts else {}
    return type(f"MXFP8{cls.__name__}", (_MXFP8Seam, cls), members)
