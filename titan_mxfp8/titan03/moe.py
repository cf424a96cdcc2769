"""TorchTitan's experts with MXFP8 GEMMs; unless ``dispatch`` is off its routed experts, with ``mxfp8_moe`` in place of
all behind the router.

    TorchTitan:  token_dispatcher.dispatch -> inner_experts -> token_dispatcher.combine
    here:        mxfp8_moe, over the dispatcher's ranks

The class of ``routed_experts`` is swapped when the model has been built; both of its children stay, with their names.
"""

import logging
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.tools import utils
from torchtitan.trainer import Trainer

from titan_mxfp8.logs import log_once
from titan_mxfp8.modules import EXPERT_CLASSES, ConvertedModule
from titan_mxfp8.ops.experts import Weights
from titan_mxfp8.titan.dispatch import (
    LAYERS,
    DispatchingLayers,
    allow_compiled_versions,
    choose_layers,
    gpt_oss_weights,
    kept_layers,
    local,
    most_tokens,
)
from titan_mxfp8.titan.fields import compiles_model

logger = logging.getLogger(__name__)


class _MXFP8Seam(ConvertedModule):
    """Mixed into an expert class: TorchTitan's own forward calls this for each of its GEMMs."""

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return self.mxfp8_grouped_mm(A, B_t, offs)


class MXFP8GroupedExperts(_MXFP8Seam, GroupedExperts):
    """Takes the place of the class of a ``GroupedExperts``."""

    needs_fsdp = ""
    gathers = "w1_EFD", "w3_EFD", "w2_EDF"

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """TorchTitan's, unless FSDP has gathered the weights in FP8, which that could not read."""
        if not self.gathered:
            return super().forward(x_RD, num_tokens_per_expert_E)
        offs = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        return self.mxfp8_experts(x_RD.bfloat16(), local_parameters(self), offs).type_as(x_RD)


def local_parameters(experts: GroupedExperts) -> Weights:
    """This rank's, as they are: fp32 too is quantised in one pass. They get the gradients of what was gathered in FP8,
    too."""
    if not isinstance(experts, GptOssGroupedExperts):
        return Weights(local(experts.w1_EFD), local(experts.w3_EFD), local(experts.w2_EDF))
    return gpt_oss_weights(experts.mlp1_weight_EGD, experts.mlp1_bias_EG, experts.mlp2_weight_EDF, experts.mlp2_bias_ED)


@cache
def expert_class(cls: type[GroupedExperts]) -> type[GroupedExperts]:
    """The class that takes the place of ``cls``: ``GroupedExperts``, gpt_oss's, or one of the user's."""
    if cls is GroupedExperts:
        return MXFP8GroupedExperts
    members = {"needs_fsdp": ""} if cls is GptOssGroupedExperts else {}
    return type(f"MXFP8{cls.__name__}", (_MXFP8Seam, cls), members)


EXPERT_CLASSES |= {cls: expert_class(cls) for cls in (GroupedExperts, GptOssGroupedExperts)}


class MXFP8RoutedExperts(RoutedExperts):
    """Takes the place of the class of a ``RoutedExperts`` whose experts are converted."""

    mxfp8_layers: DispatchingLayers  # of the model, this one among them

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """As TorchTitan's, and becomes TorchTitan's under tensor parallelism."""
        layers, experts = self.mxfp8_layers, self.inner_experts
        if parallel_dims.tp > 1:
            choose_layers(layers.transport, experts.mxfp8.recipe, [(experts.mxfp8_fqn, "tensor parallelism")])
            self.__class__ = RoutedExperts
            self.parallelize(parallel_dims)
        else:
            super().parallelize(parallel_dims)
            line = layers.connect(self._group(), utils.get_local_device())
            log_once(logger, line + "; where it compiles the model, TorchTitan dispatches" * self._is_counted())

    def forward(
        self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:
        """The names are TorchTitan's, which looks for them."""
        if torch.compiler.is_compiling() and self._is_counted():
            # TorchTitan compiles whole blocks, each as one graph, which counted rows would break
            return super().forward(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E)
        experts = self.inner_experts
        y_TD = experts.mxfp8_moe(
            x_BLD.flatten(0, 1),
            topk_scores_BLK.flatten(0, 1),
            topk_expert_ids_BLK.flatten(0, 1),
            local_parameters(experts),
            self._group(),
            self.mxfp8_layers.options(self.training, getattr(experts, "swiglu_limit", None)),
        )
        return y_TD.view_as(x_BLD)

    def _group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks of expert parallelism, which TorchTitan tells the dispatcher."""
        mesh = self.token_dispatcher.ep_mesh
        return None if mesh is None else mesh.get_group()

    def _is_counted(self) -> bool:
        """Whether the host reads how many rows land here."""
        return self.token_dispatcher.ep_mesh is not None and self.mxfp8_layers.are_counted(self.training)


def dispatch_tokens(
    model: nn.Module, converted: list[str], transport: str, rows: str | float, config: Trainer.Config | None
) -> None:
    """Has the MoE layers around converted experts, named so, dispatch their own tokens as the fields ``dispatch`` and
    ``dispatch_rows`` say; ``config`` is of the trainer that builds the model, if one does. ValueError as
    ``choose_layers``."""
    recipe = model.get_submodule(converted[0]).mxfp8.recipe
    around = {fqn: model.get_submodule(fqn.rpartition(".")[0]) for fqn in converted}
    reasons = [(fqn, _not_for_layer(layer)) for fqn, layer in around.items()]
    layers = [around[fqn] for fqn in choose_layers(transport, recipe, reasons)]
    if not layers:
        return
    shared = _dispatching_layers(layers, transport, rows, config)
    if config is not None and config.compile.enable:
        allow_compiled_versions()
    setattr(model, LAYERS, shared)
    for layer in layers:
        layer.__class__ = MXFP8RoutedExperts
        setattr(layer, LAYERS, shared)


def _not_for_layer(layer: nn.Module) -> str:
    """Why a layer around experts cannot dispatch its own tokens, in words; nothing where it can."""
    if type(layer) is not RoutedExperts:
        return f"experts in a {type(layer).__name__}"
    if type(layer.token_dispatcher) is not AllToAllTokenDispatcher:
        return f"a {type(layer.token_dispatcher).__name__}"
    cls = layer.inner_experts.mxfp8_converted_from
    return "" if cls in (GroupedExperts, GptOssGroupedExperts) else f"experts of class {cls.__name__}"


def _dispatching_layers(
    layers: list[RoutedExperts], transport: str, rows: str | float, config: Trainer.Config | None
) -> DispatchingLayers:
    """What these layers of a model need. TorchTitan validates on batches of the training's size. Where it
    dispatches itself, in a model that it compiles, nobody needs room."""
    experts, once, kept, tokens = layers[0].inner_experts, "", 1, None
    w2 = experts.mlp2_weight_EDF if isinstance(experts, GptOssGroupedExperts) else experts.w2_EDF
    if config is not None:
        once = "pipeline parallelism" * (config.parallelism.pipeline_parallel_degree > 1)
        kept = kept_layers(len(layers), config.parallelism, config.activation_checkpoint is not None)
        counted = compiles_model(config) and rows == "counted"
        tokens = None if counted else most_tokens(config.training, config.parallelism)
    return DispatchingLayers(
        transport=transport,
        rows=rows,
        once=once,
        count=len(layers),
        kept=kept,
        max_tokens=tokens,
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
    return {each: partial(local_parameters, each) for each in experts}
