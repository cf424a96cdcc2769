"""FP8 rows, rebased along the last axis, rebased along the first one instead: what wgrad takes of x and g.

A program takes 128 rows of one group and 128 columns: whole blocks of 128 along either axis. Threads that lie along
rows leave the bytes in shared memory. A thread then has 32 rows of four columns, a block of each, takes the bytes of
neighbouring rows side by side, and computes with two of them at once in fp16.

Why fp16 is exact: with ``top``, the largest scale of the tile's rows, elements times 2^(scale - top + 6) are at most
28672, and 0 or at least 2^-21 where no scale is more than 2^18 smaller: none of their four bits are lost. Divided by
2^15 times its block's scale, an element's smallest step, 2^-9, is fp16's own, 2^-24: the product is rounded as the
element would be. Times 2^15 and the quotient of the scales of a block of 32 and of 128, it is rounded again where it is
converted. Tiles with other rows are computed in fp32.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_mxfp8.backends.common.convert import (
    from_elements,
    magnitude_bits,
    reciprocal_scale,
    scale_byte,
    scale_value,
    shift_elements,
    to_elements,
)
from titan_mxfp8.backends.common.launch import Kernel
from titan_mxfp8.backends.common.tiles import Tile, map_tiles
from titan_mxfp8.backends.hopper.stages import reinterpreted
from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import Operand, OperandSpec

TILE = Tile(rows=128, segments=1)
_SPEC = OperandSpec(block_k=128, scales="mn_major")
# Tiles of columns that are taken for all rows before the next ones: rows that are read several times, once for each
# expert of a token, are then still in the L2. 8 and 16 were slower on an H200, 2 and 4 alike.
PANEL = gl.constexpr(4)

# A thread has 16 bytes of a row, or of a transposed one, and a warp four rows.
_ALONG_ROWS = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
_ROWS = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))  # every warp has all of them
# Words of four bytes: a thread has 8 of one column of words, a warp 32 of 8.
_ALONG_COLUMNS = gl.constexpr(gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1]))
# Row ``4 q + i`` is at 32 i + q, so the words of four neighbouring rows are those of one thread. The swizzle gives
# the four blocks of 8 q other banks.
_STAGED_BYTES = gl.constexpr(gl.SwizzledSharedLayout(32, 8, 4, [1, 0]))
_STAGED_WORDS = gl.constexpr(gl.SwizzledSharedLayout(8, 8, 4, [1, 0]))
# Of column ``4 c + j`` in the j-th of four.
_MADE_WORDS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
_MADE_BYTES = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


def takes(rows: Operand, spec: OperandSpec) -> bool:
    """Whether ``requantize`` makes operands of ``spec`` from these rows."""
    x = rows.data
    return x.is_contiguous() and rows.spec == spec == _SPEC and rows.axis == 1 and x.ndim == 2 and x.shape[1] % 16 == 0


def requantize(rows: Operand, spec: OperandSpec, offs: Tensor | None, places: Tensor | None) -> Operand:
    """``Backend.requantize`` along the first axis, of rows that it ``takes``."""
    x, cols = rows.data, rows.data.shape[1]
    count = x.shape[0] if places is None else places.shape[0]
    out = spec.empty(x[:1].expand(count, -1), 0, None if offs is None else offs.shape[0])
    table, row_blocks = map_tiles(offs, count, TILE, tail=False, alignment=128)
    _requantize_tiles.launch(
        ceil_div(row_blocks, TILE.blocks) * ceil_div(cols, 128 * PANEL.value) * PANEL.value,
        (x, rows.scale, places, out.data, out.scale, table), (cols,),
        (count, x.shape[0], out.data.shape[-1] // BLOCK_SIZE, row_blocks), (), device=x.device, warps=4,
    )  # fmt: skip
    return out


@gluon.jit
def _transpose_bytes(w0, w1, w2, w3):
    """Four words of four bytes each, transposed."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        prmt.b32 a, $4, $5, 0x5140;
        prmt.b32 b, $4, $5, 0x7362;
        prmt.b32 c, $6, $7, 0x5140;
        prmt.b32 d, $6, $7, 0x7362;
        prmt.b32 $0, a, c, 0x5410;
        prmt.b32 $1, a, c, 0x7632;
        prmt.b32 $2, b, d, 0x5410;
        prmt.b32 $3, b, d, 0x7632;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [w0, w1, w2, w3],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _scale_rows(word, factors01, factors23):
    """Elements of four rows times factors of the rows, in pairs of fp16 numbers; and the largest magnitudes of the
    two pairs, with any signs."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $3;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        mul.rn.f16x2 $0, $0, $4;
        mul.rn.f16x2 $1, $1, $5;
        max.NaN.xorsign.abs.f16x2 $2, $0, $1;
        }""",
        "=&r,=&r,=&r,r,r,r",
        [word, factors01, factors23],
        dtype=(gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _join_bytes(b0, b1, b2, b3):
    """Four bytes in a word. Shifted and or-ed, Triton 3.7.1's ptxas reads registers that nothing has written."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 low, high;
        prmt.b32 low, $1, $2, 0x0040;
        prmt.b32 high, $3, $4, 0x0040;
        prmt.b32 $0, low, high, 0x5410;
        }""",
        "=r,r,r,r,r",
        [b0.to(gl.int32), b1.to(gl.int32), b2.to(gl.int32), b3.to(gl.int32)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _largest_pair(a, b):
    """The larger magnitudes of two pairs of fp16 numbers, NaN on top, with any signs."""
    return gl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _round_pairs(pair01, pair23, down, shift):
    """Elements of two pairs of fp16 numbers, rounded once times ``down``, again times ``shift``."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 x;
        mul.rn.f16x2 x, $1, $3;
        mul.rn.f16x2 x, x, $4;
        cvt.rn.satfinite.e4m3x2.f16x2 low, x;
        mul.rn.f16x2 x, $2, $3;
        mul.rn.f16x2 x, x, $4;
        cvt.rn.satfinite.e4m3x2.f16x2 high, x;
        mov.b32 $0, {low, high};
        }""",
        "=&r,r,r,r,r",
        [pair01, pair23, down, shift],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _power_pair(exponent):
    """2^exponent in fp16, twice, to -24."""
    power = ((exponent + 127) << 23).to(gl.float32, bitcast=True).to(gl.float16).to(gl.int16, bitcast=True)
    power = power.to(gl.int32)
    return (power << 16) | (power & 0xFFFF)


@gluon.jit
def _in_blocks(words):
    """Words of rows, (32, 32), cut into blocks: (4, 8, 32)."""
    return words.reshape((4, 8, 32))


@gluon.jit
def _in_words(blocks):
    return gl.convert_layout(blocks.reshape((32, 32)), _ALONG_COLUMNS, assert_trivial=True)


@gluon.jit
def _load_words(staged, PLACE: gl.constexpr):
    """Those of one of each four rows, by its place among them."""
    return staged.slice(32 * PLACE, 32, dim=0).load(_ALONG_COLUMNS)


@gluon.jit
def _in_pairs(of_rows):
    """Numbers of 128 rows: first those of rows 0 and 1 of each four, then those of rows 2 and 3."""
    return of_rows.to(gl.int16).reshape((32, 2, 2)).permute((1, 0, 2)).reshape((128,))


@gluon.jit
def _load_pairs(of_rows):
    """What ``_in_pairs`` made and shared memory holds, for the threads that have those rows."""
    layout: gl.constexpr = gl.SliceLayout(1, _ALONG_COLUMNS)
    pairs = reinterpreted(of_rows, gl.int32, [64], _PLAIN)
    return pairs.slice(0, 32).load(layout), pairs.slice(32, 32).load(layout)


@gluon.jit
def _for_words(of_blocks):
    """Numbers of blocks, (4, 32), for the words in them: (32, 32)."""
    return _in_words(gl.expand_dims(of_blocks, 1).broadcast_to((4, 8, 32)))


@gluon.jit
def _rebase_in_fp16(words, factors, top, made):
    """Leaves the elements in shared memory; returns the scales of four columns in a word.

    ``top`` is the largest scale of the rows, of a range in which no block's is cut off at 0 or 254.
    """
    scales = gl.full((32,), 0, gl.int32, gl.SliceLayout(0, _ALONG_COLUMNS))
    columns = _transpose_bytes(
        _load_words(words, 0), _load_words(words, 1), _load_words(words, 2), _load_words(words, 3)
    )
    for j in gl.static_range(4):
        pair01, pair23, largest = _scale_rows(columns[j], factors[0][:, None], factors[1][:, None])
        largest = gl.reduce(_in_blocks(largest), 1, _largest_pair)
        largest = gl.maximum(largest & 0x7FFF, (largest >> 16) & 0x7FFF)
        bits = largest.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32).to(gl.int32, bitcast=True)
        lifted = scale_byte(bits, False, False)  # as if top were 133: the rows' factors are 2^6 times larger
        byte = gl.where(bits == 0, 0, gl.where(lifted == 255, 255, lifted + (top - 133)))
        new = gl.max(byte, 0)
        down = _power_pair(gl.minimum(112 - lifted, 15))  # of zeros it may be anything
        shift = _power_pair(gl.maximum(byte - gl.expand_dims(new, 0), -32) + 15)
        shift = gl.where(gl.expand_dims(new, 0) == 255, 0x7FFF7FFF, shift)
        word = _round_pairs(pair01, pair23, _for_words(down), _for_words(shift))
        made[j].permute((1, 0)).store(word)
        scales |= gl.convert_layout(new, scales.type.layout) << (8 * j)
    return scales


@gluon.jit
def _rebase_in_fp32(words, of_rows, made):
    """As ``_rebase_in_fp16``, for any scales of rows."""
    scales = gl.full((32,), 0, gl.int32, gl.SliceLayout(0, _ALONG_COLUMNS))
    of_rows = of_rows[0] & 0xFF, of_rows[0] >> 16, of_rows[1] & 0xFF, of_rows[1] >> 16
    for j in gl.static_range(4):
        values = ()
        largest = gl.full((32, 32), 0, gl.int32, _ALONG_COLUMNS)
        for i in gl.static_range(4):
            element = ((_load_words(words, i) >> (8 * j)) & 0xFF).to(gl.uint8)
            value = from_elements(element, False) * scale_value(of_rows[i])[:, None]
            largest = gl.maximum(largest, magnitude_bits(value))
            values = values + (value,)  # noqa: RUF005
        byte = scale_byte(gl.max(_in_blocks(largest), 1), False, False)
        new = gl.max(byte, 0)
        old, wide = _for_words(byte), _for_words(gl.expand_dims(new, 0).broadcast_to((4, 32)))
        rows = ()
        for i in gl.static_range(4):
            element = to_elements(values[i] * reciprocal_scale(old), old, False)
            rows = rows + (shift_elements(element, old, wide, False),)  # noqa: RUF005
        word = _join_bytes(rows[0], rows[1], rows[2], rows[3])
        made[j].permute((1, 0)).store(word)
        scales |= gl.convert_layout(new, scales.type.layout) << (8 * j)
    return scales


@gluon.jit
def _find_rows(places, start, stop, row):
    """Where rows of a tile lie, and which there are: those before ``stop``, from ``start`` on."""
    known = row < stop - start
    if places is None:
        row += start
    else:
        row = gl.load((places + start) + row, mask=known)
    return row, known


@Kernel
@gluon.jit(do_not_specialize=["rows", "places_end", "padded_blocks", "row_blocks"])
def _requantize_tiles(
    x, x_scale, places, qdata, scale, table,
    cols,
    rows, places_end, padded_blocks, row_blocks,
):  # fmt: skip
    """One program: 128 rows, those of the next four blocks of the map, and 128 columns."""
    in_panels = gl.program_id(0) // PANEL
    row_tiles = gl.cdiv(row_blocks, 4)
    tile_row, tile_col = in_panels % row_tiles, in_panels // row_tiles * PANEL + gl.program_id(0) % PANEL
    if tile_col * 128 >= cols:
        return
    start, stop = tile_row * 128, rows
    if table is not None:
        start = gl.load(table + tile_row * 4)
        stop = gl.load(table + row_blocks + tile_row * 4)  # 0 past the last group
        if start >= stop:
            return
    staged = gl.allocate_shared_memory(gl.uint8, [128, 128], _STAGED_BYTES)
    row_factors = gl.allocate_shared_memory(gl.int16, [128], _PLAIN)
    row_scales = gl.allocate_shared_memory(gl.int16, [128], _PLAIN)
    made = ()
    for _ in gl.static_range(4):
        made = made + (gl.allocate_shared_memory(gl.int32, [32, 32], _MADE_WORDS),)  # noqa: RUF005

    at = gl.arange(0, 128, gl.SliceLayout(1, _ALONG_ROWS))
    col = tile_col * 128 + gl.arange(0, 128, gl.SliceLayout(0, _ALONG_ROWS))
    row, known = _find_rows(places, start, stop, at % 32 * 4 + at // 32)
    inside = known[:, None] & (col < cols)[None, :]
    loaded = gl.load((x + col)[None, :] + row.to(gl.int64)[:, None] * cols, mask=inside, other=0)

    row, known = _find_rows(places, start, stop, gl.arange(0, 128, _ROWS))
    of_row = gl.load(x_scale + tile_col.to(gl.int64) * (gl.cdiv(places_end, 16) * 16) + row, mask=known, other=0)
    of_row = of_row.to(gl.int32)
    top, least = gl.max(of_row, 0), gl.min(gl.where(known, of_row, 255), 0)
    factor = gl.where(known, (of_row - top + 21) << 10, 0)
    row_factors.store(_in_pairs(factor))
    row_scales.store(_in_pairs(of_row))
    staged.store(loaded)

    words = reinterpreted(staged, gl.int32, [128, 32], _STAGED_WORDS)
    if (top - least <= 18) & (least >= 40) & (top <= 240):
        scales = _rebase_in_fp16(words, _load_pairs(row_factors), top, made)
    else:
        scales = _rebase_in_fp32(words, _load_pairs(row_scales), made)

    word_col = tile_col * 32 + gl.arange(0, 32, scales.type.layout)
    scale += tile_row.to(gl.int64) * (gl.cdiv(cols, 16) * 16)
    gl.store(scale.to(gl.pointer_type(gl.int32), bitcast=True) + word_col, scales, mask=word_col * 4 < cols)
    position = tile_row * 128 + gl.arange(0, 128, gl.SliceLayout(0, _ALONG_ROWS))
    padded_rows = padded_blocks * 32
    for j in gl.static_range(4):
        elements = reinterpreted(made[j], gl.uint8, [32, 128], _MADE_BYTES).load(_ALONG_ROWS)
        col = tile_col * 128 + gl.arange(0, 32, gl.SliceLayout(1, _ALONG_ROWS)) * 4 + j
        inside = (col < cols)[:, None] & (position < padded_rows)[None, :]
        gl.store((qdata + position)[None, :] + col.to(gl.int64)[:, None] * padded_rows, elements, mask=inside)
