"""The assembler (ptxas) that compiles kernels, on Hopper a newer one than that of Triton 3.6; where they are kept."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from triton import knobs
from triton.knobs import NvidiaTool
from triton.runtime.driver import driver

SM90 = (9, 0)
PTX_VERSION = 88  # that of release 12.9
# Where Triton keeps compiled kernels, and the ptxas that the user names: both read when a model is converted, before
# torch's inductor compiles it. Once that compiles a kernel it names a folder and a ptxas of its own in the environment
# (13.0 with torch 2.11), and in a run that finds all of its kernels in its cache it does not. So a first run took that
# ptxas for our kernels, and the second compiled them anew, for 8 to 18 s of its first step
# (``results/2026-11-29_h200_first_steps``).
FOLDER = knobs.cache.dir
NAMED = os.environ.get("TRITON_PTXAS_PATH")

_lock = threading.RLock()  # a knob is the whole process's


def ptxas(capability: tuple[int, int]) -> NvidiaTool:
    """Path and release of what assembles our kernels for an NVIDIA GPU of this compute capability.

    Triton 3.6 takes release 12.8 for SM90, and its wheel has 12.9 for SM100. With 12.9 the instructions that scale and
    add up sums let other warps issue in between: on an H200 forward then takes 6% less time rebased, dgrad 4%
    (``results/2026-11-27_2xh200_newer_ptxas``). 13.1, which Triton 3.7 has, gains next to nothing
    (``results/2026-11-27_h200_ptxas_13_1``) and is not taken, nor is what is newer. A ``TRITON_PTXAS_PATH`` that names
    a program when this module is imported is left as it is.
    """
    own = _of_triton(capability)
    if capability != SM90 or own.path == NAMED:
        return own
    try:
        newer = knobs.nvidia.ptxas_blackwell
    except RuntimeError:  # a build of Triton without it
        return own
    return newer if _release(own) < (12, 9) <= _release(newer) < (13,) else own


@contextmanager
def compiling() -> Iterator[dict[str, int]]:
    """Within, Triton keeps what it compiles in ``FOLDER``, and compiles for SM90 with ``ptxas``; gives the options that
    a kernel then wants.

    Triton's cache names a kernel after the ptxas that was asked for its version first, which is made to be Triton's
    own; the version of PTX, which is in the name too, tells ours apart.
    """
    folder = FOLDER if _is_writable(FOLDER) else knobs.cache.dir  # the inductor's may be
    with _lock, _set(knobs.cache, "dir", folder), _set(knobs.nvidia, "ptxas", NAMED):
        tool = ptxas(SM90) if driver.active.get_current_target().arch == SM90[0] * 10 else None
        if tool is None or tool == _of_triton(SM90):
            yield {}
            return
        from triton.backends.nvidia.compiler import get_ptxas_version

        get_ptxas_version(90)
        with _set(knobs.nvidia, "ptxas", tool.path):
            yield {"ptx_version": PTX_VERSION}


@contextmanager
def _set(group: knobs.base_knobs, name: str, value: str | None) -> Iterator[None]:
    """Not by ``group.scope``, which changes the environment too, where the inductor may just be looking."""
    own = vars(group)
    before = own.get(name, own)
    own[name] = value
    try:
        yield
    finally:
        own.pop(name, None)  # gone, if somebody else has ended a scope meanwhile
        if before is not own:
            own[name] = before


@cache
def _is_writable(folder: str) -> bool:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _of_triton(capability: tuple[int, int]) -> NvidiaTool:
    from triton.backends.nvidia.compiler import get_ptxas  # which a Triton for AMD need not have

    major, minor = capability
    with _lock, _set(knobs.nvidia, "ptxas", NAMED):
        return get_ptxas(10 * major + minor)


def _release(tool: NvidiaTool) -> tuple[int, ...]:
    return tuple(int(part) for part in tool.version.split("."))
