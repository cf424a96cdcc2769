"""The kernels of ``backends/sm100`` compiled for SM100, and that torch's checks of its GEMMs look at their arguments.

``pytest -rP tests/test_sm100_aot.py`` prints registers and shared memory of each kernel.
"""

from functools import partial

import pytest
import torch
from aot import compile_only
from scaled_mm import as_on_sm100
from test_triton_aot import OFFS, check, make
from tiers import daily

from titan_mxfp8.backends import sm100
from titan_mxfp8.backends.common.swizzled import swizzle_scales
from titan_mxfp8.backends.sm100 import gemm
from titan_mxfp8.format.spec import OperandSpec

pytestmark = pytest.mark.integration

M, N, K, E = 256, 160, 512, 3
BF16 = torch.bfloat16
ROWS, SWIZZLED = OperandSpec(), OperandSpec(scales="swizzled")
SQUARES = OperandSpec(block="32x32", scales="swizzled")
E5M2 = OperandSpec(rounding="floor", elem_dtype=torch.float8_e5m2, scales="swizzled")
# The spec, the axis (None: both), and what else there is to say.
QUANTIZE = {
    "rowwise": (SWIZZLED, 1, {}),
    "rowwise, ragged": (SWIZZLED, 1, {"offs": OFFS}),
    "columnwise, ragged": (SWIZZLED, 0, {"offs": OFFS}),
    "both": (SWIZZLED, None, {}),
    "both, ragged": (SWIZZLED, None, {"offs": OFFS}),
    "both of fp32, ragged": (SWIZZLED, None, {"dtype": torch.float32, "offs": OFFS}),
    "both of fp32, floor, E5M2": (E5M2, None, {"dtype": torch.float32}),
    "32x32 rowwise": (SQUARES, 1, {}),
    "32x32 both": (SQUARES, None, {}),
}


@pytest.mark.parametrize("case", daily(QUANTIZE, "columnwise, ragged", "both, ragged", "32x32 both"))
def test_quantize(case: str) -> None:
    spec, axis, options = QUANTIZE[case]
    with compile_only("sm_100") as kernels:
        make(sm100, spec, axis, **options)
    check(kernels)
    kernel = next(kernel for kernel in kernels if kernel.name == "_quantize_tiles")
    assert kernel.count("F2FP.SATFINITE.E5M2" if spec is E5M2 else "F2FP.SATFINITE.E4M3") >= 8
    assert kernel.count("LDG.E.128") >= 2 and kernel.count("STG.E.128") >= 1 and not kernel.count("STG.E.U8")


def test_requantise_tiles_and_what_torch_leaves() -> None:
    rows, w = (OperandSpec().empty(x, x.ndim - 1, None) for x in (torch.empty(M, K), torch.empty(E, N, K)))
    tokens = ROWS.empty(torch.empty(M, K), 0, E)
    out, dw = torch.empty(M, N, dtype=BF16), torch.empty(E, N, K, dtype=BF16)
    with compile_only("sm_100") as kernels:
        sm100.requantize(rows, 0, SWIZZLED, OFFS)
        for operand, offs in ((rows, None), (rows, OFFS), (tokens, OFFS), (w, None)):
            swizzle_scales(operand, offs)
        gemm.finish_rows(out, torch.empty(E, N, dtype=BF16), OFFS, zero_tail=True)
        gemm.zero_empty_groups(dw, OFFS)
    check(kernels)
    names = {kernel.name for kernel in kernels}
    assert names >= {"_quantize_tiles", "_map_tiles", "_swizzle_scales", "_add_bias", "_zero_tail", "_zero_empty"}


def test_torch_would_refuse_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks look: scales of another shape, rows that are no rows, offsets of another type. What layers call with
    passes them in test_late_compilation.py."""
    for name in ("_scaled_mm", "_scaled_grouped_mm"):
        monkeypatch.setattr(torch, name, partial(as_on_sm100, getattr(torch.ops.aten, name).default))
    a, b = SWIZZLED.empty(torch.empty(M, K), 1, E), SWIZZLED.empty(torch.empty(E, N, K), 2, None)
    for wrong_a, wrong_b, offs in (
        (a, b._replace(scale=b.scale[:, :-4]), OFFS),
        (a, b, OFFS.long()),
        (a._replace(scale=a.scale.flatten()), b, OFFS),
        (a._replace(data=torch.empty(K, M, dtype=a.data.dtype).mT), b, OFFS),
    ):
        with pytest.raises(RuntimeError):
            gemm.scaled_grouped_mm(wrong_a, wrong_b, offs)
    dense = SWIZZLED.empty(torch.empty(M, K), 1, None)
    for wrong in (dense._replace(scale=dense.scale[:128]), dense._replace(data=dense.data[:, :500])):
        with pytest.raises(RuntimeError):
            gemm.scaled_mm(wrong, SWIZZLED.empty(torch.empty(N, K), 1, None), None, BF16)
