"""``experts`` unless ``dispatch`` is off: TorchTitan's routed experts, with ``mxfp8_moe`` in place of all behind the
router.

    TorchTitan:  token_dispatcher.dispatch -> inner_experts -> token_dispatcher.combine
    here:        mxfp8_moe, over the dispatcher's ranks

The class of ``routed_experts`` is swapped when the model has been built; both of its children stay, with their names.
"""

import logging
from functools import cache

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.tools import utils

from titan_mxfp8.modules import ConvertedModule, Dispatch, interleaved
from titan_mxfp8.recipe import Recipe

logger = logging.getLogger(__name__)


class MXFP8RoutedExperts(RoutedExperts):
    """Takes the place of the class of a ``RoutedExperts`` whose experts are converted."""

    mxfp8_dispatch: Dispatch

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """As TorchTitan's, and becomes TorchTitan's under tensor parallelism."""
        dispatch = self.mxfp8_dispatch
        if parallel_dims.tp > 1:
            _log_once(f"MXFP8: dispatch {dispatch.transport} stays off with tensor parallelism")
            self.__class__ = RoutedExperts
            self.parallelize(parallel_dims)
        else:
            super().parallelize(parallel_dims)
            choice = dispatch.connect(self._group(), utils.get_local_device())
            compiled = "; where it compiles the model, TorchTitan dispatches" * (self._group() is not None)
            _log_once(f"MXFP8: dispatch {choice}{compiled}")

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """The names are TorchTitan's, which looks for them."""
        if torch.compiler.is_compiling() and self.token_dispatcher.ep_mesh is not None:
            # TorchTitan compiles whole blocks, and Dynamo loses how many rows land here (PendingUnbackedSymbolNotFound)
            return super().forward(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E)
        experts, dispatch = self.inner_experts, self.mxfp8_dispatch
        weights, biases = _parameters(experts)
        y_TD = experts.mxfp8_moe(
            x_BLD.flatten(0, 1),
            topk_scores_BLK.flatten(0, 1),
            topk_expert_ids_BLK.flatten(0, 1),
            weights,
            self._group(),
            transport=dispatch.transport,
            rows=dispatch.rows,
            **biases,
        )
        return y_TD.view_as(x_BLD)

    def _group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks of expert parallelism, which TorchTitan tells the dispatcher."""
        mesh = self.token_dispatcher.ep_mesh
        return None if mesh is None else mesh.get_group()


def dispatch_tokens(model: nn.Module, dispatch: Dispatch, recipe: Recipe) -> None:
    """Has the MoE layers around converted experts dispatch their own tokens. Those that keep TorchTitan's way are
    logged, with the reason."""
    if refusal := dispatch.refusal(recipe):
        logger.info(f"MXFP8: dispatch = {dispatch.transport!r} does not work with {refusal}: TorchTitan dispatches")
        return
    swapped = []
    for name, module in model.named_modules():
        if not (isinstance(module, RoutedExperts) and isinstance(module.inner_experts, ConvertedModule)):
            continue
        parts = (module, module.token_dispatcher)
        kinds = [type(part).__name__ for part in parts if type(part) not in (RoutedExperts, AllToAllTokenDispatcher)]
        if module.inner_experts.mxfp8_converted_from not in (GroupedExperts, GptOssGroupedExperts):
            kinds.append(module.inner_experts.mxfp8_converted_from.__name__)
        if kinds:
            logger.info(f"MXFP8: dispatch = {dispatch.transport!r}: {name} keeps TorchTitan's, its {kinds[0]}")
            continue
        module.__class__ = MXFP8RoutedExperts
        module.mxfp8_dispatch = dispatch
        swapped.append(name)
    count = f"{len(swapped)} MoE layer{'s' * (len(swapped) != 1)}"
    logger.info(f"MXFP8: {count} with dispatch {dispatch.transport}, rows {dispatch.rows}")


def _parameters(experts: GroupedExperts) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor | float]]:
    """This rank's w1, w3 and w2; and what gpt_oss's experts have besides."""
    if not isinstance(experts, GptOssGroupedExperts):
        return tuple(_local(w).bfloat16() for w in (experts.w1_EFD, experts.w3_EFD, experts.w2_EDF)), {}
    w1, w3 = interleaved(_local(experts.mlp1_weight_EGD).bfloat16())
    b1, b3 = interleaved(_local(experts.mlp1_bias_EG))
    biases = {"b1": b1, "b3": b3, "b2": _local(experts.mlp2_bias_ED), "swiglu_limit": experts.swiglu_limit}
    return (w1, w3, _local(experts.mlp2_weight_EDF).bfloat16()), biases


def _local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


@cache
def _log_once(line: str) -> None:
    logger.info(line)
