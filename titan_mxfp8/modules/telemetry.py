"""``health_every`` and ``hopper_rebase_report``: what quantisation does to the operands of each converted module, in
the logs, every N steps.

A step begins to be recorded with its first forward pass in training and ends in TorchTitan's
``MetricsProcessor.should_log``, which is called after the optimizer in every step, on every rank, with the step's
number. That number says whether the next step is to be recorded. The first one of a run always is, as its number is not
known yet: a run may go on from a checkpoint.
"""

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titan_mxfp8.modules.convert import training_device
from titan_mxfp8.modules.converted import ConvertedModule
from titan_mxfp8.modules.linear import MXFP8Linear
from titan_mxfp8.ops import observe
from titan_mxfp8.workarounds.patch import is_patched, patch_of

logger = logging.getLogger(__name__)

# Of this process's run.
_region = contextlib.ExitStack()
_due = True  # whether the next forward pass in training begins to record
_names: list[str] | None = None  # of the converted modules of all ranks


def attach(model: nn.Module, converted: list[str]) -> None:
    """Gives converted modules that quantise a probe each, on the device where they will compute, and has ``model``
    begin to record.

    A pipeline's stages are copies of ``model``, with probes and hook.
    """
    global _due, _names
    for module in map(model.get_submodule, converted):
        if module.mxfp8.recipe.quantized:
            module.probe = observe.make_probe(torch.device(training_device().type))
    model.register_forward_pre_hook(_begin)
    _due, _names = True, None


def _begin(part: nn.Module, inputs: tuple[object, ...]) -> None:
    global _due
    if _due and part.training:  # a validation comes between two steps
        _due = False
        _region.enter_context(observe.recording())


def end(processor: Any, step: int, every: dict[str, int]) -> None:
    """Called after a step: logs what was recorded in every N-th one.

    Args:
        processor: TorchTitan's ``MetricsProcessor``.
        every: steps between two logs: of ``health``, and of what rebasing changed in the ``experts`` and in the
            ``linears``; 0: never.
    """
    global _due
    _region.close()
    _due = any(n and (step + 1) % n == 0 for n in every.values())
    measured = {
        module.mxfp8_fqn: module
        for part in processor.model_parts
        for module in part.modules()
        if isinstance(module, ConvertedModule) and module.probe is not None
    }
    if every["health"] and step % every["health"] == 0:
        _log_health(processor, step, measured)
    for kind in ("experts", "linears"):
        if every[kind] and step % every[kind] == 0:
            of_kind = {n: m for n, m in measured.items() if isinstance(m, MXFP8Linear) == (kind == "linears")}
            counts = {name: m.probe.grad.tolist() for name, m in of_kind.items() if m.probe.grad is not None}
            if report := observe.rebase_report(counts):
                logger.info(f"MXFP8: share of elements that rebasing changed in {kind} in step {step}, here: {report}")
    for module in measured.values():
        module.probe.grad = None


def _log_health(processor: Any, step: int, measured: dict[str, ConvertedModule]) -> None:
    """Logs the figures, added up over all ranks.

    Data-parallel ranks see other tokens, expert- and pipeline-parallel ranks other modules, and their sum is that of
    the step; where ranks hold the same tensor all of its counts are multiplied alike, which leaves the shares as they
    are.
    """
    global _names
    if _names is None:
        everyones = [list(measured)]
        if dist.is_initialized():
            everyones = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, list(measured))
        _names = sorted(set().union(*everyones))
    if not _names:
        return
    device = processor.device_memory_monitor.device
    counts = torch.zeros(len(_names), len(observe.KINDS), observe.COUNTS, dtype=torch.float64, device=device)
    for name, module in measured.items():
        if module.probe.grad is not None:
            counts[_names.index(name)] = module.probe.grad
    if dist.is_initialized():
        dist.all_reduce(counts)
    figures = {}
    for name, of_module in zip(_names, counts.tolist(), strict=True):
        for figure, value in observe.summarize(of_module).items():
            figures[f"mx_health/{figure}/{name}"] = value
    processor.logger.log(figures, step)


def install(processor_class: type, periods: Callable[[Any], dict[str, int]]) -> None:
    """Makes every run that asks for it log what was recorded. Safe to call again.

    Args:
        processor_class: TorchTitan's ``MetricsProcessor``.
        periods: ``every`` of ``end``, for one of its objects.
    """
    should_log = processor_class.should_log
    if is_patched(should_log):
        return

    @patch_of(should_log)
    def end_and_should_log(self: Any, step: int) -> bool:
        every = periods(self)
        if any(every.values()):
            end(self, step, every)
        return should_log(self, step)

    processor_class.should_log = end_and_should_log
