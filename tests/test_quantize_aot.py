"""The quantise and dequantise kernels compiled for GPUs that are not here: no spills, shared memory, 16-byte accesses,
the conversions that are meant. The portable ones, those of Hopper that rebase or coalesce, and those of SM100.

``pytest -rP tests/test_quantize_aot.py`` prints registers and shared memory of each.
"""

import re
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import triton
from aot import SHARED_BYTES, Kernel, compile_only
from tiers import daily

from titan_mxfp8.backends import hopper, sm100
from titan_mxfp8.backends.common import quantizers
from titan_mxfp8.backends.common.dequantize import dequantize
from titan_mxfp8.backends.common.swizzled import swizzle_scales
from titan_mxfp8.backends.hopper import requantize_rows
from titan_mxfp8.backends.sm100 import gemm
from titan_mxfp8.format.spec import UNQUANTIZED, OperandSpec

pytestmark = pytest.mark.integration

BF16, FP32, E5M2 = torch.bfloat16, torch.float32, torch.float8_e5m2
OFFS = torch.tensor([100, 100, 250], dtype=torch.int32)
IS_TRITON_36 = triton.__version__.startswith("3.6.")
ROWS, QDQ, COALESCED = OperandSpec(), OperandSpec(stored="bf16"), OperandSpec(stored="coalesced")
REBASED = OperandSpec(block_k=128, scales="mn_major")
SQUARES, COALESCED_SQUARES, REBASED_SQUARES = (
    replace(spec, block="32x32", block_mn=32) for spec in (ROWS, COALESCED, REBASED)
)
SWIZZLED = OperandSpec(scales="swizzled")
SWIZZLED_SQUARES = replace(SWIZZLED, block="32x32")


class Case(NamedTuple):
    """What is made, along which axis (None: both), and of what."""

    spec: OperandSpec
    axis: int | None
    dtype: torch.dtype = BF16
    offs: torch.Tensor | None = None
    shape: tuple[int, int] = (256, 512)

    def compile(self, target: str, quantiser: ModuleType) -> list[Kernel]:
        x = torch.empty(self.shape, dtype=self.dtype)
        with compile_only(target) as kernels:
            if self.axis is None:
                quantiser.quantize_both(x, self.spec, self.spec, self.offs)
            else:
                quantiser.quantize(x, self.axis, self.spec, self.offs)
        return kernels

    @property
    def conversion(self) -> str:
        return f"F2FP.SATFINITE.{'E5M2' if self.spec.elem_dtype == E5M2 else 'E4M3'}"


# Each case that compiles differently enough to spill, or to lose an instruction.
PORTABLE = {
    "rowwise": Case(ROWS, 1),
    "rowwise of fp32, floor, E5M2": Case(OperandSpec(rounding="floor", elem_dtype=E5M2), 1, FP32),
    "columnwise": Case(ROWS, 0),
    "columnwise, ragged": Case(ROWS, 0, offs=OFFS),
    "both": Case(ROWS, None),
    "both, ragged": Case(ROWS, None, offs=OFFS),
    "both of fp32, ragged": Case(ROWS, None, FP32, OFFS),
    "both, odd sizes": Case(ROWS, None, shape=(77, 45)),
    "32x32 rowwise": Case(SQUARES, 1),
    "32x32 rowwise of fp32": Case(SQUARES, 1, FP32),
    "32x32 both": Case(SQUARES, None),
    "32x32 both of fp32": Case(SQUARES, None, FP32),
}
# What is compiled for other targets than sm_90, which gets all.
ELSEWHERE = {
    "sm_80": ("rowwise", "both, ragged"),
    "sm_89": ("rowwise", "both, ragged"),
    "sm_120": ("rowwise", "both, ragged", "32x32 both"),
    "sm_100": ("rowwise", "rowwise of fp32, floor, E5M2", "both, ragged", "32x32 both"),
    "gfx942": ("rowwise", "both, ragged"),
    "gfx950": ("rowwise", "rowwise of fp32, floor, E5M2", "both, ragged", "32x32 both", "32x32 both of fp32"),
}
HOPPER = {
    "rowwise": Case(REBASED, 1),
    "rowwise, squares": Case(replace(REBASED, block_mn=32), 1),
    "columnwise, ragged": Case(REBASED, 0, offs=OFFS),
    "columnwise, squares": Case(replace(REBASED, block_mn=32), 0),
    "both, ragged": Case(REBASED, None, offs=OFFS),
    "both of fp32": Case(REBASED, None, FP32),
    "both, ragged, E5M2": Case(replace(REBASED, elem_dtype=E5M2), None, offs=OFFS),
    "both, 77 rows": Case(REBASED, None, shape=(77, 480)),
    "32x32 both": Case(REBASED_SQUARES, None),
    "32x32 both of fp32": Case(REBASED_SQUARES, None, FP32),
    "coalesced": Case(COALESCED, 1),
    "coalesced, E5M2 of fp32": Case(replace(COALESCED, elem_dtype=E5M2), 1, FP32),
    "coalesced 32x32 rowwise": Case(COALESCED_SQUARES, 1),
    "coalesced 32x32 both": Case(COALESCED_SQUARES, None),
    "coalesced 32x32 both of fp32": Case(COALESCED_SQUARES, None, FP32),
    "coalesced 32x32 both, E5M2": Case(replace(COALESCED_SQUARES, elem_dtype=E5M2), None),
}
SM100 = {
    "rowwise": Case(SWIZZLED, 1),
    "rowwise, ragged": Case(SWIZZLED, 1, offs=OFFS),
    "columnwise, ragged": Case(SWIZZLED, 0, offs=OFFS),
    "both": Case(SWIZZLED, None),
    "both, ragged": Case(SWIZZLED, None, offs=OFFS),
    "both of fp32, ragged": Case(SWIZZLED, None, FP32, OFFS),
    "both of fp32, floor, E5M2": Case(replace(SWIZZLED, rounding="floor", elem_dtype=E5M2), None, FP32),
    "32x32 rowwise": Case(SWIZZLED_SQUARES, 1),
    "32x32 both": Case(SWIZZLED_SQUARES, None),
}
# What FP8 rows become along the first axis on Hopper, by what they are.
REQUANTISED = {
    "rebased, floor": (replace(REBASED, rounding="floor"), replace(REBASED, rounding="floor")),
    "rebased, E5M2": (replace(REBASED, elem_dtype=E5M2), replace(REBASED, elem_dtype=E5M2)),
    "exact to rebased": (ROWS, REBASED),
    "exact": (ROWS, ROWS),
    "coalesced to QDQ": (COALESCED, QDQ),
    "rebased to unquantised": (REBASED, UNQUANTIZED),
}


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


