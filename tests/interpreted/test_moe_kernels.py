"""The kernels that move rows, held to ``moe/rows.py`` bit for bit; and all ranks of the symmetric transport in one
process, which reads their buffers as GPUs read each other's."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from moe_cases import CASES, Case, capacities, check_against_one_process, tokens_of
from tiers import daily

from titan_mxfp8.moe import config as moe_config
from titan_mxfp8.moe import kernels, layer, rows, transport
from titan_mxfp8.moe.symmetric import Symmetric
from titan_mxfp8.moe.transport import Local


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Local:
    """The transport of one rank, on kernels."""
    monkeypatch.setattr(transport, "movements", lambda device: kernels)
    return Local()


# The others' kind of routing is among those of several ranks below.
@pytest.mark.parametrize("case", daily(zip(CASES[1:]), *CASES[1:3], *CASES[4:6], CASES[8]))
def test_one_rank(case: Case, local: Local):
    for capacity in (None, capacities(case, 1)[1]):
        check_against_one_process(local, case, capacity=capacity)


def test_ids_of_any_strides(local: Local):
    tokens = tokens_of(CASES[0], 0, 1)
    strided = tokens._replace(expert_ids=tokens.expert_ids.mT.contiguous().mT)
    handles = [local.dispatch(*of.arguments(), CASES[0].experts)[1] for of in (tokens, strided)]
    assert all(map(torch.equal, *handles))


@pytest.mark.parametrize("ranks, experts", [(1, 5), (2, 6), (3, 15), (4, 4)])
def test_plans(ranks: int, experts: int):
    counts = torch.randint(0, 9, (ranks, experts), dtype=torch.int32)
    most = counts.sum(0).view(ranks, -1).sum(1).max()
    for rank in range(ranks):
        wanted = torch.zeros(2, 1, dtype=torch.int32)
        for sent in (counts, counts // 2):  # what is wanted stays the most
            for capacity in (None, 0, 11, 1000):
                actual = kernels.plan(sent, rank, capacity, wanted[0])
                for tensor, expected in zip(actual, rows.plan(sent, rank, capacity, wanted[1]), strict=True):
                    assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)
                assert wanted.tolist() == [[most], [most]]


def test_metadata():
    """More slots than a program looks at, experts twice in a token and experts that do not exist."""
    expert_ids = torch.randint(-1, 8, (117, 5), dtype=torch.int32)
    scores = torch.rand(5, 117).t()
    for actual, expected in zip(
        kernels.make_metadata(expert_ids, scores, 7), rows.make_metadata(expert_ids, scores, 7), strict=True
    ):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)


class Turns:
    """The ranks as threads of which one runs at a time: Triton's interpreter knows no threads. Who runs goes on until
    it waits for the others, so that what lacks a barrier reads what is not there yet, or not any more."""

    def __init__(self, ranks: int):
        self.turn, self.everyone, self.buffers = threading.Lock(), threading.Barrier(ranks), [None] * ranks

    def wait(self) -> None:
        self.turn.release()
        try:
            self.everyone.wait(timeout=60)
        finally:
            self.turn.acquire()

    def run(self, of_rank: Callable[[int], None]) -> None:
        """``of_rank`` of each rank; raises what one raises."""

        def guarded(rank: int) -> None:
            with self.turn:
                try:
                    of_rank(rank)
                except BaseException:
                    self.everyone.abort()
                    raise

        with ThreadPoolExecutor(len(self.buffers)) as threads:
            futures = [threads.submit(guarded, rank) for rank in range(len(self.buffers))]
        errors = [future.exception() for future in futures if future.exception()]
        errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
        if errors:
            raise errors[0]


class FakeLink:
    """``GroupLink`` of a rank that is a thread; memory is poisoned."""

    device = torch.device("cpu")

    def __init__(self, turns: Turns, rank: int):
        self.turns, self.rank, self.ranks = turns, rank, len(turns.buffers)

    def gather(self, value: object) -> list:
        self.turns.buffers[self.rank] = value
        self.turns.wait()
        values = list(self.turns.buffers)
        self.turns.wait()
        return values

    def allocate(self, size: int) -> tuple[torch.Tensor, list[int]]:
        memory = torch.full((size + 256,), 0xFF, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % 256 :][:size]
        return memory, self.gather(memory.data_ptr())

    def barrier(self) -> None:
        self.turns.wait()


def on_ranks(ranks: int, of_rank: Callable[[Symmetric], None]) -> None:
    turns = Turns(ranks)
    transports = [Symmetric(FakeLink(turns, rank)) for rank in range(ranks)]
    turns.run(lambda rank: of_rank(transports[rank]))


SYMMETRIC = (
    (Case((7, 4, 0, 3), 64, 8, 3), 4),
    (Case((0, 6), 32, 20, 8), 2),
    (Case((5, 9), 64, 15, 2), 3),
    (Case((5, 3), 96, 4, 1, "first"), 2),
    (Case((5, 3), 64, 8, 2, "one rank"), 2),
    (Case((0,), 64, 4, 2), 2),
)


@pytest.mark.parametrize(
    "case, ranks, which",
    [
        *((*which, None) for which in SYMMETRIC if which != SYMMETRIC[2]),
        pytest.param(*SYMMETRIC[2], None, marks=pytest.mark.nightly),
        (*SYMMETRIC[0], 1),
        (*SYMMETRIC[2], 2),
    ],
)
def test_symmetric(case: Case, ranks: int, which: int | None):
    """Two layers one after the other in one buffer, with one of ``capacities``."""
    capacity = None if which is None else capacities(case, ranks)[which]

    def layers(transport: Symmetric) -> None:
        for seed in range(2):
            check_against_one_process(transport, case, capacity=capacity, seed=seed)

    on_ranks(ranks, layers)


def test_a_buffer_grows_for_wider_layers_and_refuses_more_tokens():
    first, wider = Case((4, 2), 64, 4, 1), Case((3, 4), 96, 6, 2)

    def layers(transport: Symmetric) -> None:
        for case in (first, wider, first):
            check_against_one_process(transport, case)
        for tokens in ((5, 5), (1, 5), (9, 0), (4, 4)):
            case = Case(tokens, 64, 4, 1)
            if max(tokens) > 4:
                mine, too_many = tokens_of(case, transport.rank, 2), tokens[transport.rank] > 4
                message = f"{max(tokens)} tokens .* on rank {transport.rank}, but .* 4, .* name max_tokens"
                with pytest.raises(ValueError, match=message if too_many else "another rank has more .* room for, 4"):
                    transport.dispatch(*mine.arguments(), case.experts, None)
            else:
                check_against_one_process(transport, case)

    on_ranks(2, layers)


def test_with_a_capacity_one_rank_alone_refuses_more_tokens():
    def layers(transport: Symmetric) -> None:
        for tokens in ((4, 4), (4, 5)):
            case = Case(tokens, 64, 4, 1)
            transport.dispatch(*tokens_of(case, transport.rank, 2).arguments(), case.experts, 10)

    with pytest.raises(ValueError, match=r"5 tokens .* on rank 1, .*; the other ranks wait for this one"):
        on_ranks(2, layers)


@pytest.mark.parametrize("rows", ["counted", "worst_case"])
@pytest.mark.parametrize("slots, scores_first", [(1, False), (2, True)])
def test_a_layer_has_room_for_max_tokens(slots: int, scores_first: bool, rows: str, monkeypatch: pytest.MonkeyPatch):
    """In the second batch one rank has more tokens than any in the first. Rows of one slot have the bits of a layer of
    one rank."""
    experts, d, h, batches = 4, 64, 32, ((3, 2), (1, 5), (4, 0))
    weights = [torch.randn(experts, *shape).bfloat16() for shape in ((h, d), (h, d), (d, h))]
    x = [[torch.randn(tokens, d).bfloat16() for tokens in batch] for batch in batches]
    routes = [[torch.rand(tokens, experts).topk(slots) for tokens in batch] for batch in batches]
    transports = {}
    monkeypatch.setattr(dist.distributed_c10d, "_resolve_process_group", int)
    monkeypatch.setattr(moe_config, "choose", lambda _, rank, device: (transports.get(rank, Local()), ""))

    def run(batch: int, rank: int, transport: Symmetric | None, max_tokens: int | None) -> list[torch.Tensor]:
        group, own = None, weights
        if transport is not None:
            transports[rank] = transport
            group, own = SimpleNamespace(group_name=str(rank), size=lambda: 2), [w.chunk(2)[rank] for w in weights]
        leaf, (scores, ids) = x[batch][rank].clone().requires_grad_(), routes[batch][rank]
        options = {"scores_first": scores_first, "rows": rows, "max_tokens": max_tokens}
        out = layer.mxfp8_moe(leaf, scores, ids, *own, group, **options)
        out.backward(leaf.detach())
        return [out.detach(), leaf.grad]

    alone = [[run(batch, rank, None, None) for rank in range(2)] for batch in range(len(batches))]

    def with_room(transport: Symmetric) -> None:
        for batch in range(len(batches)):
            for ours, expected in zip(
                run(batch, transport.rank, transport, 5), alone[batch][transport.rank], strict=True
            ):
                assert torch.equal(ours, expected)
        with pytest.raises(
            ValueError, match=f"room for {9 * slots} tokens comes too late: .* made their buffer for {5 * slots}"
        ):
            run(0, transport.rank, transport, 9)

    def without(transport: Symmetric) -> None:
        run(0, transport.rank, transport, None)
        with pytest.raises(ValueError, match=f"{5 * slots} tokens" if transport.rank else "another rank has more"):
            run(1, transport.rank, transport, None)

    on_ranks(2, with_room)
    if rows == "counted":
        on_ranks(2, without)


def test_a_buffer_that_inference_used_first_can_be_trained_with():
    def layers(transport: Symmetric) -> None:
        for case in (Case((4, 2), 64, 4, 1), Case((3, 4), 64, 2, 1)):  # the second one in the buffer of the first
            mine = tokens_of(case, transport.rank, 2)
            with torch.inference_mode():
                _, handle = transport.dispatch(*mine.arguments(), case.experts, None)
                received = torch.ones(handle.scores.shape[0], case.dim).bfloat16()
                transport.combine([received], True, handle.scores, handle, torch.bfloat16)
            check_against_one_process(transport, case)

    on_ranks(2, layers)


def test_dispatches_in_a_row():
    """As when activation checkpointing stops recomputing early; each is right when it comes, and still afterwards."""
    case = Case((6, 4), 64, 4, 2)

    def layers(transport: Symmetric) -> None:
        received = []
        for seed in range(3):
            mine = tokens_of(case, transport.rank, 2, seed)
            payload, handle = transport.dispatch(*mine.arguments(), case.experts, None)
            received.append((seed, payload, handle))
        for seed, payload, handle in received:
            mine = tokens_of(case, transport.rank, 2, seed)
            again = transport.dispatch_with_handle(mine.payload, handle)
            for tensor, expected in zip(payload, again, strict=True):
                assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
            check_against_one_process(transport, case, seed=seed)

    on_ranks(2, layers)
