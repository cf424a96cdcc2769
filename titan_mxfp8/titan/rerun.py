"""Steps in which rows did not fit run again, before their gradients are used: with bounded rows nothing is lost.

    forward, backward of each microbatch   what was wanted is on its way to the host when the last forward pass ends
    look, at all ranks together            the one host wait of a step: for the last microbatch's forward pass, so that
                                           clipping and the optimizer are launched while backward runs
    if rows did not fit                    gradients, counts of tokens and random numbers as they were before, a larger
                                           bound, the same microbatches again, look again
    clipping, optimizer                    as ever

The layers run again as they ran, with another bound, which is a symbol of compiled ones: so the bits are those of a
bound that was large enough at once, and where nothing is compiled those of counted rows. It ends, as each bound is
larger, and none needs to be larger than all rows that could come.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titan_mxfp8.modules import ConvertedModule
from titan_mxfp8.moe.transport import read_later
from titan_mxfp8.titan.cuda_graph import GRAPH, group_of, least_of_ranks
from titan_mxfp8.titan.dispatch import LAYERS, DispatchingLayers, token_counts

logger = logging.getLogger(__name__)

MOST_BOUNDS = 256  # of layers, since training began

Step = Callable[..., torch.Tensor]


def watch_steps(trainer: Any) -> None:
    """Has the steps of a trainer that has its model run again where rows did not fit. ``forward_backward_step`` runs
    one microbatch, of which a step has ``gradient_accumulation_steps``."""
    layers, run = getattr(trainer.model_parts[0], LAYERS, None), trainer.forward_backward_step
    if layers is None or layers.max_tokens is None or not layers.may_overflow():
        return
    rerun = Rerun(trainer, layers, run)
    trainer.forward_backward_step = lambda **batch: rerun.step(batch)


class Rerun:
    """The steps of one trainer, whose microbatches ``run`` runs. Its layers leave rows that do not fit to it."""

    def __init__(self, trainer: Any, layers: DispatchingLayers, run: Step) -> None:
        model = trainer.model_parts[0]
        self.trainer, self.layers, self._runs = trainer, layers, run
        self.wanted = layers.wanted(trainer.device)  # of all layers of its ranks, which may be others' too
        self._group = group_of(trainer)
        # Ranks of expert parallelism know what each of them wanted. Gradients are summed over these and more: there is
        # no TP where layers dispatch their own tokens.
        self._asks = self._group is not None and self._group.size() > layers.ranks
        self._counts = list(token_counts(model).values())
        self._before = [torch.empty_like(count) for count in self._counts]
        self._random = [torch] if trainer.device.type == "cpu" else [torch, torch.get_device_module(trainer.device)]
        self._states: list[torch.Tensor] = []
        self._eager = ExitStack()
        self._batches: list[dict[str, Any]] = []
        self._losses: list[torch.Tensor] = []
        self._look: Callable[[], dict[int, int]] | None = None
        self._looks = False
        self._graph_look = GraphLook(trainer.device) if trainer.device.type == "cuda" else None
        model.register_forward_hook(self._look_early)

    def step(self, batch: dict[str, Any]) -> torch.Tensor:
        """Runs a microbatch, and with the last one all of a step again if need be. Returns its loss; of the last one of
        a step that ran again, what makes the sum of those that were returned the sum of those that count. After an
        error the next microbatch is a step's first."""
        if not self._batches:
            self.wanted.check(wait=True)  # of what ran outside of steps, if anything did
        self.wanted.raises = False
        try:
            return self._step(batch) if self.layers.may_overflow() else self._runs(**batch)
        except BaseException:
            self._batches, self._losses = [], []
            with suppress(RuntimeError):  # of a GPU that has failed
                self.wanted.reset()
            raise
        finally:
            self.wanted.raises = True

    def _step(self, batch: dict[str, Any]) -> torch.Tensor:
        if not self._batches:
            _copy(self._before, self._counts)
            self._states = [module.get_rng_state() for module in self._random]
        self._looks = len(self._batches) + 1 >= self.trainer.gradient_accumulation_steps
        loss = self._run(batch)
        self._batches.append(batch)
        if not self._looks:
            self._losses.append(loss.detach().clone())  # a CUDA graph's next replay overwrites it
            return loss
        batches, losses, self._batches, self._losses = self._batches, self._losses, [], []
        while wanted := self._most_left_out():
            with self._begin_again(wanted):
                again = [self._run(batch).detach().clone() for batch in batches]
            loss = reduce(torch.add, again)
            if losses:
                loss = loss - reduce(torch.add, losses)
        return loss

    def _run(self, batch: dict[str, Any]) -> torch.Tensor:
        self._look = None
        if self._graph_look is not None and getattr(self.trainer, GRAPH, None) is not None:
            self._graph_look.forget()
        return self._runs(**batch)

    def _look_early(self, model: nn.Module, *_: object) -> None:
        """After a step's last forward pass: who reads it later waits for no backward. A graph's may be that."""
        if not (model.training and torch.is_grad_enabled()):
            return
        if self._graph_look is not None and torch.cuda.is_current_stream_capturing():
            self._graph_look.capture(*self._most())
        elif self._looks:
            self._look = self._start_look()

    def _most(self) -> tuple[list[int], torch.Tensor]:
        """The bounds, and the rows that the fullest rank wanted of each, on the device."""
        bounds, most = self.wanted.most()
        if bounds and self._asks:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        return bounds, most

    def _start_look(self) -> Callable[[], dict[int, int]]:
        bounds, most = self._most()
        read = read_later(most)
        return lambda: dict(zip(bounds, read().tolist(), strict=True))

    def _most_left_out(self) -> int:
        """The rows that the fullest rank wanted of a layer that had memory for fewer; 0: all layers had enough."""
        wanted = None
        if self._look is not None:
            wanted = self._look()
        elif self._graph_look is not None:
            wanted = self._graph_look.read()
        if wanted is None:
            wanted = self._start_look()()
        return max((rows for bound, rows in wanted.items() if rows > bound), default=0)

    @contextmanager
    def _begin_again(self, wanted: int) -> Iterator[None]:
        """Undoes what the step changed, takes a larger bound, and leaves CUDA graphs alone within."""
        trainer, layers, former = self.trainer, self.layers, self.layers.rows
        seen, graph = trainer.ntokens_seen, getattr(trainer, GRAPH, None)
        layers.grow(wanted, *self._memory())
        logger.info(
            f"MXFP8: step {trainer.step} runs again, as a MoE layer sent {wanted} rows to the experts of one rank, "
            f"{layers.share(wanted):.2f} times those of balanced ones: dispatch_rows was {former}, and is "
            f"{layers.rows} from here on"
        )
        self.wanted.reset()
        trainer.optimizers.zero_grad()  # first: gradients are in the graph's memory
        if graph is not None:
            graph.discard(warm_up=False)  # the step that runs again warms up
        if trainer.device.type == "cuda":
            torch.cuda.empty_cache()  # larger rows do not fit into what those of the former bound leave free
        for module in trainer.model_parts[0].modules():
            if isinstance(module, ConvertedModule) and module.probe is not None:
                module.probe.grad = None
        _copy(self._counts, self._before)
        for module, state in zip(self._random, self._states, strict=True):
            module.set_rng_state(state)
        try:
            with nullcontext() if graph is None else graph.eager():
                yield
        finally:
            trainer.ntokens_seen = seen
            if graph is not None and layers.rows == "counted":
                self._eager.enter_context(graph.eager())  # for good, as the host waits in each layer

    def _memory(self) -> tuple[float, float]:
        """Bytes of a GPU, and those of them that no step has needed so far: the least of all ranks."""
        device = self.trainer.device
        if device.type != "cuda":
            return math.inf, math.inf
        free, total = torch.cuda.mem_get_info(device)
        return tuple(least_of_ranks([total, free], device, self._group))


