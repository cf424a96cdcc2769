"""``rows.py`` for GPUs, and the same over memory that GPUs share.

Rows are copied whole, as integers of 4 bytes where their size allows: a program takes a row at a time, every
``programs``-th one. Addresses are 64 bits wide. Nothing of a batch is in a compiled kernel's key.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.hardware import multiprocessors
from titan_mxfp8.format.mx import ceil_div, next_power_of_2
from titan_mxfp8.moe import buffer
from titan_mxfp8.ops.library import aligned

COUNTS, LABELS, PARTS = tl.constexpr(buffer.COUNTS), tl.constexpr(buffer.LABELS), tl.constexpr(buffer.PARTS)
PARTIALS, VALUES = tl.constexpr(buffer.PARTIALS), tl.constexpr(buffer.VALUES)

_NO_LIMIT = 2**31 - 1
_SLOTS = 256  # of a program that compares them with each other
_PACKETS = 64  # of a program that looks up their rows
_COLUMNS = 4096  # of a row that a program adds up at a time
_PER_PROCESSOR = 8  # programs that copy or add up rows


class Peers(NamedTuple):
    """The ranks' buffers.

    Attributes:
        table: see ``buffer.Layout.table``.
        tokens: ``buffer.Layout.tokens``: packet n is token ``n % tokens`` of source ``n // tokens``.
        rank: this one.
    """

    table: torch.Tensor
    tokens: int
    rank: int

    @property
    def ranks(self) -> int:
        return self.table.shape[1]

    @property
    def packets(self) -> int:
        """Of all sources, if each had as many tokens as the buffers hold."""
        return self.ranks * self.tokens


@triton.jit(do_not_specialize=["slots"])
def _count_slots(ids, blocks, experts, slots, SLOTS: tl.constexpr, EXPERTS: tl.constexpr):
    """One program: how many of ``SLOTS`` slots chose each expert."""
    i = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    chosen = tl.load(ids + i, mask=i < slots, other=-1)
    for first in range(0, experts, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        count = tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(blocks + tl.program_id(0) * experts + expert, count, mask=expert < experts)


@triton.jit(do_not_specialize=["count"])
def _add_blocks(blocks, before, counts, experts, count, BLOCKS: tl.constexpr, EXPERTS: tl.constexpr):
    """One program: for ``EXPERTS`` experts, the slots before each block, and all of them.

    Of blocks ``[[1, 0], [2, 3]]`` of two experts: ``[[0, 0], [1, 0]]`` before them and ``[3, 3]`` in all.
    """
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, count, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        inside = (block < count)[:, None] & (expert < experts)[None, :]
        at = block[:, None] * experts + expert[None, :]
        n = tl.load(blocks + at, mask=inside, other=0)
        tl.store(before + at, total[None, :] + tl.cumsum(n, 0) - n, mask=inside)
        total += tl.sum(n, 0)
    tl.store(counts + expert, total, mask=expert < experts)


@triton.jit(do_not_specialize=["slots"])
def _label(ids, scores, before, labels, experts, slots, K: tl.constexpr, SLOTS: tl.constexpr, AT_ONCE: tl.constexpr):
    """One program: the labels of ``SLOTS`` slots."""
    i = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    chosen = tl.load(ids + i, mask=i < slots, other=-1)
    known = (chosen >= 0) & (chosen < experts)
    position = tl.load(before + tl.program_id(0) * experts + chosen, mask=known, other=0)
    for first in range(0, SLOTS, AT_ONCE):
        other = tl.program_id(0) * SLOTS + first + tl.arange(0, AT_ONCE)
        same = chosen[:, None] == tl.load(ids + other, mask=other < slots, other=-1)[None, :]
        position += tl.sum((same & (other[None, :] < i[:, None])).to(tl.int32), 1)
    score = tl.load(scores + i, mask=i < slots, other=0)
    at = labels + i // K * (3 * K) + i % K
    tl.store(at, chosen, mask=i < slots)
    tl.store(at + K, tl.where(known, position, 0), mask=i < slots)
    tl.store(at + 2 * K, score.to(tl.int32, bitcast=True), mask=i < slots)


@triton.jit(do_not_specialize=["rank", "capacity"])
def _plan(
    table, counts, starts, offs, local, rank, capacity, RANKS: tl.constexpr, SIZES: tl.constexpr, PEERS: tl.constexpr
):
    """The one program: see ``rows.plan``."""
    i = tl.arange(0, SIZES)
    expert, source = i // RANKS, i % RANKS
    known = expert < local
    if PEERS:
        of_source = tl.load(table + COUNTS * RANKS + source).to(tl.pointer_type(tl.int32))
    else:
        of_source = counts + source * local * RANKS
    size = tl.load(of_source + rank * local + expert, mask=known, other=0)
    end = tl.cumsum(size, 0)
    tl.store(starts + source * local + expert, end - size, mask=known)
    tl.store(offs + expert, tl.minimum(end, capacity), mask=known & (source == RANKS - 1))


@triton.jit(do_not_specialize=["packets", "tokens", "rank", "capacity"])
def _locate(
    table, labels, ends, starts, rows, scores,
    local, packets, tokens, rank, capacity,
    RANKS: tl.constexpr, SOURCES: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, SLOTS: tl.constexpr,
    PACKETS: tl.constexpr, PEERS: tl.constexpr,
):  # fmt: skip
    """One program: the rows of ``PACKETS`` packets, see ``rows.locate``."""
    packet = tl.program_id(0) * PACKETS + tl.arange(0, PACKETS)
    slot = tl.arange(0, SLOTS)[None, :]
    inside = packet < packets
    if PEERS:
        source = tl.minimum(packet // tokens, RANKS - 1)
        token = packet - source * tokens
        counts = tl.load(table + COUNTS * RANKS + source).to(tl.pointer_type(tl.int32))
        is_there = inside & (token < tl.load(counts + local * RANKS))
        of_source = tl.load(table + LABELS * RANKS + source).to(tl.pointer_type(tl.int32))
        label = of_source[:, None] + token.to(tl.int64)[:, None] * (3 * K) + slot
    else:
        r = tl.arange(0, SOURCES)
        end = tl.load(ends + r, mask=r < RANKS, other=packets)
        source = tl.minimum(tl.sum((packet[:, None] >= end[None, :]).to(tl.int32), 1), RANKS - 1)
        is_there = inside
        label = labels + packet.to(tl.int64)[:, None] * STRIDE + slot
    expert = tl.load(label, mask=is_there[:, None] & (slot < K), other=-1) - rank * local
    is_local = (expert >= 0) & (expert < local)
    row = tl.load(starts + source[:, None] * local + expert, mask=is_local, other=0)
    row += tl.load(label + K, mask=is_local, other=0)
    row = tl.where(is_local, tl.where(row < capacity, row, -2), -1)
    score = tl.load(label + 2 * K, mask=row >= 0, other=0).to(tl.float32, bitcast=True)
    tl.store(scores + row, score, mask=row >= 0)
    tl.store(rows + packet.to(tl.int64)[:, None] * K + slot, row, mask=inside[:, None] & (slot < K))


@triton.jit(do_not_specialize=["packets"])
def _gather(part, tokens, out, packets, WORDS: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """One program: every ``programs``-th packet's row of a part."""
    column = tl.arange(0, BLOCK)
    for n in range(tl.program_id(0), packets, tl.num_programs(0)):
        token = tl.load(tokens + n).to(tl.int64)
        words = tl.load(part + token * WORDS + column, mask=column < WORDS)
        tl.store(out + tl.cast(n, tl.int64) * STRIDE + column, words, mask=column < WORDS)


