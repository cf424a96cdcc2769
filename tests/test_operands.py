"""What public functions say of things that are no ordinary tensors, and that lazily negated ones keep their sign."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from watch import look_at, process_group

from scripts.bench.problems import make_offs
from titan_mxfp8 import convert_model, mxfp8_grouped_mm, mxfp8_linear, mxfp8_moe, quantize
from titan_mxfp8.backends import reference

X, W, BIAS = torch.randn(20, 64), torch.randn(4, 96, 64), torch.randn(96)
OFFS = make_offs([3, 0, 6, 11])
IDS = torch.tensor([[0, 3]] * 20)
SCORES = torch.rand(20, 2)


def moe(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, **options: object) -> torch.Tensor:
    b1 = None if bias is None else bias.expand(4, 96)
    return mxfp8_moe(x, options.pop("scores", SCORES), IDS, w, w, w.mT, b1=b1, **options)


# function(x, w, bias); the third takes w of one expert
FUNCTIONS: dict[str, Callable] = {
    "mxfp8_grouped_mm": lambda x, w, bias=None: mxfp8_grouped_mm(x, w.mT, OFFS, bias, out_dtype=torch.float32),
    "mxfp8_moe": moe,
    "mxfp8_linear": lambda x, w, bias=None: mxfp8_linear(x, w[0] if isinstance(w, torch.Tensor) else w, bias),
}


@pytest.fixture(params=FUNCTIONS)
def function(request: pytest.FixtureRequest) -> Callable:
    return FUNCTIONS[request.param]


def test_backends_get_no_lazily_negated_tensor(function: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel reads memory, where the sign is not; torch's operators look at it."""
    seen = []
    for name in ("quantize", "quantize_both", "gemm_m_grouped"):
        look_at(monkeypatch, reference, name, lambda *args: seen.extend(getattr(arg, "data", arg) for arg in args))
    results = []
    for of in (torch._neg_view, torch.neg):
        x, w = of(X).detach().requires_grad_(), of(W).detach().requires_grad_()
        y = function(x, w, of(BIAS))
        y.backward(of(torch.ones_like(y)))
        results.append([y, x.grad, w.grad])
    tensors = [x for x in seen if isinstance(x, torch.Tensor)]
    assert len(tensors) >= 4 and not any(x.is_neg() for x in tensors)
    assert all(map(torch.equal, *results))


def test_quantize_gives_backends_no_lazily_negated_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    look_at(monkeypatch, reference, "quantize", lambda x, *_: seen.append(x.is_neg()))
    quantize(torch.randn(20, 64, dtype=torch.complex64).conj().imag)
    assert seen == [False]


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        (X.numpy(), "x must be a torch.Tensor, got ndarray: torch.from_numpy makes one"),
        (None, "x must be a torch.Tensor, got NoneType"),
        (X.to_sparse(), r"x is of layout torch.sparse_coo: pass x.to_dense\(\)"),
        (torch.nested.nested_tensor([X]), "x is nested: pass the rows of all its tensors"),
        (torch.nested.nested_tensor([X, X], layout=torch.jagged), r"x is nested: .*, x.values\(\) where layout"),
    ],
    ids=["NumPy", "None", "sparse", "nested", "jagged"],
)
def test_what_is_no_ordinary_tensor(thing: object, says: str) -> None:
    for name, function in (("mxfp8_linear", mxfp8_linear), ("mxfp8_moe", moe)):
        with pytest.raises(ValueError, match=f"^{name}: {says}"):
            function(thing, W[0] if name == "mxfp8_linear" else W)
    with pytest.raises(ValueError, match=f"^quantize: {says}"):
        quantize(thing)
    for name, call in {
        "mxfp8_linear: weight": lambda: mxfp8_linear(X, thing),
        "mxfp8_grouped_mm: a": lambda: mxfp8_grouped_mm(thing, W.mT, OFFS),
        "mxfp8_grouped_mm: b_t": lambda: mxfp8_grouped_mm(X, thing, OFFS),
        "mxfp8_moe: scores": lambda: moe(X, W, scores=thing),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}{says.removeprefix('x').replace('x.', name.split()[1] + '.')}"):
            call()


def test_activations_of_the_two_gemms_alone_may_come_quantised() -> None:
    for name, call in {
        "mxfp8_linear: weight": lambda x: mxfp8_linear(X, x),
        "mxfp8_grouped_mm: b_t": lambda x: mxfp8_grouped_mm(X, x, OFFS),
        "mxfp8_moe: x": lambda x: moe(x, W),
        "quantize: x": quantize,
    }.items():
        with pytest.raises(ValueError, match=f"^{name} is an MXTensor: pass the tensor"):
            call(quantize(X))


def test_a_forgotten_transpose_is_told() -> None:
    for call, says in (
        (lambda: mxfp8_linear(X, W[0].mT), r"mxfp8_linear takes .*: pass weight.mT"),
        (lambda: mxfp8_grouped_mm(X, W, OFFS), r"mxfp8_grouped_mm: .* disagree about K: pass b_t.mT"),
        (lambda: mxfp8_moe(X, SCORES, IDS, W.mT, W.mT, W), r"mxfp8_moe takes .*: pass w1.mT, w3.mT and w2.mT"),
    ):
        with pytest.raises(ValueError, match=f"^{says}"):
            call()


@process_group()
def test_dtensors_and_meshes_are_refused_with_what_to_pass() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    for group, got in ((mesh, "DeviceMesh"), ("ep", "'ep'")):
        with pytest.raises(ValueError, match=rf"^mxfp8_moe: group must be .* got {got}.* mesh.get_group\(name\)"):
            moe(X, W, group=group)
    assert torch.equal(moe(X, W, group=mesh.get_group("ep")), moe(X, W))
    for name, call in {
        "mxfp8_linear: weight": lambda w: mxfp8_linear(X, w),
        "mxfp8_moe: w1": lambda w: moe(X, w),
        "mxfp8_grouped_mm: b_t": lambda w: mxfp8_grouped_mm(X, w.mT, OFFS),
    }.items():
        with pytest.raises(ValueError, match=rf"^{name} is a DTensor: pass what .*, {name.split()[1]}.to_local\(\)"):
            call(distribute_tensor(W[0] if "linear" in name else W, mesh))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_converted_linear_takes_jagged_tensors(compiled: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    convert_model(model)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    rows = torch.randn(20, 64, requires_grad=True)
    y = run(torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 3, 3, 20])))
    (gradient,) = torch.autograd.grad(y.values().sum(), rows)
    expected = model(rows)
    assert torch.equal(y.values(), expected) and torch.equal(y.offsets(), torch.tensor([0, 3, 3, 20]))
    assert torch.equal(gradient, *torch.autograd.grad(expected.sum(), rows))
    heads = torch.nested.nested_tensor_from_jagged(torch.randn(20, 2, 64), torch.tensor([0, 3, 20])).transpose(1, 2)
    with pytest.raises(ValueError, match=r"^0: mxfp8_linear: x is nested"):
        model[0](heads)
