"""How functions of TorchTitan and torch are replaced: around whatever is there, and once."""

import functools
import inspect
import pkgutil
from collections.abc import Callable

MARK = "_titan_mxfp8_patches"


def around(*targets: str) -> Callable[[Callable], Callable[[], None]]:
    """Decorates ``patch(original, *arguments)``: it becomes a function that puts the patch around each target.

    The modules of the targets are imported when it is called. What is there by then, somebody's own patch included, is
    the ``original``; a second call, or one after somebody has wrapped ours with ``functools.wraps``, changes nothing.

    Args:
        targets: dotted names of functions, or of methods.
    """

    def decorate(patch: Callable) -> Callable[[], None]:
        name = f"{patch.__module__}.{patch.__qualname__}"

        @functools.wraps(patch)
        def install() -> None:
            for target in targets:
                _put_around(target, patch, name)

        del install.__wrapped__  # its arguments are not the patch's
        return install

    return decorate


def _put_around(target: str, patch: Callable, name: str) -> None:
    owner_name, _, attribute = target.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    original = getattr(owner, attribute)
    marks = getattr(original, MARK, frozenset())
    if name in marks:
        return

    @functools.wraps(original)
    def patched(*args: object, **kwargs: object) -> object:
        return patch(original, *args, **kwargs)

    setattr(patched, MARK, marks | {name})
    static = isinstance(inspect.getattr_static(owner, attribute), staticmethod)
    setattr(owner, attribute, staticmethod(patched) if static else patched)
