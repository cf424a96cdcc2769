"""The reference against the format's definition, by golden numbers and by arithmetic that shares no code with it."""

import math
from bisect import bisect_left

import pytest
import torch

from scripts.bench.problems import SPREADS, group_sizes, make_offs
from titan_mxfp8 import MXTensor, quantize
from titan_mxfp8.format import mx, reference
from titan_mxfp8.format.spec import Operand, OperandSpec, interleave, separate

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MAX = {E4M3: 448.0, E5M2: 57344.0}
POW2_MAX = {E4M3: 8, E5M2: 15}
FORMATS = [(rounding, dtype) for rounding in ("rceil", "floor") for dtype in (E4M3, E5M2)]
INF, NAN = math.inf, math.nan
REBASED = OperandSpec(block_k=128, scales="mn_major")
SCALES = [math.ldexp(1.0, byte - 127) for byte in range(256)]

# amax, floor's scale and element, rceil's; E4M3.
#   449 / 448 > 1, so rceil doubles the scale: 449 / 2 = 224.5 -> 224 = 0x76. floor keeps 2^8 * 1.75 and saturates.
#   496 / 2 = 248 is the middle of 240 (0x77, odd) and 256 (0x78, even): ties go to even.
#   1e-40 has scale 2^-127, so its element is 1e-40 * 2^127 = 0.01701 -> 9 * 2^-9 = 0x09, a subnormal.
GOLDEN = [
    (448.0, 127, 0x7E, 127, 0x7E),
    (449.0, 127, 0x7E, 128, 0x76),
    (480.0, 127, 0x7E, 128, 0x77),
    (496.0, 127, 0x7E, 128, 0x78),
    (511.0, 127, 0x7E, 128, 0x78),
    (2.0**-126, 0, 0x40, 0, 0x40),
    (1e-40, 0, 0x09, 0, 0x09),
    (3.4e38, 246, 0x7E, 247, 0x78),
    (INF, 255, 0x7F, 255, 0x7F),
    (-INF, 255, 0x7F, 255, 0x7F),
    (NAN, 255, 0x7F, 255, 0x7F),
    (0.0, 0, 0x00, 0, 0x00),
    (-0.0, 0, 0x80, 0, 0x80),
    (1.0, 119, 0x78, 119, 0x78),  # 2^-8 * 256
    (-1.0, 119, 0xF8, 119, 0xF8),
]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def assert_same_bits(a: MXTensor, b: MXTensor) -> None:
    assert torch.equal(bits(a.qdata), bits(b.qdata))
    assert torch.equal(a.scale, b.scale)
    assert (a.axis, a.block) == (b.axis, b.block)


def exact(elements: torch.Tensor, scale: torch.Tensor) -> Operand:
    """An operand of these bytes, blocks along the last axis."""
    return Operand(elements, scale, OperandSpec(elem_dtype=elements.dtype), elements.ndim - 1)


def scale_by_definition(amax: float, rounding: str, dtype: torch.dtype) -> int:
    """The scale byte from real arithmetic on doubles: no bit is looked at."""
    if not math.isfinite(amax):
        return 255
    if amax == 0:
        return 0
    if rounding == "floor":
        return max(0, math.frexp(amax)[1] - 1 - POW2_MAX[dtype] + 127)
    inverse = torch.tensor(1 / MAX[dtype], dtype=torch.float32)
    return bisect_left(SCALES, (torch.tensor(amax, dtype=torch.float32) * inverse).item())


