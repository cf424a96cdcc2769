"""Forward, loss and backward of a trainer's microbatches as CUDA graphs.

Of the microbatches of a step the first writes gradients and later ones add to them, which are other kernels: so there
are two graphs, the second only where gradients are accumulated, over one pool of memory.

What the host does in an eager step and not in a replay, and is done here: inputs are copied to where the graph reads
them, gradients are given back to the parameters (``zero_grad`` takes them away), and what FSDP left unsharded after a
validation is freed, which would be used again with the weights of that time.

Nobody else can use a graph's memory. It takes a little more than an eager microbatch at its peak, which is measured:
where that is not free, steps stay eager for good, unless graphs are required. Where a validation or an eager microbatch
needs memory, the graphs go, and are captured again in the next microbatch that may.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.ops import observe
from titan_mxfp8.titan.dispatch import GIB, LAYERS

logger = logging.getLogger(__name__)

GRAPH = "mxfp8_graph"  # the attribute of a trainer that captures its steps: a ``StepGraph``
WARM_UP = 3  # eager microbatches before the capture: what is made once is made in them
# In the runs of 28 November (results/) a graph of DeepSeek-V3 16B took 1.8 to 3.6 GiB more than an eager microbatch of
# 10 to 58 GiB at its peak.
FRAGMENTS, BESIDES = 1.1, 2 * GIB  # times that peak, and bytes on top
LEFT_FREE = 0.05  # of a GPU's memory, beside a graph: for the optimizer, and libraries that allocate for themselves


class StepGraph:
    """Runs a trainer's microbatches: the first ones eagerly, then as CUDA graphs. Eager ones run on the stream that
    captures: autograd and the symmetric transport remember it.

    ``step`` is forward, loss and backward of a microbatch of ``model``: of its tensors by name, and the number of valid
    tokens of all microbatches, fp32 (). It returns the loss, and may not wait for the GPU. ``group``: of the ranks that
    train the model, None for this one alone. They capture together, or none does. ``required``: where a graph's memory
    is not free, it is captured nevertheless, which may be an error.
    """

    def __init__(
        self,
        step: Callable[[dict[str, Any], Tensor], Tensor],
        model: nn.Module,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        required: bool = False,
    ) -> None:
        self._step, self._model, self._group, self._required = step, model, group, required
        self._params = list(model.parameters())
        self._sharded = fsdp_modules(model)
        self._stream = torch.cuda.Stream(device)
        self._valid_tokens = torch.zeros((), device=device)
        self._batch: dict[str, Any] | None = None  # what the graphs read
        # With its loss, by whether gradients are added.
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._grads: list[tuple[nn.Parameter, Tensor]] = []
        self._bytes = self._eager_bytes = 0  # of the graphs; of an eager microbatch and gradients at the peak, or more
        self._before = 0  # bytes that were allocated before the last step's first eager microbatch
        self._left, self._eager = WARM_UP, False
        model.register_forward_pre_hook(lambda *_: self._make_room())

    @property
    def is_eager(self) -> bool:
        """Whether there is no graph, and none will be captured: memory is short, or this is within ``eager()``."""
        return self._eager and not self._graphs

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Within, microbatches run eagerly."""
        outer, self._eager = self._eager, True
        try:
            yield
        finally:
            self._eager = outer

    def discard(self, warm_up: bool = True) -> None:
        """Destroys the graphs. The next ones are captured after as many eager microbatches as the first ones, or,
        without ``warm_up``, in the next microbatch. To be called before the process group is destroyed, which would
        wait for the graphs."""
        if warm_up:
            self._left = WARM_UP
        self._release()

    def run(self, batch: Mapping[str, Any], valid_tokens: float | Tensor) -> Tensor:
        """One microbatch; the parameters get its gradients, or have them added. Returns the loss, detached.

        Where the shapes of the ``batch`` differ from those of the first, on all ranks, it runs eagerly.
        ``valid_tokens`` are those of all microbatches of the step and all ranks. RuntimeError after the warm-up, if it
        cannot be captured.
        """
        self._valid_tokens.fill_(valid_tokens)
        if self._batch is None:
            self._batch = {name: x.clone() if isinstance(x, Tensor) else x for name, x in batch.items()}
        if self._eager or must_run_eagerly(self._model) or _key(batch) != _key(self._batch):
            return self._run_eagerly(dict(batch))
        for name, x in batch.items():
            if isinstance(x, Tensor):
                self._batch[name].copy_(x)
        adds = any(param.grad is not None for param in self._params)
        own = bool(self._grads) and all(param.grad is grad for param, grad in self._grads)
        if self._left or (adds and not own):
            self._left = max(0, self._left - 1)
            return self._run_eagerly(self._batch)
        for module in self._sharded:
            module.reshard()
        if not self._graphs and not self._required and not self._fits():
            self._eager = True
            return self._run_eagerly(self._batch)
        if adds not in self._graphs:
            self._capture(adds)
        graph, loss = self._graphs[adds]
        graph.replay()
        for param, grad in self._grads:
            param.grad = grad
        return loss.clone()

    def _run_eagerly(self, batch: dict[str, Any]) -> Tensor:
        current = torch.cuda.current_stream()
        if all(param.grad is None for param in self._params):
            self._before = torch.cuda.memory_allocated()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self._step(batch, self._valid_tokens).detach()
        current.wait_stream(self._stream)
        self._eager_bytes = torch.cuda.max_memory_allocated() - self._before
        return loss

    def _make_room(self) -> None:
        """Before each forward pass of the model: where one that is not captured might need memory that the graphs have,
        these go."""
        if not self._graphs or torch.cuda.is_current_stream_capturing():
            return
        for _ in range(2):
            spare = torch.cuda.mem_get_info()[0] - self._bytes
            if least_of_ranks([spare], self._valid_tokens.device, self._group)[0] >= 0:
                return
            torch.cuda.empty_cache()  # a forward pass before this one has freed some
        self._release()

    def _fits(self) -> bool:
        """Whether a graph's memory is free on all ranks; else the log says how much is missing."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a graph's pool takes nothing that eager steps have freed
        free, total = torch.cuda.mem_get_info()
        needed = graph_bytes(self._eager_bytes) + LEFT_FREE * total
        (left,) = least_of_ranks([free - needed], self._valid_tokens.device, self._group)
        if left < 0:
            logger.warning(
                f"MXFP8: no CUDA graphs from here on: one would need {needed / GIB:.1f} GiB of free memory, and the "
                f"fullest GPU lacks {-left / GIB:.1f}. Fewer tokens (local_batch_size) or more checkpointing would help"
            )
        return left >= 0

    def _capture(self, adds: bool) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        start, reserved = time.perf_counter(), torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        pool = self._graphs[False][0].pool() if adds else None
        # Threads that save a checkpoint or watch NCCL may use CUDA meanwhile.
        how = {"pool": pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.graph(graph, **how):
                loss = self._step(self._batch, self._valid_tokens).detach()
        except RuntimeError as error:
            raise RuntimeError(why_not_captured(error)) from error
        self._graphs[adds] = graph, loss
        if not adds:
            self._grads = [(param, param.grad) for param in self._params if param.grad is not None]
        self._bytes += torch.cuda.memory_reserved() - reserved
        logger.info(
            f"MXFP8: forward and backward{', adding gradients,' * adds} are one CUDA graph from now on, captured in "
            f"{time.perf_counter() - start:.1f} s; its memory: {self._bytes / GIB:.2f} GiB (an eager microbatch: "
            f"{self._eager_bytes / GIB:.2f})"
        )

    def _release(self) -> None:
        if not self._graphs:
            return
        torch.cuda.synchronize()
        for graph, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._grads, self._bytes = [], 0
        torch.cuda.empty_cache()  # eager steps do not use what belonged to a graph


def graph_bytes(eager: int) -> float:
    """An upper estimate of a graph's memory, for a microbatch that takes ``eager`` bytes at its peak."""
    return FRAGMENTS * eager + BESIDES


