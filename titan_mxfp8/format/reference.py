"""The definition of MXFP8 in plain torch: every backend must give these bits.

Vectorised, any device, any shape. Operands are handled as they lie in memory (``spec.Operand``): (..., R, C), the
quantised axis C last.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_mxfp8.format.mx import BLOCK_SIZE, SCALE_BIAS, SCALE_NAN, ceil_to, ragged_rows, scale_elements, to_blocks
from titan_mxfp8.format.spec import Operand, OperandSpec
from titan_mxfp8.format.swizzle import swizzle

# Per element type: exponent of the largest power of two, and 1 / max as the fp32 that the definition multiplies by.
_POW2_MAX = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
_INV_MAX_BITS = {torch.float8_e4m3fn: 0x3B124925, torch.float8_e5m2: 0x37924925}
_NAN_BYTE = 0x7F  # one NaN code for both element types, so that bits can be compared
_SHARED = 128 // BLOCK_SIZE  # blocks that may get one scale


def quantize(x: Tensor, axis: int, spec: OperandSpec, offs: Tensor | None = None) -> Operand:
    """Quantises ``x`` along ``axis``.

    Args:
        x: bf16 or fp32, any shape.
        axis: non-negative. With 32x32 blocks, one of the last two axes.
        spec: what to make.
        offs: int32 (E,) end offsets of groups along ``axis``, or None. Each group then starts a new block: it moves to
            the next multiple of ``spec.block_k`` of an axis of ``ragged_rows`` elements, the gaps are zeros with scale
            byte 0, and elements at and past ``offs[-1]`` are dropped. ``offs=[2, 2, 40]``, length 41, block_k 32:
            elements 0..1 stay, 2..39 go to 32..69, and the axis grows to 128. Values in bf16 stay where they are.
            Of a spec that ``grouped_scales`` and the last axis: of groups of rows, which stay where they are.
    """
    if not spec.is_quantized:
        return Operand(x.bfloat16().contiguous(), None, spec, axis)
    if spec.scales == "swizzled":
        by_rows = axis == x.ndim - 1
        return swizzle(quantize(x, axis, spec.exact, None if by_rows else offs), spec, offs)
    x_along = x.movedim(axis, -1)
    if offs is not None:
        x_along = gather_groups(x_along, x.ndim - 1, offs, spec.block_k)
    elif axis != x.ndim - 1:  # stored transposed, in whole blocks: see ``OperandSpec.empty``
        x_along = F.pad(x_along, (0, -x.shape[axis] % BLOCK_SIZE))
    round_to_blocks = _round_to_squares if spec.block == "32x32" else _round_to_blocks
    data, scale = round_to_blocks(x_along.float(), spec)
    operand = Operand(data.contiguous(), scale, spec.exact, axis)
    if spec.stored == "coalesced":
        return coalesce_scales(operand)
    if spec.stored == "bf16":
        values = operand.dequantize()
        if offs is not None:
            values = scatter_groups(values, x.ndim - 1, offs, spec.block_k, x.shape[axis])
        values = values.narrow(-1, 0, x.shape[axis]).movedim(-1, axis)
        return Operand(values.to(torch.bfloat16).contiguous(), None, spec, axis)
    return operand if spec.block_k == BLOCK_SIZE else rebase(operand, spec)


def requantize(
    rows: Operand, axis: int, spec: OperandSpec, offs: Tensor | None = None, places: Tensor | None = None
) -> Operand:
    """``quantize`` of the values of ``rows``, in fp32.

    Along their own axis that changes no value where ``spec`` is exact: scales are rounded up, whatever ``spec`` says,
    as those that ``floor`` makes might cut what is already rounded. Along the other one an element's exponent moves,
    and its value changes where it falls below the smallest normal element beside its new neighbours. NaN rows make the
    blocks NaN that they go through.

    Exact blocks of 32x32 are those of both axes: of them this makes, along either, the bits that ``quantize`` makes of
    the tensor that they were rounded from.

    Args:
        rows: FP8 of (M, C), quantised along axis 1 in blocks of 1x32: exact, coalesced or rebased. Or (E, R, C) in
            exact blocks of 32x32, quantised along axis 2, R and C multiples of 32.
        axis, spec, offs: as of ``quantize``; values in bf16 along axis 1 are those of ``rows``.
        places: integers (M,): row i is that at ``places[i]`` of ``rows``, 1x32 blocks. None: all in order.
    """
    if places is not None:
        rows = rows.rows_at(places)
    if rows.spec.block == "32x32":
        return _requantize_squares(rows, axis, spec)
    assert rows.axis == 1 and rows.data.ndim == 2 and rows.spec.stored != "bf16" and rows.spec.block_mn == 1, rows.spec
    values = dequantize(rows)
    if axis == 0:
        return quantize(values, 0, spec, offs)
    if spec.stored == "bf16":
        return Operand(values.bfloat16(), None, spec, 1)
    return quantize(values, 1, replace(spec, rounding="rceil"))._replace(spec=spec)


def _requantize_squares(squares: Operand, axis: int, spec: OperandSpec) -> Operand:
    assert squares.axis == 2 and squares.spec == spec.exact and axis in (1, 2), (squares.spec, spec)
    if spec.stored == "bf16":
        return Operand(dequantize(squares).bfloat16(), None, spec, axis)
    data, scale = squares.data, squares.scale
    if axis == 1:
        data, scale = data.view(torch.uint8).mT.contiguous().view(data.dtype), scale.mT.contiguous()
    exact = Operand(data, scale, squares.spec, axis)
    if spec.scales == "swizzled":
        return swizzle(exact, spec, None)
    if spec.stored == "coalesced":
        return coalesce_scales(exact)
    return exact if spec.block_k == BLOCK_SIZE else rebase(exact, spec)


def rebase(operand: Operand, spec: OperandSpec) -> Operand:
    """Gives neighbouring blocks one scale, the largest of theirs, so that a GEMM may scale once per 128 elements of the
    axis, as with DeepSeek-V3's 1x128 scales (arXiv 2412.19437, section 3.3.2), and, with ``spec.block_mn`` of 32, by
    one number for 32 columns.

    An element becomes the nearest (ties to even) of ``element * 2^(s - S)``, s the old and S the new scale byte: its
    exponent moves, its value changes only where it falls below the smallest normal element. Blocks of bytes 120 and
    124: the 1.125 (0x39) of the first becomes 0.0703125 (0x19), its 0.013671875 (0x07), 7 of the smallest steps,
    becomes 0, the nearest to 7/16 of one. A NaN block, 255, makes its three neighbours NaN too.

    Args:
        operand: exact, in blocks of 1x32 or 32x32. The last ones may be fewer. Groups must start at multiples of 128.
        spec: of the result: ``block_k`` 128, the same blocks. ``block_mn`` 1: four blocks of 1x32 share a scale; 32:
            four of 32x32, or all 1x32 of 32 x 128 elements.
    """
    scale = operand.scale.to(torch.int16)
    largest = to_blocks(scale, scale.ndim - 1, _SHARED).amax(-1)
    if spec.block_mn > operand.spec.block_mn:
        largest = to_blocks(largest, largest.ndim - 2).amax(-2)
    shared = largest.repeat_interleave(_SHARED, dim=-1)
    if spec.block_mn > operand.spec.block_mn:
        shared = shared.repeat_interleave(spec.block_mn, dim=-2)
    shared = shared[tuple(slice(size) for size in scale.shape)]
    # the steps as scale bytes of their own: with 2^-126 every element, below 2^16, goes to 0
    steps = (scale - shared + SCALE_BIAS).clamp_(min=1).masked_fill_(shared == SCALE_NAN, SCALE_NAN).to(torch.uint8)
    exact = dequantize(operand._replace(scale=steps))
    elements = exact.to(operand.data.dtype)
    data = elements.view(torch.uint8).masked_fill_(exact.isnan(), _NAN_BYTE).view(operand.data.dtype)
    stored = scale.new_zeros(spec.scale_shape(data.shape), dtype=torch.uint8)
    stored.narrow(-1, 0, largest.shape[-2]).copy_(largest.mT)
    return Operand(data, stored, spec, operand.axis)


def coalesce_scales(operand: Operand) -> Operand:
    """Gives neighbouring blocks one scale where that changes no value: the same numbers, in the same blocks.

    Four neighbouring blocks along the axis get the largest of their scales if all of their elements can be expressed
    exactly with it, at most 15 steps from their own; zeros always can, but not with that of NaN, 255. Else the first
    two of them and the last two do, each pair for itself, if its elements can. Else they stay as they are. So a GEMM
    may scale once per 64 or 128 elements where it finds equal scales, and is exact. Blocks of bytes 120 and 124:
    elements of the first are divided by 16. If the smallest of them is 0x10 (2^-5), it becomes 0x01 (2^-9) and both
    blocks get 124; if it is 0x11 (1.125 * 2^-5), they stay. ``operand``: exact, in blocks of 1x32 or 32x32."""
    spec, squares = operand.spec, operand.spec.block == "32x32"
    elem_dtype = operand.data.dtype
    *_, rows, length = operand.data.shape
    old = operand.scale.to(torch.int16)
    count = old.shape[-1]
    # Zeros at the end fit any scale.
    data = F.pad(operand.data.view(torch.uint8), (0, -length % 128, 0, -rows % BLOCK_SIZE if squares else 0))
    data = to_blocks(data, data.ndim - 1)
    old = F.pad(old, (0, -count % _SHARED))
    room = _exact_halvings(data.view(elem_dtype)).amin(-1)
    if squares:
        room = to_blocks(room, room.ndim - 2).amin(-2)
    new = old
    for blocks in (2, _SHARED):
        scales, rooms, new = (t.unflatten(-1, (-1, blocks)) for t in (old, room, new))
        largest = scales.amax(-1, keepdim=True)
        fit = ((largest - scales <= rooms) & (largest < SCALE_NAN)).all(-1, keepdim=True)
        new = torch.where(fit, largest, new).flatten(-2)
    steps = (new - old).repeat_interleave(BLOCK_SIZE, dim=-2) if squares else new - old
    elements = data.view(elem_dtype).float() * torch.exp2(-steps.float()).unsqueeze(-1)
    elements = elements.to(elem_dtype).view(torch.uint8)
    data = torch.where(steps.unsqueeze(-1) > 0, elements, data).flatten(-2)[..., :rows, :length].contiguous()
    scale = new[..., :count].to(torch.uint8).contiguous()
    return Operand(data.view(elem_dtype), scale, replace(spec, stored="coalesced"), operand.axis)


def dequantize(operand: Operand) -> Tensor:
    """``operand.dequantize()``, several times faster on a CPU: torch converts E4M3 there without vector code.

    Shifted into place, an E4M3 code is the fp16 of 2^-8 times its value, subnormals included: 0x38 (1.0) gives 0x1C00.
    But for the NaN codes, 0x7F and 0xFF, which give 480 in the end.
    """
    data = operand.data
    if data.dtype != torch.float8_e4m3fn or data.device.type != "cpu" or data.numel() == 0:
        return operand.dequantize()
    codes = data.view(torch.int8).to(torch.int16)  # the sign goes to bits 7 to 15
    halves = codes.bitwise_left_shift_(7).bitwise_and_(-0x4080).view(torch.float16)  # clears bit 14, of the sign too
    elements = halves.float().mul_(2.0**8)
    low, high = elements.aminmax()
    if low < -448 or high > 448:
        elements.masked_fill_(elements.abs() > 448, torch.nan)
    spec, scale = operand.spec, operand.scale if operand.spec.scales == "k_major" else operand.row_scales()
    return scale_elements(elements, scale, block_k=spec.block_k, block_mn=spec.block_mn)


def changed_elements(before: Operand, after: Operand) -> Tensor:
    """Which elements have another value in ``after`` than in ``before``, NaN aside: bool, as ``before``'s data lies.

    ``after`` may be rows of ``before`` that were requantised along axis 0: padding behind them does not count.
    """
    old, new = dequantize(before), dequantize(after)
    if after.axis != before.axis:
        new = new.mT[: old.shape[0]]
    return (old != new) & ~old.isnan() & ~new.isnan()


def padded_ends(offs: Tensor, alignment: int) -> Tensor:
    """int32 end offsets of the groups once each starts at a multiple of ``alignment``."""
    return ceil_to(offs.diff(prepend=offs.new_zeros(1)), alignment).cumsum(0, dtype=torch.int32)


def gather_groups(x: Tensor, axis: int, offs: Tensor, alignment: int) -> Tensor:
    """Moves each group along ``axis``, non-negative, to the next multiple of ``alignment``, zeros between and behind
    them: an axis of ``ragged_rows`` elements. What is in no group is dropped."""
    shape, end = [*x.shape], ragged_rows(x.shape[axis], offs.shape[0], alignment)
    shape[axis] = end + 1
    places = _padded_places(offs, x.shape[axis], alignment, end)
    return x.new_zeros(shape).index_copy_(axis, places, x).narrow(axis, 0, end)


def scatter_groups(padded: Tensor, axis: int, offs: Tensor, alignment: int, length: int) -> Tensor:
    """The inverse of ``gather_groups`` of an axis of ``length`` elements; zeros at and past ``offs[-1]``."""
    places = _padded_places(offs, length, alignment, padded.shape[axis])
    return F.pad(padded, (0, 0) * (padded.ndim - 1 - axis) + (0, 1)).index_select(axis, places)


def _padded_places(offs: Tensor, length: int, alignment: int, end: int) -> Tensor:
    """Where each of ``length`` elements lies once each group starts at a multiple of ``alignment``, int64 (length,);
    ``end`` for one that is in no group."""
    sizes = offs.diff(prepend=offs.new_zeros(1))
    padded_sizes = ceil_to(sizes, alignment)
    moved = padded_sizes.cumsum(0) - padded_sizes - (offs - sizes)
    element = torch.arange(length, device=offs.device)
    group = torch.searchsorted(offs, element, right=True).clamp(max=offs.shape[0] - 1)
    return torch.where(element < offs[-1], element + moved[group], end)


def _round_to_blocks(x: Tensor, spec: OperandSpec) -> tuple[Tensor, Tensor]:
    """Elements and scales of fp32 ``x`` in blocks of 32 along the last axis."""
    length = x.shape[-1]
    padded = F.pad(x, (0, -length % BLOCK_SIZE)) if length % BLOCK_SIZE else x
    blocks = padded.unflatten(-1, (-1, BLOCK_SIZE))
    if x.stride(-1) == 1:
        amax = torch.maximum(blocks.amax(-1, keepdim=True), -blocks.amin(-1, keepdim=True))  # stores no magnitudes
    else:  # a reduction over an axis with strides takes ten times as long on a CPU
        amax = blocks.abs()
        while amax.shape[-1] > 1:
            amax = torch.maximum(*amax.chunk(2, -1))
        amax = amax.contiguous()
    data, scale = _round(blocks, amax, spec)
    return data.flatten(-2).narrow(-1, 0, length), scale.squeeze(-1)


def _round_to_squares(x: Tensor, spec: OperandSpec) -> tuple[Tensor, Tensor]:
    """Elements and scales of fp32 ``x`` in 32x32 blocks."""
    rows, cols = x.shape[-2:]
    padded = F.pad(x, (0, -cols % BLOCK_SIZE, 0, -rows % BLOCK_SIZE))
    squares = padded.unflatten(-1, (-1, BLOCK_SIZE)).unflatten(-3, (-1, BLOCK_SIZE))  # (..., R/32, 32, C/32, 32)
    data, scale = _round(squares, squares.abs().amax((-3, -1), keepdim=True), spec)
    return data.flatten(-4, -3).flatten(-2)[..., :rows, :cols], scale.squeeze(-1).squeeze(-2)


def _round(x: Tensor, amax: Tensor, spec: OperandSpec) -> tuple[Tensor, Tensor]:
    """Elements and E8M0 bytes of fp32 blocks: ``x`` divided by its scale, rounded to nearest even, saturated to the
    largest finite element. A scale of NaN makes the whole block NaN.

    ``floor`` is OCP's rule (OCP MX v1.0, section 6.3): the largest power of two in the block, divided by that of the
    element type. ``rceil`` is the one of NVIDIA's "Recipes for Pre-training LLMs with MXFP8" (arXiv 2506.08027):
    ``amax`` divided by the largest element, rounded up to a power of two, so that nothing saturates.

    Args:
        x: in blocks.
        amax: the maximum of each block's magnitudes, NaN if the block holds one; of a shape that broadcasts to ``x``.
        spec: ``rounding`` and ``elem_dtype`` count.
    """
    if spec.rounding == "floor":
        exponent = (amax.view(torch.int32) >> 23) & 0xFF
        scale = (exponent - _POW2_MAX[spec.elem_dtype]).clamp(min=0)
    else:
        inv_max = torch.tensor(_INV_MAX_BITS[spec.elem_dtype], dtype=torch.int32, device=x.device).view(torch.float32)
        bits = (amax * inv_max).view(torch.int32)
        exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
        # A subnormal has no implicit one: up to half of 2^-126 it is at most 2^-127, which is scale byte 0.
        scale = exponent + (mantissa > (exponent == 0).to(torch.int32) * 0x400000)
    poisoned = exponent == 0xFF
    # 1 / 2^(s - 127) is 2^((254 - s) - 127): an exponent of 0 is the subnormal 2^-127
    reciprocal = ((254 - scale) << 23).clamp_(min=0x00400000).masked_fill_(poisoned, 0x7FC00000).view(torch.float32)
    limit = torch.finfo(spec.elem_dtype).max
    data = (x * reciprocal).clamp_(-limit, limit).to(spec.elem_dtype).view(torch.uint8)
    if poisoned.any():  # the pass over all elements is dear, and hardly ever needed
        data, scale = data.masked_fill_(poisoned, _NAN_BYTE), scale.masked_fill_(poisoned, SCALE_NAN)
    return data.view(spec.elem_dtype), scale.to(torch.uint8)


def _exact_halvings(elements: Tensor) -> Tensor:
    """How often FP8 ``elements`` can be halved and stay what they are: 15 is that or more, 0 has 255, and NaN none."""
    info = torch.finfo(elements.dtype)
    units = elements.float().abs() / (info.smallest_normal * info.eps)  # multiples of the smallest element
    units = units.nan_to_num(1.0).clamp(max=2**18).to(torch.int32)  # above, 2^15 divides all
    lowest_bit = (units & -units).float()
    return (torch.frexp(lowest_bit).exponent - 1).clamp(max=15).masked_fill(units == 0, 255)
