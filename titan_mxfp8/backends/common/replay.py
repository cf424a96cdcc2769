"""Operators that launch what they have launched before, without the Python that decided what that is.

What an operator here does on the host (which kernels, in what order, with which numbers, on how much memory) is decided
by the shapes, strides and dtypes of its tensors and by its other arguments. Their values are on the GPU, where the host
does not look. So once an operator has been called some times with a first argument of the same shape, one call of those
that are alike in all of these is watched, and after it the same allocations and launches are made with other addresses.
``backends.replay_launches(False)`` switches that off.

A call that does anything else, such as copying an argument or calling torch's GEMM, is never replayed. What a recording
takes for granted besides is what a process does not change: the GPU, and the backend that ``auto`` chooses for it.
"""

import logging
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from titan_mxfp8 import backends
from titan_mxfp8.backends.common.launch import GluonDescriptor, Launched, TensorDescriptor, kept_descriptor, watched

try:  # private to torch's compiled code, which allocates with it; torch 2.11 to 2.13 have it
    from torch._C._dynamo.guards import _empty_strided_cuda
except ImportError:
    _empty_strided_cuda = None
    logging.getLogger(__name__).info("operators are not replayed, so small ones take the host longer: another torch")

_aten = torch.ops.aten
_ALLOCATIONS = {_aten.empty.memory_format: "empty", _aten.new_empty.default: "empty", _aten.zeros.default: "zeros"}
_MOST = 16384  # calls that are remembered: a model's linears have some dozens

# In every step a rank's experts may have another number of tokens, and a call with it comes several times: with w1 and
# w3, for x and its gradient, in forward, recomputed, in backward. Watching those, or looking at all their arguments,
# would take longer than it saves.
_UNWATCHED = 16

_watching = threading.Lock()
_calls: dict[tuple, int] = {}  # so far, of a function with a first argument of this shape
_known: dict[tuple, "_Recording | Literal[False]"] = {}  # by all that decides a call; False: not to be replayed


def call(function: Callable[..., Any], args: tuple[Any, ...], unread: int | None = None) -> Any:
    """``function(*args)``, by what it launched before where that is known.

    Args:
        function: an operator's implementation, which returns a tensor or a list of them.
        args: of it. The first is a GPU tensor; those that are no tensors have a hash.
        unread: which of them, no tensor, the implementation does not read.
    """
    device = args[0].device
    if not backends.replays or _empty_strided_cuda is None:
        return function(*args)
    if torch._C._cuda_getDevice() != device.index or knobs.runtime.launch_enter_hook.calls:
        return function(*args)
    call_of = function, args[0].shape
    calls = _calls.get(call_of, 0)
    if calls < _UNWATCHED:
        if len(_calls) >= _MOST:
            _forget_rare()
        _calls[call_of] = calls + 1
        return function(*args)
    parts, pointers, bits = [function, device], [], 0
    for arg in args:
        if isinstance(arg, Tensor):
            pointer = arg.data_ptr()
            pointers.append(pointer)
            bits |= pointer
            parts.append((arg.shape, arg.stride(), arg.dtype))
        else:
            parts.append(arg)
    if unread is not None:
        del parts[2 + unread]
    key = tuple(parts)
    known = _known.get(key)
    if known is False or bits & 15:  # what is not aligned is copied
        return function(*args)
    if known is not None:
        return known.replay(pointers, device)
    if not _watching.acquire(blocking=False):  # modes of two threads would leave torch's flags set
        return function(*args)
    try:
        with _Watch() as watch:
            result = function(*args)
    finally:
        _watching.release()
    if None not in watch.launches:
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = watch.recording(args, result) or False
    return result


def _forget_rare() -> None:
    for call_of, calls in list(_calls.items()):
        if calls < _UNWATCHED:
            _calls.pop(call_of, None)  # another thread may be here too
    if len(_calls) > _MOST // 2:
        _calls.clear()


def forget() -> None:
    """For tests that change what a process does not change: nothing that was launched before is known any more."""
    _calls.clear()
    _known.clear()


class _Place(NamedTuple):
    """An address: bytes from the start of a tensor. The call's arguments that are tensors come first, numbered from 0,
    and after them its allocations."""

    tensor: int
    offset: int