@triton.jit(do_not_specialize=["packets", "tokens"])
def _place(
    table, part0, part1, rows, out0, out1,
    packets, tokens,
    K: tl.constexpr, WORDS0: tl.constexpr, WORDS1: tl.constexpr, STRIDE0: tl.constexpr, STRIDE1: tl.constexpr,
    BLOCK0: tl.constexpr, BLOCK1: tl.constexpr, RANKS: tl.constexpr, PEERS: tl.constexpr,
):  # fmt: skip
    """One program: the rows of every ``programs``-th packet, read once, to all their places here.

    With peers, a program takes a packet of each source in turn, so that all links and this GPU's memory are busy.
    """
    dtype: tl.constexpr = out0.dtype.element_ty
    column0, column1 = tl.arange(0, BLOCK0), tl.arange(0, BLOCK1)
    for first_packet in range(tl.program_id(0) * RANKS, packets, tl.num_programs(0) * RANKS):
        for source in range(RANKS):
            token = tl.cast(first_packet // RANKS, tl.int64)
            packet = token + tl.cast(tokens, tl.int64) * source
            last = -1
            for j in tl.static_range(K):
                last = tl.maximum(last, tl.load(rows + packet * K + j))
            if last >= 0:
                if PEERS:
                    start = tl.load(table + PARTS * RANKS + source)
                    second = (tl.cast(tokens, tl.int64) * (WORDS0 * dtype.primitive_bitwidth // 8) + 15) // 16 * 16
                    at0 = tl.multiple_of(start.to(tl.pointer_type(dtype)), 16) + token * STRIDE0
                    at1 = tl.multiple_of((start + second).to(tl.pointer_type(dtype)), 16) + token * STRIDE1
                else:
                    at0 = part0 + packet * STRIDE0
                    at1 = part1 + packet * STRIDE1
                words0 = tl.load(at0 + column0, mask=column0 < WORDS0)
                words1 = tl.load(at1 + column1, mask=column1 < WORDS1)
                for j in tl.static_range(K):
                    row = tl.load(rows + packet * K + j).to(tl.int64)
                    if row >= 0:
                        tl.store(out0 + row * WORDS0 + column0, words0, mask=column0 < WORDS0)
                        tl.store(out1 + row * WORDS1 + column1, words1, mask=column1 < WORDS1)


@triton.jit(do_not_specialize=["packets", "tokens", "rank"])
def _reduce(
    table, y0, y1, weights, slot_values, rows, sums, values,
    packets, tokens, rank,
    D: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, BOTH: tl.constexpr,
    WEIGHTED: tl.constexpr, WITH_VALUES: tl.constexpr, RANKS: tl.constexpr, PEERS: tl.constexpr,
):  # fmt: skip
    """One program: the sums of every ``programs``-th packet.

    With peers, each is written into the buffer of the rank where its token is at home, if any slot of it arrived here.
    A program takes a packet of each source in turn, so that it waits for links and for memory at the same time.
    """
    for first_packet in range(tl.program_id(0) * RANKS, packets, tl.num_programs(0) * RANKS):
        for source in range(RANKS):
            if PEERS:
                token = tl.cast(first_packet // RANKS, tl.int64)
                packet = token + tl.cast(tokens, tl.int64) * source
                at = token + tl.cast(tokens, tl.int64) * rank
                start = tl.load(table + PARTIALS * RANKS + source).to(tl.pointer_type(tl.bfloat16))
                sums_there = tl.multiple_of(start, 16)
                values_there = tl.load(table + VALUES * RANKS + source).to(tl.pointer_type(tl.float32))
            else:
                packet = tl.cast(first_packet, tl.int64)
                at, sums_there, values_there = packet, sums, values
            is_here = not PEERS
            for j in tl.static_range(K):
                is_here |= tl.load(rows + packet * K + j) != -1
            if is_here:
                for first in tl.static_range(0, D, BLOCK):
                    column = first + tl.arange(0, BLOCK)
                    total = tl.zeros((BLOCK,), tl.float32)
                    for j in tl.static_range(K):
                        # no branch: the loads of all slots are under way together
                        row = tl.load(rows + packet * K + j).to(tl.int64)
                        read = (column < D) & (row >= 0)
                        y = tl.load(y0 + row * D + column, mask=read, other=0).to(tl.float32)
                        if BOTH:
                            y += tl.load(y1 + row * D + column, mask=read, other=0).to(tl.float32)
                        if WEIGHTED:
                            y *= tl.load(weights + row, mask=row >= 0, other=0)
                        total += y
                    there = sums_there + at * D + column
                    tl.store(there, total.to(sums_there.dtype.element_ty), mask=column < D)
                if WITH_VALUES:
                    slot = tl.arange(0, SLOTS)
                    row = tl.load(rows + packet * K + slot, mask=slot < K, other=-1)
                    value = tl.load(slot_values + row, mask=row >= 0, other=0)
                    tl.store(values_there + at * K + slot, value, mask=slot < K)


@triton.jit(do_not_specialize=["count", "tokens"])
def _finish(
    partials, values, slots, ids, sums, at_home,
    local, count, tokens,
    D: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr,
    WITH_VALUES: tl.constexpr, PEERS: tl.constexpr,
):  # fmt: skip
    """One program: every ``programs``-th of ``count`` tokens, see ``rows.finish``.

    With peers, what rank r added up of token t is packet ``r * tokens + t``, and what it did not is not there.
    """
    for n in range(tl.program_id(0), count, tl.num_programs(0)):
        token = tl.cast(n, tl.int64)
        slot = tl.arange(0, SLOTS)
        expert = tl.load(ids + token * K + slot, mask=slot < K, other=-1)
        known = (expert >= 0) & (expert < local * RANKS)
        owner = tl.where(known, expert // local, -1)
        for first in tl.static_range(0, D, BLOCK):
            column = first + tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK,), tl.float32)
            for r in tl.static_range(RANKS):
                if PEERS:
                    packet = token + tl.cast(tokens, tl.int64) * r
                    went = tl.max((owner == r).to(tl.int32), 0) > 0
                else:
                    packet = tl.load(slots + token * RANKS + r).to(tl.int64)
                    went = packet >= 0
                partial = tl.load(partials + packet * D + column, mask=went & (column < D), other=0)
                total += partial.to(tl.float32)
            tl.store(sums + token * D + column, total.to(sums.dtype.element_ty), mask=column < D)
        if WITH_VALUES:
            if PEERS:
                packet_of_slot = token + tl.cast(tokens, tl.int64) * owner
            else:
                packet_of_slot = tl.load(slots + token * RANKS + owner, mask=known, other=0).to(tl.int64)
            value = tl.load(values + packet_of_slot * K + slot, mask=known, other=0)
            tl.store(at_home + token * K + slot, value, mask=slot < K)


_COUNT_SLOTS, _ADD_BLOCKS, _LABEL, _PLAN = map(Kernel, (_count_slots, _add_blocks, _label, _plan))
_LOCATE, _GATHER, _PLACE, _REDUCE, _FINISH = map(Kernel, (_locate, _gather, _place, _reduce, _finish))


def label(
    expert_ids: torch.Tensor,
    scores: torch.Tensor,
    experts: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows.label``, into ``out`` if it is given; expert_ids contiguous."""
    device, (tokens, k) = expert_ids.device, expert_ids.shape
    slots, blocks = tokens * k, ceil_div(tokens * k, _SLOTS)
    if out is None:
        out = expert_ids.new_empty(experts), expert_ids.new_empty((tokens, 3 * k))
    counts, labels = out
    scores = aligned(scores.contiguous())
    in_blocks = expert_ids.new_empty((2, blocks * ceil_div(experts, 4) * 4))
    _COUNT_SLOTS.launch(blocks, (expert_ids, in_blocks[0]), (experts,), (slots,), (_SLOTS, 32), device=device)
    tensors = in_blocks[0], in_blocks[1], counts
    _ADD_BLOCKS.launch(ceil_div(experts, 16), tensors, (experts,), (blocks,), (128, 16), device=device)
    tensors = expert_ids, scores, in_blocks[1], labels
    _LABEL.launch(blocks, tensors, (experts,), (slots,), (k, _SLOTS, 32), device=device)
    return counts, labels


def plan(
    counts: torch.Tensor, rank: int, capacity: int | None = None, peers: Peers | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows.plan``; with peers the counts are theirs, and of ``counts`` only the number of columns is looked at."""
    ranks, experts = counts.shape[0] if peers is None else peers.ranks, counts.shape[1]
    local = experts // ranks
    starts = torch.empty((ranks, local), dtype=torch.int32, device=counts.device)
    offs = torch.empty(local, dtype=torch.int32, device=counts.device)
    table = None if peers is None else peers.table
    tensors = table, None if peers else counts, starts, offs
    constants = ranks, next_power_of_2(experts), peers is not None
    limits = rank, _NO_LIMIT if capacity is None else capacity
    _PLAN.launch(1, tensors, (local,), limits, constants, device=counts.device)
    return starts, offs


def locate(
    labels: torch.Tensor,
    ends: torch.Tensor | None,
    starts: torch.Tensor,
    rank: int,
    capacity: int,
    peers: Peers | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows.locate``; with peers the labels are theirs, and of ``labels`` only the width is looked at. Labels may be
    columns of something wider. Scores of rows that no slot has are not written."""
    (ranks, local), k = starts.shape, labels.shape[1] // 3
    packets = labels.shape[0] if peers is None else peers.packets
    rows = torch.empty((packets, k), dtype=torch.int32, device=starts.device)
    scores = torch.empty(capacity, dtype=torch.float32, device=starts.device)
    table, tokens = (None, 1) if peers is None else (peers.table, peers.tokens)
    tensors = table, None if peers else labels, ends, starts, rows, scores
    powers = next_power_of_2(ranks), next_power_of_2(k)
    constants = ranks, powers[0], k, labels.stride(0), powers[1], _PACKETS, peers is not None
    counts = packets, tokens, rank, capacity
    _LOCATE.launch(ceil_div(packets, _PACKETS), tensors, (local,), counts, constants, device=starts.device)
    return rows, scores


def gather(parts: list[torch.Tensor], tokens: torch.Tensor, packets: torch.Tensor, offsets: list[int]) -> None:
    """``rows.gather``."""
    count, width = packets.shape
    for part, offset in zip(parts, offsets, strict=True):
        part = aligned(part).view(torch.uint8)
        dtype = _words(part.shape[1])
        source, out = part.view(dtype), packets.view(-1)[offset:].view(dtype)
        words = source.shape[1]
        block = next_power_of_2(words)
        constants = words, width // dtype.itemsize, block
        tensors, device = (source, tokens, out), packets.device
        warps = _warps(block * dtype.itemsize)
        _GATHER.launch(_programs(count, device), tensors, (), (count,), constants, device=device, warps=warps)


def place(
    parts: list[torch.Tensor], rows: torch.Tensor, capacity: int, peers: Peers | None = None
) -> list[torch.Tensor]:
    """``rows.place``; with peers the rows are those in their buffers, and of ``parts`` only the shape and dtype is
    looked at."""
    k, device = rows.shape[1], rows.device
    received = [torch.empty((capacity, part.shape[1]), dtype=part.dtype, device=device) for part in parts]
    in_bytes = [part.view(torch.uint8) for part in received]
    widths = [part.shape[1] for part in in_bytes]
    dtype = _words(*widths)
    outs = [part.view(dtype) for part in in_bytes]
    words = [part.shape[1] for part in outs]
    if peers is None:
        sources = [aligned(part).view(torch.uint8).view(dtype) for part in parts]
        strides = [source.stride(0) for source in sources]
    else:
        sources, strides = [None] * len(parts), words
    if len(parts) == 1:  # the second has no columns
        sources, outs, words, strides = sources * 2, outs * 2, [*words, 0], [*strides, 0]
    blocks = [next_power_of_2(max(count, 1)) for count in words]
    table, tokens, ranks = (None, 1, 1) if peers is None else (peers.table, peers.tokens, peers.ranks)
    packets = rows.shape[0]
    tensors = (table, *sources, rows, *outs)
    counts = packets, tokens
    constants = (k, *words, *strides, *blocks, ranks, peers is not None)
    warps = _warps(blocks[0] * dtype.itemsize)
    _PLACE.launch(
        _programs(ceil_div(packets, ranks), device), tensors, (), counts, constants, device=device, warps=warps
    )
    return received


def reduce(
    ys: list[torch.Tensor],
    weights: torch.Tensor | None,
    slot_values: torch.Tensor | None,
    rows: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``rows.reduce``."""
    packets, k = rows.shape
    sums = torch.empty((packets, ys[0].shape[1]), dtype=dtype, device=rows.device)
    values = None if slot_values is None else torch.empty((packets, k), dtype=torch.float32, device=rows.device)
    _launch_reduce(ys, weights, slot_values, rows, (sums, values), None)
    return sums, values


def reduce_to(
    peers: Peers,
    ys: list[torch.Tensor],
    weights: torch.Tensor | None,
    slot_values: torch.Tensor | None,
    rows: torch.Tensor,
) -> None:
    """``rows.reduce`` into the buffers of the ranks that the packets came from, the sums in bf16: of token t as packet
    ``rank * tokens + t`` there. Packets without a slot here are not written."""
    _launch_reduce(ys, weights, slot_values, rows, (None, None), peers)


def _launch_reduce(
    ys: list[torch.Tensor],
    weights: torch.Tensor | None,
    slot_values: torch.Tensor | None,
    rows: torch.Tensor,
    out: tuple[torch.Tensor | None, torch.Tensor | None],
    peers: Peers | None,
) -> None:
    packets, k, d, device = *rows.shape, ys[0].shape[1], rows.device
    ys = [aligned(y.contiguous()) for y in ys]
    given = [x if x is None else aligned(x.contiguous()) for x in (weights, slot_values)]
    table, tokens, rank, ranks = (
        (None, 1, 0, 1) if peers is None else (peers.table, peers.tokens, peers.rank, peers.ranks)
    )
    tensors = table, ys[0], ys[1] if len(ys) == 2 else None, *given, rows, *out
    block = min(next_power_of_2(d), _COLUMNS)
    constants = (
        d, k, next_power_of_2(k), block, len(ys) == 2, weights is not None, slot_values is not None, ranks,
        peers is not None,
    )  # fmt: skip
    programs = _programs(ceil_div(packets, ranks), device)
    _REDUCE.launch(programs, tensors, (), (packets, tokens, rank), constants, device=device, warps=_warps(block * 2))


def finish(
    partials: torch.Tensor,
    values: torch.Tensor | None,
    slots: torch.Tensor | None,
    expert_ids: torch.Tensor,
    experts: int,
    dtype: torch.dtype,
    peers: Peers | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``rows.finish``; with peers partial sums and values are what ``reduce_to`` wrote here, and there are no
    ``slots``."""
    (tokens, k), d, device = expert_ids.shape, partials.shape[1], expert_ids.device
    sums = torch.empty((tokens, d), dtype=dtype, device=device)
    at_home = None if values is None else torch.empty((tokens, k), dtype=torch.float32, device=device)
    ranks, of_a_rank = (slots.shape[1], 1) if peers is None else (peers.ranks, peers.tokens)
    block = min(next_power_of_2(d), _COLUMNS)
    constants = d, k, next_power_of_2(k), block, ranks, values is not None, peers is not None
    _FINISH.launch(
        _programs(tokens, device), (partials, values, slots, expert_ids, sums, at_home), (experts,),
        (tokens, of_a_rank), constants, device=device, warps=_warps(block * 2),
    )  # fmt: skip
    return sums, at_home


def _programs(count: int, device: torch.device) -> int:
    return min(count, _PER_PROCESSOR * multiprocessors(device))


def _warps(row_bytes: int) -> int:
    """A thread takes 32 bytes of a row."""
    return min(max(row_bytes // 1024, 1), 8)


def _words(*widths: int) -> torch.dtype:
    return torch.uint8 if any(width % 4 for width in widths) else torch.int32
