"""The definition of MXFP8 in plain torch: every backend must give these bits. Also the ``reference`` backend itself.

Vectorised, any device, any shape. A backend provides the public functions below with these signatures.
Shapes: M tokens, N out features, K in features, E experts; C is a contraction axis and D the other one of ``b``.
"""

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F

from titan_mxfp8.format.mx import (
    BLOCK_SIZE,
    REBASED_SIZE,
    SCALE_BIAS,
    SCALE_NAN,
    Block,
    Form,
    MXTensor,
    Rounding,
    ceil_div,
    decode_scale,
    ragged_rows,
    stored_across,
    to_blocks,
)

# Per element type: exponent of the largest power of two, and 1 / max as the fp32 that the definition multiplies by.
_POW2_MAX = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
_INV_MAX_BITS = {torch.float8_e4m3fn: 0x3B124925, torch.float8_e5m2: 0x37924925}
_NAN_BYTE = 0x7F  # one NaN code for both element types, so that bits can be compared


def quantize(
    x: torch.Tensor,
    axis: int,
    *,
    rounding: Rounding,
    elem_dtype: torch.dtype,
    block: Block,
    offs: torch.Tensor | None,
) -> MXTensor:
    """Quantises ``x`` along ``axis``.

    Args:
        x: bf16 or fp32, any shape.
        axis: non-negative. With ``block="32x32"`` one of the last two axes: it decides the storage order only.
        rounding: of the scale, ``rceil`` or ``floor``.
        elem_dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        block: ``1x32`` or ``32x32``.
        offs: int32 (E,) end offsets of groups along ``axis``, or None. Each group then starts a new block: it moves to
            the next multiple of 32 of an axis of ``ragged_rows`` elements, the gaps are zeros with scale byte 0, and
            elements at and past ``offs[-1]`` are dropped. ``offs=[2, 2, 40]``, length 41: elements 0..1 stay, 2..39 go
            to 32..69, and the axis grows to 128.
    """
    if block == "32x32":
        return _quantize_squares(x, axis, rounding, elem_dtype)
    if offs is not None:
        x = _gather_groups(x, axis, offs)
    blocks = to_blocks(x.float(), axis)
    amax = torch.maximum(blocks.amax(axis + 1), -blocks.amin(axis + 1))  # of the magnitudes, without storing those
    scale = _scale_bytes(amax, elem_dtype, rounding)
    qdata = _cast(blocks, scale.unsqueeze(axis + 1), elem_dtype).flatten(axis, axis + 1).narrow(axis, 0, x.shape[axis])
    return MXTensor(_stored_along(qdata, axis), _stored_along(scale, axis), axis, block, x.dtype)


def quantize_both(
    x: torch.Tensor,
    *,
    rounding: Rounding,
    elem_dtype: torch.dtype,
    block: Block,
    offs: torch.Tensor | None,
) -> tuple[MXTensor, MXTensor]:
    """Quantises ``x`` along its last axis and along the one before it, both from ``x``; ``offs`` cuts the latter."""
    kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "block": block}
    return quantize(x, x.ndim - 1, offs=None, **kwargs), quantize(x, x.ndim - 2, offs=offs, **kwargs)


