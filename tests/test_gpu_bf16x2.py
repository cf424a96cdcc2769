"""Pairs of bf16 numbers rounded to MXFP8 two at a time, for every kind of largest number that a block can have."""

import pytest
import torch
import triton
import triton.language as tl
from contract import BF16, FORMATS

from titan_mxfp8.backends.common.bf16x2 import amax_bf16x2, round_bf16x2
from titan_mxfp8.format import reference
from titan_mxfp8.format.spec import OperandSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@triton.jit
def _round_columns(x, out, packed_cols, FLOOR: tl.constexpr, E5M2: tl.constexpr):
    """One program: 32 rows, a block in each column, and 16 pairs of columns."""
    pair = tl.program_id(0) * 16 + tl.arange(0, 16)[None, :]
    at = tl.arange(0, 32)[:, None] * packed_cols + pair
    pairs = tl.load(x + at)
    tl.store(out + at, round_bf16x2(pairs, amax_bf16x2(pairs, 0)[None, :], FLOOR, E5M2))


@pytest.mark.parametrize("rounding, dtype", FORMATS)
def test_every_largest_number(rounding: str, dtype: torch.dtype) -> None:
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
        there.view(torch.int32), out.view(torch.int32), cols, rounding == "floor", dtype == torch.float8_e5m2
    )
    spec = OperandSpec(rounding=rounding, elem_dtype=dtype, stored="bf16")
    expected = reference.quantize(x, 0, spec).data
    ours, nan = out.cpu(), expected.isnan()
    assert nan.any() and torch.equal(ours.isnan(), nan)
    assert torch.equal(ours[~nan].view(torch.int16), expected[~nan].view(torch.int16))
