"""The assembler (ptxas) that kernels are compiled with: on Hopper a newer one than Triton 3.6 to 3.8 take."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from triton import knobs
from triton.knobs import NvidiaTool
from triton.runtime.driver import driver

PTX_VERSION = 88  # that of release 12.9; later ones know it too


def ptxas(capability: tuple[int, int]) -> NvidiaTool:
    """Path and release of what assembles our kernels for an NVIDIA GPU of this compute capability.

    Triton 3.6 to 3.8 take release 12.8 for SM90, and bring a newer one for SM100, which Triton 3.9 takes for both. From
    12.9 on the instructions that scale and add up sums let other warps issue in between: on an H200 forward and dgrad
    then take 4 to 6% less time rebased, 1 to 3% less in exact ``mxfp8_2d``, wgrad and bf16 the same.
    ``TRITON_PTXAS_PATH`` is left as it is.
    """
    own, newer = _of_triton(capability), knobs.nvidia.ptxas_blackwell
    is_old = capability == (9, 0) and not os.environ.get("TRITON_PTXAS_PATH") and _release(own) < (12, 9)
    return newer if is_old and _release(newer) >= (12, 9) else own


@contextmanager
def newer_ptxas() -> Iterator[dict[str, int]]:
    """Within, Triton compiles for SM90 with ``ptxas``; gives the options that a kernel then wants.

    The version of PTX is part of a compiled kernel's name in Triton's cache, where the assembler may be an earlier one.
    """
    if driver.active.get_current_target().arch == 90 and (tool := ptxas((9, 0))) != _of_triton((9, 0)):
        with knobs.nvidia.scope():
            knobs.nvidia.ptxas = tool.path
            yield {"ptx_version": PTX_VERSION}
    else:
        yield {}


def _of_triton(capability: tuple[int, int]) -> NvidiaTool:
    from triton.backends.nvidia.compiler import get_ptxas  # which a Triton for AMD need not have

    major, minor = capability
    return get_ptxas(10 * major + minor)


def _release(tool: NvidiaTool) -> tuple[int, ...]:
    return tuple(int(part) for part in tool.version.split("."))