def rebase(mx: MXTensor, block: Literal["1x128", "32x128"], changed: torch.Tensor | None = None) -> MXTensor:
    """Gives neighbouring blocks one scale, the largest of theirs, so that a GEMM may scale once per 128 elements of
    ``mx.axis`` and, with ``32x128``, by one number for 32 columns.

    An element becomes the nearest (ties to even) of ``element * 2^(s - S)``, s the old and S the new scale byte: its
    exponent moves, its value changes only where it falls below the smallest normal element. Blocks of bytes 120 and
    124: the 1.125 (0x39) of the first becomes 0.0703125 (0x19), its 0.013671875 (0x07), 7 of the smallest steps,
    becomes 0, the nearest to 7/16 of one. A NaN block, 255, makes its three neighbours NaN too.

    Args:
        mx: 2-D or 3-D, in blocks of 32. The last ones may be fewer. Groups must start at multiples of 128.
        block: those that share a scale. ``1x128``: four of ``1x32``. ``32x128``: four of ``32x32``, or all ``1x32`` of
            32 x 128 elements.
        changed: int64 scalar, to which the number of elements is added whose value changed, not counting those that
            became NaN; or None.
    """
    axis, scale = mx.axis, mx.scale.to(torch.int16)
    largest = to_blocks(scale, axis, REBASED_SIZE // BLOCK_SIZE).amax(axis + 1)
    shared = largest.repeat_interleave(REBASED_SIZE // BLOCK_SIZE, dim=axis)
    if block == "32x128" and mx.block == "1x32":
        other = mx.other_axis
        largest = to_blocks(largest, other).amax(other + 1)
        shared = to_blocks(shared, other).amax(other + 1).repeat_interleave(BLOCK_SIZE, dim=other)
    shared = shared[tuple(slice(size) for size in scale.shape)]
    # the steps as scale bytes of their own: with 2^-126 every element, below 2^16, goes to 0
    steps = (scale - shared + SCALE_BIAS).clamp_(min=1).masked_fill_(shared == SCALE_NAN, SCALE_NAN).to(torch.uint8)
    exact = _dequantize(replace(mx, scale=steps))
    elements = exact.to(mx.qdata.dtype)
    if changed is not None:
        changed += ((elements.float() != exact) & ~exact.isnan()).sum()
    qdata = elements.view(torch.uint8).masked_fill_(exact.isnan(), _NAN_BYTE).view(mx.qdata.dtype)
    scale = _store_across(largest.to(torch.uint8), axis)
    return replace(mx, qdata=_stored_along(qdata, axis), scale=scale, block=block)


def even_out(mx: MXTensor) -> MXTensor:
    """Gives neighbouring blocks one scale where that changes no value: the same numbers, in the same blocks.

    Four neighbouring blocks along ``mx.axis`` get the largest of their scales if all of their elements can be expressed
    exactly with it, at most 15 steps from their own; zeros always can, but not with that of NaN, 255. Else the first
    two of them and the last two do, each pair for itself, if its elements can. Else they stay as they are. So a GEMM
    may scale once per 64 or 128 elements where it finds equal scales, and is exact. Blocks of bytes 120 and 124:
    elements of the first are divided by 16. If the smallest of them is 0x10 (2^-5), it becomes 0x01 (2^-9) and both
    blocks get 124; if it is 0x11 (1.125 * 2^-5), they stay.

    Args:
        mx: in blocks of 1x32 or 32x32.

    Returns:
        In the same blocks.
    """
    squares, shared = mx.block == "32x32", REBASED_SIZE // BLOCK_SIZE
    qdata = mx.qdata.view(torch.uint8).movedim(mx.axis, -1)
    *_, rows, length = qdata.shape
    old = mx.scale.to(torch.int16).movedim(mx.axis, -1)
    count = old.shape[-1]
    # Zeros at the end fit any scale.
    qdata = F.pad(qdata, (0, -length % REBASED_SIZE, 0, -rows % BLOCK_SIZE if squares else 0))
    qdata = to_blocks(qdata, qdata.ndim - 1)
    old = F.pad(old, (0, -count % shared))
    room = _exact_halvings(qdata.view(mx.qdata.dtype)).amin(-1)
    if squares:
        room = to_blocks(room, room.ndim - 2).amin(-2)
    new = old
    for blocks in (2, shared):
        scales, rooms, new = (t.unflatten(-1, (-1, blocks)) for t in (old, room, new))
        largest = scales.amax(-1, keepdim=True)
        fit = ((largest - scales <= rooms) & (largest < SCALE_NAN)).all(-1, keepdim=True)
        new = torch.where(fit, largest, new).flatten(-2)
    steps = (new - old).repeat_interleave(BLOCK_SIZE, dim=-2) if squares else new - old
    elements = qdata.view(mx.qdata.dtype).float() * torch.exp2(-steps.float()).unsqueeze(-1)
    elements = elements.to(mx.qdata.dtype).view(torch.uint8)
    qdata = torch.where(steps.unsqueeze(-1) > 0, elements, qdata).flatten(-2)[..., :rows, :length]
    qdata, scale = (t.movedim(-1, mx.axis) for t in (qdata, new[..., :count].to(torch.uint8)))
    return replace(mx, qdata=_stored_along(qdata, mx.axis).view(mx.qdata.dtype), scale=_stored_along(scale, mx.axis))


def operand_forms(
    gemm: Literal["m_grouped", "k_grouped"], weight_block: Block, rebased: bool, device: torch.device
) -> tuple[Form, Form]:
    """In what form a GEMM takes ``a`` and ``b``.

    Args:
        gemm: which of the two below.
        weight_block: of the recipe.
        rebased: whether the user asks for ``rebase``; never of a backend that cannot (``backends.select``).
        device: of the operands.
    """
    if not rebased:
        return "mx", "mx"
    return "1x128", ("32x128" if gemm == "m_grouped" else "1x128")


def quantize_operand(
    x: torch.Tensor,
    axis: int,
    *,
    rounding: Rounding,
    elem_dtype: torch.dtype,
    block: Block,
    offs: torch.Tensor | None,
    form: Form,
    changed: torch.Tensor | None = None,
) -> MXTensor:
    """``quantize`` to what a GEMM is given.

    Args:
        form: what ``operand_forms`` says. Rebased: with ``offs``, groups move to multiples of 128 instead of 32.
            ``even`` takes no ``offs``.
        changed: see ``rebase``.
    """
    kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "block": block}
    if form == "mx":
        return quantize(x, axis, offs=offs, **kwargs)
    if form == "even":
        assert offs is None
        return even_out(quantize(x, axis, offs=None, **kwargs))
    assert form != "bf16" and (form, block) != ("1x128", "32x32"), form
    if offs is not None:
        x = _gather_groups(x, axis, offs, REBASED_SIZE)
    return rebase(quantize(x, axis, offs=None, **kwargs), form, changed)


def quantize_operand_both(
    x: torch.Tensor,
    *,
    rounding: Rounding,
    elem_dtype: torch.dtype,
    block: Block,
    offs: torch.Tensor | None,
    forms: tuple[Form, Form],
    changed: torch.Tensor | None = None,
) -> tuple[MXTensor, MXTensor]:
    """``quantize_both`` to what GEMMs are given: in ``forms[0]`` along the last axis, in ``forms[1]`` the other."""
    kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "block": block, "changed": changed}
    last = quantize_operand(x, x.ndim - 1, offs=None, form=forms[0], **kwargs)
    return last, quantize_operand(x, x.ndim - 2, offs=offs, form=forms[1], **kwargs)


