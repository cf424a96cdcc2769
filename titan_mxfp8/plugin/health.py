"""``quantize.health_every``: every N steps, how the operands of each converted module fare in MXFP8, in the logs.

TorchTitan's train loop has no hooks for this. Of what it calls in every step, on every rank, ``GarbageCollection.run``
comes first, with the step's number, and ``MetricsProcessor.should_log`` comes after the optimizer.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools.utils import GarbageCollection

from titan_mxfp8.modules import ConvertedModule
from titan_mxfp8.ops import health
from titan_mxfp8.plugin.patch import is_patched, patch_of


class HealthLog:
    """Measures every ``every``-th step and logs the figures, added up over all ranks.

    Data-parallel ranks see other tokens, expert- and pipeline-parallel ranks other modules, and their sum is that of
    the step; where ranks hold the same tensor all of its counts are multiplied alike, which leaves the shares as they
    are.
    """

    def __init__(self, processor: MetricsProcessor, every: int) -> None:
        self.processor = processor
        self.every = every
        self.device = processor.device_memory_monitor.device
        self.region = contextlib.ExitStack()
        self.modules: dict[str, nn.Module] | None = None
        self.names: list[str] = []

    def begin(self, step: int) -> None:
        """Called before a step: attaches probes before the first one, and starts to record in every N-th one."""
        if self.modules is None:
            self.attach()
        if step % self.every == 0 and self.names:
            for module in self.modules.values():
                module.health_probe.grad = None
            self.region.enter_context(health.recording())

    def attach(self) -> None:
        """Gives each converted module its probe, and agrees with the other ranks on all the names there are."""
        self.modules = {}
        for part in self.processor.model_parts:
            for module in part.modules():
                if isinstance(module, ConvertedModule):
                    self.modules[module.mxfp8_fqn] = module
                    module.health_probe = health.make_probe(self.device)  # where it computes, not where FSDP keeps it
        everyones = [list(self.modules)]
        if dist.is_initialized():
            everyones = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, list(self.modules))
        self.names = sorted(set().union(*everyones))

    def end(self, step: int) -> None:
        """Called after a step: adds up and logs what was recorded in it."""
        if step % self.every or not self.names:
            return
        self.region.close()
        counts = torch.zeros(len(self.names), len(health.KINDS), health.COUNTS, dtype=torch.float64, device=self.device)
        for name, module in self.modules.items():
            if module.health_probe.grad is not None:
                counts[self.names.index(name)] = module.health_probe.grad
        if dist.is_initialized():
            dist.all_reduce(counts)
        figures = {}
        for name, of_module in zip(self.names, counts.tolist(), strict=True):
            for figure, value in health.summarize(of_module).items():
                figures[f"mx_health/{figure}/{name}"] = value
        self.processor.logger.log(figures, step)


_log: HealthLog | None = None


def install() -> None:
    """Makes every run with ``quantize.health_every`` above 0 measure and log. Safe to call again."""
    if is_patched(MetricsProcessor.should_log):
        return
    build, should_log, collect_garbage = MetricsProcessor.__init__, MetricsProcessor.should_log, GarbageCollection.run

    @patch_of(build)
    def build_with_health(self, job_config, *args, **kwargs):
        global _log
        build(self, job_config, *args, **kwargs)
        every = job_config.quantize.health_every
        _log = HealthLog(self, every) if every else None

    @patch_of(collect_garbage)
    def run_and_begin(self, step_count: int):
        collect_garbage(self, step_count)
        if _log is not None:
            _log.begin(step_count)

    @patch_of(should_log)
    def end_and_should_log(self, step: int) -> bool:
        if _log is not None:
            _log.end(step)
        return should_log(self, step)

    MetricsProcessor.__init__ = build_with_health
    MetricsProcessor.should_log = end_and_should_log
    GarbageCollection.run = run_and_begin
