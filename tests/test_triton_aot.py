"""The quantise, dequantise and pad kernels compiled for GPUs that are not here: no spills, shared memory, instructions.

``pytest -rP tests/test_triton_aot.py`` prints registers and shared memory of each.
"""

import re

import pytest
import torch
import triton
from aot import SHARED_BYTES, Kernel, compile_only

from titan_mxfp8.backends import triton as backend
from titan_mxfp8.format.mx import MXTensor
from titan_mxfp8.format.reference import quantize as reference_quantize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PLAIN = {"rounding": "rceil", "elem_dtype": E4M3, "block": "1x32", "offs": None}
OFFS = torch.tensor([100, 100, 250], dtype=torch.int32)
# Each form that compiles differently enough to spill, or to lose an instruction, by what it asks of ``quantize``.
QUANTIZE = {
    "last": {"axis": 1},
    "last of fp32, floor, E5M2": {"axis": 1, "dtype": torch.float32, "rounding": "floor", "elem_dtype": E5M2},
    "first": {"axis": 0},
    "first, ragged": {"axis": 0, "offs": OFFS},
    "both": {"axis": None},
    "both, ragged": {"axis": None, "offs": OFFS},
    "both of fp32, ragged": {"axis": None, "dtype": torch.float32, "offs": OFFS},
    "both, odd sizes": {"axis": None, "shape": (77, 45)},
    "32x32 last": {"axis": 1, "block": "32x32"},
    "32x32 both": {"axis": None, "block": "32x32"},
}
# What is compiled for other targets than sm_90, which gets all.
ELSEWHERE = {
    "sm_80": ("last", "both, ragged"),
    "sm_100": ("last", "last of fp32, floor, E5M2", "both, ragged", "32x32 both"),
    "gfx942": ("last", "both, ragged"),
    "gfx950": ("last", "last of fp32, floor, E5M2", "both, ragged", "32x32 both"),
}


def compile_quantize(
    target: str, axis: int | None, dtype: torch.dtype = torch.bfloat16, shape: tuple[int, int] = (256, 512), **kwargs
) -> list[Kernel]:
    x = torch.empty(shape, dtype=dtype)
    with compile_only(target) as kernels:
        if axis is None:
            backend.quantize_both(x, **PLAIN | kwargs)
        else:
            backend.quantize(x, axis, **PLAIN | kwargs)
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


@pytest.mark.parametrize("form", QUANTIZE)
def test_quantize_sm_90(form: str):
    kernels = compile_quantize("sm_90", **QUANTIZE[form])
    # Triton 3.6 does, byte by byte; features of a model are a multiple of 32
    check(kernels, spills=544 if form == "both, odd sizes" and triton.__version__.startswith("3.6.") else 0)
    kernel = next(kernel for kernel in kernels if "_quantize" in kernel.name)
    fp8 = "F2FP.SATFINITE.E5M2" if "E5M2" in form else "F2FP.SATFINITE.E4M3"
    assert kernel.count(fp8) >= 8
    if "odd" not in form:  # 16 bytes a thread
        assert kernel.count("LDG.E.128") >= 2 and kernel.count("STG.E.128") >= 1
    if "both" in form and "32x32" not in form:
        assert "_place_scales" in {kernel.name for kernel in kernels}


@pytest.mark.parametrize("target, form", [(target, form) for target, forms in ELSEWHERE.items() for form in forms])
def test_quantize(target: str, form: str):
    kernels = compile_quantize(target, **QUANTIZE[form])
    check(kernels, spills=8 if target == "sm_80" else 0)  # "both, ragged" by integers takes all 255 registers
    kernel = next(kernel for kernel in kernels if "_quantize" in kernel.name)
    if target == "sm_100":
        assert kernel.count("F2FP.SATFINITE.E5M2" if "E5M2" in form else "F2FP.SATFINITE.E4M3") >= 8
    else:  # integers make the elements
        assert kernel.count("F2FP.SATFINITE") == kernel.count("v_cvt_pk_fp8") == 0


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx950"])
def test_dequantize_and_pad(target: str):
    x = torch.randn(256, 512).bfloat16()
    mx = {block: reference_quantize(x, 1, **PLAIN | {"block": block}) for block in ("1x32", "32x32")}
    kwargs = {"rounding": "rceil", "elem_dtype": E4M3}
    with compile_only(target) as kernels:
        for operand in mx.values():
            backend.dequantize(MXTensor(operand.qdata, operand.scale, 1, operand.block, x.dtype))
        backend.quantize_dequantize(x, 1, block="1x32", offs=None, **kwargs)
        backend.quantize_dequantize(x, 1, block="32x32", offs=None, **kwargs)
        backend.quantize_dequantize_both(x, offs=OFFS, **kwargs)
        padded, _ = backend.pad_token_groups(x, OFFS, alignment=32, padded_rows=320)
        backend.unpad_token_groups(padded, OFFS, alignment=32, rows=256)
    check(kernels)
    assert {kernel.name.lstrip("_") for kernel in kernels} >= {
        "dequantize_rows",
        "quantize_dequantize_rows",
        "quantize_dequantize_tiles",
        "move_units",
        "map_units",
    }
