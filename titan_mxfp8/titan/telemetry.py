"""``health_every`` and ``hopper_rebase_report``: what quantisation does to the operands of each converted module, in
the logs, every N steps.

A step is a call of a trainer's ``train_step``, before which the trainer has counted it: so it is known whether a step
is to be recorded before it begins, and what is logged with its number is its own.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titan_mxfp8.modules import ConvertedModule, MXFP8Linear, training_device
from titan_mxfp8.moe.transport import gather_objects
from titan_mxfp8.ops import observe
from titan_mxfp8.titan.dispatch import LAYERS, token_counts

logger = logging.getLogger(__name__)

RECORDER = "mxfp8_recorder"


class Recorder:
    """What one run measures and logs. The model carries it, as ``mxfp8_recorder``, and so do a pipeline's copies."""

    def __init__(self) -> None:
        # Steps between two logs, of health, and of what rebasing changed in experts and linears; 0: never.
        self.every = {"health": 0, "experts": 0, "linears": 0}
        self._before: dict[str, torch.Tensor] = {}  # counts of tokens when the recorded step began
        self._after: dict[str, torch.Tensor] = {}  # and after its last forward pass

    def __deepcopy__(self, memo: dict) -> "Recorder":
        return self

    def note_counts_before(self, part: nn.Module, *_: object) -> None:
        """Called before each forward pass of the model."""
        if observe.is_recording() and part.training:
            for name, counts in token_counts(part).items():
                self._before.setdefault(name, counts.clone())

    def note_counts_after(self, part: nn.Module, *_: object) -> None:
        """Called after each forward pass of the model: the optimizer's hooks begin to count anew."""
        if observe.is_recording() and part.training:
            self._after |= {name: counts.clone() for name, counts in token_counts(part).items()}

    def step(self, trainer: Any, train_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a step of a trainer. Every N-th one is recorded, and then logged."""
        due = [what for what, n in self.every.items() if n and trainer.step % n == 0]
        measured = {
            module.mxfp8_fqn: module
            for part in trainer.model_parts
            for module in part.modules()
            if isinstance(module, ConvertedModule) and module.probe is not None
        }
        try:
            with observe.recording() if due else nullcontext():
                result = train_step(*args, **kwargs)
            self._log(trainer, due, measured)
        finally:
            for module in measured.values():
                module.probe.grad = None
            self._before, self._after = {}, {}
        return result

    def _log(self, trainer: Any, due: list[str], measured: dict[str, ConvertedModule]) -> None:
        if "health" in due:
            self._log_health(trainer, measured)
        for kind in filter("health".__ne__, due):
            of_kind = {n: m for n, m in measured.items() if isinstance(m, MXFP8Linear) == (kind == "linears")}
            counts = {name: m.probe.grad.tolist() for name, m in of_kind.items() if m.probe.grad is not None}
            if report := observe.rebase_report(counts):
                logger.info(
                    f"MXFP8: share of elements that rebasing changed in {kind} in step {trainer.step}, here: {report}"
                )

    def _log_health(self, trainer: Any, measured: dict[str, ConvertedModule]) -> None:
        """Logs the figures, added up over all ranks: they see other tokens or modules, or count the same tensor alike,
        which leaves the shares as they are."""
        device, figures = trainer.device, {}
        probes = {name: module.probe for name, module in measured.items()}
        counts = {name: torch.zeros_like(probe) if probe.grad is None else probe.grad for name, probe in probes.items()}
        counts = _sums_of_all_ranks(counts, device)
        if not counts:
            return
        for name, of_module in counts.items():
            for figure, value in observe.summarize(of_module.tolist()).items():
                figures[f"mx_health/{figure}/{name}"] = value
        layers = getattr(trainer.model_parts[0], LAYERS, None)
        if layers is not None and (share := layers.largest_share(device)):
            figures["mx_health/experts/rows_of_balanced"] = share
        figures |= self._load_of_experts(device, trainer.step)
        trainer.metrics_processor.logger.log(figures, trainer.step)

    def _load_of_experts(self, device: torch.device, step: int) -> dict[str, float]:
        """How many experts of all layers got no token of the step, which is a log line too; and the tokens of the
        fullest expert of any layer, as a multiple of those of a balanced one."""
        counts = {name: after - self._before[name] for name, after in self._after.items()}
        loads = [load.tolist() for load in _sums_of_all_ranks(counts, device).values()]
        if not loads:
            return {}
        if without := sum(load.count(0) for load in loads):
            logger.info(f"MXFP8: {without} of {sum(map(len, loads))} experts got no tokens in step {step}")
        fullest = max(max(load) * len(load) / max(sum(load), 1) for load in loads)
        return {"mx_health/experts/without_tokens": without, "mx_health/experts/fullest_of_balanced": fullest}


def _sums_of_all_ranks(own: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """What any rank has by a name, sorted, and added up over those that have it, in fp64."""
    everyones = [[(name, x.shape) for name, x in own.items()]]
    if dist.is_initialized():
        everyones = gather_objects(everyones[0], dist.group.WORLD)
    shapes = dict(sorted(set().union(*everyones)))
    sizes = [shape.numel() for shape in shapes.values()]
    sums = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
    for name, part in zip(shapes, sums.split(sizes), strict=True):
        if name in own:
            part.copy_(own[name].detach().flatten())
    if dist.is_initialized() and shapes:
        dist.all_reduce(sums)
    parts = zip(shapes.items(), sums.cpu().split(sizes), strict=True)
    return {name: part.view(shape) for (name, shape), part in parts}


def attach(model: nn.Module, converted: list[str], kind: str, health_every: int, hopper_rebase_report: int) -> None:
    """Has a run measure and log what was converted in ``model``, if it asks for that: names of ``experts`` or of
    ``linears``, which ``kind`` says. Those that quantise get a probe each, on the device where they will compute."""
    if not health_every and not hopper_rebase_report:
        return
    for module in map(model.get_submodule, converted):
        if module.mxfp8.recipe.quantized:
            module.probe = observe.make_probe(torch.device(training_device().type))
    if not hasattr(model, RECORDER):
        recorder = Recorder()
        setattr(model, RECORDER, recorder)
        model.register_forward_pre_hook(recorder.note_counts_before)
        model.register_forward_hook(recorder.note_counts_after)
    every = getattr(model, RECORDER).every
    every["health"] = min(filter(None, (every["health"], health_every)), default=0)  # who asks for more gets it
    every[kind] = hopper_rebase_report


def log_steps(trainer: Any) -> None:
    """Has the steps of a trainer that has its model recorded and logged, if the model asks for that."""
    recorder = getattr(trainer.model_parts[0], RECORDER, None)
    if recorder is not None:
        trainer.train_step = partial(recorder.step, trainer, trainer.train_step)
