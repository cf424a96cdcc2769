"""What a transport is, what it leaves of a layer's routing, and the one of a single rank.

T tokens of this rank, K slots (chosen experts) each, E experts on R ranks, M rows for the experts here: ``rows.py``.
"""

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from titan_mxfp8.backends import runs_triton
from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.moe import rows

Overlap = Callable[[], None]


def nothing() -> None:
    """The overlap callback of callers that have nothing else to launch."""


class DispatchHandle(NamedTuple):
    """A layer's routing: all that ``dispatch_with_handle`` and ``combine`` need, as tensors of their own.

    Attributes:
        offs: int32 (E/R,) end offsets of the local experts' rows.
        destinations: int32 (N, K). For each token copy that arrived here and each of its slots the row it went to; -1
            where the slot's expert is on another rank, -2 where there was no memory.
        scores: fp32 (M,), of each row.
        expert_ids: int32 (T, K), of this rank's tokens.
        copies_of_token: int32 (T, R). Which of the copies that this rank sent is its token's to rank r, or -1;
            ``collective`` only, else (0, R).
        token_of_copy: int32 (copies sent,). The token of each; ``collective`` only, else empty.
        splits: int64 (2, R) on the CPU. Copies sent to each rank and received from it; ``collective`` only, else
            (2, 0).
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
        """That of a transport which needs no list of copies."""
        copies, tokens = offs.new_empty((0, ranks)), offs.new_empty(0)
        return cls(offs, destinations, scores, expert_ids, copies, tokens, torch.empty((2, 0), dtype=torch.int64))


class Transport(Protocol):
    """Carries tokens to their experts' ranks and back. All give the same bits. Nothing here is differentiated.

    Every rank of the group calls the same functions in the same order. Nothing reads or writes rows at and past
    ``offs[-1]``.
    """

    ranks: int
    rank: int

    def reserve(self, tokens: int) -> None:
        """Makes room for ``tokens`` tokens of each rank, where a transport has memory of its own for them. Before the
        first dispatch, on any rank; afterwards it only says whether there is as much."""

    def dispatch(
        self,
        payload: list[Tensor],
        expert_ids: Tensor,
        scores: Tensor,
        experts: int,
        worst_case: bool,
        overlap: Overlap = nothing,
    ) -> tuple[list[Tensor], DispatchHandle]:
        """Tokens to their experts. A token crosses to a rank once, whatever the number of its slots there.

        Args:
            payload: one or two of (T, B_i), contiguous: FP8 data and their scales, or rows in bf16.
            expert_ids: integers (T, K); a slot of an expert that is not in 0..E-1 is sent nowhere.
            scores: fp32 (T, K).
            experts: E, of all ranks; a multiple of R.
            worst_case: False: M is the number of rows, which the host waits for where it cannot know it. True: M is
                the most that it could be, and the host waits for nothing.
            overlap: called once, before the host waits (and where it waits for nothing too): launches other work, so
                that the GPU is busy with it until the host has launched what follows.

        Returns:
            The payload, (M, B_i), expert after expert, within an expert by source rank, then token: the order of
            TorchTitan's own dispatch, without padding.

        Raises:
            ValueError: for shapes and dtypes other than these, before anything is sent.
        """

    def dispatch_with_handle(self, payload: list[Tensor], handle: DispatchHandle) -> list[Tensor]:
        """Other rows of the same tokens, (T, B_i), to the same destinations: gradients, in backward."""

    def combine(
        self, ys: list[Tensor], weighted: bool, slot_values: Tensor | None, handle: DispatchHandle, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """What the experts made of each token, added up.

        An expert's rank adds up the slots of a token in fp32; where R > 1 that travels in bf16, one row for each token
        and rank, and the source rank adds those in fp32, in the order of the ranks.

        Args:
            ys: one or two of (M, D); the sum of both is what is meant.
            weighted: whether each row is multiplied by its score.
            slot_values: fp32 (M,), a number of each row that goes to its source rank too (the gradient of its score),
                or None.
            handle: of ``dispatch``.
            dtype: of the sums.

        Returns:
            Sums (T, D), and the slot values, fp32 (T, K).
        """


class Local:
    """One rank: no links. Rows move once, from the token to its destinations. Methods are as in ``Transport``."""

    ranks, rank = 1, 0

    def reserve(self, tokens: int) -> None: ...

    def dispatch(
        self,
        payload: list[Tensor],
        expert_ids: Tensor,
        scores: Tensor,
        experts: int,
        worst_case: bool,
        overlap: Overlap = nothing,
    ) -> tuple[list[Tensor], DispatchHandle]:
        """M is T * K in both cases."""
        expert_ids = checked_ids(payload, expert_ids, scores, experts, self.ranks)
        move, tokens, capacity = movements(expert_ids.device), expert_ids.shape[0], expert_ids.numel()
        counts, metadata = move.make_metadata(expert_ids, scores, experts)
        starts, offs = move.plan(counts[None], 0)
        ends = torch.full((1,), tokens, dtype=torch.int32, device=offs.device)
        destinations, row_scores = move.find_destinations(metadata, ends, starts, 0, capacity)
        overlap()
        handle = DispatchHandle.of_direct(offs, destinations, row_scores, expert_ids, self.ranks)
        return move.permute(payload, destinations, capacity), handle

    def dispatch_with_handle(self, payload: list[Tensor], handle: DispatchHandle) -> list[Tensor]:
        return movements(handle.offs.device).permute(payload, handle.destinations, handle.scores.shape[0])

    def combine(
        self, ys: list[Tensor], weighted: bool, slot_values: Tensor | None, handle: DispatchHandle, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        weights = handle.scores if weighted else None
        return movements(handle.offs.device).local_combine(ys, weights, slot_values, handle.destinations, dtype)


@cache
def movements(device: torch.device) -> ModuleType:
    """The module that moves rows on ``device``: ``kernels`` where Triton's run, else ``rows``."""
    return importlib.import_module("titan_mxfp8.moe.kernels") if runs_triton(hardware_of(device)) else rows


