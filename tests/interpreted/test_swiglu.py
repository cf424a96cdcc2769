"""The fused SwiGLU kernels against the definition, quantised by the reference: every form that a plan has, all kinds of
groups, odd sizes."""

import pytest
import torch
from swiglu_contract import check_nan_stays_in_its_group, check_swiglu, swiglu_inputs
from tiers import daily

from titan_mxfp8.backends import hopper, triton
from titan_mxfp8.backends.common import convert
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.recipe import get_recipe

CASES = [("hopper", recipe) for recipe in ("mxfp8", "mxfp8_2d", "mxfp8_2d_rebased", "mxfp8_2d_wgrad_bf16")]
CASES += [("hopper", recipe) for recipe in ("mxfp8_e5m2_grad", "mxfp8_e5m2_grad_rebased", "mxfp8_wgrad_bf16_rebased")]
CASES += [("triton", recipe) for recipe in ("mxfp8", "mxfp8_floor", "mxfp8_e5m2_grad", "mxfp8_wgrad_bf16", "bf16")]
DAILY = [("hopper", recipe) for recipe in ("mxfp8_2d", "mxfp8_wgrad_bf16_rebased")]
DAILY += [("triton", recipe) for recipe in ("mxfp8_e5m2_grad", "bf16")]
BACKENDS = {"hopper": (hopper, Hardware("sm_90", "H200")), "triton": (triton, Hardware("sm_100", "B200"))}


@pytest.mark.parametrize("backend, recipe", daily(CASES, *DAILY))
def test_forms(backend: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "cuda_capability_geq", lambda *capability: True)
    backend, hardware = BACKENDS[backend]
    plan = backend.plan(get_recipe(recipe), hardware)
    for sizes, extra, hidden, limit, scored in (
        ([0, 44, 1, 130, 0, 31, 0], 20, 160, None, True),
        ([3, 0, 30], 0, 96, 1.5, False),
        (None, 150, 96, 1.5, True),
        ([0, 0], 40, 96, None, True),
        *[([3, 0, 30], 7, 1408, None, True)] * ("2d" in recipe and "bf16" not in recipe),
    ):
        shares = check_swiglu(backend, plan, sizes, extra, hidden, limit, scored)
        print(recipe, sizes, hidden, {name: f"{share:.1e}" for name, share in shares.items()})
    check_nan_stays_in_its_group(backend, plan)


@pytest.mark.parametrize("backend, recipe", [("hopper", "mxfp8_2d"), ("triton", "bf16")])
def test_dgate_takes_the_memory_of_u(backend: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless rows of u are apart: the same result, elsewhere."""
    monkeypatch.setattr(convert, "cuda_capability_geq", lambda *capability: True)
    backend, hardware = BACKENDS[backend]
    plan = backend.plan(get_recipe(recipe), hardware)
    gate, up, u, scores, offs = swiglu_inputs([44, 0, 7], 0, 160)
    apart = torch.cat([u, u], 1)[:, :160]
    before, given = apart.clone(), u.clone()
    specs = plan.dgrad.a, plan.wgrad.a, plan.wgrad.b
    other, made = (backend.swiglu_backward([gate, up, x], scores, None, *specs, offs) for x in (apart, given))
    dgate = made.dgate_columnwise.data
    assert dgate.data_ptr() == given.data_ptr() and torch.equal(dgate, other.dgate_columnwise.data)
    assert torch.equal(apart, before) and not torch.equal(given, u)