def nearest_element(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The byte of the element nearest to each finite double, ties to even, by search in the table of all elements."""
    top = {E4M3: 0x7E, E5M2: 0x7B}[dtype]
    table = torch.arange(top + 1, dtype=torch.uint8).view(dtype).double()
    magnitude = value.abs().clamp(max=table[-1])
    high = torch.searchsorted(table, magnitude).clamp(max=top)
    low = (high - 1).clamp(min=0)
    to_low, to_high = magnitude - table[low], table[high] - magnitude
    byte = torch.where((to_low < to_high) | ((to_low == to_high) & (low % 2 == 0)), low, high)
    return (byte + 128 * torch.signbit(value)).to(torch.uint8)


@pytest.mark.parametrize("amax, floor_scale, floor_byte, rceil_scale, rceil_byte", GOLDEN)
@pytest.mark.parametrize("place", [0, 13, 31])
def test_golden_table(
    amax: float, floor_scale: int, floor_byte: int, rceil_scale: int, rceil_byte: int, place: int
) -> None:
    x = torch.zeros(32)
    x[place] = amax
    for rounding, scale, byte in (("floor", floor_scale, floor_byte), ("rceil", rceil_scale, rceil_byte)):
        q = quantize(x, rounding=rounding)
        assert q.scale.item() == scale
        assert bits(q.qdata)[place].item() == byte
        rest = 0x7F if scale == 255 else 0
        assert (bits(q.qdata)[torch.arange(32) != place] == rest).all()


def check_blocks(x: torch.Tensor, rounding: str, dtype: torch.dtype) -> None:
    """Of (N, 32), a block in each row: scales and elements by arithmetic on doubles, NaN where one is not finite."""
    q = quantize(x, rounding=rounding, elem_dtype=dtype)
    expected = torch.tensor([scale_by_definition(value, rounding, dtype) for value in x.abs().amax(1).tolist()])
    assert torch.equal(q.scale[:, 0].long(), expected)
    finite = expected != 255
    assert 0 < finite.sum() < len(x)
    values = x[finite].double() * torch.exp2(127 - expected[finite].double())[:, None]
    assert torch.equal(bits(q.qdata)[finite], nearest_element(values, dtype))
    assert (bits(q.qdata)[~finite] == 0x7F).all()


@pytest.mark.parametrize("rounding, dtype", FORMATS)
def test_every_bf16_value_as_the_maximum_of_a_block(rounding: str, dtype: torch.dtype) -> None:
    """65536 blocks, one for each bf16 value, beside values of half, a third and a thousandth of it."""
    top = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = top.float()[:, None] * torch.tensor([1.0, -0.5, 1 / 3, 1e-3])
    x = torch.cat([x, torch.zeros(65536, 28)], dim=1)
    check_blocks(x, rounding, dtype)


@pytest.mark.parametrize("rounding, dtype", FORMATS)
def test_random_fp32_bit_patterns(rounding: str, dtype: torch.dtype) -> None:
    """Any fp32 bits: denormals, huge and tiny values, NaN payloads, 1-ulp neighbours of the rounding boundaries."""
    x = torch.randint(-(2**31), 2**31, (512, 32), dtype=torch.int64).to(torch.int32).view(torch.float32)
    boundary = torch.tensor([MAX[dtype] * 2.0**e for e in range(-130, 110)], dtype=torch.float32)
    near = torch.stack([boundary, boundary.nextafter(torch.tensor(INF)), boundary.nextafter(torch.tensor(0.0))], 1)
    x = torch.cat([x, torch.nn.functional.pad(near.flatten()[:, None], (5, 26))])
    check_blocks(x, rounding, dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_scale_byte_and_every_element_dequantise_exactly(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)  # a row has one scale and all 256 elements
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    values = MXTensor(codes.view(dtype), scale, 1, "1x32", torch.float32).dequantize()
    expected = codes.view(dtype).double() * torch.exp2(torch.arange(256).double() - 127)[:, None]
    expected[255] = NAN
    assert torch.equal(values.nan_to_num(nan=-1.0), expected.float().nan_to_num(nan=-1.0))
    assert values[255].isnan().all() and not values[:255, :0x78].isnan().any()
    quickly = reference.dequantize(exact(codes.view(dtype), scale))
    assert torch.equal(quickly.nan_to_num(nan=-1.0), values.nan_to_num(nan=-1.0))


def test_dequantise_is_exact_in_bf16_down_to_2_to_the_minus_133() -> None:
    q = quantize(torch.randn(64, 64) * torch.exp2(torch.randint(-100, 100, (64, 1)).float()))
    assert torch.equal(q.dequantize(torch.bfloat16).float(), q.dequantize())
    smallest = MXTensor(torch.full((1, 32), 2.0**-6).to(E4M3), torch.zeros(1, 1, dtype=torch.uint8), 1, "1x32", E4M3)
    assert smallest.dequantize(torch.bfloat16).double()[0, 0] == 2.0**-133


@pytest.mark.parametrize("shape", [(70, 96), (3, 40, 64), (2, 3, 33, 31), (32,), (1, 1), (0, 64), (5, 0)])
@pytest.mark.parametrize("rounding, dtype", FORMATS)
def test_blocks_lie_along_the_axis_asked_for(shape: tuple[int, ...], rounding: str, dtype: torch.dtype) -> None:
    x = torch.randn(shape)
    x.view(-1)[-1:] = NAN  # poisons its block and no other
    for axis in range(x.ndim):
        q = quantize(x, axis, rounding=rounding, elem_dtype=dtype)
        assert q.shape == x.shape and q.axis == axis and q.qdata.stride(axis) == 1
        expected = [-(-size // 32) if i == axis else size for i, size in enumerate(shape)]
        assert list(q.scale.shape) == expected and q.scale.stride(axis) == 1
        # block by block, as 32 values of their own
        for index, block in enumerate(x.movedim(axis, -1).split(32, -1) if x.numel() else ()):
            own = quantize(
                torch.nn.functional.pad(block, (0, 32 - block.shape[-1])), rounding=rounding, elem_dtype=dtype
            )
            assert torch.equal(own.scale[..., 0], q.scale.movedim(axis, -1)[..., index])
            start = 32 * index
            here = q.qdata.movedim(axis, -1)[..., start : start + block.shape[-1]]
            assert torch.equal(bits(own.qdata[..., : block.shape[-1]]), bits(here))
        assert_same_bits(quantize(x, axis - x.ndim, rounding=rounding, elem_dtype=dtype), q)


@pytest.mark.parametrize("shape", [(64, 96), (70, 33), (2, 40, 64), (1, 1)])
@pytest.mark.parametrize("rounding, dtype", FORMATS)
def test_a_32x32_tensor_is_a_1x32_tensor_along_either_axis(
    shape: tuple[int, ...], rounding: str, dtype: torch.dtype
) -> None:
    x = torch.randn(shape) * torch.exp2(torch.randint(-20, 20, shape).float())
    last, first = (quantize(x, axis, block="32x32", rounding=rounding, elem_dtype=dtype) for axis in (-1, -2))
    assert torch.equal(bits(last.qdata), bits(first.qdata)) and torch.equal(last.scale, first.scale)
    assert last.qdata.stride(-1) == 1 and first.qdata.stride(-2) == 1
    for i in range(0, shape[-2], 32):
        for j in range(0, shape[-1], 32):
            square = x[..., i : i + 32, j : j + 32]
            top = square.abs().amax((-2, -1))
            for scale, value in zip(last.scale[..., i // 32, j // 32].flatten(), top.flatten(), strict=True):
                assert scale.item() == scale_by_definition(value.item(), rounding, dtype)
    scale = last.scale.repeat_interleave(32, -2)[..., : shape[-2], :]
    same = MXTensor(last.qdata, scale, x.ndim - 1, "1x32", x.dtype)
    assert torch.equal(same.dequantize(), last.dequantize()) and torch.equal(first.dequantize(), last.dequantize())


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("rows, groups", [(200, 6), (1000, 48), (5, 160), (0, 3), (44, 1)])
def test_each_group_starts_a_block(spread: str, rows: int, groups: int) -> None:
    sizes = group_sizes(spread, rows, groups)
    x = torch.randn(rows, 40)
    x[sum(sizes) :] = NAN  # what lies past the last group is never read
    q = quantize(x, 0, offs=make_offs(sizes))
    assert q.shape == (mx.ragged_rows(rows, groups), 40)
    expected_q, expected_s, start = [], [], 0
    for size in sizes:
        group = torch.nn.functional.pad(x[start : start + size], (0, 0, 0, -size % 32))
        alone = quantize(group, 0)
        expected_q.append(bits(alone.qdata))
        expected_s.append(alone.scale)
        start += size
    filled = sum(len(part) for part in expected_q)
    assert filled <= len(q.qdata)
    assert torch.equal(bits(q.qdata)[:filled], torch.cat(expected_q))
    assert torch.equal(q.scale[: filled // 32], torch.cat(expected_s))
    assert (bits(q.qdata)[filled:] == 0).all() and (q.scale[filled // 32 :] == 0).all()
    assert_same_bits(quantize(x.mT, 1, offs=make_offs(sizes)).mT, q)


def test_bf16_and_fp32_inputs_of_equal_values_give_equal_bits() -> None:
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    assert_same_bits(quantize(x), quantize(x.float()))
    assert quantize(x).dequantize().dtype == torch.bfloat16


def test_transposing_moves_the_axis_along() -> None:
    q = quantize(torch.randn(2, 64, 96), 1)
    assert q.mT.axis == 2 and q.mT.shape == (2, 96, 64) and q.mT.mT.axis == 1
    assert torch.equal(q.mT.dequantize(), q.dequantize().mT)
    assert quantize(torch.randn(32, 4, 5), 0).mT.axis == 0


class TestFromQdataAndScales:
    def test_round_trip(self) -> None:
        q = quantize(torch.randn(7, 64, dtype=torch.bfloat16))
        for scales in (q.scale, q.scale.view(torch.float8_e8m0fnu)):
            again = MXTensor.from_qdata_and_scales(q.qdata, scales, torch.bfloat16)
            assert_same_bits(again, q)
            assert torch.equal(again.dequantize(), q.dequantize())

    @pytest.mark.parametrize(
        "change, message",
        [
            ({"qdata": torch.zeros(7, 64).to(E5M2)}, "float8_e4m3fn"),
            ({"qdata": torch.zeros(7, 48).to(E4M3)}, "multiple of 32"),
            ({"qdata": torch.zeros(7, 2, 32).to(E4M3)}, "shape"),
            ({"scales": torch.zeros(7, 2)}, "float8_e8m0fnu or uint8"),
            ({"scales": torch.zeros(7, 64, dtype=torch.uint8)}, r"\(7, 2\)"),
            ({"orig_dtype": torch.float16}, "orig_dtype"),
        ],
    )
    def test_bad_input(self, change: dict, message: str) -> None:
        good = {
            "qdata": torch.zeros(7, 64).to(E4M3),
            "scales": torch.zeros(7, 2, dtype=torch.uint8),
            "orig_dtype": torch.bfloat16,
        }
        MXTensor.from_qdata_and_scales(**good)
        with pytest.raises(ValueError, match=message):
            MXTensor.from_qdata_and_scales(**(good | change))


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"x": torch.zeros(32, 32, dtype=torch.float16)}, "bfloat16 or float32"),
        ({"axis": 2}, "axis 2 is out of range"),
        ({"rounding": "coalesced"}, "rceil, floor"),
        ({"elem_dtype": torch.float8_e4m3fnuz}, "float8_e4m3fn"),
        ({"block": "16x16"}, "1x32, 32x32"),
        ({"x": torch.zeros(2, 32, 32), "axis": 0, "block": "32x32"}, "last two axes"),
        ({"offs": torch.tensor([32])}, "int32"),
        ({"offs": torch.tensor([[32]], dtype=torch.int32)}, "int32 vector"),
        ({"offs": torch.tensor([], dtype=torch.int32)}, "one per group"),
        ({"offs": torch.tensor([4, 3], dtype=torch.int32)}, "non-decreasing"),
        ({"offs": torch.tensor([-1, 3], dtype=torch.int32)}, "non-decreasing"),
        ({"offs": torch.tensor([4, 33], dtype=torch.int32)}, "only 32 rows"),
        ({"offs": torch.tensor([4], dtype=torch.int32), "block": "32x32"}, "1x32 blocks of a 2-D tensor"),
        ({"backend": "cuda"}, "unknown backend 'cuda'"),
    ],
)
def test_bad_input_says_what_to_do(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(**({"x": torch.zeros(32, 32)} | kwargs))


# Four blocks' scale bytes, an element of the first one, and what it becomes.
#   1.125 * 2^-4 is normal. 7 * 2^-9 * 2^-4 is 7/16 of the smallest element: 0. Halfway between 0 and it (2^-9 * 2^-1):
#   the even one, 0; 3 * 2^-9 * 2^-1 = 1.5 of it: 2. 1.125 * 2^-7 is 4.5 of it: 4.
GOLDEN_REBASED = [
    ((120, 124, 0, 0), 0x39, 0x19),
    ((120, 124, 0, 0), 0x07, 0x00),
    ((120, 124, 0, 0), 0x87, 0x80),
    ((123, 124, 0, 0), 0x01, 0x00),
    ((123, 124, 0, 0), 0x03, 0x02),
    ((120, 0, 127, 126), 0x39, 0x04),
    ((124, 120, 124, 123), 0x7E, 0x7E),
    ((0, 247, 0, 0), 0x7E, 0x00),
    ((124, 255, 0, 0), 0x39, 0x7F),
]


@pytest.mark.parametrize("scales, element, expected", GOLDEN_REBASED)
def test_rebase_golden_table(scales: tuple[int, ...], element: int, expected: int) -> None:
    elements = torch.zeros(1, 128, dtype=torch.uint8)
    elements[0, 0] = element
    before = exact(elements.view(E4M3), torch.tensor([scales], dtype=torch.uint8))
    rebased = reference.rebase(before, REBASED)
    assert bits(rebased.data)[0, 0] == expected and rebased.row_scales().tolist() == [[max(scales)]]
    values, old = rebased.dequantize(), before.dequantize()
    changed = reference.changed_elements(before, rebased)
    assert changed[0, 0] == (values[0, 0] != old[0, 0] and max(scales) < 255) and not changed[0, 1:].any()
    assert values.isnan().all() if max(scales) == 255 else torch.equal(values[0, 1:], old[0, 1:])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("block, lines", [("1x32", 1), ("1x32", 32), ("32x32", 32)])
def test_rebase_against_doubles(block: str, lines: int, dtype: torch.dtype) -> None:
    """Each element anew from its value and its block's new scale, in fp64; sizes that end within a block."""
    x = torch.randn(2, 150, 170) * torch.exp2(torch.randint(-12, 1, (2, 150, 170)).double()).float()
    x[:, 32:64] *= 2.0**-12
    x[:, :, 64:96] *= 2.0**-12
    spec = OperandSpec(elem_dtype=dtype, block=block, block_mn=lines, block_k=128, scales="mn_major")
    for axis in (1, 2):
        before, rebased = (reference.quantize(x, axis, made) for made in (spec.exact, spec))
        largest = torch.stack([part.amax(-1) for part in before.scale.split(4, -1)], -1)
        if lines > before.spec.block_mn:
            largest = torch.stack([part.amax(-2) for part in largest.split(32, -2)], -2)
        assert rebased.spec == spec and torch.equal(rebased.row_scales(), largest)
        assert rebased.scale.shape[-1] % 16 == 0 and not rebased.scale[..., largest.shape[-2] :].any()
        largest = largest.repeat_interleave(lines, -2)
        values = before.dequantize().double()
        steps = largest.repeat_interleave(128, -1)[:, : values.shape[1], : values.shape[2]].double() - 127
        expected = (values * torch.exp2(-steps)).to(dtype)
        assert torch.equal(bits(rebased.data), bits(expected))
        changed = reference.changed_elements(before, rebased)
        assert torch.equal(changed, rebased.dequantize() != before.dequantize()) and changed.sum() > 20


@pytest.mark.parametrize(
    "scales, elements, expected",
    [
        ((120, 124, 124, 124), (0x10, 0x7E), (124, 124, 124, 124)),  # 2^-5 and 448: 2^-9 is left of the first
        ((120, 124, 124, 124), (0x11, 0x7E), (120, 124, 124, 124)),  # 1.125 * 2^-5 would lose a bit
        ((120, 124, 125, 124), (0x10, 0x7E), (124, 124, 125, 125)),  # a step too far for the four, so two and two
        ((120, 124, 124, 128), (0x10, 0x7E), (124, 124, 128, 128)),  # 0x38 can be halved 9 times
        ((123, 124, 124, 140), (0x11, 0x7E), (124, 124, 124, 140)),  # the first two alone, by one step
        ((123, 123, 120, 124), (0x10, 0x7E), (124, 124, 124, 124)),
        ((120, 124, 124, 124), (0x80, 0x00), (124, 124, 124, 124)),  # zeros fit any scale
        ((0, 124, 124, 124), (0x00, 0x80), (124, 124, 124, 124)),
        ((109, 124, 124, 124), (0x78, 0x78), (124, 124, 124, 124)),  # 2^8, 15 steps
        ((108, 124, 124, 124), (0x78, 0x78), (108, 124, 124, 124)),  # 16: 2^-8 would do, but is not tried
        ((255, 124, 124, 125), (0x10, 0x10), (255, 124, 125, 125)),  # NaN stays in its block
        ((100, 255, 124, 125), (0x00, 0x80), (100, 255, 125, 125)),  # zeros stay zeros
        ((255, 255, 255, 255), (0x7F, 0x7F), (255, 255, 255, 255)),  # as they are
        ((120, 124, 124, 124), (0x10, 0x7F), (120, 124, 124, 124)),  # NaN among numbers
    ],
)
def test_even_out_golden_table(scales: tuple[int, ...], elements: tuple[int, int], expected: tuple[int, ...]) -> None:
    data = torch.full((2, 128), 0x38, dtype=torch.uint8)
    data[0, :2] = torch.tensor(elements, dtype=torch.uint8)
    data[0, 2:32] = data[0, 1]
    before = exact(data.view(E4M3), torch.tensor([scales, (120, 120, 120, 120)], dtype=torch.uint8))
    after = reference.coalesce_scales(before)
    assert torch.equal(after.dequantize().nan_to_num(3.0), before.dequantize().nan_to_num(3.0))
    assert after.scale.tolist() == [list(expected), [120] * 4]
    stay = torch.tensor([scales, [120] * 4]) == torch.tensor([expected, [120] * 4])
    assert torch.equal(bits(after.data).view(2, 4, 32)[stay], data.view(2, 4, 32)[stay])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("block", ["1x32", "32x32"])
def test_even_out_changes_no_value_and_leaves_no_scales_apart_that_need_not_be(block: str, dtype: torch.dtype) -> None:
    """Against casts to the element type, by one row or 32: no steps above 15 here."""
    x = torch.randn(2, 170, 280)
    if dtype == E5M2:
        x *= torch.randint(-24, 1, x.shape).float().exp2()
    for axis in (1, 2):
        along = x.movedim(axis, -1)  # by stage and block: about equal, two and two, one apart
        along[..., 64:128] *= 2.0**-5
        along[..., 128:160] *= 2.0**-5
    seen, lines = set(), 32 if block == "32x32" else 1
    spec = OperandSpec(elem_dtype=dtype, block=block, block_mn=lines, stored="coalesced")
    for axis in (1, 2):
        before, after = (reference.quantize(x, axis, made) for made in (spec.exact, spec))
        assert (after.spec, after.axis, after.data.stride()) == (spec, axis, before.data.stride())
        values, old, new = before.dequantize().double(), before.scale, after.scale
        assert torch.equal(after.dequantize().double(), values)
        for first in range(0, old.shape[-1], 4):
            stage = old[..., first : first + 4]
            expected = stage.clone()
            for start, stop in ((0, 2), (2, 4), (0, 4)):
                if first + start < old.shape[-1]:
                    largest = stage[..., start:stop].amax(-1, keepdim=True)
                    scale = mx.decode_scale(largest).double().repeat_interleave(lines, 1)[:, : values.shape[1]]
                    part = values[..., 32 * (first + start) : 32 * (first + stop)]
                    fits = ((part / scale).to(dtype).double() * scale == part).all(-1)
                    fits = torch.stack([rows.all(-1) for rows in fits.split(lines, 1)], 1)
                    expected[..., start:stop] = torch.where(fits[..., None], largest, expected[..., start:stop])
            assert torch.equal(new[..., first : first + 4], expected)
            seen |= {len(set(scales)) for scales in expected.flatten(0, 1).tolist()}
    assert seen >= {1, 2, 3}


def test_rebased_groups_start_at_multiples_of_128() -> None:
    sizes = [3, 0, 130, 40]
    x = torch.randn(180, 40)
    rebased = reference.quantize(x, 0, REBASED, make_offs(sizes))
    assert rebased.data.shape == (40, mx.ragged_rows(180, 4, 128))
    values = rebased.dequantize()
    for group, start in zip(x[:173].split(sizes), [0, 128, 128, 384], strict=True):
        alone = reference.quantize(group, 0, REBASED).dequantize()
        assert torch.equal(values[:, start : start + len(group)], alone[:, : len(group)])
    assert values.count_nonzero() == sum(sizes) * 40
    assert reference.padded_ends(make_offs(sizes), 128).tolist() == [128, 128, 384, 512]


@pytest.mark.parametrize("features", [128, 384])
def test_interleaved_operands_lie_block_by_block(features: int) -> None:
    """And as others do where they are separated: kernels take no strides of an operand."""
    spec = OperandSpec(block_k=128, scales="mn_major")
    pair = [reference.quantize(torch.randn(5, features), 1, spec, None) for _ in range(2)]
    both = interleave(*pair)
    assert both[0].data is both[1].data and both[0].data.is_contiguous()
    blocks = [x.data.view(torch.uint8).split(128, 1) for x in pair]
    assert torch.equal(
        both[0].data.view(torch.uint8), torch.cat([x for two in zip(*blocks, strict=True) for x in two], 1)
    )
    for apart, one in zip(separate(*both), pair, strict=True):
        assert apart.data.is_contiguous() and torch.equal(bits(apart.data), bits(one.data)) and apart.scale is one.scale


def test_values_in_bf16_are_those_of_the_groups_and_stay_where_they_are() -> None:
    sizes = [3, 0, 30, 40]
    x, spec = torch.randn(80, 40), OperandSpec(stored="bf16")
    values = reference.quantize(x, 0, spec, make_offs(sizes)).data
    expected = [quantize(group, 0).dequantize() for group in x[:73].split(sizes)]
    assert torch.equal(values[:73].float(), torch.cat(expected))
