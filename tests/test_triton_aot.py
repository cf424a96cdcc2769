"""The quantise and dequantise kernels compiled for GPUs that are not here: no spills, shared memory, instructions.

``pytest -rP tests/test_triton_aot.py`` prints registers and shared memory of each.
"""

import re
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import triton
from aot import SHARED_BYTES, Kernel, compile_only
from tiers import daily

from titan_mxfp8.backends.common import quantizers
from titan_mxfp8.backends.common.dequantize import dequantize
from titan_mxfp8.format.spec import OperandSpec

pytestmark = pytest.mark.integration

ROWS = OperandSpec()
SQUARES = OperandSpec(block="32x32", block_mn=32)
OFFS = torch.tensor([100, 100, 250], dtype=torch.int32)
# Each case that compiles differently enough to spill, or to lose an instruction: the spec, the axis (None: both), and
# what else there is to say.
FLOOR_E5M2 = OperandSpec(rounding="floor", elem_dtype=torch.float8_e5m2)
QUANTIZE = {
    "rowwise": (ROWS, 1, {}),
    "rowwise of fp32, floor, E5M2": (FLOOR_E5M2, 1, {"dtype": torch.float32}),
    "columnwise": (ROWS, 0, {}),
    "columnwise, ragged": (ROWS, 0, {"offs": OFFS}),
    "both": (ROWS, None, {}),
    "both, ragged": (ROWS, None, {"offs": OFFS}),
    "both of fp32, ragged": (ROWS, None, {"dtype": torch.float32, "offs": OFFS}),
    "both, odd sizes": (ROWS, None, {"shape": (77, 45)}),
    "32x32 rowwise": (SQUARES, 1, {}),
    "32x32 rowwise of fp32": (SQUARES, 1, {"dtype": torch.float32}),
    "32x32 both": (SQUARES, None, {}),
    "32x32 both of fp32": (SQUARES, None, {"dtype": torch.float32}),
}
# What is compiled for other targets than sm_90, which gets all.
ELSEWHERE = {
    "sm_80": ("rowwise", "both, ragged"),
    "sm_89": ("rowwise", "both, ragged"),
    "sm_120": ("rowwise", "both, ragged", "32x32 both"),
    "sm_100": ("rowwise", "rowwise of fp32, floor, E5M2", "both, ragged", "32x32 both"),
    "gfx942": ("rowwise", "both, ragged"),
    "gfx950": ("rowwise", "rowwise of fp32, floor, E5M2", "both, ragged", "32x32 both"),
}


def make(
    quantiser: ModuleType,
    spec: OperandSpec,
    axis: int | None,
    shape: tuple[int, int] = (256, 512),
    dtype: torch.dtype = torch.bfloat16,
    offs: torch.Tensor | None = None,
) -> None:
    x = torch.empty(shape, dtype=dtype)
    if axis is None:
        quantiser.quantize_both(x, spec, spec, offs)
    else:
        quantiser.quantize(x, axis, spec, offs)


def compile_quantize(target: str, case: str) -> list[Kernel]:
    spec, axis, options = QUANTIZE[case]
    with compile_only(target) as kernels:
        make(quantizers, spec, axis, **options)
    return kernels


def check(kernels: list[Kernel], spills: int = 0) -> None:
    assert kernels
    for kernel in kernels:
        print(kernel)
        assert kernel.spills <= spills and not kernel.warnings
        assert kernel.shared <= SHARED_BYTES[kernel.target]
        assert ".ftz" not in kernel.ptx  # flushes subnormals
        if kernel.target in ("sm_90", "sm_100") and not spills:
            # ptxas writes R1, the stack pointer, where it takes a value for undefined: 12.8 did so to defined bytes.
            # Permutations (PRMT) may well ignore some of theirs.
            readers = re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?(\w+)[^\n]*\bR1\b", kernel.assembly)
            assert set(readers) <= {"LDC", "IADD3", "VIADD", "PRMT"}, readers


@pytest.mark.parametrize("case", daily(QUANTIZE, "rowwise", "both, ragged", "32x32 both"))
def test_quantize_sm_90(case: str):
    kernels = compile_quantize("sm_90", case)
    # Triton 3.6 does, byte by byte; features of a model are a multiple of 32
    check(kernels, spills=272 if case == "both, odd sizes" and triton.__version__.startswith("3.6.") else 0)
    kernel = next(kernel for kernel in kernels if "_quantize" in kernel.name)
    fp8 = "F2FP.SATFINITE.E5M2" if "E5M2" in case else "F2FP.SATFINITE.E4M3"
    assert kernel.count(fp8) >= 8
    if "odd" not in case:  # 16 bytes a thread
        assert kernel.count("LDG.E.128") >= 2 and kernel.count("STG.E.128") >= 1
    if "both" in case and "32x32" not in case:
        assert "_place_scales" in {kernel.name for kernel in kernels}


@pytest.mark.parametrize(
    "target, case",
    daily(
        [(target, case) for target, forms in ELSEWHERE.items() for case in forms],
        ("gfx950", "rowwise"),
    ),
)
def test_quantize(target: str, case: str):
    kernels = compile_quantize(target, case)
    check(
        kernels, spills={"sm_80": 8, "sm_89": 40}.get(target, 0)
    )  # "both, ragged" by integers takes all 255 registers
    kernel = next(kernel for kernel in kernels if "_quantize" in kernel.name)
    if target in ("sm_100", "sm_120"):
        assert kernel.count("F2FP.SATFINITE.E5M2" if "E5M2" in case else "F2FP.SATFINITE.E4M3") >= 8
    else:  # integers make the elements
        assert kernel.count("F2FP.SATFINITE") == kernel.count("v_cvt_pk_fp8") == 0


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "sm_120", "gfx950"])
def test_requantize(target: str) -> None:
    """FP8 rows along the tokens, to FP8 and to its values in bf16: sm_90 is in test_hopper_quantize_aot.py."""
    rows = ROWS.empty(torch.empty(256, 512), 1, None)
    with compile_only(target) as kernels:
        quantizers.requantize(rows, 0, ROWS, OFFS)
        quantizers.requantize(rows, 0, replace(ROWS, stored="bf16"), OFFS)
    check(kernels)
    assert {kernel.name for kernel in kernels} >= {"_quantize_tiles", "_quantize_dequantize_tiles"}


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx950"])
def test_dequantize(target: str):
    x = torch.empty(256, 512, dtype=torch.bfloat16)
    with compile_only(target) as kernels:
        for spec in (ROWS, SQUARES):
            dequantize(spec.empty(x, 1, None))
            quantizers.quantize(x, 1, replace(spec, stored="bf16"), None)
        values = replace(ROWS, stored="bf16")
        quantizers.quantize_both(x, values, values, OFFS)
    check(kernels)
    assert {kernel.name.lstrip("_") for kernel in kernels} >= {
        "dequantize_rows",
        "quantize_rows",
        "quantize_dequantize_tiles",
        "map_row_blocks",
    }
