"""CUDA graphs of forward, loss and backward under TorchTitan 0.3, with layers that dispatch their own tokens.

TorchTitan captures unless ``training.disable_cuda_graphs`` is set, and refuses expert parallelism while the config is
parsed, unless the token dispatcher is one of its own that never waits. Our layers have a dispatcher that waits and do
not use it: so it is decided here, when the model has been built and its layers say what they do.

Converted models are captured by ``titan/cuda_graph.py``, others by TorchTitan. Its graph adds to gradients which are
zeroed before each step; ours has a graph that writes them, and one that adds to them.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torchtitan.distributed.cudagraph import CUDAGraphInputSpec
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, DeepEPTokenDispatcher
from torchtitan.trainer import Trainer

from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.modules import ConvertedModule
from titan_mxfp8.titan.cuda_graph import GRAPH, StepGraph, group_of, waits_in_bf16
from titan_mxfp8.titan03.moe import MXFP8RoutedExperts
from titan_mxfp8.workarounds.patch import around

logger = logging.getLogger(__name__)

EXPERTS = "titan_mxfp8.titan03.experts"
CONVERTED = "mxfp8_converts"  # of the class of a config: what of its model is converted


@around("torchtitan.trainer.Trainer.Config._validate_cuda_graphs")
def leave_expert_parallelism_to_us(validate: Any, config: Trainer.Config) -> None:
    """Has TorchTitan ask nothing of the dispatchers of a model whose experts we convert; it goes on to refuse
    pipelines. Tells NCCL, as with TorchTitan 0.2.2, to register no memory for graphs."""
    ours = any(EXPERTS in (entry, entry[0]) for entry in config.override.imports)
    ours |= config.model_spec is not None and "experts" in getattr(type(config.model_spec.model), CONVERTED, ())
    if not ours or config.parallelism.pipeline_parallel_degree > 1:
        validate(config)
    if not config.training.disable_cuda_graphs:
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # torch's expandable segments are not made for that


@around("torchtitan.trainer.wrap_with_cuda_graph")
def capture_where_nothing_waits(wrap: Any, body: Any) -> Callable:
    """Called by a trainer that has its model. Where the host waits in a layer, CUDA graphs are switched off, with a log
    line."""
    trainer = body.__self__
    if reason := obstacle(trainer):
        logger.info(f"MXFP8: no CUDA graphs, as if --training.disable_cuda_graphs were set: {reason}")
        trainer.config.training.disable_cuda_graphs = True
        return body
    (model,) = trainer.model_parts
    if not any(isinstance(module, ConvertedModule) for module in model.modules()):
        return wrap(body)
    trainer.config.training.disable_cuda_graphs = True  # TorchTitan's steps are eager ones: it takes gradients away
    spec: CUDAGraphInputSpec | None = None

    def step(batch: dict[str, Any], valid_tokens: Tensor) -> Tensor:
        inputs, labels, *leaves = batch.values()
        return body(inputs, labels, valid_tokens, spec.unflatten(leaves))

    graph = StepGraph(step, model, trainer.device, group_of(trainer))

    def run(inputs: Tensor, labels: Tensor, valid_tokens: Tensor, more: dict[str, Any]) -> Tensor:
        nonlocal spec
        spec = spec or CUDAGraphInputSpec(more)
        leaves = {f"{index}": leaf for index, leaf in enumerate(spec.flatten(more))}  # tensors of masks among them
        return graph.run({"inputs": inputs, "labels": labels, **leaves}, valid_tokens)

    setattr(trainer, GRAPH, graph)
    return run


@around("torchtitan.trainer.Trainer.close")
def destroy_graphs(close: Any, trainer: Trainer) -> None:
    """Destroys the graphs of a trainer that closes, before the process group, which would wait for them for ever."""
    if graph := getattr(trainer, GRAPH, None):
        graph.discard()
    close(trainer)


def obstacle(trainer: Trainer) -> str:
    """What in a trainer's model keeps it from being captured, and what to do, in words; nothing where it can be."""
    (model,) = trainer.model_parts
    if any(isinstance(module, VarlenAttention) for module in model.modules()):
        return "attention of kind varlen, whose tensors change size with a batch's documents: take attn_backend='flex'"
    if waits_in_bf16(hardware_of(trainer.device)):
        for name, layer in model.named_modules():
            if isinstance(layer, GroupedExperts) and not isinstance(layer, ConvertedModule):
                return f"the host waits on this GPU for the rows of {name}, which is in bf16: convert all experts"
    if trainer.config.parallelism.expert_parallel_degree == 1:
        return ""
    waiting = AllToAllTokenDispatcher, DeepEPTokenDispatcher
    for name, layer in model.named_modules():
        if isinstance(layer, MXFP8RoutedExperts):
            if layer.mxfp8_layers.rows == "counted":
                return f"the host waits for the rows of {name} (dispatch_rows = 'counted'): set dispatch_rows='bounded'"
        elif isinstance(layer, RoutedExperts) and isinstance(layer.token_dispatcher, waiting):
            return f"TorchTitan dispatches the tokens of {name}, and the host waits for their numbers"
    return ""
