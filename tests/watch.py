"""What tests look at from outside: calls, what autograd keeps; a process group of this process; other hardware."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from titan_mxfp8 import backends
from titan_mxfp8.moe import transport
from titan_mxfp8.ops import config


def look_at(
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    before: Callable[..., object] = lambda *args: None,
    after: Callable[..., object] = lambda result, *args: None,
) -> None:
    """Has ``before`` called with the arguments of each call of ``owner.name``, and ``after`` with its result too."""
    original = getattr(owner, name)

    def run(*args: object, **kwargs: object) -> object:
        before(*args)
        result = original(*args, **kwargs)
        after(result, *args)
        return result

    monkeypatch.setattr(owner, name, run)


@contextmanager
def saved_tensors() -> Iterator[list[torch.Tensor]]:
    """The tensors that autograd keeps for the backward of what runs within."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


@contextmanager
def process_group(backend: str = "gloo", ranks: int = 1) -> Iterator[None]:
    """A default process group of which this process is rank 0; of several ranks with the backend "fake"."""
    dist.init_process_group(backend, rank=0, world_size=ranks, store=dist.HashStore() if ranks == 1 else None)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def other_hardware() -> Iterator[None]:
    """What is chosen by hardware is chosen anew within, where it passes for another, and once more after it."""
    caches = backends.load, config._config, transport.movements
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in caches:
            cache.cache_clear()
