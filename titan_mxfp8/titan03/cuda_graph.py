"""TorchTitan's CUDA graph of forward, loss and backward, with layers that dispatch their own tokens.

TorchTitan captures unless ``training.disable_cuda_graphs`` is set, and refuses expert parallelism while the config is
parsed, unless the token dispatcher is one of its own that never waits. Our layers have a dispatcher that waits and do
not use it: so it is decided here, when the model has been built and its layers say what they do.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchtitan.distributed.cudagraph import cudagraph_teardown
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, DeepEPTokenDispatcher
from torchtitan.trainer import Trainer

from titan_mxfp8.titan.cuda_graph import GRAPH, fsdp_modules, must_run_eagerly
from titan_mxfp8.titan03.moe import MXFP8RoutedExperts
from titan_mxfp8.workarounds.patch import around

logger = logging.getLogger(__name__)

EXPERTS = "titan_mxfp8.titan03.experts"
CONVERTED = "mxfp8_converts"  # of the class of a config: what of its model is converted


class StepGraph:
    """TorchTitan's graph of one trainer: ``trainer.mxfp8_graph``.

    Args:
        wrap: TorchTitan's, which captures a function and replays it.
        body: forward, loss and backward of a microbatch; a method of the trainer.
    """

    def __init__(self, wrap: Callable[[Callable], Callable], body: Callable[..., torch.Tensor]) -> None:
        self._wrap, self._body, self._captured, self._eager = wrap, body, wrap(body), False
        (self._model,) = body.__self__.model_parts
        self._sharded = fsdp_modules(self._model)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Within, microbatches run eagerly."""
        outer, self._eager = self._eager, True
        try:
            yield
        finally:
            self._eager = outer

    def discard(self) -> None:
        """Destroys the graph. It is captured again, after a microbatch that runs eagerly."""
        cudagraph_teardown()
        self._captured = self._wrap(self._body)

    def run(self, *batch: Any) -> torch.Tensor:
        """One microbatch, with TorchTitan's arguments: eagerly, if it must be."""
        if self._eager or must_run_eagerly(self._model):
            return self._body(*batch)
        for module in self._sharded:  # what a validation left gathered has the weights of that time
            module.reshard()
        return self._captured(*batch)


@around("torchtitan.trainer.Trainer.Config._validate_cuda_graphs")
def leave_expert_parallelism_to_us(validate: Any, config: Trainer.Config) -> None:
    """Has TorchTitan ask nothing of the dispatchers of a model whose experts we convert; it goes on to refuse
    pipelines."""
    ours = any(EXPERTS in (entry, entry[0]) for entry in config.override.imports)
    ours |= config.model_spec is not None and "experts" in getattr(type(config.model_spec.model), CONVERTED, ())
    if not ours or config.parallelism.pipeline_parallel_degree > 1:
        validate(config)


@around("torchtitan.trainer.wrap_with_cuda_graph")
def capture_where_nothing_waits(wrap: Any, body: Any) -> Callable:
    """Called by a trainer that has its model. Where the host waits in a layer, CUDA graphs are switched off, with a log
    line."""
    trainer = body.__self__
    if reason := obstacle(trainer):
        logger.info(f"MXFP8: no CUDA graphs, as if --training.disable_cuda_graphs were set: {reason}")
        trainer.config.training.disable_cuda_graphs = True
        return body
    graph = StepGraph(wrap, body)
    setattr(trainer, GRAPH, graph)
    return graph.run


def obstacle(trainer: Trainer) -> str:
    """What in a trainer's model keeps it from being captured, and what to do, in words; nothing where it can be."""
    (model,) = trainer.model_parts
    if any(isinstance(module, VarlenAttention) for module in model.modules()):
        return "attention of kind varlen, whose tensors change size with a batch's documents: take attn_backend='flex'"
    if trainer.config.parallelism.expert_parallel_degree == 1:
        return ""
    waiting = AllToAllTokenDispatcher, DeepEPTokenDispatcher
    for name, layer in model.named_modules():
        if isinstance(layer, MXFP8RoutedExperts):
            if layer.mxfp8_layers.dispatch.rows == "counted":
                return f"the host waits for the rows of {name} (dispatch_rows = 'counted'): set dispatch_rows='bounded'"
        elif isinstance(layer, RoutedExperts) and isinstance(layer.token_dispatcher, waiting):
            return f"TorchTitan dispatches the tokens of {name}, and the host waits for their numbers"
    return ""
