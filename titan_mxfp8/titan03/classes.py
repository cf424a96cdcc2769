"""The MXFP8 classes of TorchTitan 0.3's own modules."""

from functools import cache

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from titan_mxfp8.modules import ConvertedModule, MXFP8Linear
from titan_mxfp8.ops.experts import Weights


class MXFP8TitanLinear(MXFP8Linear, Linear):
    """Takes the place of the class of a ``Linear``."""


class MXFP8ScaledBiasRowwiseLinear(MXFP8Linear, ScaledBiasRowwiseLinear):
    """Takes the place of the class of a ``ScaledBiasRowwiseLinear``, gpt_oss's: each TP rank adds its share of bias."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = (x.to_local() if isinstance(x, DTensor) else x for x in (self.weight, self.bias))
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
    """This rank's, as they are: they get the gradients of what was gathered in FP8, too."""
    weights = experts.w1_EFD, experts.w3_EFD, experts.w2_EDF
    return Weights(*(w.to_local() if isinstance(w, DTensor) else w for w in weights))


@cache
def expert_class(cls: type[GroupedExperts]) -> type[GroupedExperts]:
    """The class that takes the place of ``cls``: ``GroupedExperts``, gpt_oss's, or one of the user's."""
    if cls is GroupedExperts:
        return MXFP8GroupedExperts
    members = {"needs_fsdp": ""} if cls is GptOssGroupedExperts else {}
    return type(f"MXFP8{cls.__name__}", (_MXFP8Seam, cls), members)
