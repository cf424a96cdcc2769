"""The backends' functions as custom operators, so that ``torch.compile`` and activation checkpointing see them.

An operator takes and returns operands as they lie in memory (``format.spec.Operand``): one tensor if the values are
stored in bf16, else FP8 elements and their scales. Beside them it takes the key of their ``OperandSpec``, which is all
that the fakes need to know.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import register_flop_formula

from titan_mxfp8 import backends
from titan_mxfp8.format.spec import Operand, spec_of
from titan_mxfp8.ops.checks import check_offs_values

_LIBRARY = torch.library.Library("titan_mxfp8", "FRAGMENT")


class Operator:
    """A custom operator whose implementation is called directly where nobody looks at operators.

    As ``torch.library.custom_op`` makes it, without its checks on each call. In eager mode, where no mode such as that
    of selective activation checkpointing is active and no tensor is of a subclass, what the dispatcher would do takes
    the host a third of the time of a small call, and gives the same. Nothing differentiates these operators:
    ``autograd.Function``s call them.
    """

    def __init__(self, function: Callable[..., object]):
        self.function = function
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(function.__name__ + schema, tags=torch.Tag.pt2_compliant_tag)
        _LIBRARY.impl(function.__name__, self.run, "CompositeExplicitAutograd")
        self.overload: OpOverload = getattr(torch.ops.titan_mxfp8, function.__name__).default

    def __call__(self, *args: object) -> object:
        if torch.compiler.is_compiling() or _modes() or not _are_plain(args):
            return self.overload(*args)
        return self.run(*args)

    def run(self, *args: object) -> object:
        """The implementation."""
        return self.function(*args)


class KernelOperator(Operator):
    """One that a backend implements. Calls that on a GPU allocate and launch, and do nothing else, are replayed.

    Args:
        unread: name of the argument that only fakes and FLOP counters read: calls that differ in it alone are alike.
    """

    def __init__(self, function: Callable[..., object], unread: str | None = None):
        super().__init__(function)
        self.unread = None if unread is None else list(inspect.signature(function).parameters).index(unread)

    def run(self, *args: object) -> object:
        return _replay().call(self.function, args, self.unread) if args[0].is_cuda else self.function(*args)


@cache
def _replay() -> ModuleType:
    """Imported where there is a GPU, as it imports Triton."""
    return importlib.import_module("titan_mxfp8.backends.common.replay")


def _modes() -> int:
    """How many modes look at operators or at calls of torch's functions."""
    return torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()


def _are_plain(args: tuple[object, ...]) -> bool:
    """Whether all tensors are ordinary ones with data, so that no operator does anything but compute. The first
    argument is a tensor, and all are on its device."""
    return not args[0].is_meta and _PLAIN.issuperset(map(type, args))


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, list, str, int, bool, torch.dtype, type(None)))


@KernelOperator
def quantize(x: torch.Tensor, axis: int, spec: str, offs: torch.Tensor | None, backend: str) -> list[torch.Tensor]:
    """``Backend.quantize`` of the spec with this key."""
    check_offs_values(offs, x.shape[0 if spec_of(spec).grouped_scales else axis])
    operand = backends.load(backend, x.device).quantize(aligned(x), axis, spec_of(spec), aligned(offs))
    return _tensors(operand)


@torch.library.register_fake(quantize.overload)
def _(x, axis, spec, offs, backend):
    return _tensors(spec_of(spec).empty(x, axis, None if offs is None else offs.shape[0]))


@KernelOperator
def quantize_both(
    x: torch.Tensor, last: str, first: str, offs: torch.Tensor | None, backend: str
) -> list[torch.Tensor]:
    """``Backend.quantize_both``: the tensors along the last axis, then those along the first one."""
    check_offs_values(offs, x.shape[-2])
    load = backends.load(backend, x.device)
    along_last, along_first = load.quantize_both(aligned(x), spec_of(last), spec_of(first), aligned(offs))
    return _tensors(along_last) + _tensors(along_first)


@torch.library.register_fake(quantize_both.overload)
def _(x, last, first, offs, backend):
    along_first = spec_of(first).empty(x, x.ndim - 2, None if offs is None else offs.shape[0])
    return _tensors(_empty_last(x, last, offs)) + _tensors(along_first)


@KernelOperator
def requantize(
    rows: torch.Tensor,
    scale: torch.Tensor,
    rows_spec: str,
    axis: int,
    spec: str,
    offs: torch.Tensor | None,
    backend: str,
) -> list[torch.Tensor]:
    """``Backend.requantize`` of FP8 rows and their scales."""
    check_offs_values(offs, rows.shape[0])
    operand = Operand(aligned(rows), aligned(scale), spec_of(rows_spec), 1)
    return _tensors(backends.load(backend, rows.device).requantize(operand, axis, spec_of(spec), aligned(offs)))


