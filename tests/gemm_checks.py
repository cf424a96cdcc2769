"""Checks of the GEMM kernels against the reference on the same quantised inputs, for any device.

Operands are quantised by the reference, on the CPU; outputs start as NaN (``poisoned_empty``).
"""

from unittest.mock import patch

import torch

from titan_mxfp8.backends.triton import gemm
from titan_mxfp8.backends.triton.operands import Mma
from titan_mxfp8.format import reference
from titan_mxfp8.format.mx import Block, MXTensor
from titan_mxfp8.testing import make_offs, poisoned_empty, relative_rms

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP32 = torch.bfloat16, torch.float32

# Relative RMS against the reference's fp32 output. fp32: only the order of additions differs, and tensor cores cut bits
# off their sums: measured up to 1.2e-7 in the interpreter and, with 1500 tokens in a group, 1.9e-6 on an H200.
# bf16: its rounding is at most 2^-8 = 3.9e-3 of an element; measured 2.0e-3.
TOLERANCE = {FP32: 4e-6, BF16: 2**-8}

# Group sizes (None: offs is None) and rows past the last group.
CASES: dict[str, tuple[list[int] | None, int]] = {
    "ragged": ([0, 44, 1, 64, 0, 31, 0], 20),
    "one row": ([1], 0),
    "no offs": (None, 70),
    "all in one": ([0, 0, 133, 0], 0),
    "all empty": ([0, 0, 0], 50),
    "no rows": ([0, 0], 0),
    "48 experts": ([0, 1, 3] * 16, 7),
    "large": ([700, 0, 1500, 257, 1], 100),
}


def wide(*shape: int) -> torch.Tensor:
    """Normal values, each row and each column at an exponent of its own, so that scales differ everywhere."""
    rows, cols = torch.randint(-6, 7, (*shape[:-1], 1)), torch.randint(-6, 7, (shape[-1],))
    return torch.randn(shape) * torch.exp2(rows.float()) * torch.exp2(cols.float())


def quantize(x: torch.Tensor, axis: int, elem_dtype: torch.dtype, block: Block = "1x32", offs=None) -> MXTensor:
    return reference.quantize(x, axis, rounding="rceil", elem_dtype=elem_dtype, block=block, offs=offs)


