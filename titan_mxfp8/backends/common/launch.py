"""Launches of Triton kernels that cost the host little, and compile nothing once a layer has run.

``JITFunction`` looks at every argument of every launch, which takes 24 us where the launch itself takes 9 (on an H200's
host, Triton 3.6), and compiles anew for whatever divides an integer. Here a kernel's arguments say what they are:

| arguments     | what                                                                    | compiled for |
|---------------|-------------------------------------------------------------------------|--------------|
| descriptors   | of TMA                                                                  | type, block  |
| tensors       | pointers, 16-byte aligned; FP8 as bytes                                 | dtype        |
| sizes         | integers that a model fixes: features, strides                          | divisibility |
| counts        | integers that a batch decides; in ``do_not_specialize``                 | nothing      |
| constants     | ``tl.constexpr``                                                        | value        |

in this order in the kernel's signature. So nothing about a batch is in the key of a compiled kernel. Where the number
of tokens chooses among constants, a launch of no programs compiles the ones not chosen as well.
"""

import inspect
import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_mxfp8.backends.common.assembler import compiling

_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)
_GLUON_DTYPES = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
}


class Launched(NamedTuple):
    """A launch of a compiled kernel: its launcher (``launcher``), and what that was given; tensors for addresses."""

    kernel: Callable[[int, int, tuple, tuple], None]
    programs: int
    descriptors: tuple[TensorDescriptor | GluonDescriptor, ...]
    tensors: tuple[Tensor | None, ...]
    numbers: tuple


class _Watched(threading.local):
    """While ``replay`` watches a thread: its launches, with None for any but of a kernel that was compiled before."""

    launches: list[Launched | None] | None = None


watched = _Watched()


class Kernel:
    """A Triton or Gluon kernel with its compiled variants."""

    def __init__(self, function: JITFunction):
        self.function = function
        self.compiled: dict[tuple, Any] = {}

    def launch(
        self,
        programs: int,
        tensors: tuple[Tensor | None, ...],
        sizes: tuple[int, ...],
        counts: tuple[int, ...],
        constants: tuple,
        *,
        device: torch.device,
        warps: int = 4,
        stages: int | None = None,
        registers: int | None = None,
        descriptors: tuple = (),
    ) -> bool:
        """Launches ``programs`` programs on the current stream of ``device``, that of the tensors; with 0 it only
        compiles. Returns whether this variant is new.

        Args:
            tensors, sizes, counts, constants, descriptors: see the table above.
            warps, stages, registers: Triton's ``num_warps``, ``num_stages`` and ``maxnreg``.
        """
        on_gpu = device.type == "cuda"
        if on_gpu and torch._C._cuda_getDevice() != device.index:
            with torch.cuda.device(device):
                return self.launch(
                    programs, tensors, sizes, counts, constants, device=device, warps=warps, stages=stages,
                    registers=registers, descriptors=descriptors,
                )  # fmt: skip
        dtypes, pointers, bits = [], [], 0
        for tensor in tensors:
            if tensor is None:
                dtypes.append(None)
                pointers.append(None)
            else:
                pointer = tensor.data_ptr()
                bits |= pointer
                dtypes.append(tensor.dtype)
                pointers.append(pointer)
        blocks = tuple([d.key for d in descriptors]) if descriptors else ()
        key = (device, sizes, constants, warps, stages, registers, tuple(dtypes), blocks)
        if torch.version.hip:  # where Triton takes 32 bits for an address in memory of less than 2 GiB
            key += (tuple([x is None or x.untyped_storage().nbytes() < 2**31 for x in tensors]),)
        kernel = self.compiled.get(key)
        if kernel is not None and programs and not knobs.runtime.launch_enter_hook.calls:
            assert not bits & 15, "tensors start at multiples of 16 bytes"
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            numbers = *sizes, *counts, *constants
            kernel(programs, stream, descriptors, (*pointers, *numbers))
            if watched.launches is not None:
                watched.launches.append(Launched(kernel, programs, descriptors, tensors, numbers))
            return False
        options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
        args = *descriptors, *map(_as_bytes, tensors), *sizes, *counts, *constants
        return self._launch_by_triton(programs, key, args, {name: n for name, n in options.items() if n is not None})

    def _launch_by_triton(self, programs: int, key: tuple, args: tuple, options: dict[str, int]) -> bool:
        """``launch`` of a variant that may be new, of 0 programs, or where something watches launches."""
        is_new, on_gpu = key not in self.compiled, key[0].type == "cuda"
        if watched.launches is not None and (is_new or programs):
            watched.launches.append(None)
        is_compiled = isinstance(self.function, JITFunction)  # else Triton interprets
        if is_compiled and driver.active.get_current_target().backend == "hip":
            options.pop("maxnreg", None)  # which Triton knows for NVIDIA alone
        with compiling() if is_compiled else nullcontext({}) as more:
            if is_new:
                compiled = self.function.warmup(*args, grid=(1,), **options, **more) if is_compiled else None
                # Loads it too, which waits for what runs: later that would stall a step of training. Off the GPU, where
                # Triton launches, it is only known to be compiled.
                self.compiled[key] = (
                    launcher(compiled.run, compiled.function, compiled.packed_metadata) if on_gpu else None
                )
            if programs:
                self.function[(programs,)](*args, **options, **more)
        return is_new