def read_later(x: Tensor) -> Callable[[], Tensor]:
    """Starts copying ``x`` to the host.

    Returns:
        A function that waits until ``x`` is there, but for nothing that was launched after this call, and returns it.
    """
    if not x.is_cuda:
        return lambda: x
    copied = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> Tensor:
        done.synchronize()
        return copied

    return wait


def checked_ids(payload: list[Tensor], expert_ids: Tensor, scores: Tensor, experts: int, ranks: int) -> Tensor:
    """A copy of ``expert_ids`` in int32; raises ValueError unless the arguments are as ``Transport.dispatch`` asks."""
    if experts % ranks:
        raise ValueError(f"{experts} experts cannot be divided among {ranks} ranks of the expert-parallel group")
    if expert_ids.ndim != 2 or expert_ids.dtype.is_floating_point:
        raise ValueError(f"expert_ids must be integers (T, K), got {expert_ids.dtype} {tuple(expert_ids.shape)}")
    if scores.shape != expert_ids.shape or scores.dtype != torch.float32:
        raise ValueError(f"scores must be float32 {tuple(expert_ids.shape)}, got {scores.dtype} {tuple(scores.shape)}")
    check_payload(payload, expert_ids.shape[0])
    return expert_ids.to(torch.int32, copy=True)


def check_payload(payload: list[Tensor], tokens: int) -> None:
    """Raises ValueError unless there are one or two contiguous (``tokens``, B)."""
    right = len(payload) in (1, 2)
    for x in payload:
        right = right and x.ndim == 2 and x.shape[0] == tokens and x.is_contiguous()
    if not right:
        shapes = [tuple(x.shape) for x in payload]
        raise ValueError(f"payload must be one or two contiguous tensors of {tokens} rows, got {shapes}")