class GraphLook:
    """What CUDA graphs write of the rows that were wanted into the host's memory, at the end of their forward pass."""

    def __init__(self, device: torch.device) -> None:
        self._unknown = torch.full((MOST_BOUNDS,), -1, dtype=torch.int32, device=device)
        self._host = torch.empty(MOST_BOUNDS, dtype=torch.int32, pin_memory=True)
        self._forgot = torch.cuda.Event()
        self._bounds: list[int] = []

    def capture(self, bounds: list[int], most: torch.Tensor) -> None:
        """Called while a graph is captured: has its replays write ``most``, int32 (bounds,)."""
        self._bounds = bounds
        self._host[: len(bounds)].copy_(most, non_blocking=True)

    def forget(self) -> None:
        """Forgets what earlier replays have written or will write. To be called before a replay that is read."""
        self._host.copy_(self._unknown, non_blocking=True)
        self._forgot.record()

    def read(self) -> dict[int, int] | None:
        """Waits for the forward pass of the graph that was replayed last. None if none was."""
        self._forgot.synchronize()
        host, stream = self._host[: len(self._bounds)], torch.cuda.current_stream()
        over = False
        while bool((host < 0).any()):
            if over:
                return None
            over = stream.query()  # once more after that: it may have written since
            time.sleep(2e-5)
        return dict(zip(self._bounds, host.tolist(), strict=True)) or None


def _copy(to: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, of)
