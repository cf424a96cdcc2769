"""How rows move around the experts, in plain torch: the definition, and what runs on CPUs.

A rank has T tokens of its own, with K slots (chosen experts) each. Of E experts R ranks have L = E / R each, expert e
is on rank e // L. A token is copied to every rank that has one of its experts, once: N copies arrive on this rank from
all source ranks. Its local experts get M rows, expert after expert, within an expert by source rank, then in the order
of the source's slots.

A slot whose expert is not in 0..E-1 is sent nowhere. Sums are in fp32, in the order of the slots.
"""

import torch
from torch import Tensor

# Destinations of slots that have no row here: the expert is another rank's, or there are more rows than memory.
ELSEWHERE, DROPPED = -1, -2


def make_metadata(expert_ids: Tensor, scores: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The routing that travels beside the tokens.

    Args:
        expert_ids: int32 (T, K).
        scores: fp32 (T, K).
        experts: E.

    Returns:
        How many slots chose each expert, int32 (E,), and the metadata, int32 (T, 3K): each slot's expert, its position
        among this rank's slots that chose the same expert, and the bits of its score. With ``expert_ids = [[0, 2],
        [2, 1]]`` the positions are ``[[0, 0], [1, 0]]``.
    """
    ids = expert_ids.reshape(-1).long()
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    order = torch.argsort(ids, stable=True)
    counts = torch.bincount(ids, minlength=experts + 1)
    starts = counts.cumsum(0) - counts
    positions = torch.empty_like(ids)
    positions[order] = torch.arange(ids.numel(), device=ids.device) - starts[ids[order]]
    positions[ids == experts] = 0
    bits = scores.contiguous().view(torch.int32)
    return counts[:experts].int(), torch.cat((expert_ids, positions.view(expert_ids.shape).int(), bits), 1)


def plan(counts: Tensor, rank: int, capacity: int | None = None, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Where the rows of each source rank and expert begin.

    Args:
        counts: int32 (R, E), of each source rank as ``make_metadata`` gives them.
        rank: whose experts.
        capacity: rows there is memory for; None: for all.
        wanted: int32 (1,), raised to the rows of the rank that is sent the most, or None.

    Returns:
        The first row of each source rank and local expert, int32 (R, L), and the end offsets of the experts' rows,
        int32 (L,), none past ``capacity``. With two sources' counts ``[[2, 0, 0, 1], [1, 3, 0, 0]]`` rank 0 has
        ``[[0, 3], [2, 3]]`` and ``[3, 6]``, with a capacity of 4 ``[3, 4]``; 6 rows are wanted, as rank 1 gets 1.
    """
    ranks, experts = counts.shape
    local = experts // ranks
    sizes = counts[:, rank * local : (rank + 1) * local].t().reshape(-1)  # by expert, then source
    ends = sizes.cumsum(0)
    starts, offs = (ends - sizes).view(local, ranks).t(), ends.view(local, ranks)[:, -1]
    if wanted is not None:
        torch.maximum(wanted, counts.sum(0, dtype=torch.int32).view(ranks, local).sum(1).amax().int(), out=wanted)
    if capacity is not None:
        offs = offs.clamp(max=capacity)
    # of stride 1, which torch 2.14 asks of a single number too
    return starts.int().contiguous(), offs.int().clone(memory_format=torch.contiguous_format)


def find_destinations(
    metadata: Tensor, ends: Tensor, starts: Tensor, rank: int, capacity: int
) -> tuple[Tensor, Tensor]:
    """The row of each slot of each copy: destinations, int32 (N, K), with ``ELSEWHERE`` and ``DROPPED``; and the score
    of each row, fp32 (M,).

    Args:
        metadata: int32 (N, 3K), see ``make_metadata``.
        ends: int32 (R,) end of each source rank's copies.
        starts: int32 (R, L), see ``plan``.
        rank: this one.
        capacity: M.
    """
    local = starts.shape[1]
    ids, positions, bits = metadata.chunk(3, 1)
    source = torch.searchsorted(ends, torch.arange(metadata.shape[0], device=ends.device), right=True)
    expert = ids - rank * local
    is_local = (expert >= 0) & (expert < local)
    rows = starts[source[:, None], torch.where(is_local, expert, 0).long()] + positions
    rows = torch.where(is_local, torch.where(rows < capacity, rows, DROPPED), ELSEWHERE)
    scores = torch.zeros(capacity, dtype=torch.float32, device=metadata.device)
    scores[rows[rows >= 0].long()] = bits.contiguous().view(torch.float32)[rows >= 0]
    return rows.int(), scores


def find_sources(destinations: Tensor, rows: int) -> Tensor:
    """The copy of each row, int32 (M,), of the ``destinations`` of ``find_destinations``; of a row that no slot has,
    any."""
    sources = torch.zeros(rows, dtype=torch.int32, device=destinations.device)
    copies = torch.arange(destinations.shape[0], dtype=torch.int32, device=destinations.device)
    for row in destinations.unbind(1):
        sources[row[row >= 0].long()] = copies[row >= 0]
    return sources


