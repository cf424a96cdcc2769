"""What the contract does not ask of the quantisers, bit for bit against the reference: every number there is, sizes and
strides that no layer has."""

from collections.abc import Iterator

import contract
import pytest
import torch
from contract import BF16, E4M3, EXACT, FORMATS, FP32, SQUARES, check_each_way, check_quantize, wild
from tiers import daily
from watch import look_at

from scripts.bench.problems import make_offs
from titan_mxfp8.backends import hopper, triton
from titan_mxfp8.backends.common import convert
from titan_mxfp8.backends.common import quantize as exact
from titan_mxfp8.format.spec import OperandSpec

REBASED = OperandSpec(block_k=128, scales="mn_major")


def specs(rounding: str = "rceil", dtype: torch.dtype = E4M3) -> Iterator[OperandSpec]:
    """Both blocks in FP8, and both as values in bf16 (QDQ)."""
    for stored in ("fp8", "bf16"):
        yield OperandSpec(rounding=rounding, elem_dtype=dtype, stored=stored)
        yield OperandSpec(rounding=rounding, elem_dtype=dtype, stored=stored, block="32x32", block_mn=32)


@pytest.fixture(params=["instruction", "integers"])
def conversion(request, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both variants: the conversion of SM90 and newer, and integer arithmetic for all else."""
    monkeypatch.setattr(convert, "cuda_capability_geq", lambda *capability: request.param == "instruction")


@pytest.mark.usefixtures("conversion")
@pytest.mark.parametrize("rounding, dtype", FORMATS)
def test_every_bfloat16(rounding: str, dtype: torch.dtype):
    for x in contract.every_bfloat16():
        check_quantize(triton, x, 1, OperandSpec(rounding=rounding, elem_dtype=dtype))


@pytest.mark.usefixtures("conversion")
@pytest.mark.parametrize("rounding, dtype", FORMATS)
@pytest.mark.parametrize("in_dtype", daily([BF16, FP32], BF16))
def test_odd_shapes(in_dtype: torch.dtype, rounding: str, dtype: torch.dtype):
    for shape in ((129, 70), (1, 1), (2, 40, 45)):  # ragged edges, one value, two matrices
        for spec in specs(rounding, dtype):
            check_each_way(triton, wild(shape, in_dtype), spec)


def test_strides_and_no_elements():
    """Transposed, cut out of a wider tensor at an odd place, expanded, and along an axis before the last two."""
    base = wild((3, 70, 136), BF16)
    for x in (base.mT, base[:, 1::2, 3:99], base[:1].expand(2, 70, 136), base.permute(1, 0, 2)[:5], base[..., ::2]):
        for spec in (EXACT, SQUARES):
            check_each_way(triton, x, spec)
    for x in (base[0, :0], base[0, :, :0], base[:, :0]):
        for spec in specs():
            check_each_way(triton, x, spec)
    check_quantize(triton, base, 0, EXACT)
    check_quantize(triton, base[0, 0], 0, EXACT)


def test_transposed_weights_are_not_copied(monkeypatch: pytest.MonkeyPatch):
    w_EKN, pointers = wild((2, 64, 96), BF16).mT, set()
    look_at(monkeypatch, exact, "as_matrices", after=lambda matrices, *_: pointers.add(matrices.x.data_ptr()))
    for spec in (EXACT, SQUARES):
        triton.quantize(w_EKN, 1, spec, None)
        triton.quantize(w_EKN, 2, spec, None)
        triton.quantize_both(w_EKN, spec, spec, None)
    assert pointers == {w_EKN.data_ptr()}


def test_ragged_corners(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(convert, "cuda_capability_geq", lambda *capability: True)
    # Groups of one row, so many that two programs map them.
    for backend, spec, ones in ((triton, EXACT, 150), (hopper, REBASED, 40)):
        x = contract.uneven((150, 40), FP32)
        for sizes in ([0, 1, 44], [150], [0, 0], [128, 0, 22], [0, 129], [127, 1, 0], [33] * 4, [1] * ones):
            check_quantize(backend, x, 0, spec, make_offs(sizes))
            contract.check_quantize_both(backend, x, spec, spec, make_offs(sizes))
        check_quantize(backend, x[:0], 0, spec, make_offs([0, 0, 0]))
        contract.check_quantize_both(backend, x[:0], spec, spec, make_offs([0, 0, 0]))
    check_quantize(triton, x, 1, EXACT, make_offs([5, 20]))  # along the last axis: 25 of 40 columns


@pytest.mark.usefixtures("conversion")
@pytest.mark.parametrize("dtype", [E4M3, contract.E5M2])
def test_dequantize(dtype: torch.dtype):
    contract.check_every_byte(dtype)
    for shape in ((70, 45), (2, 40, 96)):
        for block, block_mn in (("1x32", 1), ("32x32", 32)):
            contract.check_dequantize(wild(shape, FP32), OperandSpec(elem_dtype=dtype, block=block, block_mn=block_mn))
