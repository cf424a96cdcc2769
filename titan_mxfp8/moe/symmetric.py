"""Tokens over memory that the GPUs of one host share, without the host and without copies per slot.

Each rank has one buffer (``buffer.Layout``), which all layers of a group use:

| function        | does, on the stream of its caller                                                         |
|-----------------|-------------------------------------------------------------------------------------------|
| both dispatches | barrier; write this rank's tokens; barrier; read from all the rows that are wanted here   |
| combine         | write the local sums into the buffers of the source ranks; barrier; add up what came back |

So a link is busy while memory is: rows are permuted as they are read over it, and sums go over it as rows are added up.

Why these barriers are enough: a rank passes a barrier when all ranks have reached it, hence all that stands before it
on their streams is done.

- What is read was written: a barrier stands between.
- Tokens are overwritten by the next dispatch (with or without a handle) only, whose first barrier comes after every
  rank's last read; so two dispatches in a row, as when activation checkpointing stops recomputing early, need nothing
  else.
- Sums are overwritten by the next combine only. A dispatch comes before it, whose barriers come after every rank's last
  read of sums; where none does, combine begins with a barrier.

More tokens than there is room for are an error. Where rows are counted, every rank's host reads how many it gets; the
rank with too many tokens writes negative counts before it raises, by which the others see it and raise too.

A rank that died is waited for until the process group's timeout; then the barrier says on stdout which rank did not
come (``[FATAL] CUDASymmetricMemory::barrier: rank 0 failed to receive signal from rank 1``) and traps: the next call
that waits for the GPU raises a CUDA error, which ends the process and with it the job.

All functions of a group belong on one stream, in the same order on every rank.
"""

import importlib
import os
import socket
from dataclasses import asdict
from functools import cache, lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from titan_mxfp8.backends import runs_triton
from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.moe import buffer
from titan_mxfp8.moe.buffer import Layout
from titan_mxfp8.moe.transport import DispatchHandle, Shared, Transport, gather_objects, read_later, row_bytes

_VIEWS = 64  # of a buffer that are kept, of each kind


class GroupLink:
    """What a rank needs of the others, over ``torch.distributed._symmetric_memory``."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self.ranks, self.rank = group.size(), group.rank()
        self.handle = None

    def gather(self, value: object) -> list:
        """Every rank's ``value``, once the GPU has done what was asked of it."""
        torch.cuda.synchronize(self.device)
        return gather_objects(value, self.group)

    def allocate(self, size: int) -> tuple[Tensor, list[int]]:
        """A buffer of ``size`` bytes, and where every rank's begins, as this one's kernels see it."""
        symm_mem = _symmetric_memory()
        memory = symm_mem.empty(size, dtype=torch.uint8, device=self.device)
        self.handle = symm_mem.rendezvous(memory, group=self.group)
        offset = memory.data_ptr() - self.handle.buffer_ptrs[self.rank]  # of the tensor in what was allocated
        assert set(self.gather(offset)) == {offset}, "the buffers lie differently"
        return memory, [pointer + offset for pointer in self.handle.buffer_ptrs]

    def barrier(self) -> None:
        """On the current stream: what comes after it waits for what every rank has before it."""
        timeout = self.group._get_backend(self.device).options._timeout  # TorchTitan shortens it after the first step
        self.handle.barrier(channel=0, timeout_ms=int(timeout.total_seconds() * 1000))


