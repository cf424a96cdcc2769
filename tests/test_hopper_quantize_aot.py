"""The quantise kernels that rebase or coalesce, compiled for sm_90: no spills, 16-byte accesses, the conversions that
are meant.

``pytest -rP tests/test_hopper_quantize_aot.py`` prints registers and shared memory of each.
"""

from dataclasses import replace

import pytest
import torch
import triton
from aot import SHARED_BYTES, compile_only
from test_triton_aot import OFFS, check, make
from tiers import daily

from titan_mxfp8.backends import hopper
from titan_mxfp8.backends.hopper import requantize_rows
from titan_mxfp8.format.spec import UNQUANTIZED, OperandSpec

pytestmark = pytest.mark.integration

E5M2 = torch.float8_e5m2
EXACT, QDQ, COALESCED = OperandSpec(), OperandSpec(stored="bf16"), OperandSpec(stored="coalesced")
ROWS = OperandSpec(block_k=128, scales="mn_major")
SQUARES, COALESCED_SQUARES = (replace(spec, block="32x32", block_mn=32) for spec in (ROWS, COALESCED))
# What is made: the spec, the axis (None: both), and what else there is to say.
CASES = {
    "rowwise": (ROWS, 1, {}),
    "rowwise, squares": (replace(ROWS, block_mn=32), 1, {}),
    "columnwise, ragged": (ROWS, 0, {"offs": OFFS}),
    "columnwise, squares": (replace(ROWS, block_mn=32), 0, {}),
    "both, ragged": (ROWS, None, {"offs": OFFS}),
    "both of fp32": (ROWS, None, {"dtype": torch.float32}),
    "both, ragged, E5M2": (replace(ROWS, elem_dtype=E5M2), None, {"offs": OFFS}),
    "both, 77 rows": (ROWS, None, {"shape": (77, 480)}),
    "32x32 both": (SQUARES, None, {}),
    "32x32 both of fp32": (SQUARES, None, {"dtype": torch.float32}),
    "coalesced": (COALESCED, 1, {}),
    "coalesced, E5M2 of fp32": (replace(COALESCED, elem_dtype=E5M2), 1, {"dtype": torch.float32}),
    "coalesced 32x32 rowwise": (COALESCED_SQUARES, 1, {}),
    "coalesced 32x32 both": (COALESCED_SQUARES, None, {}),
    "coalesced 32x32 both of fp32": (COALESCED_SQUARES, None, {"dtype": torch.float32}),
    "coalesced 32x32 both, E5M2": (replace(COALESCED_SQUARES, elem_dtype=E5M2), None, {}),
}
# What FP8 rows become along the first axis, by what they are.
REQUANTISED = {
    "rebased, floor": (replace(ROWS, rounding="floor"), replace(ROWS, rounding="floor")),
    "rebased, E5M2": (replace(ROWS, elem_dtype=E5M2), replace(ROWS, elem_dtype=E5M2)),
    "exact to rebased": (EXACT, ROWS),
    "exact": (EXACT, EXACT),
    "coalesced to QDQ": (COALESCED, QDQ),
    "rebased to unquantised": (ROWS, UNQUANTIZED),
}


@pytest.mark.parametrize("case", daily(REQUANTISED, "rebased, floor", "coalesced to QDQ"))
def test_requantise_sm_90(case: str):
    """Each thread reads 8 bytes at once and no row past the last group; stores are as those of other quantisers."""
    rows, spec = REQUANTISED[case]
    with compile_only("sm_90") as kernels:
        hopper.requantize(rows.empty(torch.empty(256, 512, dtype=torch.bfloat16), 1, None), 0, spec, OFFS)
    check(kernels)
    kernel = kernels[-1]
    assert kernel.count("EXIT") >= 2
    if spec.is_quantized:
        assert kernel.count("LDG.E.64") == 8 and kernel.count("LDG.E.U8") <= 8, kernel
    else:
        assert kernel.count("LDG.E.128") >= 1
    assert kernel.count("STG.E.128") >= 1 and kernel.count("STG.E.U8") <= 2


@pytest.mark.parametrize("places", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["gathered", "in place"])
def test_requantise_rebased_rows_sm_90(places: bool):
    """Five programs fit on a multiprocessor, each reads and writes 16 bytes at once, and two elements at a time are
    multiplied three times, converted twice, and compared once."""
    rows = ROWS.empty(torch.empty(256, 512, dtype=torch.bfloat16), 1, None)
    with compile_only("sm_90") as kernels:
        requantize_rows.requantize(rows, ROWS, OFFS, torch.zeros(300, dtype=torch.int32) if places else None)
    check(kernels)
    kernel = kernels[-1]
    assert kernel.registers <= 96 and 5 * kernel.shared <= SHARED_BYTES["sm_90"]
    assert kernel.count("LDG.E.128") == 8 and kernel.count("STG.E.128") == 8 and kernel.count("STG.E.U8") == 0
    assert kernel.count("HMNMX2") == 60 and kernel.count("F2FP.SATFINITE.E4M3.F16") >= 64


@pytest.mark.parametrize("axis", daily([1, 2], 1))
@pytest.mark.parametrize("spec", [SQUARES, COALESCED_SQUARES], ids=["rebased", "coalesced"])
def test_gathered_weights_sm_90(spec: OperandSpec, axis: int):
    """A thread reads 8 bytes at once."""
    with compile_only("sm_90") as kernels:
        hopper.requantize(spec.exact.empty(torch.empty(2, 256, 512), 2, None), axis, spec, None)
    check(kernels)
    assert kernels[-1].count("LDG.E.64") == 8 and kernels[-1].count("STG.E.128") >= 1


@pytest.mark.parametrize("case", daily(CASES, "columnwise, ragged", "both, ragged", "32x32 both of fp32", "coalesced"))
def test_sm_90(case: str):
    spec, axis, options = CASES[case]
    with compile_only("sm_90") as kernels:
        make(hopper, spec, axis, **options)
    # 64 registers, with which four programs fit, are just enough for Triton 3.6.
    check(kernels, spills=32 if case == "both, ragged" and not triton.__version__.startswith("3.6.") else 0)
    kernel = next(kernel for kernel in kernels if "_rebase" in kernel.name or "_squares" in kernel.name)
    e5m2 = spec.elem_dtype == E5M2
    # each element is made, and made again once its block's neighbours are known
    assert kernel.count(f"F2FP.SATFINITE.{'E5M2' if e5m2 else 'E4M3'}") >= 32
    assert e5m2 or (kernel.count("F2FP.F16.E4M3") >= 16 and kernel.count("HMUL2") >= 16)
    if "77" not in case:
        assert kernel.count("LDG.E.128") >= 2 and kernel.count("STG.E.128") >= 1
