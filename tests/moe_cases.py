"""Tokens and their experts for the tests of transports, and what one process makes of them."""

from typing import NamedTuple
from unittest import mock

import torch

from titan_mxfp8.moe.transport import Transport

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


class Case(NamedTuple):
    """A layer's routing; ``tokens`` of each rank, again from the first where there are more ranks."""

    tokens: tuple[int, ...]
    dim: int
    experts: int
    slots: int
    routing: str = "random"  # or which experts get all: "first", "last"; "one rank": the last one's


CASES = (
    Case((37, 20, 0, 5), 64, 8, 3),
    Case((16,), 128, 4, 1),
    Case((5, 11), 64, 2, 1),  # one expert on each of 2 ranks; 4 ranks cannot divide them
    Case((0, 33), 32, 20, 8),  # 10 or 5 experts on a rank
    Case((9, 31), 96, 6, 2),  # 3 experts on each of 2 ranks; 4 ranks cannot divide them
    Case((21,), 64, 160, 6),
    Case((12, 7), 64, 4, 1, "first"),
    Case((12, 7), 64, 8, 2, "one rank"),
    Case((40, 1), 64, 4, 4, "last"),  # every token on every rank
    Case((0,), 64, 4, 2),
)


def capacities(case: Case, ranks: int) -> list[int]:
    """Of which the last holds all that could come, and the others too little where any token is."""
    most = max(case.tokens) * ranks * min(case.slots, case.experts // ranks)
    return [0, most // ranks // 2, most]


class Tokens(NamedTuple):
    """A rank's: FP8 data and their scales, and for the other tests rows in bf16; their experts and scores."""

    payload: list[torch.Tensor]
    gradients: torch.Tensor
    expert_ids: torch.Tensor
    scores: torch.Tensor

    def arguments(self) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        return self.payload, self.expert_ids, self.scores


def tokens_of(case: Case, rank: int, ranks: int, seed: int = 0) -> Tokens:
    """The tokens of ``rank``, the same in every process."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    tokens = case.tokens[rank % len(case.tokens)]
    local = max(case.experts // ranks, 1)
    first, last = {
        "random": (0, case.experts),
        "first": (0, case.slots),
        "last": (case.experts - case.slots, case.experts),
        "one rank": (case.experts - max(local, case.slots), case.experts),
    }[case.routing]
    likes = torch.rand(tokens, last - first, generator=generator)
    expert_ids = first + likes.topk(case.slots, 1).indices
    scores = torch.rand(tokens, case.slots, generator=generator)
    elements = torch.randint(0, 256, (tokens, case.dim), generator=generator, dtype=torch.uint8).view(E4M3)
    scales = torch.randint(0, 256, (tokens, case.dim // 32), generator=generator, dtype=torch.uint8)
    gradients = torch.randn(tokens, case.dim, generator=generator).to(BF16)
    return Tokens([elements, scales.view(torch.float8_e8m0fnu)], gradients, expert_ids, scores)


def expert(number: int, x: torch.Tensor) -> torch.Tensor:
    """What the tests have for experts: each multiplies by its own number."""
    return (x.float() * (0.5 + number / 7)).to(BF16)


Slot = tuple[int, int, int]  # expert, source rank, number among all slots of the source's tokens


def slots_of_ranks(case: Case, all_tokens: list[Tokens]) -> list[list[Slot]]:
    """The slots that chose an expert of each rank, in the order of its rows."""
    local = case.experts // len(all_tokens)
    slots = sorted(
        (number, source, i)
        for source, tokens in enumerate(all_tokens)
        for i, number in enumerate(tokens.expert_ids.view(-1).tolist())
    )
    return [[slot for slot in slots if slot[0] // local == rank] for rank in range(len(all_tokens))]


def expected_sums(
    case: Case, all_tokens: list[Tokens], rank: int, weighted: bool, dtype: torch.dtype, capacity: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``combine`` of experts applied twice over (two ``ys``), token by token, and the slot values 10 * score + expert.

    Sums as the transport has them: in fp32 on each rank in the order of slots, then in bf16, then over the ranks. Of
    each rank's rows the first ``capacity`` count.
    """
    tokens, ranks = all_tokens[rank], len(all_tokens)
    local, total = case.experts // ranks, torch.zeros(tokens.gradients.shape)
    fits = torch.zeros(tokens.expert_ids.shape, dtype=torch.bool)
    for slots in slots_of_ranks(case, all_tokens):
        fits.view(-1)[[i for _, source, i in slots[:capacity] if source == rank]] = True
    for owner in range(ranks):
        partial = torch.zeros_like(total)
        for slot in range(case.slots):
            ids = tokens.expert_ids[:, slot]
            for number in ids.unique().tolist():
                if number // local == owner:
                    chosen = (ids == number) & fits[:, slot]
                    x = tokens.gradients[chosen]
                    y = expert(number, x).float() + x.float()
                    partial[chosen] += tokens.scores[chosen, slot][:, None] * y if weighted else y
        total += partial if ranks == 1 else partial.to(BF16).float()
    return total.to(dtype), torch.where(fits, 10 * tokens.scores + tokens.expert_ids, 0)


def check_against_one_process(
    transport: Transport, case: Case, device: str = "cpu", capacity: int | None = None, seed: int = 0
) -> list[torch.Tensor]:
    """Holds a rank of ``transport`` to what one process makes of all ranks' tokens, bit for bit; what it received.

    With a capacity that is too small, to what comes of each rank's first rows; the transport does not raise then.
    """
    transport.shared.wanted.raises = False
    rank, ranks = transport.rank, transport.ranks
    all_tokens = [tokens_of(case, source, ranks, seed) for source in range(ranks)]
    local, mine = case.experts // ranks, all_tokens[rank]
    payload, ids, scores = mine.arguments()
    payload, ids, scores = [tensor.to(device) for tensor in payload], ids.to(device), scores.to(device)
    overlap = mock.Mock()
    kept = []
    received, handle = transport.dispatch(payload, ids, scores, case.experts, capacity, overlap, kept)
    overlap.assert_called_once_with()

    of_ranks = slots_of_ranks(case, all_tokens)
    if capacity is not None:
        assert transport.shared.wanted.read()[capacity] == max(map(len, of_ranks))
        transport.shared.wanted.reset()
    slots = of_ranks[rank][:capacity]
    rows = len(slots)
    ends = [sum(number < (rank * local + e + 1) for number, _, _ in slots) for e in range(local)]
    assert handle.offs.tolist() == ends and handle.offs.dtype == torch.int32, (case, handle.offs, ends)
    assert received[0].shape[0] == handle.scores.shape[0]
    assert handle.scores.shape[0] == (rows if capacity is None else capacity), (case, handle.scores.shape, rows)

    def of_all(tensors: list[torch.Tensor]) -> torch.Tensor:
        picked = [tensors[source].view(torch.uint8)[i // case.slots] for _, source, i in slots]
        return torch.stack(picked) if picked else tensors[0].view(torch.uint8)[:0]

    def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
        return torch.equal(actual[:rows].cpu().view(torch.uint8), expected)

    for i, rows_received in enumerate(received):
        assert rows_received.dtype == payload[i].dtype
        assert same(rows_received, of_all([tokens.payload[i] for tokens in all_tokens])), (case, i)
    expected = torch.tensor([all_tokens[source].scores.view(-1)[i] for _, source, i in slots])
    assert torch.equal(handle.scores[:rows].cpu(), expected), case
    sources = transport.find_sources(handle)[:rows].long()
    for copies, rows_received in zip(kept, received, strict=True):
        assert copies.shape[0] == handle.destinations.shape[0], case
        assert same(copies.view(torch.uint8)[sources], rows_received[:rows].cpu().view(torch.uint8)), case
    (gradients,) = transport.dispatch_with_handle([mine.gradients.to(device)], handle)
    assert same(gradients, of_all([tokens.gradients for tokens in all_tokens])), case

    y = torch.full_like(gradients, float("nan"))  # rows past the last one stay so
    values = torch.full_like(handle.scores, float("nan"))
    for at, (number, _, _) in enumerate(slots):
        y[at] = expert(number, gradients[at])
        values[at] = 10 * handle.scores[at] + number
    gradients[rows:] = float("nan")
    for weighted, dtype in ((True, BF16), (False, torch.float32)):
        sums, values_of_slots = transport.combine([y, gradients], weighted, values, handle, dtype)
        expected, expected_values = expected_sums(case, all_tokens, rank, weighted, dtype, capacity)
        assert sums.dtype == dtype
        if weighted and torch.device(device).type == "cuda":  # which multiplies and adds in one rounding
            torch.testing.assert_close(sums.cpu(), expected, rtol=2**-7, atol=2**-8)
        else:
            assert torch.equal(sums.cpu(), expected), (case, weighted)
        assert torch.equal(values_of_slots.cpu(), expected_values), case
    sums, values_of_slots = transport.combine([y], True, None, handle, BF16)
    assert values_of_slots is None and sums.shape == mine.gradients.shape
    return received
