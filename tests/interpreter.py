"""Workarounds Triton's CPU interpreter, so that kernels can be held to the format's bits without a GPU.

As shipped (3.9.0) ``TRITON_INTERPRET=1`` rounds fp32 -> fp8 half up and drops carries, truncates fp32 -> bf16, makes
fp8 NaN codes finite, and computes on bf16, which it stores as uint16, as on integers; 3.6 also lacks operations that
are needed here. ``install()`` replaces, in ``triton.runtime.interpreter``:

- float conversions: torch's, round to nearest even; fp8 saturates and NaN becomes 0x7F, as ``cvt.rn.satfinite`` does;
- arithmetic of two bf16 numbers: in fp32, rounded once; ``tl.dot`` of 8- and 16-bit operands: in fp32;
- ``tl.reduce_or``, which takes a millisecond for each element: numpy's;
- what patches ``triton.language`` anew at each call of a jitted helper (2 ms): done once, for the whole process;
- types, of which each operation makes several: what is known of one is worked out once;
- calls of operators, each of which went through two wrappers.

The process can then interpret and nothing else: ``test_triton_interpreter.py`` starts one.
"""

import dataclasses
import operator

import numpy as np
import torch
import triton.language as tl
from triton.language import core  # the interpreter looks for both modules among a function's globals
from triton.runtime import interpreter

_Handle = interpreter.TensorHandle
_FLOATS = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}
_FP8 = (tl.float8e4nv, tl.float8e5)
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)


def install() -> None:
    builder = interpreter.InterpreterBuilder
    binary_op, cast_impl = builder.binary_op, builder.cast_impl
    generic_reduce = interpreter.ReduceOps.generic_reduce

    def repaired_binary_op(self, lhs, rhs, op):
        if lhs.dtype.scalar.name == "bf16" and op not in _BITWISE:
            out = op(_float32(lhs), _float32(rhs)).astype(np.float32)
            return _Handle(_convert_float(out, tl.float32, tl.bfloat16), tl.bfloat16)
        out = binary_op(self, lhs, rhs, op)
        return _Handle(out.data, tl.int1) if out.data.dtype == np.bool_ else out  # a comparison is not of lhs's type

    def repaired_cast(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source.is_floating() and target.is_floating():
            return _Handle(_convert_float(src.data, source, target).view(interpreter._get_np_dtype(target)), target)
        if target == tl.bfloat16:
            return _Handle(_convert_float(src.data.astype(np.float32), tl.float32, target), target)
        return cast_impl(self, src, dst_type)

    def repaired_dot(self, a, b, acc, input_precision, max_num_imprecise_acc):
        product = np.matmul(_float32(a), _float32(b))
        return _Handle((product + acc.data).astype(acc.data.dtype), acc.dtype.scalar)

    def repaired_reduce(self, given):
        if self.combine_fn is not tl.standard._or_combine:
            return generic_reduce(self, given)
        (x,) = given
        return self.to_tensor(np.bitwise_or.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims), x.dtype)

    interpreter._convert_float = _convert_float
    interpreter.ReduceOps.generic_reduce = repaired_reduce
    builder.binary_op, builder.cast_impl, builder.create_dot = repaired_binary_op, repaired_cast, repaired_dot
    builder.create_expand_dims = lambda self, x, axis: _Handle(x.data[(slice(None),) * axis + (None,)], x.dtype.scalar)
    _remember_types()

    unwrap, plain = core._unwrap_if_constexpr, {tl.tensor, tl.dtype, tl.block_type, bool, int, type(None)}
    core._unwrap_if_constexpr = lambda x: x if type(x) in plain else unwrap(x)
    interpreter._patch_attr = _patch_attr
    interpreter._patch_lang(install)  # for good: triton.language now computes
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    # Off: every integer operation is done in int64 too, to see an overflow.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _patch_attr(obj, name, member, builder, scope) -> None:
    """Triton's, in one call instead of two and a copy of the keywords."""
    function = getattr(member, "__wrapped__", member)

    def interpreted(*args, _semantic=None, **kwargs):
        return function(*args, _semantic=interpreter.interpreter_semantic, **kwargs)

    scope.set_attr(obj, name, interpreted)


def _remember_types() -> None:
    """By the name of a type, in which its elements and its shape are."""
    make_block, make_tensor, numpy_type = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
    blocks, tensors, numpy_types = {}, {}, {}

    def remembered_block(self, element_ty, shape):
        key = element_ty.name, *map(operator.index, shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self)
        self.__dict__ = blocks[key]

    def remembered_tensor(self, handle, type):
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = vars(self).copy()
        self.__dict__.update(tensors[type.name])
        self.handle, self.type = handle, type

    def remembered_numpy_type(type):
        if type.name not in numpy_types:
            numpy_types[type.name] = numpy_type(type)
        return numpy_types[type.name]

    tl.block_type.__init__, tl.tensor.__init__ = remembered_block, remembered_tensor
    interpreter._get_np_dtype = remembered_numpy_type


def _convert_float(data, source, target, rounding_mode=None):
    """The bits of ``data`` (floats, or raw bits of bf16 and fp8) in another float type, as unsigned integers."""
    assert rounding_mode in (None, interpreter._ir.ROUNDING_MODE.RTNE), "only round to nearest even is repaired"
    source, target = source.scalar, target.scalar
    raw = np.array(data, order="C", copy=True)  # a broadcast view is read-only
    x = torch.from_numpy(raw.view(f"u{source.primitive_bitwidth // 8}")).view(_FLOATS[source])
    if target in _FP8:
        x = x.float()
        limit = torch.finfo(_FLOATS[target]).max
        bits = x.clamp(-limit, limit).to(_FLOATS[target]).view(torch.uint8)
        return torch.where(x.isnan(), 0x7F, bits).numpy()
    return x.to(_FLOATS[target]).contiguous().view(getattr(torch, f"uint{target.primitive_bitwidth}")).numpy()


def _float32(handle):
    return _convert_float(handle.data, handle.dtype, tl.float32).view(np.float32)
