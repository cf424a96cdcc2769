"""``experts`` unless ``dispatch`` is off: TorchTitan's routed experts, with ``mxfp8_moe`` in place of all behind the
router.

    TorchTitan:  token_dispatcher.dispatch -> inner_experts -> token_dispatcher.combine
    here:        mxfp8_moe, over the dispatcher's ranks

The class of ``routed_experts`` is swapped when the model has been built; both of its children stay, with their names.
"""

import logging
from functools import cache
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.tools import utils
from torchtitan.trainer import Trainer

from titan_mxfp8.format.mx import ceil_div
from titan_mxfp8.modules import ConvertedModule, Dispatch, check_memory, interleaved, worst_case_bytes
from titan_mxfp8.moe.layer import Dispatched
from titan_mxfp8.ops.experts import Weights
from titan_mxfp8.recipe import Recipe

logger = logging.getLogger(__name__)

# The whole config of the model that is built next, or None where there is no trainer.
run = SimpleNamespace(config=None)


class MXFP8RoutedExperts(RoutedExperts):
    """Takes the place of the class of a ``RoutedExperts`` whose experts are converted."""

    mxfp8_dispatch: Dispatch
    mxfp8_most_rows: int | None  # that a rank sends in one forward
    mxfp8_saved_layers: int  # how many such layers of a rank keep their rows for backward

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """As TorchTitan's, and becomes TorchTitan's under tensor parallelism."""
        dispatch = self.mxfp8_dispatch
        if parallel_dims.tp > 1:
            _log_once(f"MXFP8: dispatch {dispatch.transport} stays off with tensor parallelism")
            self.__class__ = RoutedExperts
            self.parallelize(parallel_dims)
        else:
            super().parallelize(parallel_dims)
            device = utils.get_local_device()
            choice = dispatch.connect(self._group(), device, self.mxfp8_most_rows)
            if dispatch.rows == "worst_case" and device.type == "cuda":
                self.check_worst_case(parallel_dims.ep, torch.cuda.get_device_properties(device).total_memory)
            compiled = "; where it compiles the model, TorchTitan dispatches" * (self._group() is not None)
            _log_once(f"MXFP8: dispatch {choice}{compiled}")

    def check_worst_case(self, ranks: int, available: float) -> None:
        """Raises ValueError if a GPU has fewer bytes than ``worst_case`` needs at least for the layers of a model."""
        if self.mxfp8_most_rows is None:
            return
        experts = self.inner_experts
        w2 = experts.mlp2_weight_EDF if isinstance(experts, GptOssGroupedExperts) else experts.w2_EDF
        needed = worst_case_bytes(
            tokens=self.mxfp8_most_rows,
            ranks=ranks,
            top_k=self.token_dispatcher.top_k,
            experts=w2.shape[0],
            dim=w2.shape[1],
            hidden=w2.shape[2],
            saved_layers=self.mxfp8_saved_layers,
        )
        check_memory(needed, available, "MXFP8: ", ", or activation checkpointing" * (self.mxfp8_saved_layers > 1))

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


def remember(config: object) -> None:
    """Keeps the config of a trainer, whose model is built next, for the sizes of its batches."""
    run.config = config if isinstance(config, Trainer.Config) else None


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
        module.mxfp8_dispatch, module.mxfp8_most_rows = dispatch, _most_rows()
        swapped.append(name)
    for name in swapped:
        model.get_submodule(name).mxfp8_saved_layers = _saved_layers(len(swapped))
    count = f"{len(swapped)} MoE layer{'s' * (len(swapped) != 1)}"
    logger.info(f"MXFP8: {count} with dispatch {dispatch.transport}, rows {dispatch.rows}")


def _most_rows() -> int | None:
    """The most tokens that a rank has in one forward. TorchTitan validates on batches of the training's size. None:
    nobody knows, or TorchTitan dispatches, since it compiles the model."""
    if run.config is None or (run.config.compile.enable and "model" in run.config.compile.components):
        return None
    training, parallelism = run.config.training, run.config.parallelism
    pipelined = parallelism.pipeline_parallel_degree > 1
    sequences = parallelism.pipeline_parallel_microbatch_size if pipelined else training.local_batch_size
    return sequences * training.seq_len // parallelism.context_parallel_degree


def _saved_layers(layers: int) -> int:
    """How many of a model's layers a rank keeps until backward, at least."""
    if run.config is None or run.config.activation_checkpoint is not None:
        return 1
    return ceil_div(layers, run.config.parallelism.pipeline_parallel_degree)


def _parameters(experts: GroupedExperts) -> Weights:
    """This rank's, in bf16."""
    if not isinstance(experts, GptOssGroupedExperts):
        return Weights(*(_local(w).bfloat16() for w in (experts.w1_EFD, experts.w3_EFD, experts.w2_EDF)))
    w1, w3 = interleaved(_local(experts.mlp1_weight_EGD).bfloat16())
    b1, b3 = interleaved(_local(experts.mlp1_bias_EG))
    return Weights(w1, w3, _local(experts.mlp2_weight_EDF).bfloat16(), b1, b3, _local(experts.mlp2_bias_ED))


def _local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


@cache
def _log_once(line: str) -> None:
    logger.info(line)
