"""The experts' SwiGLU: its definition against autograd in fp64, and what the reference makes of it."""

import pytest
import torch
from swiglu_contract import BF16, check_nan_stays_in_its_group, check_swiglu
from test_moe_layer import activation

from scripts.bench.problems import relative_rms
from titan_mxfp8 import mxfp8_moe
from titan_mxfp8.backends import reference
from titan_mxfp8.format import swiglu
from titan_mxfp8.format.spec import Operand, OperandSpec
from titan_mxfp8.recipe import RECIPES, Recipe


@pytest.mark.parametrize("limit", [None, 7.0, 1.5])
@pytest.mark.parametrize("scored", [False, True])
def test_definition_is_what_autograd_gives(limit: float | None, scored: bool) -> None:
    gate, up, u = (torch.randn(64, 96).mul(2).to(BF16) for _ in range(3))
    scores = torch.rand(64) if scored else None
    g, v, s = (t.double().requires_grad_() for t in (gate, up, torch.ones(64) if scores is None else scores))
    h = activation(g, v, limit)
    (s[:, None] * h * u.double()).sum().backward()
    *ours, dscores = swiglu.backward(gate, up, u, scores, limit)
    for out, expected in zip(ours, (g.grad, v.grad, s[:, None] * h), strict=True):
        assert out.dtype == BF16
        torch.testing.assert_close(out.double(), expected.detach(), rtol=2**-8, atol=1e-6)
    forward = swiglu.forward(gate, up, limit)
    torch.testing.assert_close(forward.double(), h.detach(), rtol=2**-8, atol=1e-6)
    if scored:
        assert dscores.dtype == torch.float32
        exact = (u.double() * forward.double()).sum(1)
        assert relative_rms(dscores, exact) < 1e-6  # 1e-7 measured
    else:
        assert dscores is None


@pytest.mark.parametrize("recipe", dict.fromkeys(RECIPES.values()), ids=str)
def test_the_reference_does_not_read_past_a_group(recipe: Recipe) -> None:
    """Nor past all of them, where rows are NaN. Other backends: interpreted/test_contract.py and test_backends.py."""
    plan = reference.plan(recipe, None)
    check_swiglu(reference, plan, [0, 44, 1, 130, 0, 31, 0], 20, 160, None, True)
    check_nan_stays_in_its_group(reference, plan)


@pytest.mark.parametrize("limit", [None, 7.0])
def test_experts_take_a_kernel_that_makes_all_at_once(limit: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it says that it can: with the results, gradients included, of the kernels that it stands for."""
    made = []

    def at_once(
        a: Operand, w1: Operand, w3: Operand, biases: tuple, limit: float | None, spec: OperandSpec, offs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Operand] | None:
        if limit is not None:
            return None
        gate, up = (reference.gemm_m_grouped(a, w, offs, bias, BF16) for w, bias in zip((w1, w3), biases, strict=True))
        made.append((gate, up, reference.swiglu(gate, up, limit, spec, offs)))
        return made[-1]

    x, scores, ids = torch.randn(40, 64), torch.rand(40, 2), torch.rand(40, 4).topk(2, 1).indices
    inputs = [x, scores, *(torch.randn(4, *shape) for shape in ((96, 64), (96, 64), (64, 96)))]
    results = []
    for kernel in (None, at_once):
        monkeypatch.setattr(reference, "swiglu_gemm_m_grouped", kernel)
        x, scores, *weights = leaves = [t.clone().requires_grad_() for t in inputs]
        y = mxfp8_moe(x, scores, ids, *weights, recipe="mxfp8_2d_rebased", backend="reference", swiglu_limit=limit)
        y.sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    assert len(made) == (limit is None)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
