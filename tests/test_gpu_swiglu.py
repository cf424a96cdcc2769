"""SwiGLU on the GPU that is here, by the backend that is chosen for it."""

import pytest
import torch
from swiglu_contract import check_nan_stays_in_its_group, check_swiglu, elements, swiglu_inputs

from titan_mxfp8 import backends
from titan_mxfp8.recipe import get_recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


RECIPES = ("mxfp8", "mxfp8_2d", "mxfp8_2d_rebased", "mxfp8_e5m2_grad_rebased", "mxfp8_2d_wgrad_bf16")


@pytest.mark.parametrize("recipe", RECIPES)
def test_swiglu(recipe: str) -> None:
    """Twice the same bits, the scores' gradient included."""
    device = torch.device("cuda", 0)
    try:
        plan = backends.plan(get_recipe(recipe), "auto", device)
    except ValueError as error:
        pytest.skip(f"{error}")
    kernels = backends.load("auto", device)
    for sizes, extra, hidden, limit, scored in (
        ([0, 44, 1, 130, 0, 31, 0], 20, 160, None, True),
        ([128, 1, 256], 0, 416, 7.0, True),
        (None, 300, 224, None, False),
        ([0, 0], 40, 96, None, True),
        ([3, 0, 300], 7, 1408, None, True),
        ([700, 0, 1500, 257, 1], 5000, 2048, None, True),
    ):
        check_swiglu(kernels, plan, sizes, extra, hidden, limit, scored, device)
    check_nan_stays_in_its_group(kernels, plan, device)
    gate, up, u, scores, offs = (t.to(device) for t in swiglu_inputs([700, 0, 1500, 257, 1], 0, 1408))
    args = scores, 7.0, plan.dgrad.a, plan.wgrad.a, plan.wgrad.b, offs
    one, other = (kernels.swiglu_backward([gate, up, u.clone()], *args) for _ in range(2))
    assert torch.equal(one.dscores, other.dscores)
    for a, b in zip(one[:5], other[:5], strict=True):
        assert torch.equal(elements(a, 2458, 2464), elements(b, 2458, 2464))
