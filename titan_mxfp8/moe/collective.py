"""Tokens over ``torch.distributed``: wherever NCCL or gloo runs.

A rank sends each token once to every rank that has one of its experts, all in one buffer of bytes:

| bytes of a copy       | what                                                               |
|-----------------------|--------------------------------------------------------------------|
| of each payload       | the token's row: FP8 data, scales; or bf16                         |
| 3 x 4 x K             | its metadata: experts, positions, bits of the scores (``rows.py``) |

each from a multiple of 16 on. NCCL knows no FP8 or E8M0 and gloo neither. The counts go to all ranks first;
the host reads them, once per layer, for the sizes that torch.distributed wants. What the ranks add up returns the same
way, and backward uses the sizes again.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from titan_mxfp8.format.mx import ceil_to
from titan_mxfp8.moe.transport import (
    DispatchHandle,
    Overlap,
    check_payload,
    checked_ids,
    movements,
    nothing,
    read_later,
)


class Collective:
    """``Transport`` over all-to-all of a process group. Methods are as there."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.ranks, self.rank = group, group.size(), group.rank()

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
        """Raises ValueError with ``worst_case`` too: the host has to know the sizes."""
        expert_ids = checked_ids(payload, expert_ids, scores, experts, self.ranks)
        if worst_case:
            raise ValueError("the collective transport cannot take rows for the worst case: use counted rows")
        move, local = movements(expert_ids.device), experts // self.ranks
        counts, metadata = move.make_metadata(expert_ids, scores, experts)
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
        capacity = int(sizes[:, self.rank * local : (self.rank + 1) * local].sum())

        starts, offs = move.plan(everything[:, :experts].contiguous(), self.rank)
        ends = everything[:, experts + self.rank].cumsum(0).int()
        copies_of_token = torch.where(goes, goes.cumsum(0) - 1 + (sent.cumsum(0) - sent), -1).int()
        token_of_copy = _token_of_copy(copies_of_token, int(splits[0].sum()))
        copies, offsets = self._exchange([*payload, metadata], token_of_copy, splits)
        metadata = copies.view(torch.int32)[:, offsets[-1] // 4 :][:, : metadata.shape[1]]
        destinations, row_scores = move.find_destinations(metadata, ends, starts, self.rank, capacity)
        handle = DispatchHandle(offs, destinations, row_scores, expert_ids, copies_of_token, token_of_copy, splits)
        return move.permute(_cut(copies, payload, offsets), destinations, capacity), handle

    def dispatch_with_handle(self, payload: list[Tensor], handle: DispatchHandle) -> list[Tensor]:
        check_payload(payload, handle.expert_ids.shape[0])
        copies, offsets = self._exchange(payload, handle.token_of_copy, handle.splits)
        move = movements(copies.device)
        return move.permute(_cut(copies, payload, offsets), handle.destinations, handle.scores.shape[0])

    def combine(
        self, ys: list[Tensor], weighted: bool, slot_values: Tensor | None, handle: DispatchHandle, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        move, weights = movements(handle.offs.device), handle.scores if weighted else None
        partials, values = move.local_combine(ys, weights, slot_values, handle.destinations, torch.bfloat16)
        back = handle.splits.flip(0)  # a rank returns what it received
        partials = self._all_to_all(partials, back)
        if values is not None:
            values = self._all_to_all(values, back)
        return move.combine(partials, values, handle.copies_of_token, handle.expert_ids, handle.offs.shape[0], dtype)

    def _exchange(self, tensors: list[Tensor], token_of_copy: Tensor, splits: Tensor) -> tuple[Tensor, list[int]]:
        """The copies that arrive, uint8 (N, bytes), and where in them each tensor begins."""
        offsets = [0]
        for tensor in tensors:
            offsets.append(ceil_to(offsets[-1] + tensor.shape[1] * tensor.element_size(), 16))
        width = offsets.pop()
        copies = torch.empty((token_of_copy.shape[0], width), dtype=torch.uint8, device=token_of_copy.device)
        movements(copies.device).gather(tensors, token_of_copy, copies, offsets)
        return self._all_to_all(copies, splits), offsets

    def _all_to_all(self, x: Tensor, splits: Tensor) -> Tensor:
        send, receive = splits.tolist()
        out = x.new_empty((sum(receive), x.shape[1]))
        dist.all_to_all_single(out, x, receive, send, group=self.group)
        return out


def _token_of_copy(copies_of_token: Tensor, copies: int) -> Tensor:
    tokens = torch.empty(copies + 1, dtype=torch.int32, device=copies_of_token.device)  # the last: of those not sent
    token = torch.arange(copies_of_token.shape[0], dtype=torch.int32, device=tokens.device)
    where = torch.where(copies_of_token >= 0, copies_of_token, copies).long()
    return tokens.scatter_(0, where.view(-1), token[:, None].expand_as(where).reshape(-1))[:copies].clone()


def _cut(copies: Tensor, payload: list[Tensor], offsets: list[int]) -> list[Tensor]:
    """The payload in the copies, as views of the same dtypes."""
    cut = []
    for tensor, offset in zip(payload, offsets, strict=False):  # the last offset may be the metadata's
        cut.append(copies[:, offset : offset + tensor.shape[1] * tensor.element_size()].view(tensor.dtype))
    return cut