def operand(mx: MXTensor, mma: Mma, offs: torch.Tensor | None, rows: int, device: str) -> MXTensor:
    """``mx`` as a device that multiplies by ``mma`` takes it; if dequantised, the axis of ``rows`` rows is unpadded."""
    if mma == "scaled":
        return MXTensor(mx.qdata.to(device), mx.scale.to(device), mx.axis, mx.block, mx.orig_dtype)
    values = mx.dequantize(BF16)
    if offs is not None:
        padded = values.movedim(mx.axis, 0)
        values = torch.full((rows, padded.shape[1]), torch.nan, dtype=BF16)
        start = padded_start = 0
        for end in offs.tolist():
            values[start:end] = padded[padded_start : padded_start + end - start]
            start, padded_start = end, padded_start + -(-(end - start) // 32) * 32
        values = values.movedim(0, mx.axis)
    return MXTensor(
        values.to(device), torch.empty(0, dtype=torch.uint8, device=device), mx.axis, mx.block, mx.orig_dtype
    )


def check_m_grouped(
    case: str,
    mma: Mma,
    tiles: gemm.Tiles | None,
    *,
    c: int = 96,
    d: int = 160,
    d_major: bool = False,
    elem_dtype: torch.dtype = E4M3,
    block: Block = "1x32",
    bias_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype = FP32,
    as_fp8: bool = False,
    device: str = "cpu",
) -> None:
    """``d_major``: ``b`` as dgrad's weight lies, else as the forward's. ``as_fp8``: FP8 where bf16 is multiplied."""
    sizes, extra = CASES[case]
    m, experts = sum(sizes or []) + extra, 1 if sizes is None else len(sizes)
    offs = None if sizes is None else make_offs(sizes)
    a = wide(m, c)
    a[m if sizes is None else sum(sizes) :] = torch.nan  # what lies past the last group must not matter
    a_mx = quantize(a, 1, elem_dtype)
    b_mx = (
        quantize(wide(experts, c, d), 1, E4M3, block) if d_major else quantize(wide(experts, d, c), 2, E4M3, block).mT
    )
    bias = None if bias_dtype is None else torch.randn(experts, d).to(bias_dtype)
    expected = reference.gemm_m_grouped(a_mx, b_mx, offs, bias=bias, out_dtype=FP32)
    form = "scaled" if as_fp8 else mma
    a_in, b_in = operand(a_mx, form, None, m, device), operand(b_mx, form, None, m, device)
    if d_major and form != "scaled":
        b_in = MXTensor(b_in.qdata.contiguous(), b_in.scale, 1, block, b_in.orig_dtype)
    offs, bias = (None if t is None else t.to(device) for t in (offs, bias))
    with poisoned_empty():
        out = gemm.multiply_m_grouped(a_in, b_in, offs, bias, out_dtype, mma, tiles)
    assert out.dtype == out_dtype and out.shape == (m, d)
    error = relative_rms(out.cpu(), expected)
    assert error <= TOLERANCE[out_dtype], f"{case} {mma}: {error:.2e}"
    assert sizes is None or not out[sum(sizes) :].any()


def check_k_grouped(
    case: str,
    mma: Mma,
    tiles: gemm.Tiles | None,
    *,
    n: int = 160,
    k: int = 96,
    elem_dtype: torch.dtype = E4M3,
    out_dtype: torch.dtype = FP32,
    as_fp8: bool = False,
    device: str = "cpu",
) -> None:
    sizes, extra = CASES[case]
    m = sum(sizes or []) + extra
    offs = None if sizes is None else make_offs(sizes)
    a_mx = quantize(wide(m, n), 0, elem_dtype, offs=offs).mT
    b_mx = quantize(wide(m, k), 0, E4M3, offs=offs)
    expected = reference.gemm_k_grouped(a_mx, b_mx, offs, out_dtype=FP32)
    form = "scaled" if as_fp8 else mma
    a_in, b_in = operand(a_mx, form, offs, m, device), operand(b_mx, form, offs, m, device)
    if form != "scaled":  # as the quantiser leaves them: tokens are rows
        a_in = MXTensor(a_in.qdata.mT.contiguous().mT, a_in.scale, 1, "1x32", a_in.orig_dtype)
        b_in = MXTensor(b_in.qdata.contiguous(), b_in.scale, 0, "1x32", b_in.orig_dtype)
    with poisoned_empty():
        out = gemm.multiply_k_grouped(a_in, b_in, None if offs is None else offs.to(device), out_dtype, mma, tiles)
    assert out.dtype == out_dtype and out.shape == expected.shape
    error = relative_rms(out.cpu(), expected)
    assert error <= TOLERANCE[out_dtype], f"{case} {mma}: {error:.2e}"
    for e, size in enumerate(sizes or []):
        assert size or not out[e].any(), f"expert {e} has no rows"


def check_unusual_offs(mma: Mma, tiles: gemm.Tiles | None, device: str = "cpu") -> None:
    """Offsets that lie apart in memory; and some past the last row, unchecked as on a GPU: nothing is written there."""
    sizes, m = [40, 0, 30, 50], 120
    offs = make_offs(sizes).repeat_interleave(2).to(device)[::2]
    past = make_offs([40, 0, 30, 300]).to(device)
    a_mx, b_mx = quantize(wide(m, 64), 1, E4M3), quantize(wide(4, 96, 64), 2, E4M3).mT
    y = reference.gemm_m_grouped(a_mx, b_mx, make_offs(sizes), bias=None, out_dtype=FP32)
    a, b = operand(a_mx, mma, None, m, device), operand(b_mx, mma, None, m, device)
    guarded = torch.full((m + 300, 96), 7.0, device=device)
    for given in (offs, past):
        with patch.object(torch, "empty", lambda *_, **__: guarded[:m]):
            out = gemm.multiply_m_grouped(a, b, given, None, FP32, mma, tiles)
        assert relative_rms(out.cpu(), y) <= TOLERANCE[FP32]
        assert (guarded[m:] == 7).all()
    a_mx, b_mx = (quantize(wide(m, size), 0, E4M3, offs=make_offs(sizes)) for size in (96, 64))
    dw = reference.gemm_k_grouped(a_mx.mT, b_mx, make_offs(sizes), out_dtype=FP32)
    a, b = (operand(x, mma, make_offs(sizes), m, device) for x in (a_mx.mT, b_mx))
    if mma != "scaled":
        a = MXTensor(a.qdata.mT.contiguous().mT, a.scale, 1, "1x32", FP32)
        b = MXTensor(b.qdata.contiguous(), b.scale, 0, "1x32", FP32)
    for given in (offs, past):
        assert relative_rms(gemm.multiply_k_grouped(a, b, given, FP32, mma, tiles).cpu(), dw) <= TOLERANCE[FP32]


def check_nan_stays_in_its_group(mma: Mma, tiles: gemm.Tiles | None, device: str = "cpu") -> None:
    """A NaN in the first row of a group: its row of y, and its column of that group's dw, nothing else."""
    sizes = [40, 30, 50]
    offs = make_offs(sizes)
    x, w, dy = torch.randn(120, 64), torch.randn(3, 96, 64), torch.randn(120, 96)
    x[40, 5] = torch.nan
    x_mx, w_mx = quantize(x, 1, E4M3), quantize(w, 2, E4M3).mT
    a, b = operand(x_mx, mma, None, 120, device), operand(w_mx, mma, None, 120, device)
    y = gemm.multiply_m_grouped(a, b, offs.to(device), None, FP32, mma, tiles).cpu()
    assert y[40].isnan().all() and y.isnan().sum() == 96
    a, b = quantize(dy, 0, E4M3, offs=offs).mT, quantize(x, 0, E4M3, offs=offs)
    a, b = operand(a, mma, offs, sum(sizes), device), operand(b, mma, offs, sum(sizes), device)
    if mma != "scaled":
        a = MXTensor(a.qdata.mT.contiguous().mT, a.scale, 1, "1x32", FP32)
    dw = gemm.multiply_k_grouped(a, b, offs.to(device), FP32, mma, tiles).cpu()
    assert dw[1, :, 5].isnan().all() and dw.isnan().sum() == 96