def named(kernels: list[Kernel], *parts: str) -> Kernel:
    """The first that has one of these in its name."""
    return next(kernel for kernel in kernels if any(part in kernel.name for part in parts))


@pytest.mark.parametrize("name", daily(PORTABLE, "rowwise", "both, ragged", "32x32 both"))
def test_portable_sm_90(name: str) -> None:
    kernels = PORTABLE[name].compile("sm_90", quantizers)
    # Triton 3.6 does, byte by byte; features of a model are a multiple of 32
    check(kernels, spills=272 if name == "both, odd sizes" and IS_TRITON_36 else 0)
    kernel = named(kernels, "_quantize")
    assert kernel.count(PORTABLE[name].conversion) >= 8
    if "odd" not in name:  # 16 bytes a thread
        assert kernel.count("LDG.E.128") >= 2 and kernel.count("STG.E.128") >= 1
    if "both" in name and "32x32" not in name:
        assert named(kernels, "_place_scales")


@pytest.mark.parametrize(
    "target, name",
    daily(
        [(target, name) for target in ELSEWHERE for name in ELSEWHERE[target]],
        ("gfx950", "rowwise"),
        ("gfx950", "32x32 both of fp32"),  # Triton knows no limit of registers on AMD
    ),
)
def test_portable_elsewhere(target: str, name: str) -> None:
    kernels = PORTABLE[name].compile(target, quantizers)
    check(kernels, {"sm_80": 8, "sm_89": 40}.get(target, 0))  # "both, ragged" by integers takes all 255 registers
    kernel = named(kernels, "_quantize")
    if target in ("sm_100", "sm_120"):
        assert kernel.count(PORTABLE[name].conversion) >= 8
    else:  # integers make the elements
        assert kernel.count("F2FP.SATFINITE") == kernel.count("v_cvt_pk_fp8") == 0


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "sm_120", "gfx950"])
def test_requantise_portable(target: str) -> None:
    """FP8 rows along the tokens, to FP8 and to its values in bf16; on sm_90 see below."""
    rows = ROWS.empty(torch.empty(256, 512), 1, None)
    with compile_only(target) as kernels:
        quantizers.requantize(rows, 0, ROWS, OFFS)
        quantizers.requantize(rows, 0, QDQ, OFFS)
    check(kernels)
    assert {kernel.name for kernel in kernels} >= {"_quantize_tiles", "_quantize_dequantize_tiles"}


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx950"])
def test_dequantise(target: str) -> None:
    x = torch.empty(256, 512, dtype=BF16)
    with compile_only(target) as kernels:
        for spec in (ROWS, SQUARES):
            dequantize(spec.empty(x, 1, None))
            quantizers.quantize(x, 1, replace(spec, stored="bf16"), None)
        quantizers.quantize_both(x, QDQ, QDQ, OFFS)
    check(kernels)
    names = {"_dequantize_rows", "_quantize_rows", "_quantize_dequantize_tiles", "_map_row_blocks"}
    assert {kernel.name for kernel in kernels} >= names