def launcher(run: Any, function: int, metadata: tuple) -> Callable[[int, int, tuple, tuple], None]:
    """What launches a compiled kernel: so many programs on a stream, with its descriptors and its other arguments.
    ``run``, ``function``, ``metadata``: ``CompiledKernel.run``, ``function`` and ``packed_metadata``."""
    direct = _direct(run)
    if direct is None:

        def launch(programs: int, stream: int, descriptors: tuple, arguments: tuple) -> None:
            run(programs, 1, 1, stream, function, metadata, None, None, None, *descriptors, *arguments)

        return launch
    launch_now, formats = direct
    options = run.launch_cooperative_grid, run.launch_pdl, None, None, metadata, None, None, None

    def launch(programs: int, stream: int, descriptors: tuple, arguments: tuple) -> None:
        encoded = []
        for kept, wanted in zip(descriptors, formats, strict=True):
            encoded += kept.encoded.get(wanted.key) or wanted.encode(kept)
        launch_now(programs, 1, 1, stream, function, *options, *encoded, *arguments)

    return launch


class _Format:
    """How a compiled kernel wants one of its descriptors: encoded, with its sizes and strides behind it."""

    def __init__(self, meta: dict[str, Any], make: Callable[..., list]):
        self.meta, self.make = meta, make
        self.key = repr(meta)

    def encode(self, kept: TensorDescriptor | GluonDescriptor) -> list:
        return kept.encoded.setdefault(self.key, self.make(kept, self.meta))


def _direct(run: Any) -> tuple[Callable[..., None], tuple[_Format, ...]] | None:
    """The function in C under the launcher of Triton 3.6 to 3.9 for NVIDIA, and the formats of its descriptors; None
    for others, which launch through ``run``.

    What lies between encodes descriptors for every launch: with five of them one took 16 us, without any 6 (on an
    H200's host).
    """
    try:
        module = inspect.getmodule(type(run))
        if module._BASE_ARGS_FORMAT != "iiiKKppOOOOOO" or run.global_scratch_size or run.profile_scratch_size:
            return None
        if not inspect.isfunction(run.launch):
            return run.launch, ()
        inner = inspect.getclosurevars(run.launch).nonlocals
        metas, at = inner.get("tensordesc_meta"), inner.get("tensordesc_indices")
        if not metas or None in metas or at != set(range(len(metas))):
            return None
        return inner["launcher"], tuple(_Format(meta, module.make_tensordesc_arg) for meta in metas)
    except (AttributeError, KeyError, TypeError):  # none of this is public
        return None


class TileLayout(NamedTuple):
    """What a TMA descriptor says of a tensor, but for its address."""

    dtype: torch.dtype  # of the elements; the tensor may hold others of the same size
    shape: tuple[int, ...]  # of the tensor, of a part of it, or of it with axes merged
    block: tuple[int, ...]  # a tile
    gluon: bool = False  # for a Gluon kernel, with the default layout of shared memory
    offset: int = 0  # elements before the first one


def descriptor(x: Tensor, layout: TileLayout) -> TensorDescriptor | GluonDescriptor:
    """A TMA descriptor of ``x``, contiguous.

    Those of GPU tensors are kept: the caching allocator gives the same addresses in every step.
    """
    if x.is_cuda:
        return kept_descriptor(x.data_ptr(), layout)
    dtype, shape, _, _, offset = layout
    return _make(x.view(-1)[offset : offset + math.prod(shape)].view(dtype).view(shape), layout)


@lru_cache(maxsize=4096)
def kept_descriptor(pointer: int, layout: TileLayout) -> TensorDescriptor | GluonDescriptor:
    return _make(_Address(pointer + layout.offset * layout.dtype.itemsize, layout.dtype), layout)


def _make(base: "Tensor | _Address", layout: TileLayout) -> TensorDescriptor | GluonDescriptor:
    dtype, shape, block, gluon, _ = layout
    shape = [size or 16 for size in shape]  # an empty tensor's is only compiled for
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if gluon:
        made = GluonDescriptor(base, shape, strides, list(block), _shared_layout(block, dtype))
    else:
        made = TensorDescriptor(base, shape, strides, list(block))
    made.key = dtype, block
    made.tile_layout = layout
    made.encoded = {}  # by its formats, see _Format
    return made


@cache
def _shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> NVMMASharedLayout:
    return NVMMASharedLayout.get_default_for(list(block), _GLUON_DTYPES[dtype])


class _Address:
    """What a descriptor asks of a tensor, without keeping its memory alive."""

    def __init__(self, pointer: int, dtype: torch.dtype):
        self.pointer, self.dtype = pointer, dtype

    def data_ptr(self) -> int:
        return self.pointer


def _as_bytes(x: Tensor | None) -> Tensor | None:
    return x.view(torch.uint8) if x is not None and x.dtype in _BYTES else x
