"""``quantize.health_every``: every N steps, how the operands of each converted module fare in MXFP8, in the logs.

A step begins to be recorded with its first forward pass in training and ends in ``MetricsProcessor.should_log``, which
TorchTitan calls after the optimizer in every step, on every rank, with the step's number. That number says whether the
next step is to be recorded. The first one of a run always is, as its number is not known yet: a run may go on from a
checkpoint.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools import utils

from titan_mxfp8.modules import ConvertedModule
from titan_mxfp8.ops import health
from titan_mxfp8.plugin.repairs.patch import is_patched, patch_of

# Of this process's run.
_region = contextlib.ExitStack()
_due = True  # whether the next forward pass in training begins to record
_names: list[str] | None = None  # of the converted modules of all ranks


def attach(model: nn.Module, converted: list[str]) -> None:
    """Gives converted modules a probe each, on the device where they will compute, and has ``model`` begin to record.

    A pipeline's stages are copies of ``model``, with probes and hook.
    """
    global _due, _names
    for fqn in converted:
        model.get_submodule(fqn).health_probe = health.make_probe(torch.device(utils.device_type))
    model.register_forward_pre_hook(_begin)
    _due, _names = True, None


def _begin(part: nn.Module, inputs: tuple[object, ...]) -> None:
    global _due
    if _due and part.training:  # a validation comes between two steps
        _due = False
        _region.enter_context(health.recording())


def end(processor: MetricsProcessor, step: int) -> None:
    """Called after a step: logs what was recorded in every N-th one, added up over all ranks.

    Data-parallel ranks see other tokens, expert- and pipeline-parallel ranks other modules, and their sum is that of
    the step; where ranks hold the same tensor all of its counts are multiplied alike, which leaves the shares as they
    are.
    """
    global _due
    every = processor.job_config.quantize.health_every
    _region.close()
    _due = (step + 1) % every == 0
    measured = {
        module.mxfp8_fqn: module.health_probe
        for part in processor.model_parts
        for module in part.modules()
        if isinstance(module, ConvertedModule) and module.health_probe is not None
    }
    if step % every == 0:
        _log(processor, step, measured)
    for probe in measured.values():
        probe.grad = None


def _log(processor: MetricsProcessor, step: int, measured: dict[str, torch.Tensor]) -> None:
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
    counts = torch.zeros(len(_names), len(health.KINDS), health.COUNTS, dtype=torch.float64, device=device)
    for name, probe in measured.items():
        if probe.grad is not None:
            counts[_names.index(name)] = probe.grad
    if dist.is_initialized():
        dist.all_reduce(counts)
    figures = {}
    for name, of_module in zip(_names, counts.tolist(), strict=True):
        for figure, value in health.summarize(of_module).items():
            figures[f"mx_health/{figure}/{name}"] = value
    processor.logger.log(figures, step)


def install() -> None:
    """Makes every run with ``quantize.health_every`` above 0 log what was recorded. Safe to call again."""
    should_log = MetricsProcessor.should_log
    if is_patched(should_log):
        return

    @patch_of(should_log)
    def end_and_should_log(self: MetricsProcessor, step: int) -> bool:
        if self.job_config.quantize.health_every:
            end(self, step)
        return should_log(self, step)

    MetricsProcessor.should_log = end_and_should_log
