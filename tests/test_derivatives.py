"""Derivatives besides those of one backward: second ones and transforms are refused, exported graphs have gradients."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from scripts.bench.problems import make_offs
from titan_mxfp8 import convert_model, mxfp8_grouped_mm, mxfp8_linear, mxfp8_moe, quantize
from titan_mxfp8.ops.config import config_of
from titan_mxfp8.ops.experts import Weights
from titan_mxfp8.ops.grouped_experts import grouped_experts
from titan_mxfp8.recipe import get_recipe

OFFS = make_offs([10, 0, 7, 15])
T = 32
IDS = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(i))[:2] for i in range(T)])


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), requires_grad=True)


def experts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    weights = Weights(w, w, w, None, None, None)
    return grouped_experts(x.bfloat16(), weights, OFFS, config_of(get_recipe("mxfp8_2d").key, "auto", x.device)).float()


# layer(x (T, 64), w)
LAYERS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "linear": (mxfp8_linear, (64, 64)),
    "linear of FP8 rows": (lambda x, w: mxfp8_linear(quantize(x), w, recipe="mxfp8_2d"), (64, 64)),
    "grouped": (lambda x, w: mxfp8_grouped_mm(x, w, OFFS, out_dtype=torch.float32), (4, 64, 64)),
    "experts": (experts, (4, 64, 64)),
    "moe": (lambda x, w: mxfp8_moe(x, torch.ones(T, 2), IDS, w, w, w, recipe="mxfp8_2d"), (4, 64, 64)),
    "moe of scaled tokens": (lambda x, w: mxfp8_moe(x, torch.ones(T, 2), IDS, w, w, w, scores_first=True), (4, 64, 64)),
}


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> tuple[Callable, torch.Tensor, torch.Tensor]:
    function, shape = LAYERS[request.param]
    return function, values(T, 64), values(*shape)


@pytest.mark.parametrize("by", ["x", "w"])
def test_a_gradient_penalty_is_refused_whatever_is_asked_for(layer: tuple, by: str) -> None:
    """Only what leads to the inputs that are asked for is run then: x, w, or what x came from."""
    function, x, w = layer
    of = x if by == "x" else w
    y = function(x * 1, w).tanh()
    (gradient,) = torch.autograd.grad(y.sum(), of, create_graph=True)
    loss = y.mean() + gradient.square().mean()
    for inputs in ([x], [w], [x, w]):
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            torch.autograd.grad(loss, inputs, retain_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        loss.backward(inputs=[w], retain_graph=True)
    (again,) = torch.autograd.grad(function(x * 1, w).tanh().sum(), of)
    assert torch.equal(gradient, again), "the first derivative is what it is without a graph"


@pytest.mark.parametrize("name", ["linear", "grouped", "moe"])
def test_what_leads_to_the_inputs_keeps_none_of_them_and_makes_no_cycle(name: str) -> None:
    (function, shape), gone = LAYERS[name], []
    hidden = values(T, 64) * 1
    y = function(hidden, values(*shape))
    weakref.finalize(hidden, gone.append, "x")
    weakref.finalize(y.grad_fn, gone.append, "graph")
    gc.disable()
    try:
        del hidden
        assert gone == ["x"]
        y.sum().backward()
        del y
        assert gone == ["x", "graph"]
    finally:
        gc.enable()


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(64, 64))
    convert_model(made)
    return made


TRANSFORMS = {
    "grad": lambda m: torch.func.grad(lambda params: torch.func.functional_call(m, params, torch.ones(8, 64)).sum())(
        dict(m.named_parameters())
    ),
    "vjp": lambda m: torch.func.vjp(m, torch.ones(8, 64)),
    "jvp": lambda m: torch.func.jvp(m, (torch.ones(8, 64),), (torch.ones(8, 64),)),
    "vmap": lambda m: torch.vmap(m)(torch.ones(2, 8, 64)),
    "jacrev": lambda m: torch.func.jacrev(m)(torch.ones(1, 64)),
    "is_grads_batched": lambda m: torch.autograd.grad(
        m(torch.ones(8, 64)), list(m.parameters()), torch.ones(3, 8, 64), is_grads_batched=True
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused_in_words(transform: str) -> None:
    with pytest.raises(RuntimeError, match=r"^MXFP8 layers take no transforms of torch.func .*: use backward"):
        TRANSFORMS[transform](model())


def test_tracing_of_old_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"^0: mxfp8_linear: x must be a torch.Tensor, got Proxy: torch.fx cannot"):
        torch.fx.symbolic_trace(model())
    with pytest.raises(RuntimeError, match=r"torch.jit.trace cannot trace MXFP8 layers: use torch.export"):
        torch.jit.trace(model(), torch.randn(8, 64))


class Layers(nn.Module):
    """A linear before each of the other kinds, which trains only if they have gradients."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, (self.layer, shape) = nn.Linear(64, 64), LAYERS[name]
        self.w = nn.Parameter(values(*shape).detach())
        convert_model(self, recipe="mxfp8_2d")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.first(x), self.w)


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    module.zero_grad()
    module(x).square().sum().backward()
    return [param.grad for param in module.parameters()]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_an_exported_model_has_the_gradients_of_the_model(name: str, strict: bool) -> None:
    made, x = Layers(name), torch.randn(T, 64)
    exported = torch.export.export(made, (x,), strict=strict).module()
    for actual, expected in zip(gradients(exported, x), gradients(made, x), strict=True):
        assert torch.equal(actual, expected)
    y = exported(x)
    (gradient,) = torch.autograd.grad(y.sum(), exported.w, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(gradient.sum(), exported.first.weight)


@pytest.mark.parametrize("rows", [8, 64])
def test_one_exported_graph_takes_any_number_of_rows(rows: int) -> None:
    made = model()
    batch = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(made, (torch.randn(rows, 64),), dynamic_shapes=batch).module()
    for other in (8, 64, 100):
        x = torch.randn(other, 64)
        assert all(map(torch.equal, gradients(exported, x), gradients(made, x)))