@pytest.mark.parametrize("name", daily(HOPPER, "columnwise, ragged", "both, ragged", "32x32 both of fp32", "coalesced"))
def test_hopper(name: str) -> None:
    case = HOPPER[name]
    kernels = case.compile("sm_90", hopper)
    # The registers with which four programs fit, or two, are just enough for one release of Triton and not for another.
    check(kernels, spills=32 if name == ("32x32 both of fp32" if IS_TRITON_36 else "both, ragged") else 0)
    kernel = named(kernels, "_rebase", "_squares")
    # each element is made, and made again once its block's neighbours are known
    assert kernel.count(case.conversion) >= 32
    assert case.spec.elem_dtype == E5M2 or (kernel.count("F2FP.F16.E4M3") >= 16 and kernel.count("HMUL2") >= 16)
    if "77" not in name:
        assert kernel.count("LDG.E.128") >= 2 and kernel.count("STG.E.128") >= 1


@pytest.mark.parametrize("name", daily(REQUANTISED, "rebased, floor", "coalesced to QDQ"))
def test_requantise_hopper(name: str) -> None:
    """Each thread reads 8 bytes at once and no row past the last group; stores are as those of other quantisers."""
    rows, spec = REQUANTISED[name]
    with compile_only("sm_90") as kernels:
        hopper.requantize(rows.empty(torch.empty(256, 512, dtype=BF16), 1, None), 0, spec, OFFS)
    check(kernels)
    kernel = kernels[-1]
    assert kernel.count("EXIT") >= 2
    if spec.is_quantized:
        assert kernel.count("LDG.E.64") == 8 and kernel.count("LDG.E.U8") <= 8, kernel
    else:
        assert kernel.count("LDG.E.128") >= 1
    assert kernel.count("STG.E.128") >= 1 and kernel.count("STG.E.U8") <= 2


@pytest.mark.parametrize("places", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["gathered", "in place"])
def test_requantise_rebased_rows(places: bool) -> None:
    """Five programs fit on a multiprocessor, each reads and writes 16 bytes at once, and two elements at a time are
    multiplied three times, converted twice, and compared once."""
    rows = REBASED.empty(torch.empty(256, 512, dtype=BF16), 1, None)
    with compile_only("sm_90") as kernels:
        requantize_rows.requantize(rows, REBASED, OFFS, torch.zeros(300, dtype=torch.int32) if places else None)
    check(kernels)
    kernel = kernels[-1]
    assert kernel.registers <= 96 and 5 * kernel.shared <= SHARED_BYTES["sm_90"]
    assert kernel.count("LDG.E.128") == 8 and kernel.count("STG.E.128") == 8 and kernel.count("STG.E.U8") == 0
    assert kernel.count("HMNMX2") == 60 and kernel.count("F2FP.SATFINITE.E4M3.F16") >= 64


@pytest.mark.parametrize("axis", daily([1, 2], 1))
@pytest.mark.parametrize("spec", [REBASED_SQUARES, COALESCED_SQUARES], ids=["rebased", "coalesced"])
def test_gathered_weights(spec: OperandSpec, axis: int) -> None:
    """A thread reads 8 bytes at once."""
    with compile_only("sm_90") as kernels:
        hopper.requantize(spec.exact.empty(torch.empty(2, 256, 512), 2, None), axis, spec, None)
    check(kernels)
    assert kernels[-1].count("LDG.E.64") == 8 and kernels[-1].count("STG.E.128") >= 1


@pytest.mark.parametrize("name", daily(SM100, "columnwise, ragged", "both, ragged", "32x32 both"))
def test_sm100(name: str) -> None:
    kernels = SM100[name].compile("sm_100", sm100)
    check(kernels)
    kernel = named(kernels, "_quantize_tiles")
    assert kernel.count(SM100[name].conversion) >= 8
    assert kernel.count("LDG.E.128") >= 2 and kernel.count("STG.E.128") >= 1 and not kernel.count("STG.E.U8")


def test_requantise_sm100_and_what_torch_leaves() -> None:
    m, n, k, experts = 256, 160, 512, 3
    rows, w = (ROWS.empty(x, x.ndim - 1, None) for x in (torch.empty(m, k), torch.empty(experts, n, k)))
    tokens = ROWS.empty(torch.empty(m, k), 0, experts)
    out, dw = torch.empty(m, n, dtype=BF16), torch.empty(experts, n, k, dtype=BF16)
    with compile_only("sm_100") as kernels:
        sm100.requantize(rows, 0, SWIZZLED, OFFS)
        for operand, offs in ((rows, None), (rows, OFFS), (tokens, OFFS), (w, None)):
            swizzle_scales(operand, offs)
        gemm.finish_rows(out, torch.empty(experts, n, dtype=BF16), OFFS, zero_tail=True)
        gemm.zero_empty_groups(dw, OFFS)
    check(kernels)
    names = {kernel.name for kernel in kernels}
    assert names >= {"_quantize_tiles", "_map_tiles", "_swizzle_scales", "_add_bias", "_zero_tail", "_zero_empty"}
