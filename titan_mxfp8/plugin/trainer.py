"""What a trainer's steps get: CUDA graphs, another run where rows did not fit, weights that are quantised once, and
what is measured in the logs."""

import logging
from functools import partial
from typing import Any

from torch import Tensor, nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts
from torchtitan.models.moe.moe import GroupedExperts

from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.plugin.experts import RoutedExperts
from titan_mxfp8.plugin.job_config import has_our_fields
from titan_mxfp8.recipe import GROUPED_MM
from titan_mxfp8.titan.cuda_graph import GRAPH, StepGraph, group_of, waits_for_rows, waits_in_bf16
from titan_mxfp8.titan.once import quantize_once
from titan_mxfp8.titan.rerun import watch_steps
from titan_mxfp8.titan.telemetry import log_steps
from titan_mxfp8.workarounds.patch import around

logger = logging.getLogger(__name__)


@around("torchtitan.components.checkpoint.CheckpointManager.__init__")
def change_steps(init: Any, manager: CheckpointManager, *args: Any, **kwargs: Any) -> None:
    """Every trainer gives itself to its checkpoint manager, when it has its model, whatever the class of the trainer:
    TorchTitan's own is in ``__main__``. Its steps are captured if it asks for that, run again where rows did not fit,
    quantise weights once, and log what is measured."""
    init(manager, *args, **kwargs)
    if "train_state" not in kwargs.get("states", {}):
        return
    trainer = kwargs["states"]["train_state"]
    if has_our_fields(getattr(trainer, "job_config", None)) and trainer.job_config.training.cuda_graph != "off":
        _capture(trainer, required=trainer.job_config.training.cuda_graph == "on")
    watch_steps(trainer)
    modules = [module for part in trainer.model_parts for module in part.modules()]
    quantize_once(trainer, {each: partial(each.weights, False) for each in modules if isinstance(each, RoutedExperts)})
    log_steps(trainer)


def _capture(trainer: Any, required: bool) -> None:
    eager, (model,) = trainer.forward_backward_step, trainer.model_parts

    def step(batch: dict[str, Any], valid_tokens: Tensor) -> Tensor:
        inputs = dict(batch)
        return eager(labels=inputs.pop("labels"), input_dict=inputs, global_valid_tokens=valid_tokens)

    if waits_for_rows(model):
        logger.info("MXFP8: no CUDA graphs, as rows are counted (dispatch_rows): the host waits for them")
        return
    if _waits_for_bf16(trainer, model):
        reason = f"experts left in bf16, for whose rows the host waits: convert all ([{GROUPED_MM}] fqns)"
        if required:
            raise ValueError(f"training.cuda_graph = 'on' does not work with {reason}, or set cuda_graph = 'off'")
        logger.info(f"MXFP8: no CUDA graphs (training.cuda_graph = 'auto') with {reason}")
        return
    graph = StepGraph(step, model, trainer.device, group_of(trainer), required)

    def forward_backward_step(
        *, input_dict: dict[str, Tensor], labels: Tensor, global_valid_tokens: float | Tensor
    ) -> Tensor:
        return graph.run({**input_dict, "labels": labels}, global_valid_tokens)

    setattr(trainer, GRAPH, graph)
    trainer.forward_backward_step = forward_backward_step


def _waits_for_bf16(trainer: Any, model: nn.Module) -> bool:
    """Whether the host waits for the rows of experts that were not converted: as TorchTitan dispatches their tokens, as
    they are gpt_oss's or do without torch._grouped_mm, or on GPUs where that waits."""
    titans = [each for each in model.modules() if isinstance(each, GroupedExperts | GptOssGroupedExperts)]
    left = [each for each in titans if not isinstance(each, RoutedExperts)]
    wait = trainer.parallel_dims.ep > 1 or waits_in_bf16(hardware_of(trainer.device))
    return any(wait or isinstance(each, GptOssGroupedExperts) or not each.use_grouped_mm for each in left)


@around("torchtitan.components.checkpoint.CheckpointManager.close")
def destroy_graphs(close: Any, manager: CheckpointManager) -> None:
    """Destroys the graphs of a trainer that closes, before the process group, which would wait for them for ever."""
    trainer = getattr(manager, "states", {}).get("train_state")
    if graph := getattr(trainer, GRAPH, None):
        graph.discard()
    close(manager)
