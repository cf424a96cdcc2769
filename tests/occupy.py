"""A kernel that occupies multiprocessors, for tests of other kernels beside it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl


@triton.jit
def _occupy(state, registers, LOOKS: tl.constexpr):
    """Waits until the second element of ``state`` is set. The first counts the programs that have started, the third
    those that gave up."""
    at = tl.arange(0, 32768)
    kept = tl.load(registers + at)  # with addresses more than half of what there is: no large kernel fits beside
    tl.atomic_add(state, 1)
    looks = 0
    while (tl.atomic_add(state + 1, 0) == 0) & (looks < LOOKS):
        looks += 1
    tl.atomic_add(state + 2, (looks == LOOKS).to(tl.int32))
    tl.store(registers + at, kept)


@contextmanager
def occupied_multiprocessors(count: int, looks: int = 1 << 24) -> Iterator[None]:
    """Another kernel occupies ``count`` multiprocessors of the current GPU, as those of NCCL do, until what is queued
    on the current stream within has been done.

    Wait for events in there: the device never gets idle. And run the same once before: CUDA loads a kernel when it is
    first used, which waits for those that run.

    Raises:
        TimeoutError: it was to last longer than ``looks``, about a microsecond each.
    """
    if not count:
        yield
        return
    state = torch.zeros(3, dtype=torch.int32, device="cuda")
    registers = torch.zeros(32768, dtype=torch.int32, device="cuda")
    here, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    state[1].fill_(0)  # loads the kernel
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        _occupy[(count,)](state, registers, LOOKS=looks, num_warps=32)
    while state[0].item() < count:
        pass
    try:
        yield
    finally:
        state[1].fill_(1)
        here.wait_stream(beside)
    if state[2].item():
        raise TimeoutError(f"multiprocessors were to be occupied for longer than {looks} looks at a flag")
