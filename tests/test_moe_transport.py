"""Tokens to their experts and back: one process here, several over gloo in ``parallel_moe.py``."""

import math
import threading
from types import SimpleNamespace

import processes
import pytest
import torch
from moe_cases import CASES, Case, capacities, check_against_one_process
from tiers import daily

from titan_mxfp8.moe import symmetric
from titan_mxfp8.moe.bounds import bound, factor_of
from titan_mxfp8.moe.buffer import PAYLOAD, Layout
from titan_mxfp8.moe.transport import Local

CPU = torch.device("cpu")


@pytest.mark.integration
@pytest.mark.parametrize("ranks", daily([2, 4], 4))
def test_several_processes(ranks: int):
    processes.check(ranks, "parallel_moe.py")


@pytest.mark.parametrize("case", CASES)
def test_one_process(case: Case):
    transport = Local()
    for capacity in (None, *capacities(case, 1)):
        check_against_one_process(transport, case, capacity=capacity)


def test_slots_without_an_expert_are_sent_nowhere():
    x = torch.arange(64.0).view(4, 16)
    expert_ids = torch.tensor([[0, -1], [2, 0], [-1, 7], [1, 1]])  # of 3 experts; the last names one twice
    scores = torch.arange(8.0).view(4, 2)
    (received,), handle = Local().dispatch([x], expert_ids, scores, 3, None)
    assert handle.offs.tolist() == [2, 4, 5]
    assert handle.destinations.tolist() == [[0, -1], [4, 1], [-1, -1], [2, 3]]
    assert torch.equal(received[:5], x[[0, 1, 3, 3, 1]])
    assert handle.scores[:5].tolist() == [0, 3, 6, 7, 2]
    y = torch.full_like(received, float("nan"))
    y[:5] = received[:5]
    out, values = Local().combine([y], False, y[:, 1].contiguous(), handle, torch.float32)
    assert torch.equal(out, x * torch.tensor([1.0, 2, 0, 2])[:, None])
    assert values.tolist() == [[1, 0], [17, 17], [0, 0], [49, 49]]
    _, handle = Local().dispatch([x], expert_ids, scores, 3, 4)
    assert handle.destinations.tolist() == [[0, -1], [-2, 1], [-1, -1], [2, 3]], "the last row has no memory"


def test_nothing_of_a_handle_is_an_input():
    expert_ids, scores = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    _, handle = Local().dispatch([torch.ones(3, 32)], expert_ids, scores, 1, 3)
    inputs = {expert_ids.data_ptr(), scores.data_ptr()}
    pointers = [x.data_ptr() for x in handle if x.numel()]
    assert inputs.isdisjoint(pointers) and len(set(pointers)) == len(pointers)


def test_rows_that_did_not_fit_are_counted_and_told_once():
    """In inference mode too, by a tensor that calls outside of it raise. Who is told in a model: test_moe_layer.py."""
    transport = Local()
    for in_inference, raises in ((True, False), (False, True)):
        transport.shared.wanted.raises = raises
        with torch.inference_mode(in_inference):
            transport.dispatch([torch.ones(4, 16)], torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1), 1, 2)
    assert transport.shared.wanted.read() == {2: 4}
    with pytest.raises(RuntimeError, match="4 rows by a MoE layer that had memory for 2"):
        transport.shared.wanted.check()
    transport.shared.wanted.check()
    assert transport.shared.wanted.read() == {2: 0}


def test_a_call_of_another_thread_amid_one_changes_nothing():
    """It has other numbers of tokens, and reads what was wanted before."""
    transport = Local()

    def call(tokens: int) -> None:
        ids, scores = torch.zeros(tokens, 1, dtype=torch.int32), torch.ones(tokens, 1)
        transport.dispatch([torch.ones(tokens, 16)], ids, scores, 1, tokens)

    class Other(dict):
        def items(self) -> list:
            found = [*super().items()]
            if threading.current_thread() is threading.main_thread():
                other = threading.Thread(target=call, args=(2,))
                other.start()
                other.join()
            return found

    transport.shared.wanted._reads = Other()
    for _ in range(3):
        call(4)
    assert transport.shared.wanted.read() == {4: 4, 2: 2}


