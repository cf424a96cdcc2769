"""The backends' functions as custom operators, so that ``torch.compile`` and activation checkpointing see them.

An operator takes and returns operands as they lie in memory (``format.spec.Operand``): one tensor if the values are
stored in bf16, else FP8 elements and their scales. Beside them it takes the key of their ``OperandSpec``
(``format.codec``), which is all that the fakes need to know.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import register_flop_formula

from titan_mxfp8 import backends
from titan_mxfp8.format.codec import decode
from titan_mxfp8.format.spec import Operand, OperandSpec
from titan_mxfp8.ops.checks import check_offs_values

_LIBRARY = torch.library.Library("titan_mxfp8", "FRAGMENT")
_PLAIN = frozenset((Tensor, torch.nn.Parameter, list, str, int, bool, torch.dtype, type(None)))


class Operator:
    """A custom operator whose implementation is called directly where nobody looks at operators.

    As ``torch.library.custom_op`` makes it, without its checks on each call. In eager mode, where no mode such as that
    of selective activation checkpointing is active and no tensor is of a subclass, what the dispatcher would do takes
    the host a third of the time of a small call, and gives the same. Nothing differentiates these operators:
    ``autograd.Function``s call them. The first argument is a tensor, and all are on its device.
    """

    def __init__(self, function: Callable[..., object]):
        self.function = function
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(function.__name__ + schema, tags=torch.Tag.pt2_compliant_tag)
        _LIBRARY.impl(function.__name__, self.run, "CompositeExplicitAutograd")
        self.overload: OpOverload = getattr(torch.ops.titan_mxfp8, function.__name__).default

    def __call__(self, *args: object) -> object:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack():
            return self.overload(*args)
        is_plain = not args[0].is_meta and _PLAIN.issuperset(map(type, args))
        return self.run(*args) if is_plain else self.overload(*args)

    def run(self, *args: object) -> object:
        """The implementation. An autocast region would run the reference's fp32 matmuls in bf16."""
        device_type = args[0].device.type
        if not torch.is_autocast_enabled(device_type):
            return self.function(*args)
        with torch.autocast(device_type, enabled=False):
            return self.function(*args)


class KernelOperator(Operator):
    """One that a backend implements. Calls that on a GPU allocate and launch, and do nothing else, are replayed.
    ``unread``: name of the argument that only fakes and FLOP counters read: calls that differ in it alone are alike."""

    def __init__(self, function: Callable[..., object], unread: str | None = None):
        super().__init__(function)
        self.unread = None if unread is None else list(inspect.signature(function).parameters).index(unread)

        self.run_aligned = self._run_aligned  # the same object each time, for those who remember calls

    def run(self, *args: object) -> object:
        return _replay().call(self.run_aligned, args, self.unread) if args[0].is_cuda else super().run(*args)

    def _run_aligned(self, *args: object) -> object:
        return super().run(*[aligned(x) if isinstance(x, Tensor) else x for x in args])


@cache
def _replay() -> ModuleType:
    """Imported where there is a GPU, as it imports Triton."""
    return importlib.import_module("titan_mxfp8.backends.common.replay")


def aligned(x: Tensor | None) -> Tensor | None:
    """``x`` with a last stride of 1 if it is a vector, a single number too, which torch 2.14 asks of offsets, or empty,
    which torch takes for contiguous with any strides. On a GPU also at a multiple of 16 bytes, as kernels are compiled
    for. Itself, or a copy where it is not so."""
    if x is not None and x.ndim and x.stride(-1) != 1 and (x.ndim == 1 or not x.numel()):
        x = x.clone(memory_format=torch.contiguous_format)
    return x if x is None or not x.is_cuda or x.data_ptr() % 16 == 0 else x.clone()


@KernelOperator
def quantize(x: Tensor, axis: int, spec: str, offs: Tensor | None, backend: str) -> list[Tensor]:
    """``Backend.quantize`` of the spec with this key."""
    wanted: OperandSpec = decode(spec)
    check_offs_values(offs, x.shape[0 if wanted.grouped_scales else axis])
    return backends.load(backend, x.device).quantize(x, axis, wanted, offs).tensors()


@torch.library.register_fake(quantize.overload)
def _(x, axis, spec, offs, backend):
    return decode(spec).empty(x, axis, None if offs is None else offs.shape[0]).tensors()


@KernelOperator
def quantize_both(x: Tensor, rowwise: str, columnwise: str, offs: Tensor | None, backend: str) -> list[Tensor]:
    """``Backend.quantize_both``: the tensors along the last axis, then those along the one before it."""
    check_offs_values(offs, x.shape[-2])
    both = backends.load(backend, x.device).quantize_both(x, decode(rowwise), decode(columnwise), offs)
    return both[0].tensors() + both[1].tensors()


@torch.library.register_fake(quantize_both.overload)
def _(x, rowwise, columnwise, offs, backend):
    groups = None if offs is None else offs.shape[0]
    of_rows = decode(rowwise).empty(x, x.ndim - 1, groups if decode(rowwise).grouped_scales else None)
    return of_rows.tensors() + decode(columnwise).empty(x, x.ndim - 2, groups).tensors()


@KernelOperator
def requantize(
    rows: Tensor, scale: Tensor, rows_spec: str, axis: int, spec: str, offs: Tensor | None, backend: str
) -> list[Tensor]:
    """``Backend.requantize`` of FP8 rows and their scales."""
    operand = Operand(rows, scale, decode(rows_spec), 1)
    return backends.load(backend, rows.device).requantize(operand, axis, decode(spec), offs).tensors()


@torch.library.register_fake(requantize.overload)
def _(rows, scale, rows_spec, axis, spec, offs, backend):
    return decode(spec).empty(rows, axis, None if offs is None else offs.shape[0]).tensors()


@KernelOperator
def gemm_m_grouped(
    a: Tensor,
    a_scale: Tensor | None,
    a_spec: str,
    b: Tensor,
    b_scale: Tensor | None,
    b_spec: str,
    b_axis: int,
    offs: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """``Backend.gemm_m_grouped``; ``b_axis``: the one of the weight's axes, 1 or 2, that it was quantised along."""
    check_offs_values(offs, a.shape[0])
    operands = Operand(a, a_scale, decode(a_spec), 1), Operand(b, b_scale, decode(b_spec), b_axis)
    bias = None if bias is None else bias.contiguous()
    return backends.load(backend, a.device).gemm_m_grouped(*operands, offs, bias, out_dtype)


@torch.library.register_fake(gemm_m_grouped.overload)
def _(a, a_scale, a_spec, b, b_scale, b_spec, b_axis, offs, bias, out_dtype, backend):
    return a.new_empty((a.shape[0], b.shape[_features(b_spec, b_axis)]), dtype=out_dtype)


@partial(KernelOperator, unread="rows")
def gemm_k_grouped(
    a: Tensor,
    a_scale: Tensor | None,
    a_spec: str,
    b: Tensor,
    b_scale: Tensor | None,
    b_spec: str,
    rows: int,
    offs: Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """``Backend.gemm_k_grouped``; ``rows``: tokens, padding aside."""
    operands = Operand(a, a_scale, decode(a_spec), 0), Operand(b, b_scale, decode(b_spec), 0)
    return backends.load(backend, a.device).gemm_k_grouped(*operands, offs, out_dtype)


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
    return {0: 1, 1: 2, 2: 1}[axis] if decode(spec).stored == "bf16" else -2
