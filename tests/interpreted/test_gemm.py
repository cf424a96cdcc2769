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
from titan_mxfp8.format.mx import MXTensor
from titan_mxfp8.testing import make_offs, poisoned_empty, relative_rms

MMAS = ("scaled", "bf16_tma", "bf16")
# Small tiles: 160 rows then have bands, several tiles for each of the 3 programs, and tails on all sides.
TILES = gemm.Tiles(bm=16, bn=64, bc=64, warps=4, stages=2, programs=1)


@pytest.mark.parametrize("mma", MMAS)
@pytest.mark.parametrize("case", [case for case in CASES if case != "large"])
def test_group_sizes(case: str, mma: str):
    check_m_grouped(case, mma, TILES)
    check_k_grouped(case, mma, TILES)


@pytest.mark.parametrize("mma", MMAS)
def test_tiles_are_taken_on_demand(mma: str, monkeypatch: pytest.MonkeyPatch):
    """If others have taken all tiles, each of the 3 programs computes but the first, which is its own."""
    offs = make_offs([64])
    a = operand(quantize(wide(64, 64), 1, E4M3), mma, None, 64, "cpu")
    w = operand(quantize(wide(1, 128, 64), 2, E4M3), mma, None, 64, "cpu")
    x = operand(quantize(wide(64, 128), 0, E4M3, offs=offs), mma, offs, 64, "cpu")
    monkeypatch.setattr(gemm.torch, "zeros", lambda *size, **kwargs: torch.full(size, 1000, **kwargs))
    with poisoned_empty():
        y = gemm.multiply_m_grouped(a, w.mT, offs, None, FP32, mma, TILES)
        dw = gemm.multiply_k_grouped(x.mT, x, offs, FP32, mma, TILES)[0]
    for out in (y, dw):  # tiles of 16 x 64, down the first column of tiles
        computed = ~out.isnan()
        assert computed[:48, :64].all() and not computed[48:].any() and not computed[:, 64:].any()


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


def matrices(m: int) -> tuple[MXTensor, ...]:
    """x and w of forward, dy and x of wgrad."""
    x, w, dy = wide(m, 96), wide(1, 160, 96), wide(m, 160)
    return quantize(x, 1, E4M3), quantize(w, 2, E4M3).mT, quantize(dy, 0, E4M3).mT, quantize(x, 0, E4M3)


@pytest.mark.parametrize("m", [0, 1, 70])
def test_matrices_without_groups_go_to_torch(m: int, monkeypatch: pytest.MonkeyPatch):
    kernels = Mock()
    monkeypatch.setattr(gemm, "multiply_m_grouped", kernels.m_grouped)
    monkeypatch.setattr(gemm, "multiply_k_grouped", kernels.k_grouped)
    x_k, w_k, dy_m, x_m = matrices(m)
    y = reference.gemm_m_grouped(x_k, w_k, None, bias=None, out_dtype=FP32)
    dw = reference.gemm_k_grouped(dy_m, x_m, None, out_dtype=FP32)
    offs = torch.tensor([m], dtype=torch.int32)
    x_k, w_k, dy_m, x_m = (operand(mx, "bf16", None, m, "cpu") for mx in (x_k, w_k, dy_m, x_m))
    for result, expected in (
        (gemm.gemm_m_grouped(x_k, w_k, None, bias=None, out_dtype=BF16), y),
        (gemm.gemm_k_grouped(dy_m, x_m, None, out_dtype=BF16), dw),
        (gemm.wgrad_bf16(dy_m.qdata.mT, x_m.qdata, None), dw),
    ):
        assert result.dtype == BF16 and result.shape == expected.shape
        assert not m or relative_rms(result, expected) <= TOLERANCE[BF16]
    assert not kernels.mock_calls
    gemm.gemm_m_grouped(x_k, w_k, None, bias=torch.zeros(1, 160), out_dtype=BF16)
    gemm.gemm_m_grouped(x_k, w_k, None, bias=None, out_dtype=FP32)
    gemm.gemm_m_grouped(x_k, w_k, offs, bias=None, out_dtype=BF16)
    gemm.gemm_k_grouped(dy_m, x_m, None, out_dtype=FP32)
    gemm.gemm_k_grouped(dy_m, x_m, offs, out_dtype=BF16)
    monkeypatch.setattr(gemm, "mma_for", lambda device: "scaled")
    gemm.gemm_m_grouped(x_k, w_k, None, bias=None, out_dtype=BF16)
    gemm.gemm_k_grouped(dy_m, x_m, None, out_dtype=BF16)
    assert (kernels.m_grouped.call_count, kernels.k_grouped.call_count) == (4, 3)


@pytest.mark.parametrize("before", [(True, True), (False, True), (False, False)])
def test_torch_adds_up_in_fp32_and_keeps_its_settings(before: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch):
    settings, multiply = torch.backends.cuda.matmul, torch.Tensor.__matmul__
    names = ("allow_bf16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction_split_k")
    seen = []

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(getattr(settings, name) for name in names))
        return multiply(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    default = tuple(getattr(settings, name) for name in names)
    settings.allow_bf16_reduced_precision_reduction = before
    try:
        gemm.wgrad_bf16(torch.ones(8, 4, dtype=BF16), torch.ones(8, 5, dtype=BF16), None)
        with pytest.raises(RuntimeError):
            gemm.wgrad_bf16(torch.ones(8, 4, dtype=BF16), torch.ones(9, 5, dtype=BF16), None)
        assert seen == [(False, before[1])] * 2
        assert tuple(getattr(settings, name) for name in names) == before
    finally:
        settings.allow_bf16_reduced_precision_reduction = default


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
