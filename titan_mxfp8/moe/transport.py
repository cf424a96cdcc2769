"""What a transport is, what it leaves of a layer's routing, and the one of a single rank.

T tokens at home, K slots (chosen experts) each, E experts on R ranks, M rows that land here: ``rows.py``.
"""

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import NamedTuple, Protocol

import torch

from titan_mxfp8.backends import runs_triton
from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.moe import rows


class DispatchHandle(NamedTuple):
    """A layer's routing: all that ``dispatch_with_handle`` and ``combine`` need, as tensors of their own.

    Attributes:
        offs: int32 (E/R,) end offsets of the local experts' rows.
        rows: int32 (N, K). For each packet (a token of some rank that came here) and each of its slots the row where
            it arrived; -1 where the slot's expert is elsewhere, -2 where there was no room.
        scores: fp32 (M,), of each received row.
        expert_ids: int32 (T, K), of this rank's tokens.
        slots: int32 (T, R). Which of the packets that this rank sent is its token's to rank r, or -1; ``collective``
            only, else (0, R).
        tokens: int32 (packets sent,). The token of each; ``collective`` only, else empty.
        splits: int64 (2, R) on the CPU. Packets sent to each rank and received from it; ``collective`` only, else
            (2, 0).
    """

    offs: torch.Tensor
    rows: torch.Tensor
    scores: torch.Tensor
    expert_ids: torch.Tensor
    slots: torch.Tensor
    tokens: torch.Tensor
    splits: torch.Tensor


