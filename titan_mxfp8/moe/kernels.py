"""``rows.py`` for GPUs, and the same over memory that GPUs share.

Rows are copied whole, as integers of 4 bytes where their size allows: a program takes a row at a time, every
``programs``-th one. Addresses are 64 bits wide. Nothing of a batch is in a compiled kernel's key.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.hardware import multiprocessors
from titan_mxfp8.format.mx import ceil_div, next_power_of_2
from titan_mxfp8.moe import buffer
from titan_mxfp8.ops.library import aligned

COUNTS, METADATA, PAYLOAD = tl.constexpr(buffer.COUNTS), tl.constexpr(buffer.METADATA), tl.constexpr(buffer.PAYLOAD)
PARTIALS, VALUES = tl.constexpr(buffer.PARTIALS), tl.constexpr(buffer.VALUES)

_NO_LIMIT = 2**31 - 1
_SLOTS = 256  # of a program that compares them with each other
_COPIES = 64  # of a program that looks up their rows
_COLUMNS = 4096  # of a row that a program adds up at a time
_PER_PROCESSOR = 8  # programs that copy or add up rows


class Peers(NamedTuple):
    """The ranks' buffers, from which copies are read, and to which their sums go.

    Attributes:
        table: see ``buffer.Layout.table``; None: copies and sums are tensors of this rank.
        tokens: ``buffer.Layout.tokens``: copy n is token ``n % tokens`` of source ``n // tokens``.
        rank: this one.
        ranks: how many.
    """

    table: Tensor | None
    tokens: int
    rank: int
    ranks: int


_ALONE = Peers(None, 1, 0, 1)


@Kernel
@triton.jit(do_not_specialize=["slots"])
def _count_slots(ids, blocks, experts, slots, SLOTS: tl.constexpr, EXPERTS: tl.constexpr):
    """One program: how many of ``SLOTS`` slots chose each expert."""
    i = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    chosen = tl.load(ids + i, mask=i < slots, other=-1)
    for first in range(0, experts, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        count = tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(blocks + tl.program_id(0) * experts + expert, count, mask=expert < experts)


@Kernel
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


@Kernel
@triton.jit(do_not_specialize=["slots"])
def _make_metadata(
    ids, scores, before, metadata, experts, slots, K: tl.constexpr, SLOTS: tl.constexpr, AT_ONCE: tl.constexpr
):
    """One program: the metadata of ``SLOTS`` slots."""
    i = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    chosen = tl.load(ids + i, mask=i < slots, other=-1)
    known = (chosen >= 0) & (chosen < experts)
    position = tl.load(before + tl.program_id(0) * experts + chosen, mask=known, other=0)
    for first in range(0, SLOTS, AT_ONCE):
        other = tl.program_id(0) * SLOTS + first + tl.arange(0, AT_ONCE)
        same = chosen[:, None] == tl.load(ids + other, mask=other < slots, other=-1)[None, :]
        position += tl.sum((same & (other[None, :] < i[:, None])).to(tl.int32), 1)
    score = tl.load(scores + i, mask=i < slots, other=0)
    at = metadata + i // K * (3 * K) + i % K
    tl.store(at, chosen, mask=i < slots)
    tl.store(at + K, tl.where(known, position, 0), mask=i < slots)
    tl.store(at + 2 * K, score.to(tl.int32, bitcast=True), mask=i < slots)


@Kernel
@triton.jit(do_not_specialize=["rank", "capacity"])
def _plan(
    table, counts, starts, offs, wanted,
    local, rank, capacity,
    RANKS: tl.constexpr, SIZES: tl.constexpr, BOUNDED: tl.constexpr, PEERS: tl.constexpr,
):  # fmt: skip
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
    if BOUNDED:
        most = 0
        for owner in range(RANKS):
            most = tl.maximum(most, tl.sum(tl.load(of_source + owner * local + expert, mask=known, other=0), 0))
        tl.atomic_max(wanted, most)


@Kernel
@triton.jit(do_not_specialize=["copies", "tokens", "rank", "capacity"])
def _find_destinations(
    table, metadata, ends, starts, destinations, scores,
    local, copies, tokens, rank, capacity,
    RANKS: tl.constexpr, SOURCES: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, SLOTS: tl.constexpr,
    COPIES: tl.constexpr, PEERS: tl.constexpr,
):  # fmt: skip
    """One program: the destinations of ``COPIES`` copies, see ``rows.find_destinations``."""
    copy = tl.program_id(0) * COPIES + tl.arange(0, COPIES)
    slot = tl.arange(0, SLOTS)[None, :]
    inside = copy < copies
    if PEERS:
        source = tl.minimum(copy // tokens, RANKS - 1)
        token = copy - source * tokens
        counts = tl.load(table + COUNTS * RANKS + source).to(tl.pointer_type(tl.int32))
        is_there = inside & (token < tl.load(counts + local * RANKS))
        of_source = tl.load(table + METADATA * RANKS + source).to(tl.pointer_type(tl.int32))
        at = of_source[:, None] + token.to(tl.int64)[:, None] * (3 * K) + slot
    else:
        r = tl.arange(0, SOURCES)
        end = tl.load(ends + r, mask=r < RANKS, other=copies)
        source = tl.minimum(tl.sum((copy[:, None] >= end[None, :]).to(tl.int32), 1), RANKS - 1)
        is_there = inside
        at = metadata + copy.to(tl.int64)[:, None] * STRIDE + slot
    expert = tl.load(at, mask=is_there[:, None] & (slot < K), other=-1) - rank * local
    is_local = (expert >= 0) & (expert < local)
    row = tl.load(starts + source[:, None] * local + expert, mask=is_local, other=0)
    row += tl.load(at + K, mask=is_local, other=0)
    row = tl.where(is_local, tl.where(row < capacity, row, -2), -1)
    score = tl.load(at + 2 * K, mask=row >= 0, other=0).to(tl.float32, bitcast=True)
    tl.store(scores + row, score, mask=row >= 0)
    tl.store(destinations + copy.to(tl.int64)[:, None] * K + slot, row, mask=inside[:, None] & (slot < K))


@Kernel
@triton.jit(do_not_specialize=["slots"])
def _find_sources(destinations, sources, slots, K: tl.constexpr, SLOTS: tl.constexpr):
    """One program: the rows of ``SLOTS`` slots, see ``rows.find_sources``."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    row = tl.load(destinations + slot, mask=slot < slots, other=-1)
    tl.store(sources + row, slot // K, mask=row >= 0)


@Kernel
@triton.jit(do_not_specialize=["copies"])
def _gather(x, tokens, out, copies, WORDS: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """One program: every ``programs``-th copy's row of ``x``."""
    column = tl.arange(0, BLOCK)
    for n in range(tl.program_id(0), copies, tl.num_programs(0)):
        token = tl.load(tokens + n).to(tl.int64)
        words = tl.load(x + token * WORDS + column, mask=column < WORDS)
        tl.store(out + tl.cast(n, tl.int64) * STRIDE + column, words, mask=column < WORDS)


@Kernel
@triton.jit(do_not_specialize=["copies", "tokens"])
def _permute(
    table, data, scales, destinations, out0, out1, kept0, kept1,
    copies, tokens,
    K: tl.constexpr, WORDS0: tl.constexpr, WORDS1: tl.constexpr, STRIDE0: tl.constexpr, STRIDE1: tl.constexpr,
    BLOCK0: tl.constexpr, BLOCK1: tl.constexpr, RANKS: tl.constexpr, PEERS: tl.constexpr,
):  # fmt: skip
    """One program: the rows of every ``programs``-th copy, read once, to all their destinations, and once to ``kept``.

    With peers, a program takes a copy of each source in turn, so that all links and this GPU's memory are busy.
    """
    dtype: tl.constexpr = out0.dtype.element_ty
    column0, column1 = tl.arange(0, BLOCK0), tl.arange(0, BLOCK1)
    for first_copy in range(tl.program_id(0) * RANKS, copies, tl.num_programs(0) * RANKS):
        for source in range(RANKS):
            token = tl.cast(first_copy // RANKS, tl.int64)
            copy = token + tl.cast(tokens, tl.int64) * source
            last = -1
            for j in tl.static_range(K):
                last = tl.maximum(last, tl.load(destinations + copy * K + j))
            if last >= 0:
                if PEERS:
                    start = tl.load(table + PAYLOAD * RANKS + source)
                    scales_at = (tl.cast(tokens, tl.int64) * (WORDS0 * dtype.primitive_bitwidth // 8) + 15) // 16 * 16
                    at0 = tl.multiple_of(start.to(tl.pointer_type(dtype)), 16) + token * STRIDE0
                    at1 = tl.multiple_of((start + scales_at).to(tl.pointer_type(dtype)), 16) + token * STRIDE1
                else:
                    at0 = data + copy * STRIDE0
                    at1 = scales + copy * STRIDE1
                words0 = tl.load(at0 + column0, mask=column0 < WORDS0)
                words1 = tl.load(at1 + column1, mask=column1 < WORDS1)
                if kept0 is not None:
                    tl.store(kept0 + copy * WORDS0 + column0, words0, mask=column0 < WORDS0)
                    tl.store(kept1 + copy * WORDS1 + column1, words1, mask=column1 < WORDS1)
                for j in tl.static_range(K):
                    row = tl.load(destinations + copy * K + j).to(tl.int64)
                    if row >= 0:
                        tl.store(out0 + row * WORDS0 + column0, words0, mask=column0 < WORDS0)
                        tl.store(out1 + row * WORDS1 + column1, words1, mask=column1 < WORDS1)


@Kernel
@triton.jit(do_not_specialize=["copies", "tokens", "rank"])
def _local_combine(
    table, y0, y1, weights, slot_values, destinations, sums, values,
    copies, tokens, rank,
    D: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, BOTH: tl.constexpr,
    WEIGHTED: tl.constexpr, WITH_VALUES: tl.constexpr, RANKS: tl.constexpr, PEERS: tl.constexpr,
):  # fmt: skip
    """One program: the sums of every ``programs``-th copy.

    With peers, each is written into the buffer of its source rank, if any of its slots chose an expert here.
    A program takes a copy of each source in turn, so that it waits for links and for memory at the same time.
    """
    for first_copy in range(tl.program_id(0) * RANKS, copies, tl.num_programs(0) * RANKS):
        for source in range(RANKS):
            if PEERS:
                token = tl.cast(first_copy // RANKS, tl.int64)
                copy = token + tl.cast(tokens, tl.int64) * source
                at = token + tl.cast(tokens, tl.int64) * rank
                start = tl.load(table + PARTIALS * RANKS + source).to(tl.pointer_type(tl.bfloat16))
                sums_there = tl.multiple_of(start, 16)
                values_there = tl.load(table + VALUES * RANKS + source).to(tl.pointer_type(tl.float32))
            else:
                copy = tl.cast(first_copy, tl.int64)
                at, sums_there, values_there = copy, sums, values
            is_here = not PEERS
            for j in tl.static_range(K):
                is_here |= tl.load(destinations + copy * K + j) != -1
            if is_here:
                for first in tl.static_range(0, D, BLOCK):
                    column = first + tl.arange(0, BLOCK)
                    total = tl.zeros((BLOCK,), tl.float32)
                    for j in tl.static_range(K):
                        # no branch: the loads of all slots are under way together
                        row = tl.load(destinations + copy * K + j).to(tl.int64)
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
                    row = tl.load(destinations + copy * K + slot, mask=slot < K, other=-1)
                    value = tl.load(slot_values + row, mask=row >= 0, other=0)
                    tl.store(values_there + at * K + slot, value, mask=slot < K)


@Kernel
@triton.jit(do_not_specialize=["count", "tokens"])
def _combine(
    partials, values, copies_of_token, ids, sums, slot_values,
    local, count, tokens,
    D: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr,
    WITH_VALUES: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """One program: every ``programs``-th of ``count`` tokens, see ``rows.combine``.

    Where they are not listed, what rank r added up of token t is copy ``r * tokens + t``.
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
                if LISTED:
                    copy = tl.load(copies_of_token + token * RANKS + r).to(tl.int64)
                    went = copy >= 0
                else:
                    copy = token + tl.cast(tokens, tl.int64) * r
                    went = tl.max((owner == r).to(tl.int32), 0) > 0
                partial = tl.load(partials + copy * D + column, mask=went & (column < D), other=0)
                total += partial.to(tl.float32)
            tl.store(sums + token * D + column, total.to(sums.dtype.element_ty), mask=column < D)
        if WITH_VALUES:
            if LISTED:
                copy_of_slot = tl.load(copies_of_token + token * RANKS + owner, mask=known, other=0).to(tl.int64)
            else:
                copy_of_slot = token + tl.cast(tokens, tl.int64) * owner
            value = tl.load(values + copy_of_slot * K + slot, mask=known, other=0)
            tl.store(slot_values + token * K + slot, value, mask=slot < K)


def make_metadata(
    expert_ids: Tensor, scores: Tensor, experts: int, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """``rows.make_metadata``, into ``out`` if it is given; expert_ids contiguous."""
    device, (tokens, k) = expert_ids.device, expert_ids.shape
    slots, blocks = tokens * k, ceil_div(tokens * k, _SLOTS)
    if out is None:
        out = expert_ids.new_empty(experts), expert_ids.new_empty((tokens, 3 * k))
    counts, metadata = out
    scores = aligned(scores.contiguous())
    in_blocks = expert_ids.new_empty((2, blocks * ceil_div(experts, 4) * 4))
    _count_slots.launch(blocks, (expert_ids, in_blocks[0]), (experts,), (slots,), (_SLOTS, 32), device=device)
    tensors = in_blocks[0], in_blocks[1], counts
    _add_blocks.launch(ceil_div(experts, 16), tensors, (experts,), (blocks,), (128, 16), device=device)
    tensors = expert_ids, scores, in_blocks[1], metadata
    _make_metadata.launch(blocks, tensors, (experts,), (slots,), (k, _SLOTS, 32), device=device)
    return counts, metadata


def plan(
    counts: Tensor, rank: int, capacity: int | None = None, wanted: Tensor | None = None, peers: Peers | None = None
) -> tuple[Tensor, Tensor]:
    """``rows.plan``; with peers the counts are theirs, and of ``counts`` only the number of columns is looked at."""
    ranks, experts = counts.shape[0] if peers is None else peers.ranks, counts.shape[1]
    local = experts // ranks
    starts = torch.empty((ranks, local), dtype=torch.int32, device=counts.device)
    offs = torch.empty(local, dtype=torch.int32, device=counts.device)
    tensors = (None, counts) if peers is None else (peers.table, None)
    constants = ranks, next_power_of_2(experts), wanted is not None, peers is not None
    limits = rank, _NO_LIMIT if capacity is None else capacity
    _plan.launch(1, (*tensors, starts, offs, wanted), (local,), limits, constants, device=counts.device)
    return starts, offs


def find_destinations(
    metadata: Tensor, ends: Tensor | None, starts: Tensor, rank: int, capacity: int, peers: Peers | None = None
) -> tuple[Tensor, Tensor]:
    """``rows.find_destinations``; with peers the metadata are theirs, and of ``metadata`` only the width is looked at.
    It may be columns of something wider. Scores of rows that no slot has are not written."""
    (ranks, local), k, device = starts.shape, metadata.shape[1] // 3, starts.device
    copies = metadata.shape[0] if peers is None else peers.ranks * peers.tokens  # as many as the buffers hold
    table, tokens, _, _ = peers or _ALONE
    destinations = torch.empty((copies, k), dtype=torch.int32, device=device)
    scores = torch.empty(capacity, dtype=torch.float32, device=device)
    tensors = table, None if peers else metadata, ends, starts, destinations, scores
    sources, slots = next_power_of_2(ranks), next_power_of_2(k)
    constants = ranks, sources, k, metadata.stride(0), slots, _COPIES, peers is not None
    counts = copies, tokens, rank, capacity
    _find_destinations.launch(ceil_div(copies, _COPIES), tensors, (local,), counts, constants, device=device)
    return destinations, scores


def find_sources(destinations: Tensor, rows: int) -> Tensor:
    """``rows.find_sources``."""
    sources, slots = destinations.new_zeros(rows), destinations.numel()
    constants = destinations.shape[1], _SLOTS
    _find_sources.launch(
        ceil_div(slots, _SLOTS), (destinations, sources), (), (slots,), constants, device=sources.device
    )
    return sources


def gather(tensors: list[Tensor], tokens: Tensor, copies: Tensor, offsets: list[int]) -> None:
    """``rows.gather``."""
    (count, width), device = copies.shape, copies.device
    for tensor, offset in zip(tensors, offsets, strict=True):
        x = aligned(tensor).view(torch.uint8)
        dtype = _words(x.shape[1])
        x, out = x.view(dtype), copies.view(-1)[offset:].view(dtype)
        block = next_power_of_2(x.shape[1])
        constants, warps = (x.shape[1], width // dtype.itemsize, block), _warps(block * dtype.itemsize)
        _gather.launch(_programs(count, device), (x, tokens, out), (), (count,), constants, device=device, warps=warps)


def permute(
    payload: list[Tensor],
    destinations: Tensor,
    capacity: int,
    peers: Peers | None = None,
    kept: list[Tensor] | None = None,
) -> list[Tensor]:
    """``rows.permute``; with peers the copies are those in their buffers, and of ``payload`` only the shape and dtype
    is looked at. ``kept`` gets the copies that have a row here, (N, B_i); of others anything."""
    (copies, k), device = destinations.shape, destinations.device
    received = [torch.empty((capacity, tensor.shape[1]), dtype=tensor.dtype, device=device) for tensor in payload]
    in_bytes = [tensor.view(torch.uint8) for tensor in received]
    dtype = _words(*(tensor.shape[1] for tensor in in_bytes))
    outs = [tensor.view(dtype) for tensor in in_bytes]
    words, there = [tensor.shape[1] for tensor in outs], [None] * len(payload)
    if kept is not None:
        kept += [tensor.new_empty((copies, tensor.shape[1])) for tensor in received]
        there = [tensor.view(torch.uint8).view(dtype) for tensor in kept]
    if peers is None:
        sources = [aligned(tensor).view(torch.uint8).view(dtype) for tensor in payload]
        strides = [source.stride(0) for source in sources]
    else:
        sources, strides = [None] * len(payload), words
    if len(payload) == 1:  # the scales have no columns
        sources, outs, there, words, strides = sources * 2, outs * 2, there * 2, [*words, 0], [*strides, 0]
    blocks = [next_power_of_2(max(count, 1)) for count in words]
    table, tokens, _, ranks = peers or _ALONE
    constants = (k, *words, *strides, *blocks, ranks, peers is not None)
    programs, warps = _programs(ceil_div(copies, ranks), device), _warps(blocks[0] * dtype.itemsize)
    tensors = (table, *sources, destinations, *outs, *there)
    _permute.launch(programs, tensors, (), (copies, tokens), constants, device=device, warps=warps)
    return received


def local_combine(
    ys: list[Tensor],
    weights: Tensor | None,
    slot_values: Tensor | None,
    destinations: Tensor,
    dtype: torch.dtype,
    peers: Peers | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """``rows.local_combine``; with peers into the buffers of the source ranks, in bf16, of token t as copy ``rank *
    tokens + t`` there, and nothing is returned. Copies without a slot here are not written then."""
    (copies, k), d, device = destinations.shape, ys[0].shape[1], destinations.device
    sums = values = None
    table, tokens, rank, ranks = peers or _ALONE
    if peers is None:
        sums = torch.empty((copies, d), dtype=dtype, device=device)
        values = None if slot_values is None else torch.empty((copies, k), dtype=torch.float32, device=device)
    first, *second = [aligned(y.contiguous()) for y in ys]
    given = [x if x is None else aligned(x.contiguous()) for x in (weights, slot_values)]
    tensors = table, first, second[0] if second else None, *given, destinations, sums, values
    block = min(next_power_of_2(d), _COLUMNS)
    options = len(ys) == 2, weights is not None, slot_values is not None
    constants = d, k, next_power_of_2(k), block, *options, ranks, peers is not None
    programs, counts = _programs(ceil_div(copies, ranks), device), (copies, tokens, rank)
    _local_combine.launch(programs, tensors, (), counts, constants, device=device, warps=_warps(block * 2))
    return sums, values


def combine(
    partials: Tensor,
    values: Tensor | None,
    copies_of_token: Tensor | tuple[int, int],
    expert_ids: Tensor,
    experts: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """``rows.combine``."""
    (tokens, k), d, device = expert_ids.shape, partials.shape[1], expert_ids.device
    sums = torch.empty((tokens, d), dtype=dtype, device=device)
    slot_values = None if values is None else torch.empty((tokens, k), dtype=torch.float32, device=device)
    listed = isinstance(copies_of_token, Tensor)
    ranks, of_a_rank = (copies_of_token.shape[1], 1) if listed else copies_of_token
    block = min(next_power_of_2(d), _COLUMNS)
    constants = d, k, next_power_of_2(k), block, ranks, values is not None, listed
    tensors = partials, values, copies_of_token if listed else None, expert_ids, sums, slot_values
    programs, warps, counts = _programs(tokens, device), _warps(block * 2), (tokens, of_a_rank)
    _combine.launch(programs, tensors, (experts,), counts, constants, device=device, warps=warps)
    return sums, slot_values


def _programs(count: int, device: torch.device) -> int:
    return min(count, _PER_PROCESSOR * multiprocessors(device))


def _warps(row_bytes: int) -> int:
    """A thread takes 32 bytes of a row."""
    return min(max(row_bytes // 1024, 1), 8)


def _words(*widths: int) -> torch.dtype:
    return torch.uint8 if any(width % 4 for width in widths) else torch.int32