@torch.library.register_fake(requantize.overload)
def _(rows, scale, rows_spec, axis, spec, offs, backend):
    return _tensors(spec_of(spec).empty(rows, axis, None if offs is None else offs.shape[0]))


@KernelOperator
def gemm_m_grouped(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    a_spec: str,
    b: torch.Tensor,
    b_scale: torch.Tensor | None,
    b_spec: str,
    b_axis: int,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
    zero_tail: bool = True,
) -> torch.Tensor:
    """``Backend.gemm_m_grouped``; ``b_axis``: the one of the weight's axes, 1 or 2, that it was quantised along."""
    check_offs_values(offs, a.shape[0])
    a_operand = Operand(aligned(a), aligned(a_scale), spec_of(a_spec), 1)
    b_operand = Operand(aligned(b), b_scale, spec_of(b_spec), b_axis)
    gemm = backends.load(backend, a.device).gemm_m_grouped
    rest = aligned(offs), None if bias is None else aligned(bias.contiguous()), out_dtype, zero_tail
    return _without_autocast(gemm, a.device, a_operand, b_operand, *rest)


@torch.library.register_fake(gemm_m_grouped.overload)
def _(a, a_scale, a_spec, b, b_scale, b_spec, b_axis, offs, bias, out_dtype, backend, zero_tail=True):
    return a.new_empty((a.shape[0], b.shape[_features(b_spec, b_axis)]), dtype=out_dtype)


@partial(KernelOperator, unread="rows")
def gemm_k_grouped(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    a_spec: str,
    b: torch.Tensor,
    b_scale: torch.Tensor | None,
    b_spec: str,
    rows: int,
    offs: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    """``Backend.gemm_k_grouped``; ``rows``: tokens, padding aside."""
    check_offs_values(offs, None)
    operands = Operand(aligned(a), a_scale, spec_of(a_spec), 0), Operand(aligned(b), b_scale, spec_of(b_spec), 0)
    gemm = backends.load(backend, a.device).gemm_k_grouped
    return _without_autocast(gemm, a.device, *operands, aligned(offs), out_dtype)


@torch.library.register_fake(gemm_k_grouped.overload)
def _(a, a_scale, a_spec, b, b_scale, b_spec, rows, offs, out_dtype, backend):
    n, k = a.shape[_features(a_spec, 0)], b.shape[_features(b_spec, 0)]
    return a.new_empty((1 if offs is None else offs.shape[0], n, k), dtype=out_dtype)


# What torch's FLOP counter, and the AC modes that weigh by it, know of the GEMMs: two for each product of elements, as
# if every row belonged to a group; nothing for the scales.
@register_flop_formula(torch.ops.titan_mxfp8.gemm_m_grouped)
def _(a_shape, a_scale_shape, a_spec, b_shape, b_scale_shape, b_spec, b_axis, *args, **kwargs) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[_features(b_spec, b_axis)]


@register_flop_formula(torch.ops.titan_mxfp8.gemm_k_grouped)
def _(a_shape, a_scale_shape, a_spec, b_shape, b_scale_shape, b_spec, rows, *args, **kwargs) -> int:
    return 2 * rows * a_shape[_features(a_spec, 0)] * b_shape[_features(b_spec, 0)]


def _features(spec: str, axis: int) -> int:
    """Which axis of a stored operand, quantised along ``axis`` of its input, the GEMM keeps: FP8 lies with the
    quantised axis last; values in bf16 lie like the input, (M, features) or (E, N, K)."""
    if spec_of(spec).stored == "bf16":
        return {0: 1, 1: 2, 2: 1}[axis]
    return -2


def _empty_last(x: torch.Tensor, spec: str, offs: torch.Tensor | None) -> Operand:
    """``OperandSpec.empty`` along the last axis, where ``offs`` are of groups of rows."""
    by_rows = offs is not None and spec_of(spec).grouped_scales
    return spec_of(spec).empty(x, x.ndim - 1, offs.shape[0] if by_rows else None)


def _tensors(operand: Operand) -> list[torch.Tensor]:
    return [operand.data] if operand.scale is None else [operand.data, operand.scale]


def aligned(x: torch.Tensor | None) -> torch.Tensor | None:
    """``x`` at a multiple of 16 bytes, as kernels are compiled for: itself, or a copy where it was cut out of the
    middle of something. Vectors contiguous too."""
    if x is None or not x.is_cuda:
        return x
    if x.ndim == 1:
        x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _without_autocast(gemm: Callable[..., torch.Tensor], device: torch.device, *args: object) -> torch.Tensor:
    """An autocast region would run the reference's fp32 matmuls in bf16."""
    if not torch.is_autocast_enabled(device.type):
        return gemm(*args)
    with torch.autocast(device.type, enabled=False):
        return gemm(*args)
