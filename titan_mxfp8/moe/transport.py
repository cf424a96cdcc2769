"""What a transport is, what it leaves of a layer's routing, and the one of a single rank.

T tokens of this rank, K slots (chosen experts) each, E experts on R ranks, M rows for the experts here: ``rows.py``.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_mxfp8.backends import runs_triton
from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.moe import rows
from titan_mxfp8.moe.bounds import WantedRows

Overlap = Callable[[], None]


def nothing() -> None:
    """The overlap callback of callers that have nothing else to launch."""


class DispatchHandle(NamedTuple):
    """A layer's routing: all that ``dispatch_with_handle`` and ``combine`` need, as tensors of their own.

    Attributes:
        offs: int32 (E/R,) end offsets of the local experts' rows.
        destinations: int32 (N, K). For each token copy that arrived here and each of its slots the row it went to; -1
            where the slot's expert is on another rank, -2 where there was no memory for it.
        scores: fp32 (M,), of each row.
        expert_ids: int32 (T, K), of this rank's tokens.
        copies_of_token: int32 (T, R). Which of the copies that this rank sent is its token's to rank r, or -1;
            ``collective`` with counted rows only, else (0, R).
        token_of_copy: int32 (copies sent,). The token of each; likewise, else empty.
        splits: int64 (2, R) on the CPU. Copies sent to each rank and received from it; likewise, else (2, 0).
    """

    offs: Tensor
    destinations: Tensor
    scores: Tensor
    expert_ids: Tensor
    copies_of_token: Tensor
    token_of_copy: Tensor
    splits: Tensor

    @classmethod
    def of_direct(
        cls, offs: Tensor, destinations: Tensor, scores: Tensor, expert_ids: Tensor, ranks: int
    ) -> "DispatchHandle":
        """Of tokens whose copies need no list: on each rank token t's is the t-th of its source."""
        copies, tokens = offs.new_empty((0, ranks)), offs.new_empty(0)
        return cls(offs, destinations, scores, expert_ids, copies, tokens, torch.empty((2, 0), dtype=torch.int64))


@dataclass(eq=False)
class Shared:
    """What the layers of a group share on a rank."""

    room: int = 0  # the most tokens that any rank has, see ``Transport.agree``
    reserved: int = 0  # see ``Transport.reserve``
    agreed: set[tuple] = field(default_factory=set)  # the settings that all ranks have the same
    wanted: WantedRows = field(default_factory=WantedRows)  # where the number of rows is bounded


