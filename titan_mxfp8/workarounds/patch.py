"""How functions of TorchTitan and torch are replaced, around whatever is there and once; how a workaround is listed."""

import functools
import importlib.metadata
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import torch

MARK = "_titan_mxfp8_patches"
TITAN02, TITAN03 = "0.2.2", "0.3.0"
BOTH = f"{TITAN02} {TITAN03}"


def around(*targets: str) -> Callable[[Callable], Callable[[], None]]:
    """Decorates ``patch(original, *arguments)``: it becomes a function that puts the patch around each target.

    The modules of the targets are imported when it is called. What is there by then, somebody's own patch included, is
    the ``original``; a second call, or one after somebody has wrapped ours with ``functools.wraps``, changes nothing.
    ``targets``: dotted names of functions, or of methods."""

    def decorate(patch: Callable) -> Callable[[], None]:
        name = f"{patch.__module__}.{patch.__qualname__}"

        @functools.wraps(patch)
        def install() -> None:
            for target in targets:
                _put_around(target, patch, name)

        del install.__wrapped__  # its arguments are not the patch's
        install.targets = targets
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Workaround:
    """A row of the list."""

    install: Callable[..., None]  # its docstring begins with what is wrong without it
    changes: tuple[str, ...] = ()  # dotted names
    torchtitan: str = ""  # for which versions, with spaces between them; empty: whether or not there is one
    since: str = ""  # the first version of torch; empty: the oldest that is supported
    before: str = ""  # the version of torch that needs it no more
    cpu: bool = False  # only where there is no accelerator
    by_config: bool = False  # not at import, but where a config is known that needs it

    @property
    def name(self) -> str:
        return self.install.__name__

    @property
    def versions(self) -> str:
        """In words."""
        bounds = [f"torch {sign} {version}" for sign, version in ((">=", self.since), ("<", self.before)) if version]
        titans = [f"TorchTitan {version}" for version in self.torchtitan.split()]
        return ", ".join([*titans, *bounds] or ["any torch"]) + ", on CPUs" * self.cpu

    def is_for_this_machine(self) -> bool:
        """Whether versions and hardware are those that it is for."""
        return (
            (not self.torchtitan or installed_version("torchtitan") in self.torchtitan.split())
            and (not self.since or torch.__version__ >= self.since)
            and (not self.before or torch.__version__ < self.before)
            and not (self.cpu and torch.accelerator.is_available())
        )


WORKAROUNDS: list[Workaround] = []


def workaround(*changes: str, **fields: object) -> Callable[[Callable], Callable]:
    """Decorates a function that installs a workaround: lists it. ``changes`` and ``fields`` are those of the row; what
    ``around`` has decorated knows what it changes."""

    def decorate(install: Callable) -> Callable:
        WORKAROUNDS.append(Workaround(install=install, changes=changes or install.targets, **fields))
        return install

    return decorate


@functools.cache
def installed_version(package: str) -> str:
    """Empty where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
