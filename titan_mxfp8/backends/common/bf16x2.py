"""Two bf16 numbers in an int32, the first one in its lower half: half the registers, and half the instructions where
NVIDIA computes with both at once. Functions for kernels.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from titan_mxfp8.backends.common.convert import scale_byte, through_elements


@triton.jit
def pack_bf16x2(low, high):
    """fp32 numbers rounded to bf16: 1.0 and -2.0 are 0xC0003F80."""
    if cuda_capability_geq(8, 0):
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = low.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
        return low | (high.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def unpack_bf16x2(packed):
    """Both numbers of each, in fp32."""
    return (packed << 16).to(tl.float32, bitcast=True), (packed & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def tile_blocks():
    """Of each of the 128 blocks of 32 numbers in a tile of 32 rows and 128 columns: its row, and its place in the row.

    The tile's pairs lie as (4, 4, 8, 16): row ``8 i + q``, columns ``32 l + 2 c`` and the next one are at [i, l, q, c].
    Triton gives a thread 16 of a block's 64 bytes, a warp eight blocks, and each of four warps an l. So no maximum of
    32 numbers, along rows or columns, crosses warps.
    """
    block = tl.arange(0, 128)
    return block // 32 * 8 + block % 8, block // 8 % 4


@triton.jit
def _places(start, rows_left, tile_col, packed_cols, stride):
    """Where the tile of rows from ``start`` on and of columns ``128 * tile_col`` on lies in a matrix whose rows have
    ``packed_cols`` pairs and are ``stride`` pairs apart: its offset, its pairs' offsets behind that, and which
    exist."""
    row, block = tile_blocks()
    row, pair = row[:, None], block[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = (row < rows_left) & (pair < packed_cols - tile_col * 64)
    return start.to(tl.int64) * stride + tile_col * 64, row * stride + pair, inside


@triton.jit
def load_bf16x2(x, start, rows_left, tile_col, packed_cols, stride):
    """A tile of pairs of bf16 numbers, (128, 16), zeros where there are none."""
    first, at, inside = _places(start, rows_left, tile_col, packed_cols, stride)
    return tl.load(x.to(tl.pointer_type(tl.int32), bitcast=True) + first + at, mask=inside, other=0)


@triton.jit
def store_bf16x2(data, packed, start, rows_left, tile_col, packed_cols):
    """Stores such a tile, in any shape, in a contiguous matrix."""
    first, at, inside = _places(start, rows_left, tile_col, packed_cols, packed_cols)
    data = data.to(tl.pointer_type(tl.int32), bitcast=True) + first
    tl.store(data + at, tl.reshape(packed, (128, 16)), mask=inside)


@triton.jit
def amax_bf16x2(packed, AXIS: tl.constexpr):
    """The largest first and second magnitudes along an axis, NaN on top, packed."""
    return tl.max(packed & 0x7FFF, AXIS) | tl.max(packed & 0x7FFF0000, AXIS)


@triton.jit
def magnitude_bits_bf16x2(maxima):
    """``convert.magnitude_bits`` of both."""
    return (maxima & 0x7FFF) << 16, maxima & 0x7FFF0000


@triton.constexpr_function
def _ptx(lines: list[str], **constants: int) -> str:
    """Instructions with registers x and y, and constants: pairs of equal bf16 numbers, given by their bits."""
    declared = [f".reg .b32 {', '.join(['x', 'y', *constants])}"]
    declared += [f"mov.b32 {name}, 0x{bits:04X}{bits:04X}" for name, bits in constants.items()]
    return "{ " + "; ".join(declared + lines) + "; }"


@triton.constexpr_function
def _scales_ptx(floor: bool, e5m2: bool) -> str:
    """Scales ($0) and their reciprocals ($1) of pairs of blocks from their largest magnitudes ($2).

    The exponent of the largest element, 2^8 (E5M2: 2^15), is taken from that of the magnitude. Rounded up, the latter
    is one larger where more than 1.75 remains, as 448 is 1.75 * 2^8: then 0x1F carries into it. Scale byte 0 is the
    subnormal 2^-127, 0x0040. Of Inf and NaN the scale is NaN: 0 times them is.
    """
    largest = (15 if e5m2 else 8) << 7
    lines = ["add.u32 x, $2, above", "and.b32 x, x, exponent", "max.bf16x2 x, x, least", "sub.u32 x, x, largest"]
    lines += ["fma.rn.bf16x2 $0, $2, zero, x", "and.b32 x, x, exponent", "sub.u32 $1, one, x"]
    return _ptx(
        lines, above=0 if floor else 0x1F, exponent=0x7F80, least=largest | 0x40, largest=largest, zero=0, one=0x7F00
    )


@triton.constexpr_function
def _round_ptx(floor: bool, e5m2: bool) -> str:
    """Pairs ($1) rounded to elements, given the scales ($2) and their reciprocals ($3).

    Beside 1.5 times 2^4 (E5M2: 2^5) times a number's own power of two, or that of the smallest normal element, bf16 has
    room for whole steps of the elements: the addition rounds, and 1.5 keeps the sum in one binade for either sign. Then
    zeros get their signs back. What is divided by a scale that was rounded up cannot be too large.
    """
    least, factor, most = (0x3880, 0x4240, 0x4760) if e5m2 else (0x3C80, 0x41C0, 0x43E0)
    lines = ["fma.rn.bf16x2 x, $1, $3, zero"]
    lines += ["min.NaN.bf16x2 x, x, most", "neg.bf16x2 x, x"] * 2 if floor else []
    lines += ["and.b32 y, x, exponent", "max.bf16x2 y, y, least", "fma.rn.bf16x2 $0, y, up, x"]
    lines += ["fma.rn.bf16x2 $0, y, down, $0", "and.b32 x, x, sign", "or.b32 $0, $0, x"]
    lines += ["fma.rn.bf16x2 $0, $0, $2, zero"]
    return _ptx(
        lines, zero=0x8000, sign=0x8000, exponent=0x7F80, least=least, up=factor, down=factor | 0x8000, most=most
    )


@triton.jit
def round_bf16x2(packed, maxima, FLOOR: tl.constexpr, E5M2: tl.constexpr):
    """``convert.through_elements`` of both numbers, given ``amax_bf16x2`` of their blocks, which broadcast over
    them."""
    if cuda_capability_geq(8, 0):
        scales, reciprocals = tl.inline_asm_elementwise(
            _scales_ptx(FLOOR, E5M2), "=&r,=&r,r", [maxima], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        return tl.inline_asm_elementwise(
            _round_ptx(FLOOR, E5M2), "=&r,r,r,r", [packed, scales, reciprocals], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low, high = unpack_bf16x2(packed)
        low_max, high_max = magnitude_bits_bf16x2(maxima)
        low = through_elements(low, scale_byte(low_max, FLOOR, E5M2), E5M2)
        high = through_elements(high, scale_byte(high_max, FLOOR, E5M2), E5M2)
        return pack_bf16x2(low, high)
