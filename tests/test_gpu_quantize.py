"""What the contract (``test_backends.py``) does not ask of the quantisers on a GPU, bit for bit against the reference
on the CPU: every number there is, odd sizes and strides, many groups, sizes beyond int32; and dequantise and pad.

``PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python -m pytest -k "not int32" tests/test_gpu_quantize.py`` must
be clean as well.
"""

from dataclasses import replace
from types import SimpleNamespace

import contract
import pytest
import torch
import triton.language as tl
from contract import BF16, E4M3, E5M2, EXACT, FORMATS, FP32, SQUARES, check_each_way, uneven, wild
from poison import poisoned_empty
from triton import jit

from scripts.bench.problems import SPREADS, group_sizes, make_offs
from titan_mxfp8 import quantize
from titan_mxfp8.backends import hopper, triton
from titan_mxfp8.backends.common.bf16x2 import amax_bf16x2, round_bf16x2
from titan_mxfp8.format import reference
from titan_mxfp8.format.spec import Operand, OperandSpec
from titan_mxfp8.ops import library
from titan_mxfp8.ops.pad import pad_token_groups, unpad_token_groups

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
# Tile edges (128 rows, 128 columns of bf16), block edges, sizes that 16-byte accesses do not fit, one row, one column.
SHAPES = [(384, 160), (129, 70), (1, 2048), (1000, 1), (33, 4099), (5, 96, 224), (2, 3, 40, 72)]
REBASED = OperandSpec(block_k=128, scales="mn_major")
REBASED_SQUARES = OperandSpec(block_k=128, scales="mn_major", block="32x32", block_mn=32)
EVEN_SQUARES = OperandSpec(stored="coalesced", block="32x32", block_mn=32)
# What is quantised along both axes, by the backend that makes it.
SPECS = [(triton, spec) for spec in (EXACT, SQUARES, replace(EXACT, stored="bf16"), replace(SQUARES, stored="bf16"))]
SPECS += [(hopper, spec) for spec in (REBASED, REBASED_SQUARES, EVEN_SQUARES) if IS_HOPPER]


def ids(value: object) -> str:
    return value.key if isinstance(value, OperandSpec) else getattr(value, "__name__", str(value)).split(".")[-1]


@pytest.mark.parametrize("rounding, dtype", FORMATS)
def test_every_bfloat16(rounding: str, dtype: torch.dtype):
    for x in contract.every_bfloat16():
        check_each_way(triton, x, OperandSpec(rounding=rounding, elem_dtype=dtype), device="cuda")


@pytest.mark.parametrize("rounding, dtype", FORMATS)
@pytest.mark.parametrize("in_dtype", [BF16, FP32])
@pytest.mark.parametrize("backend, spec", SPECS, ids=ids)
def test_shapes(backend, spec: OperandSpec, in_dtype: torch.dtype, rounding: str, dtype: torch.dtype):
    spec = replace(spec, rounding=rounding, elem_dtype=dtype)
    for shape in SHAPES:
        check_each_way(backend, wild(shape, in_dtype), spec, device="cuda")
    if backend is hopper:
        for make in (uneven, contract.coalescible_squares):
            check_each_way(backend, make((129, 288), in_dtype), spec, device="cuda")


@pytest.mark.parametrize("backend, spec", SPECS, ids=ids)
def test_strides(backend, spec: OperandSpec):
    """Through the ops, which copy what does not start at 16 bytes."""
    name = backend.__name__.split(".")[-1]

    def quantize_op(x: torch.Tensor, axis: int, spec: OperandSpec, offs: torch.Tensor | None) -> Operand:
        return operand(library.quantize(x, axis, spec.key, offs, name), spec, axis)

    def quantize_both_op(x, rowwise, columnwise, offs) -> tuple[Operand, Operand]:
        tensors = library.quantize_both(x, rowwise.key, columnwise.key, offs, name)
        split = len(tensors) // 2
        return operand(tensors[:split], rowwise, x.ndim - 1), operand(tensors[split:], columnwise, x.ndim - 2)

    def operand(tensors: list[torch.Tensor], spec: OperandSpec, axis: int) -> Operand:
        return Operand(*tensors, *[None] * (2 - len(tensors)), spec, axis)

    ops, base = SimpleNamespace(quantize=quantize_op, quantize_both=quantize_both_op), wild((3, 130, 264), BF16)
    views = base.mT, base[:, 1::2, 3:99], base[:1].expand(2, 130, 264), base.permute(1, 0, 2), base[..., ::2]
    for x in (*views, base[1, 1:], base[0].T):
        check_each_way(ops, x, spec, device="cuda")


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_dequantize(dtype: torch.dtype):
    contract.check_every_byte(dtype, "cuda")
    for shape in SHAPES:
        for spec in (EXACT, SQUARES):
            contract.check_dequantize(wild(shape, FP32), replace(spec, elem_dtype=dtype), "cuda")


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("alignment", [16, 32, 48, 128])
def test_pad(alignment: int, dtype: torch.dtype):
    for spread in SPREADS:
        for rows, groups, cols in ((1000, 7, 1536), (777, 160, 100), (300, 300, 8), (64, 1, 7)):
            for used in (rows, rows - 20):
                x, offs = wild((rows, cols), dtype), make_offs(group_sizes(spread, used, groups))
                expected = *pad_token_groups(x, offs, alignment), x.where(torch.arange(rows)[:, None] < offs[-1], 0)
                padded, padded_offs = pad_token_groups(x.cuda(), offs.cuda(), alignment)
                actual = padded, padded_offs, unpad_token_groups(padded, offs.cuda(), alignment, rows)
                torch.testing.assert_close(tuple(t.cpu() for t in actual), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not IS_HOPPER, reason="a kernel of SM90")
