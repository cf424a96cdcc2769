"""TorchTitan's expert modules with MXFP8 GEMMs: ``GroupedExperts`` (llama4, deepseek_v3, qwen3) and gpt_oss's.

Each class has one path: the loop over experts that TorchTitan falls back to below SM90 (``use_grouped_mm = false``)
would leave the experts in bf16, and padding of the token groups is not needed. Where the layer dispatches its tokens
itself (moe.py), a module is called with tokens in their own order and their routing, and ``mxfp8_moe`` does all else.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts, ScaleBiasForward
from torchtitan.models.moe.moe import GroupedExperts

from titan_mxfp8.modules import ConvertedModule
from titan_mxfp8.ops.experts import Weights
from titan_mxfp8.titan.dispatch import DispatchingLayers, gpt_oss_weights, local


class Routing:
    """Where the tokens go: fp32 scores (T, K) and expert_ids (T, K), numbers among all experts; whether scores multiply
    the tokens, and not the experts' outputs. No dataclass and no tuple: in those FSDP would cast the scores to bf16."""

    def __init__(self, scores: torch.Tensor, expert_ids: torch.Tensor, scores_first: bool) -> None:
        self.scores, self.expert_ids, self.scores_first = scores, expert_ids, scores_first


class RoutedExperts(ConvertedModule):
    """Mixed into both classes. ``mxfp8_layers`` is None where TorchTitan dispatches."""

    mxfp8_layers: DispatchingLayers | None = None
    needs_fsdp = ""

    def forward(self, x: torch.Tensor, tokens: torch.Tensor | Routing) -> torch.Tensor:
        """``x`` (M, D) sorted by expert and the number of tokens of each: rows past the last expert's give zeros. Or
        (T, D) tokens and their ``Routing``."""
        is_sorted, limit = not isinstance(tokens, Routing), getattr(self, "swiglu_limit", None)
        weights = self.weights(is_sorted)
        if is_sorted:
            offs = torch.cumsum(tokens, dim=0, dtype=torch.int32)
            return self.mxfp8_experts(x.bfloat16(), weights, offs, limit).type_as(x)
        group, options = expert_parallel_group(next(self.parameters())), self.mxfp8_layers.options(self.training, limit)
        return self.mxfp8_moe(x, tokens.scores, tokens.expert_ids, weights, group, options, tokens.scores_first)

    def waits(self) -> bool:
        """Whether the host waits in a call now for the number of rows that come."""
        counted = self.mxfp8_layers.are_counted(self.training)
        return counted and expert_parallel_group(next(self.parameters())) is not None


class MXFP8GroupedExperts(RoutedExperts, GroupedExperts):
    """Takes the place of the class of a ``GroupedExperts``."""

    gathers = "w1", "w3", "w2"

    def weights(self, is_sorted: bool) -> Weights:
        """This rank's, as they are: fp32 too is quantised in one pass."""
        w1, w3, w2 = self.w1, self.w3, self.w2
        if isinstance(w1, DTensor):
            w1, w3, w2 = w1.to_local(), w3.to_local(), w2.to_local()
        return Weights(w1, w3, w2)


class MXFP8GptOssGroupedExperts(RoutedExperts, GptOssGroupedExperts):
    """Takes the place of the class of a ``GptOssGroupedExperts``."""

    def weights(self, is_sorted: bool) -> Weights:
        """This rank's; with ``is_sorted`` its share of ``b2``, where ranks hold parts of H and their outputs are
        summed. The gradient of ``b2`` is whole on every one."""
        b2 = local(self.mlp2_bias)
        if is_sorted:
            b2 = ScaleBiasForward.apply(b2, contraction_shards(self.mlp2_weight))
        return gpt_oss_weights(self.mlp1_weight, self.mlp1_bias, self.mlp2_weight, b2)


def contraction_shards(w2_EDH: torch.Tensor) -> int:
    """Among how many ranks the last axis of a weight is split: their outputs are partial sums. TorchTitan asks for a
    mesh dimension named ``tp`` instead, and where its name is ``etp`` adds the whole bias on every rank."""
    degree = 1
    for dim, placement in enumerate(getattr(w2_EDH, "placements", ())):
        if placement.is_shard(2):
            degree *= w2_EDH.device_mesh.size(dim)
    return degree


def expert_parallel_group(weight: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks among which expert parallelism has split a weight; None for a whole one."""
    if isinstance(weight, DTensor) and "ep" in (weight.device_mesh.mesh_dim_names or ()):
        return weight.device_mesh.get_group("ep")
    return None
