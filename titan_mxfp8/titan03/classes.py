"""The MXFP8 classes of TorchTitan 0.3's own modules."""

from functools import cache

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from titan_mxfp8.modules import ConvertedModule, MXFP8Linear


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


@cache
def expert_class(cls: type[GroupedExperts]) -> type[GroupedExperts]:
    """The class that takes the place of ``cls``: ``GroupedExperts``, gpt_oss's, or one of the user's."""
    members = {"needs_fsdp": ""} if cls in (GroupedExperts, GptOssGroupedExperts) else {}
    return type(f"MXFP8{cls.__name__}", (_MXFP8Seam, cls), members)
