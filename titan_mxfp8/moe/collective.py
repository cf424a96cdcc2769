"""Tokens over ``torch.distributed``: wherever NCCL or gloo runs.

A rank sends each token once to every rank that has one of its experts, all in one buffer of bytes:

| bytes of a copy       | what                                                               |
|-----------------------|--------------------------------------------------------------------|
| of each payload       | the token's row: FP8 data, scales; or bf16                         |
| 3 x 4 x K             | its metadata: experts, positions, bits of the scores (``rows.py``) |

each from a multiple of 16 on. NCCL knows no FP8 or E8M0 and gloo neither. What the ranks add up returns the same way.

- Counted rows: the counts go to all ranks first, and the host reads them, once per layer, for the sizes that
  torch.distributed wants. Backward uses the sizes again.
- A capacity: every rank sends all of its tokens to all, as many as any rank may have, and gets as many sums back; so
  sizes are known, links are busier, and no host waits.
"""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from titan_mxfp8.format.mx import ceil_to
from titan_mxfp8.moe.rows import goes_to
from titan_mxfp8.moe.transport import DispatchHandle, Shared, Transport, gather_objects, movements, read_later

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13

# While the group lives, which nothing here may prolong: a thread of gloo that frees its last tensor while Python ends
# aborts the process.
_SHARED: WeakKeyDictionary[dist.ProcessGroup, Shared] = WeakKeyDictionary()


class Collective(Transport):
    """``Transport`` over collectives of a process group."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group.size(), group.rank(), _SHARED.setdefault(group, Shared()))
        self.group = group

    def _gather(self, value: object) -> list:
        return gather_objects(value, self.group)

    def _dispatch(self, payload, expert_ids, scores, experts, capacity, overlap, kept):
        move, local, room = movements(expert_ids.device), experts // self.ranks, self.shared.room
        counts, metadata = move.make_metadata(expert_ids, scores, experts)
        if capacity is not None:
            listed = None
            all_counts = counts.new_empty((self.ranks, experts))
            _all_gather(all_counts.view(-1), counts, group=self.group)
            copies, offsets, work = self._to_all([*payload, metadata], room)
            overlap()
            wanted = self.shared.wanted.buffer(capacity, counts.device)
            starts, offs = move.plan(all_counts, self.rank, capacity, wanted)
            ends = room * torch.arange(1, self.ranks + 1, dtype=torch.int32, device=counts.device)
            work.wait()
        else:
            goes = goes_to(expert_ids, local, self.ranks)
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
            listed = copies_of_token, token_of_copy, splits
        metadata = copies.view(torch.int32)[:, offsets[-1] // 4 :][:, : metadata.shape[1]]
        destinations, row_scores = move.find_destinations(metadata, ends, starts, self.rank, capacity)
        routing = offs, destinations, row_scores, expert_ids
        handle = DispatchHandle(*routing, *listed) if listed else DispatchHandle.of_direct(*routing, self.ranks)
        arrived = _cut(copies, payload, offsets)
        if kept is not None:
            kept += [tensor.clone(memory_format=torch.contiguous_format) for tensor in arrived]
        return move.permute(arrived, destinations, capacity), handle

    def _dispatch_with_handle(self, payload, handle):
        if _is_counted(handle):
            copies, offsets = self._exchange(payload, handle.token_of_copy, handle.splits)
        else:
            copies, offsets, work = self._to_all(payload, handle.destinations.shape[0] // self.ranks)
            work.wait()
        move = movements(copies.device)
        return move.permute(_cut(copies, payload, offsets), handle.destinations, handle.scores.shape[0])

    def _combine(self, ys, weights, slot_values, handle, dtype):
        move = movements(handle.offs.device)
        partials, values = move.local_combine(ys, weights, slot_values, handle.destinations, torch.bfloat16)
        if _is_counted(handle):
            back, copies_of_token = handle.splits.flip(0), handle.copies_of_token  # a rank returns what it received
        else:
            back, copies_of_token = None, (self.ranks, handle.destinations.shape[0] // self.ranks)
        partials = self._all_to_all(partials, back)
        if values is not None:
            values = self._all_to_all(values, back)
        return move.combine(partials, values, copies_of_token, handle.expert_ids, handle.offs.shape[0], dtype)

    def _to_all(self, tensors: list[Tensor], room: int) -> tuple[Tensor, list[int], dist.Work]:
        """As ``_exchange``, but every token to all ranks, ``room`` of each; what is there once the work has been waited
        for. What lies behind a rank's tokens names no expert."""
        tokens = torch.arange(tensors[0].shape[0], dtype=torch.int32, device=tensors[0].device)
        mine, offsets = _packed(tensors, tokens, room)
        mine[len(tokens) :].fill_(0xFF)
        copies = mine.new_empty((self.ranks * room, mine.shape[1]))
        return copies, offsets, _all_gather(copies, mine, group=self.group, async_op=True)

    def _exchange(self, tensors: list[Tensor], token_of_copy: Tensor, splits: Tensor) -> tuple[Tensor, list[int]]:
        """The copies that arrive, uint8 (N, bytes), and where in them each tensor begins."""
        copies, offsets = _packed(tensors, token_of_copy, token_of_copy.shape[0])
        return self._all_to_all(copies, splits), offsets

    def _all_to_all(self, x: Tensor, splits: Tensor | None) -> Tensor:
        send, receive = (None, None) if splits is None else splits.tolist()
        out = torch.empty_like(x) if splits is None else x.new_empty((sum(receive), x.shape[1]))
        dist.all_to_all_single(out, x, receive, send, group=self.group)
        return out


def _is_counted(handle: DispatchHandle) -> bool:
    return handle.splits.shape[1] > 0


def _packed(tensors: list[Tensor], tokens: Tensor, room: int) -> tuple[Tensor, list[int]]:
    """Copies of ``tokens``, the first rows of uint8 (room, bytes), and where in a copy each tensor's row begins."""
    offsets = [0]
    for tensor in tensors:
        offsets.append(ceil_to(offsets[-1] + tensor.shape[1] * tensor.element_size(), 16))
    copies = torch.empty((room, offsets.pop()), dtype=torch.uint8, device=tokens.device)
    movements(copies.device).gather(tensors, tokens, copies[: tokens.shape[0]], offsets)
    return copies, offsets


def _token_of_copy(copies_of_token: Tensor, copies: int) -> Tensor:
    tokens = torch.empty(copies + 1, dtype=torch.int32, device=copies_of_token.device)  # the last: of those not sent
    token = torch.arange(copies_of_token.shape[0], dtype=torch.int32, device=tokens.device)
    where = torch.where(copies_of_token >= 0, copies_of_token, copies).long()
    return tokens.scatter_(0, where.view(-1), token[:, None].expand_as(where).reshape(-1))[:copies].clone()


def _cut(copies: Tensor, payload: list[Tensor], offsets: list[int]) -> list[Tensor]:
    """The payload in the copies, as views of the same dtypes."""
    return [
        copies[:, offset : offset + tensor.shape[1] * tensor.element_size()].view(tensor.dtype)
        for tensor, offset in zip(payload, offsets, strict=False)  # the last offset may be the metadata's
    ]