class Symmetric(Transport):
    """``Transport`` over memory that the ranks share.

    The first dispatch makes the buffer, for as many tokens as any rank has then or has reserved. A later one may not
    have more.
    """

    def __init__(self, link: GroupLink):
        super().__init__(link.ranks, link.rank, Shared())
        self.link = link
        self.layout: Layout | None = None
        self._view = self._rooms = None  # of the buffer's memory: ``Layout.view`` and ``Layout.rooms``
        self._sums_are_read = self._captured = False

    def reserve(self, tokens: int) -> None:
        """See ``Transport``. Raises ValueError: the buffer has been made, for fewer."""
        if self.layout is not None and tokens > self.layout.tokens:
            raise ValueError(
                f"room for {tokens} tokens comes too late: the first call of these ranks made their buffer for "
                f"{self.layout.tokens}. Name max_tokens in that call, the same in all layers"
            )
        super().reserve(tokens)

    def _gather(self, value: object) -> list:
        return self.link.gather(value)

    def _set_room(self, tokens: int) -> None:
        if self.layout is None:
            super()._set_room(tokens)

    def _dispatch(self, payload, expert_ids, scores, experts, capacity, overlap, kept):
        (tokens, k), dim = expert_ids.shape, payload[0].shape[1]
        self._make_room(experts=experts, slots=k, row_bytes=row_bytes(payload), dim=dim)
        if tokens > self.layout.tokens:
            self._refuse(tokens, experts)
        self.link.barrier()
        counts = self._view(buffer.COUNTS, torch.int32, experts + 1)
        metadata = self._view(buffer.METADATA, torch.int32, tokens, 3 * k)
        counts[experts:].fill_(tokens)
        self.kernels.make_metadata(expert_ids, scores, experts, out=(counts, metadata))
        self._write(payload)

        counts = self._view(buffer.COUNTS, torch.int32, 1, experts)
        wanted = None if capacity is None else self.shared.wanted.buffer(capacity, self.link.device)
        starts, offs = self.kernels.plan(counts, self.rank, capacity, wanted, self.peers)
        count = read_later(offs[-1:]) if capacity is None else None
        overlap()
        if count is not None:
            capacity = int(count())  # the host waits here
        if capacity < 0:
            raise ValueError(
                f"another rank has more tokens than the symmetric transport has room for, {self.layout.tokens}: its "
                "error says what to do"
            )
        destinations, row_scores = self.kernels.find_destinations(
            metadata, None, starts, self.rank, capacity, self.peers
        )
        handle = DispatchHandle.of_direct(offs, destinations, row_scores, expert_ids, self.ranks)
        return self.kernels.permute(payload, destinations, capacity, self.peers, kept), handle

    def _dispatch_with_handle(self, payload, handle):
        self._make_room(row_bytes=row_bytes(payload))
        self.link.barrier()
        self._write(payload)
        return self.kernels.permute(payload, handle.destinations, handle.scores.shape[0], self.peers)

    def _combine(self, ys, weights, slot_values, handle, dtype):
        (copies, k), d = handle.destinations.shape, ys[0].shape[1]
        self._make_room(dim=d, slots=k)
        if self._sums_are_read:
            self.link.barrier()
        self.kernels.local_combine(ys, weights, slot_values, handle.destinations, torch.bfloat16, self.peers)
        self.link.barrier()
        self._sums_are_read = True
        sums = self._view(buffer.PARTIALS, torch.bfloat16, copies, d)
        values = None if slot_values is None else self._view(buffer.VALUES, torch.float32, copies, k)
        directly, local = (self.ranks, self.layout.tokens), handle.offs.shape[0]
        return self.kernels.combine(sums, values, directly, handle.expert_ids, local, dtype)

    def _refuse(self, tokens: int, experts: int) -> NoReturn:
        """Raises of more tokens than there is room for, and has the others raise, whose hosts wait for counts."""
        self.link.barrier()
        counts = self._view(buffer.COUNTS, torch.int32, experts)
        counts.fill_(-(2**31 // experts))  # so much that no rank's sum is positive, and none overflows
        self.link.barrier()
        self._sums_are_read = False
        raise self._too_many(tokens, "the other ranks raise an error too")

    def _write(self, payload: list[Tensor]) -> None:
        """This rank's tokens, for all to read."""
        in_bytes = [tensor.view(torch.uint8) for tensor in payload]
        rooms = self._rooms(payload[0].shape[0], *(tensor.shape[1] for tensor in in_bytes))
        for room, tensor in zip(rooms, in_bytes, strict=True):
            room.copy_(tensor)
        self.link.barrier()
        self._sums_are_read = False

    def _make_room(self, **sizes: int) -> None:
        """A buffer that holds this too. All of it is of the model, so every rank comes here with the same, and where
        the buffer must grow, all make a new one. For tokens it never grows: handles number copies by them."""
        self._captured |= self.link.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self.layout is not None and self.layout.holds(**sizes):
            return
        wanted = (self.layout or Layout(ranks=self.ranks, tokens=max(self.shared.room, 1))).grown(**sizes)
        if self._captured:
            raise RuntimeError(
                "the symmetric transport makes its buffer in the first forward and backward: run them once before "
                "capturing a CUDA graph"
            )
        from titan_mxfp8.moe import kernels

        for other in self.link.gather(wanted):  # and every rank has read what it wanted from the buffer before
            wanted = wanted.grown(**asdict(other))
        self.kernels, self.layout = kernels, wanted
        self._view = self._rooms = None  # they held the buffer before
        # Views are kept: each step asks for the same, and to make one takes the host as long as a launch. Tensors that
        # are made in inference mode could not be written outside of it.
        normal_mode = torch.inference_mode(False)
        memory, pointers = normal_mode(self.link.allocate)(wanted.offsets[-1])
        self._view = lru_cache(_VIEWS)(normal_mode(partial(wanted.view, memory)))
        self._rooms = lru_cache(_VIEWS)(normal_mode(partial(wanted.rooms, memory)))
        self.peers = kernels.Peers(wanted.table(pointers, self.link.device), wanted.tokens, self.rank, self.ranks)


@cache
def symmetric_of(group: dist.ProcessGroup, device: torch.device) -> Symmetric:
    """The transport of a group, whose buffer all layers share."""
    return Symmetric(GroupLink(group, device))


def symmetric_available(group: dist.ProcessGroup, device: torch.device) -> tuple[bool, str]:
    """Whether ``Symmetric`` can be used by the group, the same on every rank, and why not.

    Every rank calls it at the same time. It takes all ranks on one host, each on a GPU of its own that reads the
    others' memory, and is tried out: a container or a driver may refuse what the GPUs could do.
    """
    if device.type != "cuda" or torch.version.hip or not runs_triton(hardware_of(device)):
        return False, "it needs NVIDIA GPUs of SM80 or newer"
    return _try_out(group, device)


@cache
def _try_out(group: dist.ProcessGroup, device: torch.device) -> tuple[bool, str]:
    """``symmetric_available`` on GPUs, once for each group. The cache keeps the group until the process ends, which a
    group of CPUs must not be: a thread of gloo that frees its last tensor while Python ends aborts the process."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = socket.gethostname(), boot.read_text() if boot.exists() else ""
    gathered = gather_objects((host, str(torch.cuda.get_device_properties(device).uuid)), group)
    found = _first(obstacle(gathered, group.rank(), device), group) or trial(group, device)
    return found is None, found or "all ranks are on one host, with peer access"


def trial(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """What fails where the ranks share a byte, in words, the same on every rank; None where nothing does."""
    made: list[Tensor] = []
    steps = (
        lambda: made.append(_symmetric_memory().empty(1, dtype=torch.uint8, device=device)),
        lambda: _symmetric_memory().rendezvous(made[0], group=group),
    )
    for step in steps:
        failure = None
        try:
            step()
        except RuntimeError as error:
            failure = f"sharing memory failed: {str(error).split(chr(10))[0]}"
        if found := _first(failure, group):  # before the next step, in which ranks wait for each other
            return found
    return None


def obstacle(gathered: list[tuple[tuple[str, str], str]], rank: int, device: torch.device) -> str | None:
    """What stands in the way of a rank, in words; ``gathered``: each rank's host and GPU."""
    from torch.distributed._symmetric_memory import get_backend

    if get_backend(device) not in (None, "CUDA"):
        return f"torch's symmetric memory uses {get_backend(device)}, not CUDA"
    host, own = gathered[rank]
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for peer, (other_host, gpu) in enumerate(gathered):
        if peer == rank:
            continue
        if other_host != host:
            return f"rank {peer} is on host {other_host[0]}, rank {rank} on {host[0]}"
        if gpu == own:
            return f"ranks {rank} and {peer} share a GPU"
        if gpu not in visible:
            return f"rank {rank} does not see the GPU of rank {peer} (CUDA_VISIBLE_DEVICES)"
        if not torch.cuda.can_device_access_peer(device, visible[gpu]):
            return f"the GPU of rank {rank} has no peer access to that of rank {peer}"
    return None


def _symmetric_memory() -> ModuleType:
    # Nothing here multicasts; setting that up can fail where the fabric manager does not run.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    return importlib.import_module("torch.distributed._symmetric_memory")


def _first(failure: str | None, group: dist.ProcessGroup) -> str | None:
    """The failure of the first rank that has one."""
    return next(filter(None, gather_objects(failure, group)), None)
