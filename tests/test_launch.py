"""Launches of compiled kernels: what reaches the function in C that does it. The launcher here has the form of Triton
3.6's for NVIDIA; GPU tests have the real one."""

import math
from unittest.mock import Mock

import pytest
import torch

from titan_mxfp8.backends.common import launch

_BASE_ARGS_FORMAT = "iiiKKppOOOOOO"  # where ``launcher`` looks for it: in the module of the launcher's class
METAS = ({"swizzle": 3, "block_size": [64, 128]}, {"swizzle": 1, "block_size": [128, 128]})
SHAPE = (128, 256)


def make_tensordesc_arg(given: launch.TensorDescriptor, meta: dict) -> list:
    ENCODED.append((given.base.data_ptr(), meta["swizzle"]))
    return [ENCODED[-1], *given.shape, *given.strides]


ENCODED: list[tuple[int, int]] = []


class Launcher:
    """Triton 3.6's ``CudaLauncher``, but for the function in C."""

    def __init__(self, metas: tuple[dict, ...], scratch: int = 0):
        self.in_c = Mock()
        self.global_scratch_size, self.profile_scratch_size = scratch, 0
        self.launch_cooperative_grid, self.launch_pdl = False, True
        self.direct = True
        self.launch = wrapped(self.in_c, metas) if metas else self.in_c

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: object) -> None:
        self.direct = False
        scratch = "scratch" if self.global_scratch_size else None
        self.launch(x, y, z, stream, function, self.launch_cooperative_grid, self.launch_pdl, scratch, None, *args)


def wrapped(launcher: Mock, metas: tuple[dict, ...]):
    tensordesc_indices, tensordesc_meta = set(range(len(metas))), list(metas)

    def inner(*args: object) -> None:
        final = list(args[: len(_BASE_ARGS_FORMAT)])
        for i, arg in enumerate(args[len(_BASE_ARGS_FORMAT) :]):
            if i in tensordesc_indices:
                final.extend(make_tensordesc_arg(arg, tensordesc_meta[i]))
            else:
                final.append(arg)
        launcher(*final)

    return inner


def make_descriptors(pointer: int, count: int) -> tuple[launch.TensorDescriptor, ...]:
    layout = launch.TileLayout(torch.bfloat16, SHAPE, (64, 128))
    return tuple(launch.kept_descriptor(pointer + i * 2 * math.prod(SHAPE), layout) for i in range(count))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_what_is_launched_is_what_triton_launches(count: int):
    ours, theirs = Launcher(METAS[:count]), Launcher(METAS[:count])
    descriptors, arguments = make_descriptors(4096, count), (7, None, 32)
    for _ in range(2):
        launch.launcher(ours, 11, (4, 1))(5, 99, descriptors, arguments)
        theirs(5, 1, 1, 99, 11, (4, 1), None, None, None, *descriptors, *arguments)
    assert ours.in_c.call_args_list == theirs.in_c.call_args_list and ours.in_c.call_count == 2
    assert ours.direct and not theirs.direct


def test_a_descriptor_is_encoded_once_for_each_format():
    run, other = Launcher(METAS[:1]), Launcher(METAS[1:])
    (descriptor,) = make_descriptors(8192, 1)
    ENCODED.clear()
    launches = [launch.launcher(each, 11, ()) for each in (run, other)]
    for _ in range(3):
        for each in launches:
            each(5, 99, (descriptor,), ())
    assert ENCODED == [(8192, 3), (8192, 1)]


def test_other_launchers_are_called_as_they_are(monkeypatch: pytest.MonkeyPatch):
    """Those of kernels that want memory to scratch on, and of a Triton with another order of arguments."""
    run = Launcher(METAS[:1], scratch=64)
    launch.launcher(run, 11, ())(5, 99, make_descriptors(4096, 1), ())
    assert not run.direct and run.in_c.call_args.args[7] == "scratch"
    run = Launcher(METAS[:1])
    monkeypatch.setitem(globals(), "_BASE_ARGS_FORMAT", "iiiKKppOOOOOOOOO")
    launch.launcher(run, 11, ())(5, 99, make_descriptors(4096, 1), ())
    assert not run.direct


def test_a_number_of_descriptors_that_the_kernel_does_not_take_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        launch.launcher(Launcher(METAS), 11, ())(5, 99, make_descriptors(4096, 1), ())
