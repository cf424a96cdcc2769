"""Tokens over ``torch.distributed``: wherever NCCL or gloo runs.

A rank sends each token once to every rank that has one of its experts, all in one buffer of bytes:

| bytes of a packet     | what                                                          |
|-----------------------|---------------------------------------------------------------|
| of each part          | the token's row: FP8 elements, scales; or bf16                |
| 3 x 4 x K             | its labels: experts, positions, bits of the scores (rows.py)  |

each from a multiple of 16 on. NCCL knows no FP8 or E8M0 and gloo neither. The counts go to all ranks first;
the host reads them, once per layer, for the sizes that torch.distributed wants. What the ranks add up returns the same
way, and backward uses the sizes again.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from titan_mxfp8.format.mx import ceil_to
from titan_mxfp8.moe.transport import DispatchHandle, check_dispatch, check_parts, movements, read_later


class Collective:
    """``Transport`` over all-to-all of a process group."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.ranks, self.rank = group, group.size(), group.rank()

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
        """See ``Transport``.

        Raises:
            ValueError: besides, with ``worst_case``: the host has to know the sizes.
        """
        check_dispatch(parts, expert_ids, scores, experts, self.ranks)
        if worst_case:
            raise ValueError("the collective transport cannot take rows for the worst case: use counted rows")
        move, local = movements(expert_ids.device), experts // self.ranks
        expert_ids = expert_ids.to(torch.int32, copy=True)
        counts, labels = move.label(expert_ids, scores, experts)
        # floor: an expert -1 is on rank -1
        owners = torch.div(expert_ids, local, rounding_mode="floor")
        goes = torch.stack([(owners == rank).any(1) for rank in range(self.ranks)], 1)  # (T, R)
        sent = goes.sum(0)
        mine = torch.cat((counts, sent.int())).expand(self.ranks, -1).contiguous()  # the same to all
        everything = torch.empty_like(mine)
        dist.all_to_all_single(everything, mine, group=self.group)

        read = read_later(everything)
        overlap()
        sizes = read().long()  # the host waits here
        splits = torch.stack((sizes[self.rank, experts:], sizes[:, experts + self.rank]))
        received = int(sizes[:, self.rank * local : (self.rank + 1) * local].sum())

        starts, offs = move.plan(everything[:, :experts].contiguous(), self.rank)
        ends = everything[:, experts + self.rank].cumsum(0).int()
        slots = torch.where(goes, goes.cumsum(0) - 1 + (sent.cumsum(0) - sent), -1).int()
        tokens = self._tokens(slots, int(splits[0].sum()))
        packets, offsets = self._exchange([*parts, labels], tokens, splits)
        labels = packets.view(torch.int32)[:, offsets[-1] // 4 :][:, : labels.shape[1]]
        handle_rows, row_scores = move.locate(labels, ends, starts, self.rank, received)
        handle = DispatchHandle(offs, handle_rows, row_scores, expert_ids, slots, tokens, splits)
        return move.place(_cut(packets, parts, offsets), handle_rows, received), handle

    def dispatch_with_handle(self, parts: list[torch.Tensor], handle: DispatchHandle) -> list[torch.Tensor]:
        """See ``Transport``."""
        check_parts(parts, handle.expert_ids.shape[0])
        packets, offsets = self._exchange(parts, handle.tokens, handle.splits)
        move = movements(packets.device)
        return move.place(_cut(packets, parts, offsets), handle.rows, handle.scores.shape[0])

    def combine(
        self,
        ys: list[torch.Tensor],
        weighted: bool,
        slot_values: torch.Tensor | None,
        handle: DispatchHandle,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``Transport``."""
        move = movements(handle.rows.device)
        weights = handle.scores if weighted else None
        partials, values = move.reduce(ys, weights, slot_values, handle.rows, torch.bfloat16)
        received, sent = handle.splits.flip(0), handle.tokens.shape[0]  # home sends what it received
        partials = self._all_to_all(partials, sent, received)
        if values is not None:
            values = self._all_to_all(values, sent, received)
        local = handle.offs.shape[0]
        return move.finish(partials, values, handle.slots, handle.expert_ids, local, out_dtype)

    def _tokens(self, slots: torch.Tensor, packets: int) -> torch.Tensor:
        """The token of each packet, from the packet of each token and rank."""
        tokens = torch.empty(packets + 1, dtype=torch.int32, device=slots.device)
        token = torch.arange(slots.shape[0], dtype=torch.int32, device=slots.device)
        where = torch.where(slots >= 0, slots, packets).long()
        return tokens.scatter_(0, where.view(-1), token[:, None].expand_as(slots).reshape(-1))[:packets].clone()

    def _exchange(
        self, parts: list[torch.Tensor], tokens: torch.Tensor, splits: torch.Tensor
    ) -> tuple[torch.Tensor, list[int]]:
        """The packets that arrive, uint8 (N, bytes), and where in them each part begins."""
        offsets = [0]
        for part in parts:
            offsets.append(ceil_to(offsets[-1] + part.shape[1] * part.element_size(), 16))
        width = offsets.pop()
        packets = torch.empty((tokens.shape[0], width), dtype=torch.uint8, device=tokens.device)
        movements(tokens.device).gather(parts, tokens, packets, offsets)
        return self._all_to_all(packets, int(splits[1].sum()), splits), offsets

    def _all_to_all(self, x: torch.Tensor, rows: int, splits: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((rows, x.shape[1]))
        send, receive = splits.tolist()
        dist.all_to_all_single(out, x, receive, send, group=self.group)
        return out


def _cut(packets: torch.Tensor, parts: list[torch.Tensor], offsets: list[int]) -> list[torch.Tensor]:
    """The parts in the packets, as views of the same dtypes."""
    cut = []
    for part, offset in zip(parts, offsets, strict=False):  # the last offset may be the labels'
        columns = packets[:, offset : offset + part.shape[1] * part.element_size()]
        cut.append(columns.view(part.dtype))
    return cut
