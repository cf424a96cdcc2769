"""How rows move around the experts, in plain torch: the definition, and what runs on CPUs.

T tokens at home on a rank, K slots (chosen experts) each; E experts, L = E / R of them on each of R ranks, expert e on
rank e // L. A *packet* is a token that came to a rank, with the slots that chose one of the rank's experts: N arrive
here, and M rows land, expert after expert, within an expert by source rank, then in the order of the slots at home.

A slot whose expert is not in 0..E-1 is sent nowhere. Sums are in fp32, in the order of the slots.
"""

import torch

# In ``rows``: the slot's expert is another rank's, or its row is one more than there is room for (a token that names
# an expert twice, where rows are allocated for the worst case).
ELSEWHERE, DROPPED = -1, -2


def label(expert_ids: torch.Tensor, scores: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What travels beside the tokens' rows.

    Args:
        expert_ids: int32 (T, K).
        scores: fp32 (T, K).
        experts: E.

    Returns:
        How many slots chose each expert, int32 (E,), and the labels, int32 (T, 3K): each slot's expert, its position
        among the slots here that chose the same expert, and the bits of its score. With ``expert_ids = [[0, 2],
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


def plan(counts: torch.Tensor, rank: int, capacity: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the rows of each source and expert land.

    Args:
        counts: int32 (R, E), of each source as ``label`` gives them.
        rank: whose experts.
        capacity: rows there is room for; None: all.

    Returns:
        The first row of each source and local expert, int32 (R, L), and the end offsets of the experts' rows, int32
        (L,). With two sources' counts ``[[2, 0], [1, 3]]`` of two local experts: ``[[0, 3], [2, 3]]`` and ``[3, 6]``.
    """
    ranks, experts = counts.shape
    local = experts // ranks
    sizes = counts[:, rank * local : (rank + 1) * local].t().reshape(-1)  # by expert, then source
    ends = sizes.cumsum(0)
    starts, offs = (ends - sizes).view(local, ranks).t(), ends.view(local, ranks)[:, -1]
    return starts.int().contiguous(), offs.clamp(max=capacity).int() if capacity is not None else offs.int()


def locate(
    labels: torch.Tensor, ends: torch.Tensor, starts: torch.Tensor, rank: int, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The received row of each slot of each packet.

    Args:
        labels: int32 (N, 3K), see ``label``.
        ends: int32 (R,) end of each source's packets.
        starts: int32 (R, L), see ``plan``.
        rank: this one.
        capacity: M.

    Returns:
        Rows, int32 (N, K), with ``ELSEWHERE`` and ``DROPPED``, and the score of each received row, fp32 (M,).
    """
    local = starts.shape[1]
    ids, positions, bits = labels.chunk(3, 1)
    source = torch.searchsorted(ends, torch.arange(labels.shape[0], device=ends.device), right=True)
    expert = ids - rank * local
    is_local = (expert >= 0) & (expert < local)
    rows = starts[source[:, None], torch.where(is_local, expert, 0).long()] + positions
    rows = torch.where(is_local, torch.where(rows < capacity, rows, DROPPED), ELSEWHERE)
    scores = torch.zeros(capacity, dtype=torch.float32, device=labels.device)
    scores[rows[rows >= 0].long()] = bits.contiguous().view(torch.float32)[rows >= 0]
    return rows.int(), scores


def gather(parts: list[torch.Tensor], tokens: torch.Tensor, packets: torch.Tensor, offsets: list[int]) -> None:
    """Packs the rows of ``tokens``, int32 (N,), of the parts, each (T, B) of any dtype, side by side into ``packets``,
    uint8 (N, bytes), each from its byte of ``offsets`` on."""
    for part, offset in zip(parts, offsets, strict=True):
        source = part.view(torch.uint8)
        packets[:, offset : offset + source.shape[1]] = source[tokens.long()]


def place(parts: list[torch.Tensor], rows: torch.Tensor, capacity: int) -> list[torch.Tensor]:
    """The packets' rows where they land.

    Args:
        parts: one or two of (N, B_i), contiguous along B_i.
        rows: int32 (N, K), of ``locate``.
        capacity: M.

    Returns:
        (M, B_i) of the same dtypes; rows that no slot has are not written.
    """
    received = []
    for part in parts:
        source = part.view(torch.uint8)
        out = torch.empty((capacity, source.shape[1]), dtype=torch.uint8, device=part.device)
        for row in rows.unbind(1):
            out[row[row >= 0].long()] = source[row >= 0]
        received.append(out.view(part.dtype))
    return received


def reduce(
    ys: list[torch.Tensor],
    weights: torch.Tensor | None,
    slot_values: torch.Tensor | None,
    rows: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The experts' outputs of each packet, added up.

    Args:
        ys: one or two of (M, D), of which the sum is taken.
        weights: fp32 (M,) by which it is multiplied, or None.
        slot_values: fp32 (M,), or None.
        rows: int32 (N, K).
        dtype: of the sums that are returned.

    Returns:
        Sums (N, D), zeros for a packet without rows, and the slot values of each packet, fp32 (N, K), zeros for slots
        without rows.
    """
    sums = torch.zeros((rows.shape[0], ys[0].shape[1]), dtype=torch.float32, device=rows.device)
    for row in rows.unbind(1):
        row, has_row = row[row >= 0].long(), row >= 0
        y = ys[0][row].float()
        for other in ys[1:]:
            y = y + other[row].float()
        sums[has_row] += y if weights is None else weights[row, None] * y
    values = None
    if slot_values is not None:
        values = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        values[rows >= 0] = slot_values[rows[rows >= 0].long()]
    return sums.to(dtype), values


def finish(
    partials: torch.Tensor,
    values: torch.Tensor | None,
    slots: torch.Tensor,
    expert_ids: torch.Tensor,
    experts: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sums of each token over the ranks, in their order.

    Args:
        partials: (N, D), what the ranks added up of the packets that this one sent.
        values: fp32 (N, K), or None.
        slots: int32 (T, R), the packet of each token and rank, or -1.
        expert_ids: int32 (T, K).
        experts: L, on each rank.
        dtype: of the sums.

    Returns:
        Sums (T, D), and for each slot its value, fp32 (T, K), 0 where it was sent nowhere.
    """
    sums = torch.zeros((slots.shape[0], partials.shape[1]), dtype=torch.float32, device=slots.device)
    for packet in slots.unbind(1):
        sums[packet >= 0] += partials[packet[packet >= 0].long()].float()
    if values is None:
        return sums.to(dtype), None
    known = (expert_ids >= 0) & (expert_ids < experts * slots.shape[1])
    owner = torch.where(known, expert_ids // experts, 0).long()
    packet = slots.gather(1, owner).clamp(min=0).long()
    slot = torch.arange(expert_ids.shape[1], device=slots.device)
    at_home = torch.zeros(expert_ids.shape, dtype=torch.float32, device=slots.device)
    at_home[known] = values[packet, slot][known] if values.numel() else 0.0
    return sums.to(dtype), at_home
