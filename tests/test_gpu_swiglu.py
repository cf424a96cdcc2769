"""SwiGLU on the GPU that is here, by the backend that is chosen for it."""

import pytest
import torch
from swiglu_contract import check_nan_stays_in_its_group, check_swiglu

from titan_mxfp8 import backends
from titan_mxfp8.recipe import get_recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_2d", "mxfp8_2d_rebased", "mxfp8_e5m2_grad_rebased"])
def test_swiglu(recipe: str) -> None:
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
    ):
        check_swiglu(kernels, plan, sizes, extra, hidden, limit, scored, device)
    check_nan_stays_in_its_group(kernels, plan, device)