class Transport:
    """Carries tokens to their experts' ranks and back. All give the same bits. Nothing here is differentiated.

    Every rank of the group calls the same functions in the same order. Nothing reads or writes rows at and past
    ``offs[-1]``.
    """

    def __init__(self, ranks: int, rank: int, shared: Shared):
        self.ranks, self.rank, self.shared = ranks, rank, shared

    def reserve(self, tokens: int) -> None:
        """Makes room for ``tokens`` tokens of each rank, the same on all ranks. Before the first dispatch; afterwards
        ``symmetric``, which has memory of its own for them, only says whether there is as much."""
        self.shared.reserved = max(self.shared.reserved, tokens)

    def agree(self, tokens: int, **settings: object) -> int:
        """Makes sure, the first time that it sees ``settings``, that all ranks have the same; they call it together.
        Returns ``room``, the most tokens that any rank had in such a first call, or reserved. Raises ValueError on
        every rank, if they disagree.

        Args:
            tokens: T.
            settings: what must be the same on all ranks, by the name that an error calls it: experts, recipe.
        """
        shared, key = self.shared, (self.shared.reserved, *settings.items())
        if key not in shared.agreed:
            of_ranks = self._gather((settings, max(tokens, shared.reserved)))
            for name, value in of_ranks[0][0].items():
                for rank, (other, _) in enumerate(of_ranks):
                    if other.get(name, value) != value:
                        raise ValueError(
                            f"the ranks of the expert-parallel group disagree about {name}: {value} on rank 0, "
                            f"{other[name]} on rank {rank}; all need the same"
                        )
            self._set_room(max(1, *(room for _, room in of_ranks)))
            shared.agreed.add(key)
        return shared.room

    def dispatch(
        self,
        payload: list[Tensor],
        expert_ids: Tensor,
        scores: Tensor,
        experts: int,
        capacity: int | None = None,
        overlap: Overlap = nothing,
        kept: list[Tensor] | None = None,
    ) -> tuple[list[Tensor], DispatchHandle]:
        """Tokens to their experts. A token crosses to a rank once, whatever the number of its slots there.

        Args:
            payload: one or two of (T, B_i), contiguous: FP8 data and their scales, or rows in bf16.
            expert_ids: integers (T, K); a slot of an expert that is not in 0..E-1 is sent nowhere.
            scores: fp32 (T, K).
            experts: E, of all ranks; a multiple of R.
            capacity: M, the same on all ranks: the host waits for nothing, rows that do not fit are left out, and
                ``wanted`` says how many there would be. None: M is the number of rows, which the host waits for where
                it cannot know it.
            overlap: called once, before the host waits (and where it waits for nothing too): launches other work, so
                that the GPU is busy with it until the host has launched what follows.
            kept: an empty list that gets the payload once for each of the N copies that arrived, (N, B_i), of a copy
                without rows anything; or None. With one rank these are the payload itself.

        Returns:
            The payload, (M, B_i), expert after expert, within an expert by source rank, then token: the order of
            TorchTitan's own dispatch, without padding.

        Raises:
            ValueError: on ranks that disagree about shapes and dtypes, and for more tokens than there is room for where
                it matters: with a capacity, or where the transport has memory for so many.
            RuntimeError: in a call before there were more rows than its capacity (``WantedRows.check``).
        """
        tokens, slots = expert_ids.shape
        room = self.agree(tokens, experts=experts, slots=slots, row_bytes=row_bytes(payload))
        self.shared.wanted.check()
        if capacity is not None and tokens > room:
            others = "the other ranks wait for this one until the timeout of the process group, or until they are ended"
            raise self._too_many(tokens, others)
        expert_ids = expert_ids.to(torch.int32, copy=True, memory_format=torch.contiguous_format)
        received, handle = self._dispatch(payload, expert_ids, scores, experts, capacity, overlap, kept)
        if capacity is not None:
            self.shared.wanted.watch(capacity)
        return received, handle

    def dispatch_with_handle(self, payload: list[Tensor], handle: DispatchHandle) -> list[Tensor]:
        """Other rows of the same tokens, (T, B_i), to the same destinations: gradients, in backward. Raises
        RuntimeError as ``dispatch``."""
        self.shared.wanted.check()
        return self._dispatch_with_handle(payload, handle)

    def find_sources(self, handle: DispatchHandle) -> Tensor:
        """Which of the N copies that arrived each row is, int32 (M,), of a row that is none anything. With one rank
        copies are its tokens."""
        return movements(handle.offs.device).find_sources(handle.destinations, handle.scores.shape[0])

    def combine(
        self, ys: list[Tensor], weighted: bool, slot_values: Tensor | None, handle: DispatchHandle, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """What the experts made of each token, added up: sums (T, D), and the slot values, fp32 (T, K).

        An expert's rank adds up the slots of a token in fp32; where R > 1 that travels in bf16, one row for each token
        and rank, and the source rank adds those in fp32, in the order of the ranks. Rows that did not fit count as 0.

        Args:
            ys: one or two of (M, D); the sum of both is what is meant.
            weighted: whether each row is multiplied by its score.
            slot_values: fp32 (M,), a number of each row that goes to its source rank too (the gradient of its score),
                or None.
            handle: of ``dispatch``.
            dtype: of the sums.
        """
        return self._combine(ys, handle.scores if weighted else None, slot_values, handle, dtype)

    # Of each transport: ``dispatch`` and ``dispatch_with_handle`` of arguments that were checked, and ``combine``.

    def _dispatch(self, payload, expert_ids, scores, experts, capacity, overlap, kept):
        raise NotImplementedError

    def _dispatch_with_handle(self, payload, handle):
        raise NotImplementedError

    def _combine(self, ys, weights, slot_values, handle, dtype):
        raise NotImplementedError

    def _gather(self, value: object) -> list:
        """Every rank's ``value``."""
        raise NotImplementedError

    def _set_room(self, tokens: int) -> None:
        self.shared.room = max(self.shared.room, tokens)

    def _too_many(self, tokens: int, others: str) -> ValueError:
        return ValueError(
            f"{tokens} tokens (slots, with scores_first) on rank {self.rank}, but there is room for "
            f"{self.shared.room}, the most that any rank had or named in the first call: name max_tokens of mxfp8_moe, "
            "what any rank ever has, from the first call on, or use counted rows and the collective transport; "
            + others
        )


class Local(Transport):
    """One rank: no links. Rows move once, from the token to its destinations."""

    def __init__(self) -> None:
        super().__init__(1, 0, Shared())

    def agree(self, tokens: int, **settings: object) -> int:
        """See ``Transport``: there is nobody else."""
        return tokens

    def _dispatch(self, payload, expert_ids, scores, experts, capacity, overlap, kept):
        """Without a capacity M is T * K, which holds all."""
        device = expert_ids.device
        move, tokens, wanted = movements(device), expert_ids.shape[0], None
        if capacity is None:
            capacity = expert_ids.numel()
        else:
            wanted = self.shared.wanted.buffer(capacity, device)
        counts, metadata = move.make_metadata(expert_ids, scores, experts)
        starts, offs = move.plan(counts[None], 0, capacity, wanted)
        ends = torch.full((1,), tokens, dtype=torch.int32, device=device)
        destinations, row_scores = move.find_destinations(metadata, ends, starts, 0, capacity)
        overlap()
        handle = DispatchHandle.of_direct(offs, destinations, row_scores, expert_ids, self.ranks)
        if kept is not None:
            kept += payload
        return move.permute(payload, destinations, capacity), handle

    def _dispatch_with_handle(self, payload, handle):
        return movements(handle.offs.device).permute(payload, handle.destinations, handle.scores.shape[0])

    def _combine(self, ys, weights, slot_values, handle, dtype):
        return movements(handle.offs.device).local_combine(ys, weights, slot_values, handle.destinations, dtype)


@cache
def movements(device: torch.device) -> ModuleType:
    """The module that moves rows on ``device``: ``kernels`` where Triton's run, else ``rows``."""
    return importlib.import_module("titan_mxfp8.moe.kernels") if runs_triton(hardware_of(device)) else rows


def read_later(x: Tensor) -> Callable[[], Tensor]:
    """Starts copying ``x`` to the host. Gives a function that waits until ``x`` is there, but for nothing that was
    launched after this call, and returns it."""
    if not x.is_cuda:
        return lambda: x
    copied = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> Tensor:
        done.synchronize()
        return copied

    return wait


def gather_objects(value: object, group: dist.ProcessGroup) -> list:
    """Every rank's ``value``; of a group whose other ranks do not exist, as in a dry run, this one's."""
    if dist.get_backend(group) == "fake":
        return [value] * group.size()
    gathered = [None] * group.size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def row_bytes(payload: list[Tensor]) -> int:
    """Of a token's data and scales together."""
    return sum([tensor.shape[1] * tensor.element_size() for tensor in payload])
