"""The quantisers of the backends that run on Triton, as one table: an operand's layout says which kernels make it.

| layout      | what is stored                                                | kernels         | multiplied on     |
|-------------|---------------------------------------------------------------|-----------------|-------------------|
| `bf16`      | the values, not quantised                                     | none            | all               |
| `qdq`       | the quantised values in bf16 (fake-quantised)                 | `dequantize.py` | all but SM100     |
| `fp8`       | FP8, a scale for 32 elements                                  | `quantize.py`   | SM100, gfx950     |
| `coalesced` | the same, neighbours at one scale where that changes no value | `rebase.py`     | SM90              |
| `mn_major`  | FP8, a scale for 128 elements (rebased), scales MN-major      | `rebase.py`     | SM90              |
| `swizzled`  | FP8, a scale for 32 elements, scales in tiles of 128 x 4      | `swizzled.py`   | SM100             |

Blocks of 32x32 in layouts `fp8`, `coalesced` and `mn_major` are made in `squares.py`, and whole rows in layout `qdq` in
`quantize.py`. All kernels run on all GPUs; the plans of the backends (``Backend.plan``) say what is wanted where.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from titan_mxfp8.backends.common import dequantize, rebase, squares, swizzled
from titan_mxfp8.backends.common import quantize as exact
from titan_mxfp8.backends.common.tiles import lies_transposed
from titan_mxfp8.format import reference
from titan_mxfp8.format.mx import Block
from titan_mxfp8.format.spec import Operand, OperandSpec
from titan_mxfp8.format.swizzle import unswizzle

Layout = Literal["bf16", "qdq", "fp8", "coalesced", "mn_major", "swizzled"]
Launch = Callable[..., None]

# launch(x, rowwise, columnwise, offs, source) fills the operands along the last axis of ``x`` and along another one,
# mostly the one before it; None: not wanted. ``offs`` are of ragged groups along the latter, or of rows where scales
# lie by groups (``OperandSpec.grouped_scales``). With a ``source`` ``x`` is its FP8 elements, else values. Launches of
# "qdq" and "mn_major" in blocks of 1x32 take one argument more: which rows of the source are meant.
LAUNCHES: dict[tuple[Layout, Block], Launch] = {
    ("qdq", "1x32"): dequantize.launch,
    ("qdq", "32x32"): dequantize.launch,
    ("fp8", "1x32"): exact.launch,
    ("fp8", "32x32"): squares.launch,
    ("coalesced", "1x32"): rebase.launch,
    ("coalesced", "32x32"): squares.launch,
    ("mn_major", "1x32"): rebase.launch,
    ("mn_major", "32x32"): squares.launch,
    ("swizzled", "1x32"): swizzled.launch,
    ("swizzled", "32x32"): swizzled.launch,
}


def layout_of(spec: OperandSpec) -> Layout:
    """The row of the table."""
    if spec.stored == "bf16":
        return "qdq" if spec.is_quantized else "bf16"
    if spec.stored == "coalesced":
        return "coalesced"
    return "fp8" if spec.scales == "k_major" else spec.scales


def quantize(x: Tensor, axis: int, spec: OperandSpec, offs: Tensor | None) -> Operand:
    """``Backend.quantize``."""
    layout, is_last = layout_of(spec), axis == x.ndim - 1
    if layout == "bf16":
        return Operand(x.to(torch.bfloat16).contiguous(), None, spec, axis)
    # What is stored along one of the last two axes is what is stored along the other one of x.mT. Not of values, which
    # lie like x, nor of coalesced 1x32 blocks, which are made along the last axis alone.
    if layout != "qdq" and (layout != "coalesced" or spec.block == "32x32"):
        other = 2 * x.ndim - 3 - axis
        if offs is None and axis >= x.ndim - 2 and lies_transposed(x):
            return quantize(x.mT, other, spec, None)._replace(axis=axis)
        if offs is not None and is_last and not spec.grouped_scales:  # no GEMM wants this, so it may cost a copy
            return quantize(x.mT.contiguous(), other, spec, offs)._replace(axis=axis)
    operand = spec.empty(x, axis, None if offs is None else offs.shape[0])
    LAUNCHES[layout, spec.block](x, operand if is_last else None, None if is_last else operand, offs, None)
    return operand


def quantize_both(
    x: Tensor, rowwise: OperandSpec, columnwise: OperandSpec, offs: Tensor | None
) -> tuple[Operand, Operand]:
    """``Backend.quantize_both``: in one read of ``x`` if both specs are the same, unless there is no kernel for that.

    There is none for coalesced 1x32 blocks, nor for rebased ones that become 32x128, which nothing needs along both
    axes at once.
    """
    layout, last = layout_of(rowwise), x.ndim - 1
    one_read = rowwise == columnwise and layout != "bf16"
    if not one_read or (rowwise.block == "1x32" and (rowwise.block_mn == 32 or layout == "coalesced")):
        offs_of_rows = offs if rowwise.grouped_scales else None
        return quantize(x, last, rowwise, offs_of_rows), quantize(x, last - 1, columnwise, offs)
    if layout == "qdq" and rowwise.block == "32x32":  # the same values along both axes: they lie in memory once
        values = quantize(x, last, rowwise, offs)
        return values, values._replace(axis=last - 1)
    if layout != "qdq" and offs is None and lies_transposed(x):
        first, second = quantize_both(x.mT, rowwise, columnwise, None)
        return second._replace(axis=last), first._replace(axis=last - 1)
    groups = None if offs is None else offs.shape[0]
    operands = rowwise.empty(x, last, groups if rowwise.grouped_scales else None), columnwise.empty(x, last - 1, groups)
    LAUNCHES[layout, rowwise.block](x, *operands, offs, None)
    return operands


def requantize(
    rows: Operand, axis: int, spec: OperandSpec, offs: Tensor | None, places: Tensor | None = None
) -> Operand:
    """``Backend.requantize``. Along their own axis swizzled rows that are rounded alike keep their elements."""
    if rows.spec.block == "32x32":
        return _requantize_squares(rows, axis, spec)
    if rows.spec.grouped_scales:
        rows = unswizzle(rows, offs)
    layout = layout_of(spec)
    if places is not None and (axis == 1 or layout not in ("qdq", "mn_major")):
        rows, places = rows.rows_at(places), None
    if axis == 1:
        if layout in ("bf16", "qdq"):
            return Operand(dequantize.dequantize(rows), None, spec, 1)
        if layout == "swizzled" and rows.spec == replace(spec, scales="k_major"):
            return swizzled.swizzle_scales(rows, offs)
        values = dequantize.dequantize(rows, torch.float32)
        if layout == "swizzled":
            return quantize(values, 1, spec, offs)
        # Rounded up: scales that floor makes might cut what is already rounded.
        return quantize(values, 1, replace(spec, rounding="rceil"), None)._replace(spec=spec)
    if layout == "bf16":
        return Operand(dequantize.dequantize(rows, offs=offs), None, spec, 0)
    like, gathers = (rows.data, ()) if places is None else (rows.data[:1].expand(places.shape[0], -1), (places,))
    operand = spec.empty(like, 0, None if offs is None else offs.shape[0])
    LAUNCHES[layout, spec.block](rows.data, None, operand, offs, rows, *gathers)
    return operand


def _requantize_squares(w: Operand, axis: int, spec: OperandSpec) -> Operand:
    """What Hopper multiplies is made by a kernel; layouts of others, where no run has gathered weights, by torch."""
    if layout_of(spec) not in ("coalesced", "mn_major"):
        return reference.requantize(w, axis, spec)
    operand, is_last = spec.empty(w.data, axis, None), axis == w.axis
    squares.launch(w.data, operand if is_last else None, None if is_last else operand, None, w)
    return operand