@pytest.mark.parametrize("steps", [0, 18, 19, 60])
def test_requantise_any_rebased_rows(steps: int):
    """All elements, with scales of rows that lie so many steps apart: up to 18 are computed in fp16."""
    for least in (39, 40, 127, 240 - steps, 241 - steps):
        data = torch.randint(0, 256, (300, 400), dtype=torch.uint8)
        data[:, ::2] &= torch.where((data[:, ::2] & 0x7F) == 0x7F, 0x80, 0xFF)  # else NaN is all that comes out
        data[:, ::4] &= torch.where(torch.rand(300, 100) < 0.97, 0x81, 0xFF).to(torch.uint8)
        scale = torch.randint(least, least + steps + 1, (4, 304), dtype=torch.uint8)
        data[:128, ::8], data[0, ::8] = 0, 1  # the smallest element alone, beside a row of the largest scale
        scale[:, 0], scale[:, 1] = least, least + steps
        rows, places = Operand(data.view(E4M3), scale, REBASED, 1), torch.randint(0, 300, (500,), dtype=torch.int32)
        contract.check_requantize(hopper, rows, 0, REBASED, None, "cuda")
        for sizes in ([0, 1, 44, 0, 128, 127], [500], [0, 0]):
            contract.check_requantize(hopper, rows, 0, REBASED, make_offs(sizes), "cuda", places)


@pytest.mark.alone
def test_beyond_int32():
    """2^31 elements and more, in the input and in both outputs: the last rows are where 32-bit offsets would fail."""
    rows, cols, edge = 2**18 + 32, 8192 + 64, 256 + 32
    x = torch.randn((rows, cols), dtype=BF16, device="cuda")
    for backend, spec in [(triton, EXACT), (hopper, REBASED)][: 2 if IS_HOPPER else 1]:
        with poisoned_empty():
            rowwise, columnwise = backend.quantize_both(x, spec, spec, None)
        blocks = -(-edge // spec.block_k)
        ends = {1: (rowwise.data[-edge:], rowwise.row_scales()[-edge:])}
        ends[0] = columnwise.data[:, -edge:], columnwise.row_scales()[:, -blocks:]
        for axis, (data, scale) in ends.items():
            expected = reference.quantize(x[-edge:].cpu(), axis, spec)
            assert torch.equal(data.cpu().view(torch.uint8), expected.data.view(torch.uint8))
            assert torch.equal(scale.cpu(), expected.row_scales())
        again = backend.requantize(rowwise, 0, spec, None)
        expected = reference.requantize(reference.quantize(x[-edge:].cpu(), 1, spec), 0, spec)
        assert torch.equal(again.data[:, -edge:].cpu().view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(again.row_scales()[:, -blocks:].cpu(), expected.row_scales())
        del again
        if spec == EXACT:
            one = quantize(x, backend="triton")
            assert torch.equal(one.qdata.view(torch.uint8), rowwise.data.view(torch.uint8))
            assert torch.equal(one.scale, rowwise.scale)
        del rowwise, columnwise, ends


@jit
def _round_columns(x, out, packed_cols, FLOOR: tl.constexpr, TO_E5M2: tl.constexpr):
    """One program, numbers rounded two at a time: 32 rows, a block in each column, and 16 pairs of columns."""
    pair = tl.program_id(0) * 16 + tl.arange(0, 16)[None, :]
    at = tl.arange(0, 32)[:, None] * packed_cols + pair
    pairs = tl.load(x + at)
    tl.store(out + at, round_bf16x2(pairs, amax_bf16x2(pairs, 0)[None, :], FLOOR, TO_E5M2))


@pytest.mark.parametrize("rounding, dtype", FORMATS)
def test_every_largest_number_of_pairs_of_bf16(rounding: str, dtype: torch.dtype) -> None:
    """Each of the 32768 magnitudes is the largest number of some blocks, the others are any that are not larger: so all
    distances of exponents occur, subnormal scales, zeros of both signs, Inf and NaN."""
    largest = torch.arange(2**15, dtype=torch.int32).repeat(8)
    others = torch.randint(0, 2**15, (31, largest.numel()), dtype=torch.int32)
    near = largest - torch.randint(0, 20 * 2**7, others.shape, dtype=torch.int32)
    others = torch.where(torch.rand(others.shape) < 0.5, near.clamp(min=0), others % (largest + 1))
    bits = torch.cat([largest[None], others]) | (torch.randint(0, 2, (32, largest.numel()), dtype=torch.int32) << 15)
    x = bits.to(torch.int16).view(BF16)
    there, out = x.cuda(), torch.empty_like(x, device="cuda")
    cols = x.shape[1] // 2
    _round_columns[(cols // 16,)](
        there.view(torch.int32), out.view(torch.int32), cols, rounding == "floor", dtype == E5M2
    )
    spec = OperandSpec(rounding=rounding, elem_dtype=dtype, stored="bf16")
    expected = reference.quantize(x, 0, spec).data
    ours, nan = out.cpu(), expected.isnan()
    assert nan.any() and torch.equal(ours.isnan(), nan)
    assert torch.equal(ours[~nan].view(torch.int16), expected[~nan].view(torch.int16))
