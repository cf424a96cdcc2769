"""``experts`` unless ``dispatch`` is off: TorchTitan's routed experts, with ``mxfp8_moe`` in place of all behind the
router.

    TorchTitan:  token_dispatcher.dispatch -> inner_experts -> token_dispatcher.combine
    here:        mxfp8_moe, over the dispatcher's ranks

The class of ``routed_experts`` is swapped when the model has been built; both of its children stay, with their names.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.tools import utils
from torchtitan.trainer import Trainer

from titan_mxfp8.logs import log_once
from titan_mxfp8.modules import Dispatch, interleaved
from titan_mxfp8.moe.layer import Dispatched
from titan_mxfp8.ops.experts import Weights
from titan_mxfp8.recipe import Recipe
from titan_mxfp8.titan.dispatch import (
    LAYERS,
    DispatchingLayers,
    choose_layers,
    kept_layers,
    let_compiled_layers_grow,
    most_tokens,
)
from titan_mxfp8.titan.fsdp import shard_without_experts
from titan_mxfp8.titan.gather import gather_quantized
from titan_mxfp8.titan03.classes import local_parameters
from titan_mxfp8.workarounds.patch import around

logger = logging.getLogger(__name__)

_USERS_OF_FSDP = "distributed.fsdp", "models.deepseek_v3.mtp", "models.qwen3.parallelize", "models.gpt_oss.parallelize"
_APPLY_FSDP = [f"torchtitan.{module}.apply_fsdp_to_decoder" for module in _USERS_OF_FSDP]


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
            line = layers.connect(self._group(), utils.get_local_device())
            log_once(logger, line + "; where it compiles the model, TorchTitan dispatches" * self._is_counted())

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """The names are TorchTitan's, which looks for them."""
        if torch.compiler.is_compiling() and self._is_counted():
            # TorchTitan compiles whole blocks, and Dynamo loses how many rows land here (PendingUnbackedSymbolNotFound)
            return super().forward(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E)
        experts, layers = self.inner_experts, self.mxfp8_layers
        limit = getattr(experts, "swiglu_limit", None)
        y_TD = experts.mxfp8_moe(
            x_BLD.flatten(0, 1),
            topk_scores_BLK.flatten(0, 1),
            topk_expert_ids_BLK.flatten(0, 1),
            _parameters(experts),
            self._group(),
            Dispatched(layers.dispatch.transport, self._rows(), layers.rows, limit),
            gathered=experts.gathered,
        )
        return y_TD.view_as(x_BLD)

    def _group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks of expert parallelism, which TorchTitan tells the dispatcher."""
        mesh = self.token_dispatcher.ep_mesh
        return None if mesh is None else mesh.get_group()

    def _is_counted(self) -> bool:
        """Whether the host reads how many rows land here."""
        return self.token_dispatcher.ep_mesh is not None and self._rows() == "counted"

    def _rows(self) -> str:
        """Those of ``mxfp8_moe``. Nobody runs a validation's batch again."""
        return self.mxfp8_layers.dispatch.rows if self.training else "counted"


def dispatch_tokens(
    model: nn.Module,
    converted: list[str],
    dispatch: Dispatch,
    chooses_rows: bool,
    recipe: Recipe,
    config: Trainer.Config | None,
) -> None:
    """Has the MoE layers around converted experts dispatch their own tokens.

    Args:
        converted: names of converted expert modules.
        chooses_rows: whether the rows of ``dispatch`` are left to us.
        config: of the trainer that builds the model; None: none does.

    Raises:
        ValueError: as ``choose_layers``.
    """
    reasons = [(fqn, _not_for_layer(model.get_submodule(fqn.rpartition(".")[0]))) for fqn in converted]
    layers = [model.get_submodule(fqn.rpartition(".")[0]) for fqn in choose_layers(dispatch, recipe, reasons)]
    if not layers:
        return
    sizes = _dispatching_layers(layers, dispatch, chooses_rows, config)
    if config is not None and config.compile.enable:
        let_compiled_layers_grow()
    setattr(model, LAYERS, sizes)
    for layer in layers:
        layer.__class__ = MXFP8RoutedExperts
        layer.mxfp8_layers = sizes


def _not_for_layer(layer: nn.Module) -> str:
    """Why a layer around experts cannot dispatch its own tokens, in words; nothing where it can."""
    if type(layer) is not RoutedExperts:
        return f"experts in a {type(layer).__name__}"
    if type(layer.token_dispatcher) is not AllToAllTokenDispatcher:
        return f"a {type(layer.token_dispatcher).__name__}"
    cls = layer.inner_experts.mxfp8_converted_from
    return "" if cls in (GroupedExperts, GptOssGroupedExperts) else f"experts of class {cls.__name__}"


def _dispatching_layers(
    layers: list[RoutedExperts], dispatch: Dispatch, chooses_rows: bool, config: Trainer.Config | None
) -> DispatchingLayers:
    """What these layers of a model need. TorchTitan validates on batches of the training's size. Where it
    dispatches itself, in a model that it compiles, nobody needs room."""
    experts, count, once = layers[0].inner_experts, len(layers), ""
    w2 = experts.mlp2_weight_EDF if isinstance(experts, GptOssGroupedExperts) else experts.w2_EDF
    compiled = config is not None and config.compile.enable and "model" in config.compile.components
    kept, rows = 1, None
    if config is not None:
        once = "pipeline parallelism" * (config.parallelism.pipeline_parallel_degree > 1)
        kept = kept_layers(count, config.parallelism, config.activation_checkpoint is not None)
        nobodys = compiled and dispatch.rows == "counted" and not chooses_rows
        rows = None if nobodys else most_tokens(config.training, config.parallelism)
    return DispatchingLayers(
        dispatch=dispatch,
        chooses_rows=chooses_rows,
        once=once,
        count=count,
        kept=kept,
        rows=rows,
        top_k=layers[0].token_dispatcher.top_k,
        experts=w2.shape[0],
        dim=w2.shape[1],
        hidden=w2.shape[2],
    )


def weights_of(model_parts: list[nn.Module], compiled: bool) -> dict[GroupedExperts, Callable[[], Weights]]:
    """The experts of layers that dispatch their own tokens, and what gives their weights. With ``compiled`` those that
    TorchTitan dispatches nevertheless are left out."""
    layers = [layer for part in model_parts for layer in part.modules() if isinstance(layer, MXFP8RoutedExperts)]
    experts = [layer.inner_experts for layer in layers if not (compiled and layer._is_counted())]
    return {each: partial(_parameters, each) for each in experts}


def _parameters(experts: GroupedExperts) -> Weights:
    """This rank's, as they are: fp32 too is quantised in one pass."""
    if not isinstance(experts, GptOssGroupedExperts):
        return local_parameters(experts)
    w1, w3 = interleaved(_local(experts.mlp1_weight_EGD))
    b1, b3 = interleaved(_local(experts.mlp1_bias_EG))
    return Weights(w1, w3, _local(experts.mlp2_weight_EDF), b1, b3, _local(experts.mlp2_bias_ED))


def _local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


@around(*_APPLY_FSDP)
def leave_experts_out_of_fsdp(apply_fsdp: Any, *args: Any, **kwargs: Any) -> None:
    """Has FSDP leave experts alone that it would not shard."""
    shard_without_experts(apply_fsdp, *args, **kwargs)


@around(*_APPLY_FSDP)
def gather_experts_in_fp8(apply_fsdp: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Has FSDP gather experts in FP8 where it can."""
    apply_fsdp(model, *args, **kwargs)
    gather_quantized(model)
