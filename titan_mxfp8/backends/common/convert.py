"""Numbers to MXFP8 bytes and back, bit for bit as ``format/reference.py`` defines them. Functions for kernels.

Scales are int32 here, elements uint8, values fp32. fp32 arithmetic keeps subnormals: Triton emits no ``.ftz``.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


@triton.jit
def magnitude_bits(x):
    """Bits of ``|x|``: integers in the order of the magnitudes, NaN on top, which ``tl.max`` of floats would drop."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_byte(amax_bits, FLOOR: tl.constexpr, E5M2: tl.constexpr):
    """E8M0 byte of blocks from the bits of their largest magnitude: 448, 0x43E00000, gives 127 (E4M3)."""
    if FLOOR:
        bits = tl.minimum(amax_bits, 0x7F800000)  # NaN is Inf now
        return tl.where(bits == 0x7F800000, 255, tl.maximum((bits >> 23) - (15 if E5M2 else 8), 0))
    else:
        quotient = amax_bits.to(tl.float32, bitcast=True) * (1 / 57344 if E5M2 else 1 / 448)
        bits = tl.minimum(quotient.to(tl.int32, bitcast=True), 0x7F800000)  # NaN, which has no sign here, is Inf now
        # Any mantissa bit carries into the exponent. A subnormal has no implicit one: up to half of 2^-126 it is at
        # most 2^-127, which is scale byte 0.
        return (bits + tl.where(bits < 0x800000, 0x3FFFFF, 0x7FFFFF)) >> 23


@triton.jit
def scale_value(scale):
    """``2^(s - 127)``: 0 gives the subnormal 2^-127, 255 NaN."""
    bits = tl.where(scale == 0, 0x00400000, scale << 23)
    return tl.where(scale == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal_scale(scale):
    """``2^(127 - s)``, NaN for 255. 254, of which it would be subnormal, does not occur: the largest is 247."""
    return tl.where(scale == 255, 0x7FC00000, (254 - scale) << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_elements(value, scale, E5M2: tl.constexpr):
    """Elements of values already divided by their scales, bytes which broadcast over them: 3.0 is 0x44."""
    if cuda_capability_geq(9, 0):
        # One instruction for two elements: to nearest even, saturating, NaN becomes 0x7F. Triton has no E4M3 conversion
        # before SM89, and on SM89 it rounds E5M2 twice, through fp16.
        if E5M2:
            return value.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        DROPPED: tl.constexpr = 21 if E5M2 else 20  # mantissa bits
        LEAST: tl.constexpr = 113 if E5M2 else 121  # fp32 exponent of the smallest normal element
        bits = value.to(tl.int32, bitcast=True)
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x47600000 if E5M2 else 0x43E00000)  # saturates
        to_even = ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)
        normal = (magnitude + to_even - ((LEAST - 1) << 23)) >> DROPPED
        # Beside a number that large, fp32 has room for whole steps of the subnormal elements: the addition rounds.
        LARGE: tl.constexpr = (LEAST + DROPPED) << 23
        sum_bits = (magnitude.to(tl.float32, bitcast=True) + float_of_bits(LARGE)).to(tl.int32, bitcast=True)
        element = tl.where(magnitude < LEAST << 23, sum_bits - LARGE, normal) | ((bits >> 24) & 0x80)
        return tl.where(scale == 255, 0x7F, element).to(tl.uint8)


@triton.jit
def from_elements(byte, E5M2: tl.constexpr):
    """fp32 of elements, exactly: 0x44 is 3.0."""
    if cuda_capability_geq(9, 0):
        return byte.to(tl.float8e5 if E5M2 else tl.float8e4nv, bitcast=True).to(tl.float32)
    elif E5M2:  # the upper half of an fp16
        return (byte.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        # Exponent and mantissa where fp32 has them are 2^-120 of the value: 0x38 << 20 is 2^-120, and 0x38 is 1.
        wide = byte.to(tl.int32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def through_elements(x, scale, E5M2: tl.constexpr):
    """``x`` rounded to the elements of blocks of scale byte ``scale``, which broadcasts over ``x``."""
    return from_elements(to_elements(x * reciprocal_scale(scale), scale, E5M2), E5M2) * scale_value(scale)


@triton.jit
def shift_elements(byte, scale, largest, E5M2: tl.constexpr):
    """Elements re-expressed with ``largest`` instead of ``scale`` (``format.reference.rebase``), which broadcast.

    0x39 (1.125) with scales 120 and 124 becomes 0x19 (0.0703125).
    """
    factor = (tl.maximum(scale - largest, -64) + 127) << 23  # 2^-64 takes every element to 0
    factor = tl.where(largest == 255, 0x7FC00000, factor).to(tl.float32, bitcast=True)
    if E5M2 or not cuda_capability_geq(9, 0):
        return to_elements(from_elements(byte, E5M2) * factor, largest, E5M2)
    else:
        # In fp16 one instruction takes two elements. It holds their products down to 2^-24, and what is below 2^-10
        # becomes 0 in any case.
        shifted = byte.to(tl.float8e4nv, bitcast=True).to(tl.float16) * factor.to(tl.float16)
        return shifted.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def halving_bits(byte, E5M2: tl.constexpr):
    """int32 whose trailing zeros say how often elements can be halved exactly: 15 to 17 are 15 or more, 18 and more
    are zeros. The bitwise or of several has those of the one with the fewest. Those of NaN mean nothing."""
    # The last bit of each sum is the smallest element.
    if E5M2:
        # 2 has 17 zeros; larger ones, which have more, would pass for zero.
        value = tl.minimum(tl.maximum(from_elements(byte, True), -2.0), 2.0) + 192.0
    else:
        value = from_elements(byte, False) + 24576.0
    return value.to(tl.int32, bitcast=True)


@triton.jit
def coalesce_scales(byte, halvings, ROWS: tl.constexpr):
    """``format.reference.coalesce_scales``: the new scales of (ROWS, 4) blocks, neighbours in a row, from the old ones
    and the bitwise or of each block's ``halving_bits``."""
    zeros = ((halvings & -halvings).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    room = tl.where(zeros >= 18, 255, tl.minimum(zeros, 15))
    scale = byte
    for BLOCKS in tl.static_range(2, 5, 2):
        old = tl.reshape(byte, (ROWS, 4 // BLOCKS, BLOCKS))
        largest = tl.max(old, 2)[:, :, None]
        fits = (largest - old <= tl.reshape(room, (ROWS, 4 // BLOCKS, BLOCKS))) & (largest < 255)
        fit = tl.min(fits.to(tl.int32), 2)[:, :, None] > 0
        scale = tl.reshape(tl.where(fit, largest, tl.reshape(scale, (ROWS, 4 // BLOCKS, BLOCKS))), (ROWS, 4))
    return scale


@triton.jit
def float_of_bits(BITS: tl.constexpr):
    return tl.full((), BITS, tl.int32).to(tl.float32, bitcast=True)
