"""The fused SwiGLU kernels compiled for GPUs that are not here: no spills, registers, instructions.

``pytest -rP tests/test_swiglu_aot.py`` prints registers and shared memory of each.
"""

from types import ModuleType

import pytest
import torch
from aot import SHARED_BYTES, Kernel, compile_only
from tiers import daily
from triton import __version__ as triton_version

from titan_mxfp8.backends import hopper, sm100, triton
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.recipe import get_recipe

pytestmark = pytest.mark.integration

OFFS = torch.tensor([100, 100, 250], dtype=torch.int32)
SM100 = [(recipe, limit) for recipe in ("mxfp8", "mxfp8_2d_wgrad_bf16") for limit in (None, 7.0)]
RECIPES = ("mxfp8", "mxfp8_2d", "mxfp8_2d_rebased", "mxfp8_e5m2_grad_rebased", "mxfp8_2d_wgrad_bf16")


def compile_swiglu(
    target: str, backend: ModuleType, recipe: str, limit: float | None, offs: torch.Tensor | None
) -> dict[str, Kernel]:
    plan, hidden = backend.plan(get_recipe(recipe), Hardware(target, target)), 512 if limit is None else 480
    gate, up = torch.empty(256, 2 * hidden, dtype=torch.bfloat16).chunk(2, 1)
    u, scores = torch.empty(256, hidden, dtype=torch.bfloat16), torch.empty(256) if offs is not None else None
    with compile_only(target) as kernels:
        backend.swiglu(gate, up, limit, plan.forward.a, offs)
        backend.swiglu_backward([gate, up, u], scores, limit, plan, offs)
    for kernel in kernels:
        print(kernel)
        # Quantising along both axes has as few registers as Triton 3.6 can do with.
        may_spill = kernel.name == "_rebase_tiles" and not triton_version.startswith("3.6.")
        assert kernel.spills <= (32 if may_spill else 0) and not kernel.warnings
        assert kernel.shared <= SHARED_BYTES[target]
        # but for the sigmoid nothing flushes subnormals
        assert ".ftz" not in kernel.ptx.replace("ex2.approx.ftz", "").replace("rcp.approx.ftz", "")
    return {kernel.name.lstrip("_"): kernel for kernel in kernels}


LIMIT = pytest.param(7.0, None, id="limit", marks=pytest.mark.nightly)


@pytest.mark.parametrize("limit, offs", [pytest.param(None, OFFS, id="ragged"), LIMIT])
@pytest.mark.parametrize("recipe", daily(RECIPES, "mxfp8_2d_rebased"))
def test_sm_90(recipe: str, limit: float | None, offs: torch.Tensor | None) -> None:
    kernels = compile_swiglu("sm_90", hopper, recipe, limit, offs)
    forward = kernels["swiglu"]
    assert forward.registers <= 72 and forward.count("LDG.E.128") == 8 and forward.count("F2F.") == 0
    assert forward.count("STG.E.64") + forward.count("STG.E.128") >= 4
    if "rebased" in recipe:
        gradients = kernels["rebased_swiglu_backward"]
        # Two programs of 8 warps fit on a multiprocessor; with a limit and a Triton after 3.6 one.
        most = 168 if limit and not triton_version.startswith("3.6.") else 128
        assert gradients.registers <= most and 2 * gradients.shared <= SHARED_BYTES["sm_90"]
        # Each number is loaded once, and elements are stored 8 at a time along H, 16 along M.
        assert gradients.count("F2F.") == 0 and gradients.count("LDG.E.128") == 24
        assert gradients.count("STG.E.64") == 16 and gradients.count("STG.E.128") == 12
        return
    backward = kernels["swiglu_backward_in_rows"]
    # Three programs of 4 warps fit on a multiprocessor, four with values in bf16 alone; by Triton 3.6 two with a limit.
    most = 216 if limit and triton_version.startswith("3.6.") else 128 if recipe == "mxfp8" and not limit else 168
    assert backward.registers <= most
    assert not limit or "min.NaN.f32" in backward.ptx
    # Each number is loaded once, and rounded to bf16 and to values two at a time.
    assert backward.count("LDG.E.128") == 12 and backward.count("STG.E.128") >= 12
    assert backward.count("F2F.") == 0 and ("bf16" in recipe or backward.count("HFMA2") >= 100)


@pytest.mark.parametrize("offs", [OFFS, pytest.param(None, marks=pytest.mark.nightly)], ids=["ragged", "one"])
@pytest.mark.parametrize("recipe, limit", daily(SM100, ("mxfp8", None)))
def test_sm_100(recipe: str, limit: float | None, offs: torch.Tensor | None) -> None:
    """The kernels that write scales in tiles. With 4 warps three programs fit on a multiprocessor, four in bf16."""
    kernels = compile_swiglu("sm_100", sm100, recipe, limit, offs)
    assert set(kernels) == {"swiglu", "swiglu_backward", *["map_tiles"] * (offs is not None)}
    forward, backward = kernels["swiglu"], kernels["swiglu_backward"]
    assert forward.registers <= 64 and forward.count("LDG.E.128") == 8 and forward.count("STG.E.128") >= 1
    assert backward.registers <= (128 if "bf16" in recipe else 168)
    assert backward.count("LDG.E.128") >= 24 and backward.count("STG.E.128") >= (16 if "bf16" in recipe else 10)
    for kernel in (forward, backward):
        assert kernel.count("F2FP.SATFINITE.E4M3") >= 8 and kernel.count("F2F.") == 0


ELSEWHERE = [(target, "mxfp8", None) for target in ("sm_80", "sm_100", "gfx950")]
ELSEWHERE += [("sm_80", "mxfp8_floor", 7.0), ("sm_80", "mxfp8_e5m2_grad", None)]  # assembly of other roundings


@pytest.mark.nightly
@pytest.mark.parametrize("target, recipe, limit", ELSEWHERE)
def test_elsewhere(target: str, recipe: str, limit: float | None) -> None:
    compile_swiglu(target, triton, recipe, limit, OFFS)