def gemm_m_grouped(
    a: MXTensor,
    b: MXTensor,
    offs: torch.Tensor | None,
    *,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Rows of group e times matrix e: the forward and dgrad GEMM.

    Args:
        a: (M, C) quantised along C.
        b: (E, C, D) quantised along C.
        offs: int32 (E,) end offsets of the groups among the M rows; None: E is 1 and every row is in the group.
        bias: (E, D), added to the rows of each group, or None.
        out_dtype: bf16 or fp32.

    Returns:
        (M, D), zeros in the rows at and past ``offs[-1]``.
    """
    a_MC, b_ECD = _dequantize(a), _dequantize(b)
    if offs is None:
        y_MD = a_MC @ b_ECD[0]
        return (y_MD if bias is None else y_MD + bias.float()).to(out_dtype)
    y_MD = torch._grouped_mm(a_MC, b_ECD, offs=offs)
    row_M = torch.arange(a_MC.shape[0], device=offs.device)
    if bias is not None:
        expert_M = torch.searchsorted(offs, row_M, right=True).clamp(max=offs.numel() - 1)
        y_MD = y_MD + bias.float()[expert_M]
    return y_MD.to(out_dtype).masked_fill_((row_M >= offs[-1])[:, None], 0)


def gemm_k_grouped(a: MXTensor, b: MXTensor, offs: torch.Tensor | None, *, out_dtype: torch.dtype) -> torch.Tensor:
    """``a`` times ``b`` over the tokens of each group: the wgrad GEMM.

    Args:
        a: (N, M) quantised along M with ``offs``, so that M is the padded axis.
        b: (M, K) quantised along M with ``offs``.
        offs: the offsets that both were quantised with; None: one group.
        out_dtype: bf16 or fp32.

    Returns:
        (E, N, K), exactly 0 for an empty group.
    """
    a_NM, b_MK = _dequantize(a), _dequantize(b)
    if offs is None:
        return (a_NM @ b_MK).unsqueeze(0).to(out_dtype)
    if a_NM.shape[1] == 0:  # torch._grouped_mm refuses the strides of an empty matrix
        return a_NM.new_zeros((offs.shape[0], a_NM.shape[0], b_MK.shape[1]), dtype=out_dtype)
    ends_E = _padded_sizes(offs, a.block_length).cumsum(0, dtype=torch.int32)
    return torch._grouped_mm(a_NM, b_MK, offs=ends_E).to(out_dtype)


def wgrad_bf16(dy_MN: torch.Tensor, x_MK: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """The weight gradient from unquantised operands, for recipes whose wgrad is bf16: (E, N, K), 0 for an empty group.

    Args:
        dy_MN: bf16, like ``x_MK``.
        x_MK: rows of the same groups.
        offs: int32 (E,) end offsets of the groups among the M rows; None: one group.
    """
    if offs is None:
        return (dy_MN.mT @ x_MK).unsqueeze(0)
    if dy_MN.shape[0] == 0:  # torch._grouped_mm refuses the strides of an empty matrix
        return dy_MN.new_zeros((offs.shape[0], dy_MN.shape[1], x_MK.shape[1]))
    dw_ENK = torch._grouped_mm(dy_MN.mT, x_MK, offs=offs)
    empty_E = offs.diff(prepend=offs.new_zeros(1)) == 0  # torch may leave these uninitialised
    return dw_ENK.masked_fill_(empty_E[:, None, None], 0)


def _scale_bytes(amax: torch.Tensor, elem_dtype: torch.dtype, rounding: Rounding) -> torch.Tensor:
    """E8M0 byte of a block from the fp32 maximum of its magnitudes (NaN if the block holds one)."""
    if rounding == "floor":
        exponent = (amax.view(torch.int32) >> 23) & 0xFF
        scale = (exponent - _POW2_MAX[elem_dtype]).clamp(min=0)
    else:
        inv_max = torch.tensor(_INV_MAX_BITS[elem_dtype], dtype=torch.int32, device=amax.device).view(torch.float32)
        bits = (amax * inv_max).view(torch.int32)
        exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
        # A subnormal has no implicit one: up to half of 2^-126 it is at most 2^-127, which is scale byte 0.
        scale = exponent + (mantissa > (exponent == 0).to(torch.int32) * 0x400000)
    return scale.masked_fill_(exponent == 0xFF, SCALE_NAN).to(torch.uint8)


def _cast(x: torch.Tensor, scale: torch.Tensor, elem_dtype: torch.dtype) -> torch.Tensor:
    """fp32 ``x`` divided by its scale, rounded to nearest even, saturated to the largest finite element."""
    reciprocal = decode_scale(254 - scale)  # 1 / 2^(s - 127) is 2^((254 - s) - 127); 254 - 255 wraps to 255, NaN
    limit = torch.finfo(elem_dtype).max
    qdata = (x * reciprocal).clamp_(-limit, limit).to(elem_dtype).view(torch.uint8)
    poisoned = scale == SCALE_NAN
    if poisoned.any():  # the pass over all elements is dear, and hardly ever needed
        qdata = qdata.masked_fill_(poisoned, _NAN_BYTE)
    return qdata.view(elem_dtype)


def _quantize_squares(x: torch.Tensor, axis: int, rounding: Rounding, elem_dtype: torch.dtype) -> MXTensor:
    rows, cols = x.shape[-2:]
    padded = F.pad(x.float(), (0, -cols % BLOCK_SIZE, 0, -rows % BLOCK_SIZE))
    squares = padded.unflatten(-1, (-1, BLOCK_SIZE)).unflatten(-3, (-1, BLOCK_SIZE))  # (..., R/32, 32, C/32, 32)
    scale = _scale_bytes(squares.abs().amax((-3, -1)), elem_dtype, rounding)
    qdata = _cast(squares, scale[..., :, None, :, None], elem_dtype).flatten(-4, -3).flatten(-2)[..., :rows, :cols]
    return MXTensor(_stored_along(qdata, axis), _stored_along(scale, axis), axis, "32x32", x.dtype)


def _exact_halvings(elements: torch.Tensor) -> torch.Tensor:
    """How often FP8 ``elements`` can be halved and stay what they are: 15 is that or more, 0 has 255, and NaN none."""
    info = torch.finfo(elements.dtype)
    units = elements.float().abs() / (info.smallest_normal * info.eps)  # multiples of the smallest element
    units = units.nan_to_num(1.0).clamp(max=2**18).to(torch.int32)  # above, 2^15 divides all
    lowest_bit = (units & -units).float()
    return (torch.frexp(lowest_bit).exponent - 1).clamp(max=15).masked_fill(units == 0, 255)


def _dequantize(mx: MXTensor) -> torch.Tensor:
    """``mx.dequantize(torch.float32)``, several times faster on a CPU: torch converts E4M3 there without vector code.

    Shifted into place, an E4M3 code is the fp16 of 2^-8 times its value, subnormals included: 0x38 (1.0) gives 0x1C00.
    But for the NaN codes, 0x7F and 0xFF, which give 480 in the end.
    """
    if mx.qdata.dtype != torch.float8_e4m3fn or mx.qdata.device.type != "cpu" or mx.qdata.numel() == 0:
        return mx.dequantize(torch.float32)
    codes = mx.qdata.view(torch.int8).to(torch.int16)  # the sign goes to bits 7 to 15
    halves = (
        codes.bitwise_left_shift_(7).bitwise_and_(-0x4080).view(torch.float16)
    )  # bit 14, of the sign too, is cleared
    elements = halves.float().mul_(2.0**8)
    low, high = elements.aminmax()
    if low < -448 or high > 448:
        elements.masked_fill_(elements.abs() > 448, torch.nan)
    return mx.scale_elements(elements)


def _stored_along(x: torch.Tensor, axis: int) -> torch.Tensor:
    """The same tensor, its storage contiguous along ``axis``."""
    return x.movedim(axis, -1).contiguous().movedim(-1, axis)


def _store_across(scale: torch.Tensor, axis: int) -> torch.Tensor:
    """The same tensor, its storage that of ``stored_across``."""
    along = scale.movedim(axis, -1)
    stored = scale.new_zeros(stored_across(*along.shape)).narrow(-1, 0, along.shape[-2])
    return stored.copy_(along.mT).mT.movedim(-1, axis)


def _padded_sizes(offs: torch.Tensor, alignment: int) -> torch.Tensor:
    sizes = offs.diff(prepend=offs.new_zeros(1))
    return ceil_div(sizes, alignment) * alignment


def _gather_groups(x: torch.Tensor, axis: int, offs: torch.Tensor, alignment: int = BLOCK_SIZE) -> torch.Tensor:
    """Moves each group along ``axis`` to the next multiple of ``alignment``, zeros between: see ``quantize``."""
    length, groups = x.shape[axis], offs.numel()
    padded_length = ragged_rows(length, groups, alignment)
    if length == 0:
        return x.new_zeros([padded_length if i == axis else size for i, size in enumerate(x.shape)])
    padded_sizes = _padded_sizes(offs, alignment)
    padded_ends = padded_sizes.cumsum(0)
    position = torch.arange(padded_length, device=x.device)
    group = torch.searchsorted(padded_ends, position, right=True)
    inside = group < groups
    group = group.clamp(max=groups - 1)
    start = offs - offs.diff(prepend=offs.new_zeros(1))
    source = position - (padded_ends - padded_sizes)[group] + start[group]
    filled = inside & (source < offs[group])
    gathered = x.index_select(axis, torch.where(filled, source, 0))
    return gathered.movedim(axis, -1).masked_fill_(~filled, 0).movedim(-1, axis)
