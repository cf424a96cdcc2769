"""The quantise kernels that rebase, bit for bit against the reference, in the interpreter."""

import pytest
import torch
from kernel_checks import (
    E4M3,
    E5M2,
    REBASINGS,
    assert_equal,
    assert_same,
    check_even,
    check_rebased,
    partly_even,
    rounded_in_place,
    uneven,
    wild,
)

from titan_mxfp8.backends import hopper
from titan_mxfp8.backends.triton import convert
from titan_mxfp8.format import reference
from titan_mxfp8.testing import SPREADS, group_sizes, make_offs

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def conversion(monkeypatch):
    """The conversion of SM90: the backend runs on no other."""
    monkeypatch.setattr(convert, "cuda_capability_geq", lambda *capability: True)


@pytest.mark.parametrize(
    "in_dtype, rounding, dtype",
    [(BF16, "rceil", E4M3), (BF16, "floor", E5M2), (FP32, "floor", E4M3), (FP32, "rceil", E5M2)],
)
@pytest.mark.parametrize("blocks", REBASINGS)
def test_both_axes(blocks: str, in_dtype: torch.dtype, rounding: str, dtype: torch.dtype):
    for shape in ((129, 296), (1, 1), (2, 40, 70)):  # whole blocks and edges, one value, two matrices
        check_rebased(uneven(shape, in_dtype), rounding, dtype, blocks)
    check_rebased(wild((160, 130), in_dtype), rounding, dtype, blocks)


@pytest.mark.parametrize("dtype, rounding", [(E4M3, "rceil"), (E5M2, "floor")])
def test_even(rounding: str, dtype: torch.dtype):
    for make in (partly_even, wild):
        for shape in ((129, 296), (1, 1), (2, 40, 70)):
            check_even(make(shape, BF16), rounding, dtype)
    x = partly_even((160, 256), FP32)
    check_even(x.mT, rounding, dtype)
    check_rebased(x, rounding, dtype, "32x32 to even")
    squares = partly_even((9, 12), FP32).repeat_interleave(32, 0).repeat_interleave(32, 1)
    check_rebased(squares, rounding, dtype, "32x32 to even")


@pytest.mark.parametrize("blocks", REBASINGS)
def test_strides(blocks: str):
    base = uneven((2, 140, 136), BF16)
    for x in (base.mT, base[:, 1::2, 3:99], base[..., ::2]):
        check_rebased(x, "rceil", E4M3, blocks)
    check_rebased(base[:, :0], "rceil", E4M3, blocks)


@pytest.mark.parametrize("spread", SPREADS)
def test_ragged(spread: str):
    """All rows in groups, and a tail of 45 that belongs to none."""
    for rows, groups in ((400, 5), (77, 9)):
        x = torch.where(torch.rand(rows, 1) < 0.5, wild((rows, 72), BF16), uneven((rows, 72), BF16))
        check_rebased(x, "rceil", E4M3, "1x32 to 1x128", make_offs(group_sizes(spread, rows, groups)), one_axis=False)
        check_rebased(x, "rceil", E4M3, "1x32 to 1x128", make_offs(group_sizes(spread, rows - 45, groups)))


def test_ragged_corners():
    x = uneven((300, 40), FP32)
    for sizes in ([0, 1, 44], [300], [0, 0], [127, 128, 0], [0, 129], [0, 0, 100, 0]):
        check_rebased(x, "floor", E5M2, "1x32 to 1x128", make_offs(sizes), one_axis=False)
        check_rebased(x, "floor", E5M2, "1x32 to 32x128", make_offs(sizes))
    check_rebased(x[:0], "rceil", E4M3, "1x32 to 1x128", make_offs([0, 0, 0]))


def test_dequantised_values_are_those_of_the_triton_backend():
    x, offs = wild((150, 72), BF16), make_offs([0, 1, 44, 90])
    kwargs = {"rounding": "rceil", "elem_dtype": E4M3, "block": "1x32"}
    last, first = hopper.quantize_operand_both(x, offs=offs, forms=("bf16", "bf16"), **kwargs)
    assert (last.axis, first.axis) == (1, 0) and last.is_dequantized and first.is_dequantized
    assert_equal(last.qdata, rounded_in_place(x, 1, None, **kwargs))
    assert_equal(first.qdata, rounded_in_place(x, 0, offs, **kwargs))


def test_even_along_one_axis_and_bf16_along_the_other():
    """What the activations of ``mxfp8_2d`` take."""
    x, offs = partly_even((150, 160), BF16), make_offs([0, 1, 44, 90])
    kwargs = {"rounding": "rceil", "elem_dtype": E4M3, "block": "1x32"}
    last, first = hopper.quantize_operand_both(x, offs=offs, forms=("even", "bf16"), **kwargs)
    assert_same(last, reference.quantize_operand(x, 1, offs=None, form="even", **kwargs))
    assert first.axis == 0 and first.is_dequantized
    assert_equal(first.qdata[:90], rounded_in_place(x, 0, offs, **kwargs)[:90])


def test_what_fits_is_not_changed_and_what_does_not_is_counted():
    """1.125 * 2^-6, the smallest normal element with a mantissa, loses it one step further."""
    kwargs = {"rounding": "rceil", "elem_dtype": E4M3, "block": "1x32", "offs": None, "form": "1x128"}
    x = torch.full((1, 128), 448.0)
    for step, expected in ((6, 0), (7, 1)):
        x[0, 32:64], x[0, 40] = 448 * 2.0**-step, 1.125 * 2.0**-step
        changed = torch.zeros((), dtype=torch.int64)
        mx = hopper.quantize_operand(x, 1, changed=changed, **kwargs)
        assert changed == expected and (mx.dequantize()[0] != x[0]).sum() == expected
