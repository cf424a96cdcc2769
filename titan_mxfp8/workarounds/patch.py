"""How the adapters replace functions of TorchTitan and torch: around whatever is there, and once."""

import functools
from collections.abc import Callable

MARK = "_patched_by_titan_mxfp8"


def is_patched(function: Callable) -> bool:
    """Whether ``function`` is a patch of ours, or somebody's ``functools.wraps`` around one."""
    return hasattr(function, MARK)


def patch_of(function: Callable) -> Callable[[Callable], Callable]:
    """``functools.wraps(function)``, for a patch of ours: ``is_patched`` of it is true.

    ``__wrapped__``, which every decorator of that kind sets, would not tell ours from others'.
    """

    def decorate(patch: Callable) -> Callable:
        patch = functools.wraps(function)(patch)
        setattr(patch, MARK, True)
        return patch

    return decorate
