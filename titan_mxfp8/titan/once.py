"""Experts' weights are quantised once for a step of several microbatches, of gradient accumulation or a pipeline.

    before the first microbatch   quantised: into ``kept`` of a module whose weights are here, as forward and dgrad take
                                  them; into ``kept`` of a shard that FSDP gathers in FP8, as this rank sends it
    in all of them                it is taken, by recomputation and by a step that runs again too
    after the last one            nothing is kept: the optimizer, validation and whoever edits weights find what they
                                  would find otherwise. Nor is anything after an optimizer's step or an error; of a
                                  step in backward, when the microbatch has ended, as layers run again until then

Quantising belongs to no microbatch, so it is in no CUDA graph; for those what is kept lies in the same memory always.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from titan_mxfp8.logs import count_of
from titan_mxfp8.modules import ConvertedModule
from titan_mxfp8.ops.experts import Weights, bytes_ahead, can_quantize_ahead, quantize_ahead
from titan_mxfp8.titan.cuda_graph import GRAPH, group_of, least_of_ranks
from titan_mxfp8.titan.dispatch import GIB, local
from titan_mxfp8.titan.gather import blocks_params

logger = logging.getLogger(__name__)

SPARE = 0.02  # of a GPU's memory, left over by what is kept


class _Holder(NamedTuple):
    """Who has an attribute ``kept``, what makes it, and its bytes."""

    owner: Any
    quantize: Callable[[], list[torch.Tensor]]
    bytes: int


def quantize_once(trainer: Any, weights: Mapping[ConvertedModule, Callable[[], Weights]]) -> None:
    """Has the steps of a trainer that has its model quantise experts' weights once, if they have several microbatches.
    The log says so, and why others are quantised each time.

    Args:
        trainer: whose ``forward_backward_step`` runs one microbatch of ``gradient_accumulation_steps``, or all of a
            pipeline's. A step that runs again has to do so within it.
        weights: of this rank, of experts that are multiplied by ``mxfp8_moe`` or ``mxfp8_experts``.
    """
    weights = {module: of for module, of in weights.items() if module.quantize_weights_once != "off"}
    if not weights or (trainer.gradient_accumulation_steps == 1 and not trainer.parallel_dims.pp_enabled):
        return
    holders, left = [], {}
    for module, of in weights.items():
        if reason := why_each_time(module):
            left[reason] = left.get(reason, 0) + 1
        elif not module.gathered:
            size = bytes_ahead(of()[:3], module.mxfp8)
            holders.append(_Holder(module, lambda m=module, of=of: quantize_ahead(of()[:3], m.mxfp8), size))
    for param in (param for part in trainer.model_parts for param in blocks_params(part)):
        holders.append(_Holder(param, param.quantize_shard, param.sharded_size.numel()))
    for reason, count in left.items():
        layers = count_of(count, "MoE layer")
        logger.info(f"MXFP8: every microbatch quantises the experts' weights of {layers}: {reason}")
    if holders:
        auto = any(module.quantize_weights_once == "auto" for module in weights)
        layers = count_of(len(weights) - sum(left.values()), "MoE layer")
        kept = f"{sum(holder.bytes for holder in holders) / GIB:.2f} GiB{' if they are free' * auto}"
        logger.info(f"MXFP8: a step quantises the experts' weights of {layers} once, and keeps {kept}")
        QuantizedOnce(trainer, holders, auto)


class QuantizedOnce:
    """The steps of one trainer, from here on. ``auto``: whether it stops where memory is short."""

    def __init__(self, trainer: Any, holders: list[_Holder], auto: bool) -> None:
        self.trainer, self._holders = trainer, holders
        self._microbatch, trainer.forward_backward_step = trainer.forward_backward_step, self.step
        self._decisions = 2 if auto and trainer.device.type == "cuda" else 0  # left, one a step
        self._on, self._left, self._runs = True, 0, False
        self._buffers: list[list[torch.Tensor]] = []  # of CUDA graphs
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(self.end_soon)

    def step(self, **batch: Any) -> torch.Tensor:
        """Runs a microbatch; with a step's first one all weights are quantised."""
        self._runs = True
        try:
            if self._left <= 0:
                self.begin()
            loss = self._microbatch(**batch)
        except BaseException:
            self.end()
            raise
        finally:
            self._runs = False
        self._left -= 1
        if self._left <= 0:
            self.end()
        return loss

    @torch.no_grad()
    def begin(self) -> None:
        """Quantises, for as many microbatches as a step has."""
        self._left = self.trainer.gradient_accumulation_steps
        if self._decisions:
            self._decide()
        if not self._on:
            return
        graph = getattr(self.trainer, GRAPH, None)
        captures = graph is not None and not graph.is_eager
        if not captures:
            self._buffers.clear()
        for number, holder in enumerate(self._holders):
            made = holder.quantize()
            if number < len(self._buffers):
                torch._foreach_copy_(*([x.view(torch.uint8) for x in some] for some in (self._buffers[number], made)))
                made = self._buffers[number]
            elif captures:
                self._buffers.append(made)
            holder.owner.kept = made

    def end_soon(self, *_: object) -> None:
        """Called before an optimizer's step, which may be one in backward."""
        self._left = 0
        if not self._runs:
            self.end()

    def end(self) -> None:
        """From here on weights may change."""
        self._left = 0
        for holder in self._holders:
            holder.owner.kept = ()

    def _decide(self) -> None:
        """In a first step, which makes the optimizer's state, there is room for what will be its, and that is more.
        In the second one it must fit beside that. With a state from a checkpoint, the second one says what is left."""
        self._decisions -= 1
        states = [x for each in self.trainer.optimizers for of in each.state.values() for x in of.values()]
        state = sum(local(x).nbytes for x in states if isinstance(x, torch.Tensor))
        if self._decisions:
            self._on = not state
            return
        free, total = torch.cuda.mem_get_info(self.trainer.device)
        free -= state if self._on else sum(holder.bytes for holder in self._holders)
        # All ranks decide alike: they discard their graphs, and capture again, together.
        (spare,) = least_of_ranks([free - SPARE * total], self.trainer.device, group_of(self.trainer))
        if self._on == (spare >= 0):
            return
        self._on = not self._on
        self._buffers.clear()
        if graph := getattr(self.trainer, GRAPH, None):
            graph.discard()
        if not self._on:
            logger.info(
                "MXFP8: every microbatch quantises the experts' weights: there is too little memory to keep them"
            )


def why_each_time(module: ConvertedModule) -> str:
    """Why each call has to quantise the weights of a module, in words; empty where one may for all of a step."""
    if not can_quantize_ahead(module.mxfp8):
        return f"with recipe {module.mxfp8.recipe.name} their values are multiplied in bf16"
    if getattr(module, "_is_fsdp_managed_module", False) and not module.gathered:
        return "FSDP frees what it has gathered"
    return ""