def test_bounds():
    assert [factor_of(rows) for rows in ("counted", "bounded", "worst_case", 0, "2.5")] == [None, 1.5, math.inf, 0, 2.5]
    for rows in ("all", -1, math.nan, True, None, "-1"):
        with pytest.raises(ValueError, match=r"rows is one of counted, bounded, worst_case, or a factor .* got"):
            factor_of(rows)
    assert bound(1.5, 100, 4, 2, 8) == 640  # 600 in tiles of 128
    assert bound(2, 100, 4, 2, 8) == bound(math.inf, 100, 4, 2, 8) == 800
    assert bound(2, 100, 4, 2, 1) == 200  # one expert here, which a token has once
    assert bound(0, 100, 4, 2, 8) == bound(math.inf, 0, 4, 2, 8) == 0


GPUS = ["GPU-a", "GPU-b", "GPU-c"]  # that this process sees; each but the last has access to the others


@pytest.mark.parametrize(
    "gathered, rank, obstacle",
    [
        ([("host", "GPU-a"), ("host", "GPU-b")], 0, None),
        ([("host", "GPU-a"), ("other", "GPU-b")], 1, "rank 0 is on host host, rank 1 on other"),
        ([("host", "GPU-a"), ("host", "GPU-a")], 0, "ranks 0 and 1 share a GPU"),
        ([("host", "GPU-a"), ("host", "GPU-d")], 0, "rank 0 does not see the GPU of rank 1 (CUDA_VISIBLE_DEVICES)"),
        ([("host", "GPU-a"), ("host", "GPU-c")], 1, "the GPU of rank 1 has no peer access to that of rank 0"),
    ],
)
def test_what_stands_in_the_way_of_symmetric_memory(gathered, rank, obstacle, monkeypatch: pytest.MonkeyPatch):
    devices = {name: torch.device("cuda", i) for i, name in enumerate(GPUS)}
    properties = [SimpleNamespace(uuid=name) for name in GPUS]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties[i])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: device.index < 2)
    monkeypatch.setattr("torch.distributed._symmetric_memory.get_backend", lambda device: "CUDA")
    gathered = [((host, "boot"), gpu) for host, gpu in gathered]
    assert symmetric.obstacle(gathered, rank, devices[gathered[rank][1]]) == obstacle
    monkeypatch.setattr("torch.distributed._symmetric_memory.get_backend", lambda device: "NVSHMEM")
    assert "NVSHMEM" in symmetric.obstacle(gathered, rank, devices[gathered[rank][1]])


def test_a_machine_that_refuses_to_share_memory_is_found_out(monkeypatch: pytest.MonkeyPatch):
    """On any rank, before anything is trained."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA driver error: operation not permitted\nand where")

    memory = SimpleNamespace(empty=lambda *_, **__: torch.empty(1), rendezvous=lambda *_, **__: None)
    monkeypatch.setattr(symmetric, "_symmetric_memory", lambda: memory)
    monkeypatch.setattr(symmetric, "gather_objects", lambda value, group: [None, value])
    assert symmetric.trial(None, CPU) is None
    for step in ("rendezvous", "empty"):
        monkeypatch.setattr(memory, step, refuse)
        assert symmetric.trial(None, CPU) == "sharing memory failed: CUDA driver error: operation not permitted"


def test_a_buffer():
    layout = Layout(ranks=2, tokens=5, experts=6, slots=3, row_bytes=33, dim=32)
    offsets = layout.offsets
    assert list(offsets) == sorted(set(offsets)) and all(offset % 256 == 0 for offset in offsets)
    memory = torch.zeros(offsets[-1], dtype=torch.uint8)
    rooms = layout.rooms(memory, 3, 32, 1)
    assert [tuple(room.shape) for room in rooms] == [(3, 32), (3, 1)]
    # wherever a rank with fewer tokens has its scales, the others look for them after 5 rows
    assert [room.data_ptr() - memory.data_ptr() - offsets[PAYLOAD] for room in rooms] == [0, 160]
    assert layout.grown(tokens=4, dim=64) == Layout(ranks=2, tokens=5, experts=6, slots=3, row_bytes=33, dim=64)
    assert layout.table([1000, 5000], CPU)[PAYLOAD].tolist() == [1000 + offsets[PAYLOAD], 5000 + offsets[PAYLOAD]]
