"""The kernels bit for bit against the reference, in the interpreter."""

import sys

import pytest
import torch
from kernel_checks import (
    E4M3,
    E5M2,
    FORMATS,
    check_dequantize,
    check_every_byte,
    check_pad,
    check_quantize,
    check_quantize_both,
    check_quantize_dequantize,
    wild,
)

from titan_mxfp8.backends import triton as backend
from titan_mxfp8.backends.triton import convert
from titan_mxfp8.testing import SPREADS, group_sizes, make_offs

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(params=["instruction", "integers"])
def conversion(request, monkeypatch):
    """Both ways to FP8: the conversion of SM90 and newer, and integer arithmetic for all else."""
    monkeypatch.setattr(convert, "cuda_capability_geq", lambda *capability: request.param == "instruction")


@pytest.mark.usefixtures("conversion")
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_bfloat16(dtype: torch.dtype):
    """Each of the 65536, in a block of neighbours and in a block whose maximum is 2^8 times larger."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16).view(-1, 32)
    high = (every.float().abs().amax(1, keepdim=True) * 256).to(BF16)
    for rounding in ("rceil", "floor"):
        check_quantize(every, 1, rounding, dtype, "1x32")
        check_quantize(torch.cat([high, every[:, 1:]], 1), 1, rounding, dtype, "1x32")


@pytest.mark.usefixtures("conversion")
@pytest.mark.parametrize("rounding, dtype", FORMATS)
@pytest.mark.parametrize("in_dtype", [BF16, FP32])
def test_one_axis(in_dtype: torch.dtype, rounding: str, dtype: torch.dtype):
    for shape in ((160, 96), (129, 70), (1, 1), (3, 40, 96)):  # whole blocks, ragged edges, one value, three matrices
        x = wild(shape, in_dtype)
        for block in ("1x32", "32x32"):
            check_quantize(x, len(shape) - 1, rounding, dtype, block)
            check_quantize(x, len(shape) - 2, rounding, dtype, block)
            check_quantize_both(x, rounding, dtype, block)


@pytest.mark.parametrize("block", ["1x32", "32x32"])
def test_strides(block: str):
    """Transposed, cut out of a wider tensor at an odd place, expanded, and along an axis before the last two."""
    base = wild((3, 70, 136), BF16)
    views = (base.mT, base[:, 1::2, 3:99], base[:1].expand(2, 70, 136), base.permute(1, 0, 2), base[..., ::2])
    for x in views:
        for axis in (1, 2):
            check_quantize(x, axis, "rceil", E4M3, block)
        check_quantize_both(x, "rceil", E4M3, block)
    check_quantize(base, 0, "rceil", E4M3, "1x32")
    check_quantize(base[0, 0], 0, "rceil", E4M3, "1x32")


def test_transposed_weights_are_not_copied(monkeypatch):
    w_EKN = wild((2, 64, 96), BF16).mT
    module = sys.modules[backend.quantize.__module__]
    as_matrices = module.as_matrices

    def without_copy(x: torch.Tensor, axis: int) -> torch.Tensor:
        matrices = as_matrices(x, axis)
        assert matrices.data_ptr() == w_EKN.data_ptr()
        return matrices

    monkeypatch.setattr(module, "as_matrices", without_copy)
    for block in ("1x32", "32x32"):
        kwargs = {"rounding": "rceil", "elem_dtype": E4M3, "block": block, "offs": None}
        backend.quantize(w_EKN, 1, **kwargs)
        backend.quantize(w_EKN, 2, **kwargs)
        backend.quantize_both(w_EKN, **kwargs)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (2, 0, 64)])
def test_empty(shape: tuple[int, ...]):
    x = torch.empty(shape, dtype=BF16)
    for block in ("1x32", "32x32"):
        for axis in (x.ndim - 1, x.ndim - 2):
            check_quantize(x, axis, "rceil", E4M3, block)
        check_quantize_both(x, "rceil", E4M3, block)
    check_quantize_dequantize(x, "rceil", E4M3, "1x32")


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("rows, groups", [(300, 5), (77, 48)])
def test_ragged(rows: int, groups: int, spread: str):
    """All rows in groups, and a tail of 45 that belongs to none."""
    x = wild((rows, 72), BF16)
    for sizes in (group_sizes(spread, rows, groups), group_sizes(spread, rows - 45, groups)):
        offs = make_offs(sizes)
        check_quantize(x, 0, "rceil", E4M3, "1x32", offs)
        check_quantize_both(x, "floor", E5M2, "1x32", offs)
        check_quantize_dequantize(x, "rceil", E4M3, "1x32", offs)


def test_ragged_corners():
    x = wild((150, 40), FP32)
    for sizes in ([0, 1, 44], [150], [0, 0], [128, 0, 22], [0, 128], [33] * 4, [1] * 150):
        check_quantize(x, 0, "floor", E4M3, "1x32", make_offs(sizes))
        check_quantize_both(x, "rceil", E4M3, "1x32", make_offs(sizes))
    check_quantize(x[:0], 0, "rceil", E4M3, "1x32", make_offs([0, 0, 0]))
    check_quantize_both(x[:0], "rceil", E4M3, "1x32", make_offs([0, 0, 0]))
    check_quantize(x, 1, "rceil", E4M3, "1x32", make_offs([5, 20]))  # along the last axis: 25 of 40 columns


def test_many_groups():
    """300 groups, not a power of two, pass in chunks of 32."""
    x = wild((700, 32), BF16)
    check_quantize_both(x, "rceil", E4M3, "1x32", make_offs(group_sizes("zipf", 660, 300)))


@pytest.mark.usefixtures("conversion")
@pytest.mark.parametrize("rounding, dtype", FORMATS)
def test_dequantize(rounding: str, dtype: torch.dtype):
    for shape in ((96, 64), (70, 45), (2, 40, 96)):
        x = wild(shape, FP32)
        for block in ("1x32", "32x32"):
            for axis in (x.ndim - 2, x.ndim - 1):
                check_dequantize(x, axis, dtype, block)
            check_quantize_dequantize(x, rounding, dtype, block)
    check_dequantize(wild((90, 40), BF16), 0, dtype, "1x32", make_offs([7, 0, 70]))


@pytest.mark.usefixtures("conversion")
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_byte(dtype: torch.dtype):
    check_every_byte(dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_pad(dtype: torch.dtype):
    for rows, sizes in ((100, [0, 1, 44]), (64, [64]), (90, [0, 0]), (75, [17, 0, 32, 26]), (0, [0, 0])):
        for alignment, cols in ((16, 24), (32, 520), (48, 7), (128, 40)):
            check_pad(wild((rows, cols), dtype), sizes, alignment)
    check_pad(wild((400, 16), dtype), group_sizes("zipf", 390, 300), 16)