class _Allocation(NamedTuple):
    """How a tensor is allocated: filled with zeros, or not at all, even where ``torch.use_deterministic_algorithms``
    has torch.empty fill it. Shapes are tuples, as ``_empty_strided_cuda`` takes no torch.Size."""

    how: Literal["empty", "zeros"]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Recording(NamedTuple):
    """What a call allocates and launches, with places for addresses, and which allocations it returns: one, or several
    as a list."""

    allocations: tuple[_Allocation, ...]
    launches: tuple[Launched, ...]  # descriptors are (_Place, TileLayout), tensors _Place or None
    returned: int | tuple[int, ...]

    def replay(self, pointers: list[int], device: torch.device) -> Tensor | list[Tensor]:
        """Makes the call again. To ``pointers``, of its arguments that are tensors, those of allocations are added."""
        allocated = []
        for how, shape, stride, dtype in self.allocations:
            if how == "empty":  # as torch's compiled code allocates, in a quarter of the time of torch.empty
                tensor = _empty_strided_cuda(shape, stride, dtype)
            else:
                tensor = torch.zeros(shape, dtype=dtype, device=device)
            allocated.append(tensor)
            pointers.append(tensor.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        for kernel, programs, descriptors, tensors, numbers in self.launches:
            kernel(
                programs,
                stream,
                tuple([kept_descriptor(pointers[i] + offset, layout) for (i, offset), layout in descriptors]),
                (*[place if place is None else pointers[place[0]] + place[1] for place in tensors], *numbers),
            )
        if isinstance(self.returned, int):
            return allocated[self.returned]
        return [allocated[i] for i in self.returned]


class _Watch(TorchDispatchMode):
    """Sees what is allocated and launched within, and whether anything else is done."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[tuple[str, Tensor]] = []
        self.launches: list[Launched | None] = []
        self.does_more = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.allocated.append((_ALLOCATIONS[func], out))
        elif not func.is_view or args[0].untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
            self.does_more = True  # contiguous() too says that it is a view
        return out

    def __enter__(self) -> "_Watch":
        watched.launches = self.launches
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        watched.launches = None
        super().__exit__(*exception)

    def recording(self, args: tuple[Any, ...], result: Tensor | list[Tensor]) -> _Recording | None:
        """What to do again; None if that is not the whole of it, or if it cannot be told whose an address is."""
        if self.does_more:
            return None
        given = [a for a in args if isinstance(a, Tensor)]
        allocated = [tensor for _, tensor in self.allocated]
        try:
            spans = _spans(given + allocated)
            launches = tuple(
                launch._replace(
                    descriptors=tuple((_place(_start(d), spans), d.tile_layout) for d in launch.descriptors),
                    tensors=tuple(None if x is None else _place(x.data_ptr(), spans) for x in launch.tensors),
                )
                for launch in self.launches
            )
            results = result if isinstance(result, list) else [result]
            returned = tuple(_place(tensor.data_ptr(), spans).tensor - len(given) for tensor in results)
        except LookupError:
            return None
        if any(i < 0 or not _is_alike(tensor, allocated[i]) for i, tensor in zip(returned, results, strict=True)):
            return None
        allocations = tuple(_Allocation(how, tuple(x.shape), x.stride(), x.dtype) for how, x in self.allocated)
        return _Recording(allocations, launches, returned if isinstance(result, list) else returned[0])


def _spans(tensors: list[Tensor]) -> list[range]:
    """The addresses of each tensor. Raises LookupError: they share memory."""
    spans = [range(x.data_ptr(), x.data_ptr() + _extent(x)) for x in tensors]
    for one, other in pairwise(sorted(spans, key=lambda span: span.start)):
        if one.stop > other.start or one.start == other.start:
            raise LookupError("shared memory")
    return spans


def _place(address: int, spans: list[range]) -> _Place:
    """In which of the tensors an address is. Raises LookupError of one in none."""
    tensor = next((i for i, span in enumerate(spans) if address in span), None)
    if tensor is None:
        raise LookupError("nobody's address")
    return _Place(tensor, address - spans[tensor].start)


def _start(descriptor: TensorDescriptor | GluonDescriptor) -> int:
    """The address of the tensor that a descriptor was made of."""
    layout = descriptor.tile_layout
    return descriptor.base.data_ptr() - layout.offset * layout.dtype.itemsize


def _extent(tensor: Tensor) -> int:
    """Bytes from the start of the first element to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _is_alike(tensor: Tensor, other: Tensor) -> bool:
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) == (
        other.data_ptr(), other.shape, other.stride(), other.dtype,
    )  # fmt: skip
