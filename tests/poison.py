"""Memory that nobody has written, made visible."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Within, ``torch.empty``, ``empty_like`` and ``new_empty`` give 0xFF bytes: NaN in every float type here."""
    shipped = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def poison(out: torch.Tensor) -> torch.Tensor:
        out.untyped_storage().fill_(0xFF)
        return out

    torch.empty = lambda *args, **kwargs: poison(shipped[0](*args, **kwargs))
    torch.empty_like = lambda *args, **kwargs: poison(shipped[1](*args, **kwargs))
    torch.Tensor.new_empty = lambda *args, **kwargs: poison(shipped[2](*args, **kwargs))
    try:
        yield
    finally:
        torch.empty, torch.empty_like, torch.Tensor.new_empty = shipped
