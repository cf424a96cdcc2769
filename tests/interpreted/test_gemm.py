"""The GEMM kernels against the reference, in the interpreter: every way to multiply, on this CPU."""

from unittest.mock import Mock

import pytest
import torch
from gemm_checks import (
    BF16,
    CASES,
    E4M3,
    E5M2,
    FP32,
    TOLERANCE,
    check_k_grouped,
    check_m_grouped,
    check_nan_stays_in_its_group,
    check_unusual_offs,
    operand,
    quantize,
    wide,
)

from titan_mxfp8.backends.triton import gemm
from titan_mxfp8.format import reference
from titan_mxfp8.testing import relative_rms

MMAS = ("scaled", "bf16_tma", "bf16")
# Small tiles: 160 rows then have bands, several tiles for each of the 3 programs, and tails on all sides.
TILES = gemm.Tiles(bm=16, bn=64, bc=64, warps=4, stages=2, programs=1)


@pytest.mark.parametrize("mma", MMAS)
@pytest.mark.parametrize("case", [case for case in CASES if case != "large"])
def test_group_sizes(case: str, mma: str):
    check_m_grouped(case, mma, TILES)
    check_k_grouped(case, mma, TILES)


@pytest.mark.parametrize("mma", MMAS)
@pytest.mark.parametrize("block", ["1x32", "32x32"])
@pytest.mark.parametrize("elem_dtype", [E4M3, E5M2])
def test_formats(elem_dtype: torch.dtype, block: str, mma: str):
    for d_major in (False, True):
        check_m_grouped("ragged", mma, TILES, elem_dtype=elem_dtype, block=block, d_major=d_major)
    check_k_grouped("ragged", mma, TILES, elem_dtype=elem_dtype)


@pytest.mark.parametrize("mma", MMAS)
def test_outputs_and_biases(mma: str):
    for bias_dtype in (BF16, FP32):
        for out_dtype in (BF16, FP32):
            check_m_grouped("ragged", mma, TILES, bias_dtype=bias_dtype, out_dtype=out_dtype)
    check_m_grouped("no offs", mma, TILES, bias_dtype=BF16, out_dtype=BF16)
    check_k_grouped("ragged", mma, TILES, out_dtype=BF16)


@pytest.mark.parametrize("mma", MMAS)
def test_any_multiple_of_32(mma: str):
    for c, d in ((32, 32), (64, 96), (224, 32)):
        check_m_grouped("ragged", mma, TILES, c=c, d=d)
        check_k_grouped("ragged", mma, TILES, n=c, k=d)


@pytest.mark.parametrize("mma", ["bf16_tma", "bf16"])
def test_fp8_where_bf16_is_multiplied(mma: str):
    """Activations that arrive quantised, say from an all-to-all."""
    check_m_grouped("ragged", mma, TILES, as_fp8=True)
    for case in ("ragged", "no offs"):
        check_k_grouped(case, mma, TILES, as_fp8=True)


def test_matrices_without_groups_go_to_torch_and_are_added_up_in_fp32(monkeypatch: pytest.MonkeyPatch):
    settings, multiply = torch.backends.cuda.matmul, torch.Tensor.__matmul__
    kernels, bf16_sums = Mock(), []

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        bf16_sums.append(settings.allow_bf16_reduced_precision_reduction)
        return multiply(a, b)

    monkeypatch.setattr(gemm, "multiply_m_grouped", kernels.m_grouped)
    monkeypatch.setattr(gemm, "multiply_k_grouped", kernels.k_grouped)
    x, w, dy = wide(70, 96), wide(1, 160, 96), wide(70, 160)
    x_k, w_k = quantize(x, 1, E4M3), quantize(w, 2, E4M3).mT
    dy_m, x_m = quantize(dy, 0, E4M3).mT, quantize(x, 0, E4M3)
    m_grouped, k_grouped = reference.gemm_m_grouped, reference.gemm_k_grouped
    expected = m_grouped(x_k, w_k, None, bias=None, out_dtype=FP32), k_grouped(dy_m, x_m, None, out_dtype=FP32)
    x_k, w_k, dy_m, x_m = (operand(mx, "bf16", None, 70, "cpu") for mx in (x_k, w_k, dy_m, x_m))
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "__matmul__", watched)
        y = gemm.gemm_m_grouped(x_k, w_k, None, bias=None, out_dtype=BF16)
        dw = gemm.gemm_k_grouped(dy_m, x_m, None, out_dtype=BF16)
    assert relative_rms(y, expected[0]) <= TOLERANCE[BF16] and relative_rms(dw, expected[1]) <= TOLERANCE[BF16]
    assert bf16_sums == [False, False] and settings.allow_bf16_reduced_precision_reduction
    assert not kernels.mock_calls
    gemm.gemm_m_grouped(x_k, w_k, None, bias=torch.zeros(1, 160), out_dtype=BF16)
    gemm.gemm_m_grouped(x_k, w_k, None, bias=None, out_dtype=FP32)
    gemm.gemm_m_grouped(x_k, w_k, torch.tensor([70], dtype=torch.int32), bias=None, out_dtype=BF16)
    assert kernels.m_grouped.call_count == 3


@pytest.mark.parametrize("mma", MMAS)
def test_nan_stays_in_its_group(mma: str):
    check_nan_stays_in_its_group(mma, TILES)


@pytest.mark.parametrize("mma", MMAS)
def test_unusual_offs(mma: str):
    check_unusual_offs(mma, TILES)


@pytest.mark.parametrize(
    "m, tokens, large",
    [
        (131072, None, True),
        (131072, gemm.FEW_TOKENS, True),
        (131072, gemm.FEW_TOKENS - 1, False),
        (128 * 32, None, False),  # 32 x 4 large tiles for 132 processors
        (128 * 33, None, True),
    ],
)
def test_small_tiles_where_large_ones_would_be_few_or_short(m: int, tokens: int | None, large: bool):
    both = gemm.TILES["bf16_tma"]
    tiles = gemm.tiles_for("bf16_tma", (1, m, 1024), tokens, 132)
    assert tiles == both[0 if large else 1]


def test_what_the_backend_launches():
    """With the tiles that it chooses itself."""
    check_m_grouped("ragged", "bf16", None)
    check_k_grouped("ragged", "bf16", None)
