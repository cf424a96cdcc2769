"""A program for torchrun on 2 or more GPUs of one host: the symmetric transport against the collective one, bit for
bit, and both against one process.

    torchrun --standalone --nproc-per-node 2 tests/gpu_moe_ranks.py

Run by tests/test_gpu_moe_transport.py. With the word ``die`` the last rank leaves in the middle.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from moe_cases import BF16, CASES, E4M3, capacities, check_against_one_process

from titan_mxfp8.moe import choose
from titan_mxfp8.moe.collective import Collective
from titan_mxfp8.moe.symmetric import GroupLink, Symmetric, symmetric_available
from titan_mxfp8.moe.transport import Transport

ROUNDS, AT_ONCE = 1000, 5


class Unruly(GroupLink):
    """Ranks that come late, and a buffer full of NaN wherever nobody may be reading any more."""

    poison, delays = False, torch.Generator()

    def allocate(self, size: int) -> tuple[torch.Tensor, list[int]]:
        self.memory, pointers = super().allocate(size)
        self.memory.fill_(0xFF)
        return self.memory, pointers

    def barrier(self) -> None:
        self.sleep()
        super().barrier()
        if self.poison:
            self.memory.fill_(0xFF)
            self.poison = False
        self.sleep()

    def sleep(self) -> None:
        """Half of the time for up to 0.2 ms, once in a hundred times for 5 ms."""
        draw = torch.rand(2, generator=self.delays)
        if draw[0] < 0.5:
            torch.cuda._sleep(int(draw[1] * 400_000) if draw[0] > 0.01 else 10_000_000)


def say(*words: object) -> None:
    if rank == 0:
        print(*words, flush=True)


Layer = list[torch.Tensor]  # elements, scales, gradients, experts, scores


def draw(generator: torch.Generator, most: int, dim: int, experts: int, k: int, like: float = 1.0) -> Layer:
    tokens = int(torch.randint(0, most + 1, (), generator=generator)) if like else most
    favourites = like * 4 * torch.rand(experts, generator=generator) * torch.rand((), generator=generator)
    ids = (torch.randn(tokens, experts, generator=generator) + favourites).topk(k, 1).indices
    elements = torch.randint(0, 256, (tokens, dim), generator=generator, dtype=torch.uint8).view(E4M3)
    scales = torch.randint(0, 256, (tokens, dim // 32), generator=generator, dtype=torch.uint8)
    gradients = torch.randn(tokens, dim, generator=generator).to(BF16)
    return [x.to(device) for x in (elements, scales, gradients, ids, torch.rand(tokens, k, generator=generator))]


def run(transport: Transport, layer: Layer, experts: int, capacity: int | None) -> list[torch.Tensor]:
    """A forward and a backward; all that comes out, of received rows those up to the last offset."""
    elements, scales, gradients, ids, scores = layer
    if isinstance(transport, Symmetric) and isinstance(transport.link, Unruly):
        transport.link.poison = True
    payload, handle = transport.dispatch([elements, scales], ids, scores, experts, capacity)
    (rows,) = transport.dispatch_with_handle([gradients], handle)
    sums, _ = transport.combine([rows], True, None, handle, BF16)
    values = handle.scores * 3
    grads, of_slots = transport.combine([rows, rows], False, values, handle, BF16)
    return [handle.offs, *payload, rows, handle.scores, sums, grads, of_slots]


def check_same(actual: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    received = expected[0][-1].item()
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if 1 <= i <= 4:
            a, b = a[:received], b[:received]
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"{what}: output {i} differs on rank {rank}"


def check_cases() -> None:
    count = 0
    unruly = Symmetric(Unruly(group, device))
    unruly.reserve(64)
    for case in CASES:
        if case.experts % ranks:
            continue
        for transport in (collective, unruly):
            for capacity in (None, *capacities(case, ranks)):
                check_against_one_process(transport, case, device, capacity)
                count += 1
    say(f"{count} cases are right")


def check_rounds() -> None:
    experts, dim, k = 5 * ranks, 1024, 4
    generator = torch.Generator().manual_seed(rank)
    unruly = Symmetric(Unruly(group, device))
    unruly.link.delays.manual_seed(100 + rank)
    unruly.reserve(300)
    for _ in range(ROUNDS // AT_ONCE):
        layers = [draw(generator, 300, dim, experts, k) for _ in range(AT_ONCE)]
        results = [run(unruly, layer, experts, 300 * ranks * k) for layer in layers]  # the host runs ahead
        for layer, result in zip(layers, results, strict=True):
            check_same(result, run(collective, layer, experts, None), "rounds")
    say(f"{ROUNDS} rounds with delays and poison: the same bits")


def die() -> None:
    """The last rank is gone; the others must end with a message."""
    fast = Symmetric(GroupLink(group, device))
    layer = draw(torch.Generator().manual_seed(rank), 20, 64, ranks, 1, like=0)
    run(fast, layer, ranks, None)
    torch.cuda.synchronize()
    if rank == ranks - 1:
        os._exit(0)
    run(fast, layer, ranks, None)


rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
timeout = timedelta(seconds=10 if "die" in sys.argv else 120)
dist.init_process_group("nccl", device_id=device, timeout=timeout)
group = dist.group.WORLD
if "die" in sys.argv:
    die()
    raise AssertionError("nobody noticed")
collective = Collective(group)
assert symmetric_available(group, device)[0], symmetric_available(group, device)
say(*choose("auto", group, device), *choose("collective", group, device))
assert choose("auto", group, device)[0] is choose("symmetric", group, device)[0]
for check in (check_cases, check_rounds):
    check()
torch.cuda.synchronize()
dist.barrier()
dist.destroy_process_group()
os.write(1, b"passed\n")