def gather(tensors: list[Tensor], tokens: Tensor, copies: Tensor, offsets: list[int]) -> None:
    """Packs the rows of ``tokens``, int32 (N,), of the tensors, each (T, B) of any dtype, side by side into ``copies``,
    uint8 (N, bytes), each from its byte of ``offsets`` on."""
    for tensor, offset in zip(tensors, offsets, strict=True):
        source = tensor.view(torch.uint8)
        copies[:, offset : offset + source.shape[1]] = source[tokens.long()]


def permute(payload: list[Tensor], destinations: Tensor, capacity: int) -> list[Tensor]:
    """The copies' rows, each at all its destinations: (M, B_i) of the same dtypes; rows that are no slot's destination
    are not written.

    Args:
        payload: one or two of (N, B_i), contiguous along B_i.
        destinations: int32 (N, K), of ``find_destinations``.
        capacity: M.
    """
    received = []
    for tensor in payload:
        source = tensor.view(torch.uint8)
        out = torch.empty((capacity, source.shape[1]), dtype=torch.uint8, device=tensor.device)
        for row in destinations.unbind(1):
            out[row[row >= 0].long()] = source[row >= 0]
        received.append(out.view(tensor.dtype))
    return received


def local_combine(
    ys: list[Tensor], weights: Tensor | None, slot_values: Tensor | None, destinations: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The sum of each copy's rows, of the experts' outputs on this rank: (N, D), zeros for a copy without rows. And the
    slot values of each copy, fp32 (N, K), zeros for slots without rows.

    Args:
        ys: one or two of (M, D), of which the sum is taken.
        weights: fp32 (M,) by which it is multiplied, or None.
        slot_values: fp32 (M,), or None.
        destinations: int32 (N, K).
        dtype: of the sums that are returned.
    """
    sums = torch.zeros((destinations.shape[0], ys[0].shape[1]), dtype=torch.float32, device=destinations.device)
    for row in destinations.unbind(1):
        row, has_row = row[row >= 0].long(), row >= 0
        y = ys[0][row].float()
        for other in ys[1:]:
            y = y + other[row].float()
        sums[has_row] += y if weights is None else weights[row, None] * y
    values = None
    if slot_values is not None:
        values = torch.zeros(destinations.shape, dtype=torch.float32, device=destinations.device)
        values[destinations >= 0] = slot_values[destinations[destinations >= 0].long()]
    return sums.to(dtype), values


def combine(
    partials: Tensor,
    values: Tensor | None,
    copies_of_token: Tensor | tuple[int, int],
    expert_ids: Tensor,
    experts: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """On the source rank, the sum of each token's partial sums, in the order of the ranks, (T, D); and for each slot
    its value, fp32 (T, K), 0 where it was sent nowhere.

    Args:
        partials: (N, D), the local sums of the copies that this rank sent.
        values: fp32 (N, K), or None.
        copies_of_token: int32 (T, R), the copy of each token that was sent to each rank, or -1. Or R and how many
            copies there are of each rank, if any of them that is token t's is the t-th.
        expert_ids: int32 (T, K).
        experts: L, on each rank.
        dtype: of the sums.
    """
    tokens = expert_ids.shape[0]
    if isinstance(copies_of_token, tuple):
        ranks, of_a_rank = copies_of_token
        copies = (
            torch.arange(ranks, device=partials.device) * of_a_rank
            + torch.arange(tokens, device=partials.device)[:, None]
        )
        copies_of_token = torch.where(goes_to(expert_ids, experts, ranks), copies, -1)
    ranks = copies_of_token.shape[1]
    sums = torch.zeros((tokens, partials.shape[1]), dtype=torch.float32, device=partials.device)
    for copy in copies_of_token.unbind(1):
        sums[copy >= 0] += partials[copy[copy >= 0].long()].float()
    if values is None:
        return sums.to(dtype), None
    known = (expert_ids >= 0) & (expert_ids < experts * ranks)
    owner = torch.where(known, expert_ids // experts, 0).long()
    copy = copies_of_token.gather(1, owner).clamp(min=0).long()
    slot = torch.arange(expert_ids.shape[1], device=partials.device)
    out = torch.zeros(expert_ids.shape, dtype=torch.float32, device=partials.device)
    out[known] = values[copy, slot][known] if values.numel() else 0.0
    return sums.to(dtype), out


def goes_to(expert_ids: Tensor, experts: int, ranks: int) -> Tensor:
    """Whether each token has an expert on each rank, bool (T, R); ``experts``: L."""
    owners = torch.div(expert_ids, experts, rounding_mode="floor")  # floor: an expert -1 is on rank -1
    return torch.stack([(owners == rank).any(1) for rank in range(ranks)], 1)