class Transport(Protocol):
    """Carries tokens to their experts' ranks and back. All give the same bits. Nothing here is differentiated.

    Every rank of the group calls the same functions in the same order. Nothing reads or writes rows at and past
    ``offs[-1]``.
    """

    ranks: int
    rank: int

    def reserve(self, tokens: int) -> None:
        """Makes room for ``tokens`` tokens at home, on all ranks, where a transport has memory of its own for them.
        Before the first dispatch, on any rank; afterwards it only says whether there is as much."""

    def dispatch(
        self,
        parts: list[torch.Tensor],
        expert_ids: torch.Tensor,
        scores: torch.Tensor,
        experts: int,
        worst_case: bool,
        overlap: Callable[[], None] = lambda: None,
    ) -> tuple[list[torch.Tensor], DispatchHandle]:
        """Tokens to their experts. A token crosses to a rank once, whatever the number of its slots there.

        Args:
            parts: one or two of (T, B_i), contiguous: FP8 elements and their scales, or rows in bf16.
            expert_ids: integers (T, K); a slot of an expert that is not in 0..E-1 is sent nowhere.
            scores: fp32 (T, K).
            experts: E, of all ranks; a multiple of R.
            worst_case: False: M is what lands here, which the host waits for where it cannot know it. True: M is
                what could land here at most, and the host waits for nothing.
            overlap: called once, before the host waits (and where it waits for nothing too): launches other work, so
                that the GPU is busy with it until the host has launched what follows.

        Returns:
            The parts, (M, B_i), expert after expert, within an expert by source rank, then token: the order of
            TorchTitan's own dispatch, without padding.

        Raises:
            ValueError: for shapes and dtypes other than these, before anything is sent.
        """

    def dispatch_with_handle(self, parts: list[torch.Tensor], handle: DispatchHandle) -> list[torch.Tensor]:
        """Other rows of the same tokens, (T, B_i), to the same places: gradients, in backward."""

    def combine(
        self,
        ys: list[torch.Tensor],
        weighted: bool,
        slot_values: torch.Tensor | None,
        handle: DispatchHandle,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the experts made of each token, added up.

        An expert's rank adds up the slots of a token in fp32; where R > 1 that travels in bf16, one row for each token
        and rank, and home adds those in fp32, in the order of the ranks.

        Args:
            ys: one or two of (M, D); the sum of both is what is meant.
            weighted: whether each row is multiplied by its score.
            slot_values: fp32 (M,), a number for each row that goes home too (the gradient of its score), or None.
            handle: of ``dispatch``.
            out_dtype: of the sums.

        Returns:
            Sums (T, D), and the slot values, fp32 (T, K).
        """


class Local:
    """One rank: no links. Rows move once, from the token to its places."""

    ranks, rank = 1, 0

    def reserve(self, tokens: int) -> None:
        """See ``Transport``: there is none."""

    def dispatch(
        self,
        parts: list[torch.Tensor],
        expert_ids: torch.Tensor,
        scores: torch.Tensor,
        experts: int,
        worst_case: bool,
        overlap: Callable[[], None] = lambda: None,
    ) -> tuple[list[torch.Tensor], DispatchHandle]:
        """See ``Transport``; M is T * K in both cases."""
        check_dispatch(parts, expert_ids, scores, experts, self.ranks)
        move = movements(expert_ids.device)
        expert_ids = expert_ids.to(torch.int32, copy=True)
        counts, labels = move.label(expert_ids, scores, experts)
        starts, offs = move.plan(counts[None], 0)
        tokens, capacity = expert_ids.shape[0], expert_ids.numel()
        ends = torch.full((1,), tokens, dtype=torch.int32, device=offs.device)
        handle_rows, row_scores = move.locate(labels, ends, starts, 0, capacity)
        overlap()
        empty, no_splits = offs.new_empty(0), torch.empty((2, 0), dtype=torch.int64)
        handle = DispatchHandle(offs, handle_rows, row_scores, expert_ids, empty.view(0, 1), empty.clone(), no_splits)
        return move.place(parts, handle_rows, capacity), handle

    def dispatch_with_handle(self, parts: list[torch.Tensor], handle: DispatchHandle) -> list[torch.Tensor]:
        """See ``Transport``."""
        return movements(handle.rows.device).place(parts, handle.rows, handle.scores.shape[0])

    def combine(
        self,
        ys: list[torch.Tensor],
        weighted: bool,
        slot_values: torch.Tensor | None,
        handle: DispatchHandle,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``Transport``."""
        weights = handle.scores if weighted else None
        return movements(handle.rows.device).reduce(ys, weights, slot_values, handle.rows, out_dtype)


@cache
def movements(device: torch.device) -> ModuleType:
    """The module that moves rows on ``device``: ``kernels`` where Triton's run, else ``rows``."""
    return importlib.import_module("titan_mxfp8.moe.kernels") if runs_triton(hardware_of(device)) else rows


def read_later(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Starts copying ``x`` to the host.

    Returns:
        A function that waits until ``x`` is there, but for nothing that was launched after this call, and returns it.
    """
    if not x.is_cuda:
        return lambda: x
    copied = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> torch.Tensor:
        done.synchronize()
        return copied

    return wait


def check_dispatch(
    parts: list[torch.Tensor], expert_ids: torch.Tensor, scores: torch.Tensor, experts: int, ranks: int
) -> None:
    """Raises ValueError unless the arguments are as ``Transport.dispatch`` asks."""
    if experts % ranks:
        raise ValueError(f"{experts} experts cannot be divided among {ranks} ranks of the expert-parallel group")
    if expert_ids.ndim != 2 or expert_ids.dtype.is_floating_point:
        raise ValueError(f"expert_ids must be integers (T, K), got {expert_ids.dtype} {tuple(expert_ids.shape)}")
    if scores.shape != expert_ids.shape or scores.dtype != torch.float32:
        raise ValueError(f"scores must be float32 {tuple(expert_ids.shape)}, got {scores.dtype} {tuple(scores.shape)}")
    check_parts(parts, expert_ids.shape[0])


def check_parts(parts: list[torch.Tensor], tokens: int) -> None:
    """Raises ValueError unless there are one or two contiguous (``tokens``, B)."""
    shapes = [tuple(part.shape) for part in parts]
    right = all(part.ndim == 2 and part.shape[0] == tokens and part.is_contiguous() for part in parts)
    if not right or len(parts) not in (1, 2):
        raise ValueError(f"parts must be one or two contiguous tensors of {tokens} rows, got {shapes}")
