"""The GEMM kernels against the reference, in the interpreter: every way to multiply, on this CPU."""

from functools import partial

import pytest
import torch
from gemm_checks import (
    BF16,
    CASES,
    E4M3,
    E5M2,
    FP32,
    check_k_grouped,
    check_m_grouped,
    check_nan_stays_in_its_group,
    check_unusual_offs,
)

from titan_mxfp8.backends.triton import gemm

MMAS = ("scaled", "bf16_tma", "bf16")
# Small tiles: 160 rows then have bands, several tiles for each of the 3 programs, and tails on all sides.
TILES = gemm.tiles_of((16, 64, 64, 4, 2, 1))


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


@pytest.mark.parametrize("mma", MMAS)
def test_nan_stays_in_its_group(mma: str):
    check_nan_stays_in_its_group(mma, TILES)


@pytest.mark.parametrize("mma", MMAS)
def test_unusual_offs(mma: str):
    check_unusual_offs(mma, TILES)


def test_tiles_are_timed_once_for_a_family(monkeypatch):
    """The slowest is listed first; two families of shapes are met thrice, the second while a graph is captured."""
    tiles = gemm.tiles_of((128, 128, 64, 8, 3, 1), (64, 64, 64, 4, 3, 1))
    timed, capturing = [], False

    def do_bench(launch, warmup: int, rep: int) -> float:
        launch()
        return float(timed[-1].bm)

    monkeypatch.setattr(gemm, "_chosen", {})
    monkeypatch.setattr(gemm.triton.testing, "do_bench", do_bench)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    choose = partial(gemm._choose, tiles=tiles, launch=timed.append, device=torch.device("cuda", 0))
    for _ in range(3):
        assert choose(("m", 1)) == tiles[1]
    capturing = True
    for _ in range(3):
        assert choose(("m", 2)) == tiles[0]
    assert timed == list(tiles)
