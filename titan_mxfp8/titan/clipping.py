"""Gradients are clipped by the optimizer, while it reads them: a pass over all of them less.

    norm                  as TorchTitan computes it
    multiplication        left out
    fused Adam, AdamW     divide each gradient that they read by ``grad_scale``, and write the quotient back; it is
                          what ``torch.amp.GradScaler`` gives them

``clip_grads_with_norm_`` of torch multiplies by min(1, max_norm / (norm + 1e-6)). What is divided by here is the
reciprocal of that: gradients that are clipped may differ in their last bit, others do not.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_mxfp8.modules import ConvertedModule
from titan_mxfp8.workarounds.patch import around

logger = logging.getLogger(__name__)

EPS = 1e-6  # of clip_grads_with_norm_

_running: list["ClippingOptimizers"] = []  # whose steps run


@around("torch.nn.utils.clip_grads_with_norm_")
def clip_in_optimizers(
    clip: Callable[..., None],
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """In a step of a trainer whose optimizers clip, leaves it to them."""
    if not _running:
        return clip(parameters, max_norm, total_norm, foreach)
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return _running[-1].left.append(_Call(params, max_norm, total_norm, partial(clip, foreach=foreach)))


def clip_in_optimizers_of(trainer: Any) -> None:
    """Has the steps of a trainer that has its model and optimizers clip as they read gradients, if a module of the
    model is converted and all optimizers are fused ``torch.optim.Adam`` or ``AdamW``."""
    modules = (module for part in trainer.model_parts for module in part.modules())
    optimizers = list(trainer.optimizers)
    if any(isinstance(module, ConvertedModule) for module in modules) and all(map(_divides, optimizers)):
        logger.info("MXFP8: the optimizer clips gradients, in the pass in which it reads them")
        ClippingOptimizers(trainer, optimizers)


class _Call(NamedTuple):
    """Of ``clip_grads_with_norm_``, left out."""

    params: list[Tensor]
    max_norm: float
    norm: Tensor
    clip: Callable[..., None]


class ClippingOptimizers:
    """Those of one trainer. Where a step clips not all gradients, or not all by the same norm, torch clips them."""

    def __init__(self, trainer: Any, optimizers: list[torch.optim.Optimizer]) -> None:
        self.left: list[_Call] = []
        self._optimizers = optimizers
        self._run, trainer.train_step = trainer.train_step, self._step
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._begin)
            optimizer.register_step_post_hook(_end)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        _running.append(self)
        try:
            result = self._run(*args, **kwargs)
            self._clip()  # what no optimizer has
            return result
        finally:
            _running.pop()
            self.left = []

    def _begin(self, *_: object) -> None:
        """Before the first optimizer's step, for all of them."""
        clipped = {param for call in self.left for param in call.params}
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        trained = (param for group in groups for param in group["params"] if param.grad is not None)
        norms = {(call.max_norm, id(call.norm)) for call in self.left}
        if len(norms) != 1 or not clipped.issuperset(trained):
            self._clip()
            return
        scale = ((self.left[0].norm.float() + EPS) / self.left[0].max_norm).clamp(min=1)
        self.left = []
        for optimizer in self._optimizers:
            optimizer.grad_scale = scale

    def _clip(self) -> None:
        calls, self.left = self.left, []
        for call in calls:
            call.clip(call.params, call.max_norm, call.norm)


def _end(optimizer: torch.optim.Optimizer, *_: object) -> None:
    optimizer.grad_scale = None


def _divides(optimizer: torch.optim.Optimizer) -> bool:
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
