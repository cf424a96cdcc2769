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
from torchtitan.trainer import Trainer

from titan_mxfp8.modules import Dispatch, interleaved
from titan_mxfp8.moe.layer import Dispatched
from titan_mxfp8.ops.experts import Weights
from titan_mxfp8.recipe import Recipe
from titan_mxfp8.titan.dispatch import DispatchingLayers, choose_layers, kept_layers, most_tokens

logger = logging.getLogger(__name__)


class MXFP8RoutedExperts(RoutedExperts):
    """Takes the place of the class of a ``RoutedExperts`` whose experts are converted."""

    mxfp8_layers: DispatchingLayers  # of the model, this one among them

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """As TorchTitan's, and becomes TorchTitan's under tensor parallelism."""
        layers, experts = self.mxfp8_layers, self.inner_experts
        if parallel_dims.tp > 1:
            choose_layers(layers.dispatch, experts.mxfp8.recipe, [(experts.mxfp8_fqn, "tensor parallelism")])
            self.__class__ = RoutedExperts
            self.parallelize(parallel_dims)
        else:
            super().parallelize(parallel_dims)
            compiled = "; where it compiles the model, TorchTitan dispatches" * (self._group() is not None)
            _log_once(layers.connect(self._group(), utils.get_local_device()) + compiled)

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
        experts, dispatch = self.inner_experts, self.mxfp8_layers.dispatch
        y_TD = experts.mxfp8_moe(
            x_BLD.flatten(0, 1),
            topk_scores_BLK.flatten(0, 1),
            topk_expert_ids_BLK.flatten(0, 1),
            _parameters(experts),
            self._group(),
            Dispatched(dispatch.transport, dispatch.rows, limit=getattr(experts, "swiglu_limit", None)),
        )
        return y_TD.view_as(x_BLD)

    def _group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks of expert parallelism, which TorchTitan tells the dispatcher."""
        mesh = self.token_dispatcher.ep_mesh
        return None if mesh is None else mesh.get_group()


def dispatch_tokens(
    model: nn.Module, converted: list[str], dispatch: Dispatch, recipe: Recipe, config: Trainer.Config | None
) -> None:
    """Has the MoE layers around converted experts dispatch their own tokens.

    Args:
        converted: names of converted expert modules.
        config: of the trainer that builds the model; None: none does.

    Raises:
        ValueError: as ``choose_layers``.
    """
    reasons = [(fqn, _not_for_layer(model.get_submodule(fqn.rpartition(".")[0]))) for fqn in converted]
    layers = [model.get_submodule(fqn.rpartition(".")[0]) for fqn in choose_layers(dispatch, recipe, reasons)]
    for layer in layers:
        layer.__class__ = MXFP8RoutedExperts
        layer.mxfp8_layers = _dispatching_layers(layer, len(layers), dispatch, config)


def _not_for_layer(layer: nn.Module) -> str:
    """Why a layer around experts cannot dispatch its own tokens, in words; nothing where it can."""
    if type(layer) is not RoutedExperts:
        return f"experts in a {type(layer).__name__}"
    if type(layer.token_dispatcher) is not AllToAllTokenDispatcher:
        return f"a {type(layer.token_dispatcher).__name__}"
    cls = layer.inner_experts.mxfp8_converted_from
    return "" if cls in (GroupedExperts, GptOssGroupedExperts) else f"experts of class {cls.__name__}"


def _dispatching_layers(
    layer: RoutedExperts, count: int, dispatch: Dispatch, config: Trainer.Config | None
) -> DispatchingLayers:
    """What ``count`` layers like this one need. TorchTitan validates on batches of the training's size. Where it
    compiles the model it dispatches itself, and nobody needs room."""
    experts = layer.inner_experts
    w2 = experts.mlp2_weight_EDF if isinstance(experts, GptOssGroupedExperts) else experts.w2_EDF
    compiled = config is not None and config.compile.enable and "model" in config.compile.components
    kept, rows = 1, None
    if config is not None:
        kept = kept_layers(count, config.parallelism, config.activation_checkpoint is not None)
        rows = None if compiled else most_tokens(config.training, config.parallelism)
    return DispatchingLayers(
        dispatch=dispatch,
        count=count,
        kept=kept,
        rows=rows,
        top_k=layer.token_dispatcher.top_k,
        experts=w2.shape[0],
        dim=w2.shape[1],
        hidden=w2.shape[2],
    )


def _parameters(experts: GroupedExperts) -> Weights:
    """This rank's, as they are: fp32 too is quantised in one pass."""
    if not isinstance(experts, GptOssGroupedExperts):
        return Weights(_local(experts.w1_EFD), _local(experts.w3_EFD), _local(experts.w2_EDF))
    w1, w3 = interleaved(_local(experts.mlp1_weight_EGD))
    b1, b3 = interleaved(_local(experts.mlp1_bias_EG))
    return Weights(w1, w3, _local(experts.mlp2_weight_EDF), b1, b3, _local(experts.mlp2_bias_ED))


def _local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


@cache
def _log_once(line: str) -> None:
    logger.info(line)
