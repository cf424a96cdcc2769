"""What the contract does not ask of the portable GEMMs: how tiles are handed out and chosen, what torch multiplies."""

from unittest.mock import Mock

import pytest
import torch
from contract import BF16, FP32, check_offs_past_the_last_row, judge, product_k_grouped, product_m_grouped, wide
from poison import poisoned_empty
from test_contract import TILES, VARIANTS

from scripts.bench.problems import make_offs
from titan_mxfp8.backends import triton
from titan_mxfp8.backends.common import gemm
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.format import reference
from titan_mxfp8.format.spec import UNQUANTIZED, Operand
from titan_mxfp8.recipe import get_recipe


@pytest.fixture(params=VARIANTS)
def hardware(request, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    here = VARIANTS[request.param].hardware
    monkeypatch.setattr(gemm, "hardware_of", lambda device: here)
    return here


def test_tiles_are_taken_on_demand(hardware: Hardware, monkeypatch: pytest.MonkeyPatch):
    """If others have taken all tiles, each of the 3 programs computes but the first, which is its own."""
    offs, plan = make_offs([128]), triton.plan(get_recipe("mxfp8"), hardware)
    a, w = reference.quantize(wide(128, 64), 1, plan.forward.a), reference.quantize(wide(1, 128, 64), 2, plan.forward.b)
    x = reference.quantize(wide(128, 128), 0, plan.wgrad.b, offs)
    monkeypatch.setattr(gemm.torch, "zeros", lambda *size, **kwargs: torch.full(size, 1000, **kwargs))
    with poisoned_empty():
        y = gemm.multiply_m_grouped(a, w, offs, None, FP32, hardware.mma, TILES)
        dw = gemm.multiply_k_grouped(x, x, offs, FP32, hardware.mma, TILES)[0]
    for out in (y, dw):  # tiles of 32 x 64, down the first column of tiles
        computed = ~out.isnan()
        assert computed[:96, :64].all() and not computed[96:].any() and not computed[:, 64:].any()


def test_offs_past_the_last_row(hardware: Hardware):
    check_offs_past_the_last_row(triton, triton.plan(get_recipe("mxfp8"), hardware))


@pytest.mark.parametrize("variant", ["bf16_tma", "bf16"])
def test_torch_multiplies_large_matrices_without_groups(variant: str, monkeypatch: pytest.MonkeyPatch):
    """The interpreter has 3 multiprocessors, which 4 tiles of 128 x 128 keep busy. A bias, fp32 or groups need ours."""
    here = VARIANTS[variant].hardware
    plan, ours = triton.plan(get_recipe("mxfp8"), here), Mock()
    monkeypatch.setattr(gemm, "hardware_of", lambda device: here)
    monkeypatch.setattr(gemm, "_prepared", set())
    monkeypatch.setattr(gemm, "multiply_m_grouped", ours.m_grouped)
    monkeypatch.setattr(gemm, "multiply_k_grouped", ours.k_grouped)
    for rows, features, is_large in ((130, 160, True), (70, 96, False), (0, 160, False)):
        x, w, dy = wide(rows, 160), wide(1, features, 160), wide(rows, features)
        a, b = reference.quantize(x, 1, plan.forward.a), reference.quantize(w, 2, plan.forward.b)
        g, b_first = reference.quantize(dy, 1, plan.dgrad.a), reference.quantize(w, 1, plan.dgrad.b)
        dy_m, x_m = reference.quantize(dy, 0, plan.wgrad.a), reference.quantize(x, 0, plan.wgrad.b)
        y, dx = gemm.gemm_m_grouped(a, b, None, None, BF16), gemm.gemm_m_grouped(g, b_first, None, None, BF16)
        dw = gemm.gemm_k_grouped(dy_m, x_m, None, BF16)
        # Where torch multiplies, ours are prepared for fewer tokens, once.
        assert (ours.m_grouped.call_count, ours.k_grouped.call_count) == (2, 1 if 0 < rows < 130 else 0)
        assert all(call.args[0].data.shape[0] == (0 if is_large else rows) for call in ours.m_grouped.call_args_list)
        if is_large:
            gemm.gemm_m_grouped(a, b, None, None, BF16)
            assert ours.m_grouped.call_count == 2
            judge(y, product_m_grouped(a, b, None, None), plan.forward, "y")
            judge(dx, product_m_grouped(g, b_first, None, None), plan.dgrad, "dx")
            judge(dw, product_k_grouped(dy_m, x_m, None, rows), plan.wgrad, "dw")
            offs = make_offs([rows])
            gemm.gemm_m_grouped(a, b, None, torch.zeros(1, features), BF16)
            gemm.gemm_m_grouped(a, b, None, None, FP32)
            gemm.gemm_m_grouped(a, b, offs, None, BF16)
            gemm.gemm_k_grouped(dy_m, x_m, None, FP32)
            gemm.gemm_k_grouped(dy_m, x_m, offs, BF16)
            assert (ours.m_grouped.call_count, ours.k_grouped.call_count) == (5, 2)
        ours.reset_mock()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120", "gfx942", "gfx950", "sm_100", "sm_103"])
def test_torch_multiplies_unquantised_groups_where_its_host_need_not_wait(arch: str, monkeypatch: pytest.MonkeyPatch):
    """On Blackwell of data centres. Elsewhere but on SM90 torch._grouped_mm copies the offsets to the host."""
    torchs, ours, rows = Mock(), Mock(), make_offs([3, 64])
    monkeypatch.setattr(gemm, "hardware_of", lambda device: Hardware(arch, arch))
    monkeypatch.setattr(gemm.reference, "gemm_k_grouped", torchs)
    monkeypatch.setattr(gemm, "multiply_k_grouped", ours)
    a = Operand(torch.zeros(64, 32, dtype=BF16), None, UNQUANTIZED, 0)
    for out_dtype in (BF16, FP32):
        gemm.gemm_k_grouped(a, a, rows, out_dtype)
    assert (torchs.call_count, ours.call_count) == ((2, 0) if arch.startswith("sm_10") else (0, 2))
    gemm.gemm_k_grouped(a, a, None, FP32)
    assert ours.call_count == (0 if arch.startswith("sm_10") else 2 if arch != "sm_90" else 3)


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