def least_of_ranks(values: Sequence[float], device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    """The least of each of these numbers on any rank of a group; None: this one alone. Waits for the GPU."""
    if group is None:
        return [*values]
    least = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return least.tolist()


def group_of(trainer: Any) -> dist.ProcessGroup | None:
    """The ranks whose losses a trainer adds up; None: there is one."""
    mesh = trainer.parallel_dims.get_optional_mesh("loss")
    return None if mesh is None else mesh.get_group()


def why_not_captured(error: RuntimeError) -> str:
    """In words, of what a capture raised, and what to set."""
    cause = error.__context__ or error  # the end of a capture that failed fails too
    first, _, _ = f"{cause}".partition("\n")
    reason = "something in them waits for the GPU, or allocates what a graph cannot keep. Switch"
    if isinstance(cause, torch.OutOfMemoryError):
        reason = "a graph keeps the memory of a microbatch for itself. Take fewer tokens (local_batch_size), or switch"
    return (
        f"forward and backward cannot be captured as a CUDA graph ({first}): {reason} CUDA graphs off: "
        "training.cuda_graph = 'off', with TorchTitan 0.3 training.disable_cuda_graphs = True"
    )


def must_run_eagerly(model: nn.Module) -> bool:
    """Whether the next microbatch of a model is measured, which hooks do, or the host waits in its layers."""
    return observe.is_recording() or waits_for_rows(model)


def waits_for_rows(model: nn.Module) -> bool:
    """Whether the host counts the rows of layers that dispatch their own tokens. A bound may have become too large for
    the memory, so that rows are counted from then on."""
    layers = getattr(model, LAYERS, None)
    return layers is not None and layers.ranks > 1 and layers.rows == "counted"


def waits_in_bf16(hardware: Hardware) -> bool:
    """Whether the host waits on this NVIDIA GPU for the rows of experts in bf16. torch._grouped_mm does without on SM90
    and SM100."""
    return hardware.capability is not None and hardware.capability[0] not in (9, 10)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Those of a model that FSDP gathers one by one."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _key(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: (x.shape, x.dtype) if isinstance(x, Tensor) else x for name, x in batch.items()}
