"""The backend of SM100 without one: its quantisers in the interpreter, and torch's GEMMs as ``scaled_mm`` has them."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import scaled_mm
import torch
from contract import BF16, assert_same, check_swizzled_scales, of_groups, uneven
from poison import poisoned_empty
from swiglu_contract import swiglu_inputs
from tiers import daily
from torch._subclasses.fake_tensor import FakeTensorMode
from watch import other_hardware

from scripts.bench.problems import make_offs, relative_rms
from titan_mxfp8 import backends, mxfp8_grouped_mm, mxfp8_linear, mxfp8_moe
from titan_mxfp8.backends import sm100
from titan_mxfp8.backends.common import convert
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.format import reference, swizzle
from titan_mxfp8.format.spec import OperandSpec
from titan_mxfp8.ops import library
from titan_mxfp8.recipe import get_recipe

HARDWARE = Hardware("sm_100", "NVIDIA B200")
BLOCKED = OperandSpec(scales="swizzled")
LAYERS = ("mxfp8", "mxfp8_2d", "mxfp8_e5m2_grad", "mxfp8_2d_wgrad_bf16", "bf16")
SIZES = [0, 44, 1, 64, 0, 31, 0]  # and 20 rows of no group


@pytest.fixture(autouse=True)
def sm_100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "cuda_capability_geq", lambda *capability: True)


@pytest.mark.parametrize("sizes", [None, [1300], [0, 1, 44, 130, 0, 1080]])
def test_swizzled_scales(sizes: list[int] | None) -> None:
    check_swizzled_scales(sizes, 160)


def test_rows_with_swizzled_scales_are_requantised() -> None:
    """Along the features, to the same values, elements stay what they are."""
    plan, offs = sm100.plan(get_recipe("mxfp8"), HARDWARE), make_offs([0, 1, 44, 130, 0, 80])
    x, spec = uneven((300, 160), BF16), plan.wgrad.b
    rows = reference.quantize(x, 1, OperandSpec())
    ours = sm100.requantize(rows, 1, spec, offs)
    assert torch.equal(swizzle.unswizzle(ours, offs).scale[:255], rows.scale[:255]) and ours.data is rows.data
    tiles = reference.quantize(x, 1, spec, offs)
    again, plain = sm100.requantize(tiles, 0, spec, offs), swizzle.unswizzle(tiles, offs)
    assert_same(of_groups(again, offs), of_groups(reference.requantize(plain, 0, spec, offs), offs))


def test_swiglu_leaves_zeros_in_tiles_of_no_group() -> None:
    plan = sm100.plan(get_recipe("mxfp8"), HARDWARE)
    gate, up, u, scores, offs = swiglu_inputs([0, 44, 130, 0], 400, 160)
    with poisoned_empty():
        h = sm100.swiglu(gate, up, None, plan.forward.a, offs)
        made = sm100.swiglu_backward([gate, up, u], scores, None, plan, offs)
    for operand in (h, made.dgate_rowwise, made.dup_rowwise):
        assert operand.scale[: 3 * 128].any() and not operand.scale[3 * 128 :].any()
        assert (operand.data[174:].view(torch.uint8) == 0xFF).all()  # as they were


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What ``auto`` finds is an SM100."""
    monkeypatch.setattr(backends, "hardware_of", lambda device: HARDWARE)
    with other_hardware():
        yield


def gradients(layer: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = layer(*leaves)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def cut_out(bias: torch.Tensor) -> torch.Tensor:
    """The same numbers as every second one of a wider tensor, as gpt_oss's biases are."""
    return torch.stack([bias + 1, bias], 2)[..., 1]


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("recipe", daily(LAYERS, "mxfp8_2d", "bf16"))
def test_layers_are_those_of_the_reference(recipe: str) -> None:
    """Grouped GEMM, linear and experts, forward and backward: offsets reach every quantiser that places scales."""
    offs, experts = make_offs(SIZES), len(SIZES)
    x, w, bias = torch.randn(160, 96), torch.randn(experts, 64, 96) / 10, torch.randn(experts, 64)
    w1, w3, w2 = (torch.randn(experts, *shape) / 10 for shape in ((64, 96), (64, 96), (96, 64)))
    b2 = torch.randn(experts, 96)
    likes, scores = torch.rand(96, experts), torch.rand(96, 2)
    likes[:, 1] += 1  # all tokens choose one expert
    ids = likes.topk(2, 1).indices

    def grouped(backend: str) -> list[torch.Tensor]:
        def layer(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            options = {"recipe": recipe, "bias": cut_out(bias), "backend": backend}
            both = (mxfp8_grouped_mm(x, w.mT, offs, requantize_input=again, **options) for again in (False, True))
            return torch.cat([y[: sum(SIZES)] for y in both])

        return gradients(layer, *(t.to(BF16) for t in (x, w, bias)))

    def linear(backend: str) -> list[torch.Tensor]:
        layer = partial(mxfp8_linear, recipe=recipe, backend=backend)
        return gradients(layer, *(t.to(BF16) for t in (x, w[0], bias[0])))

    def moe(backend: str) -> list[torch.Tensor]:
        def layer(x, scores, w1, w3, w2):
            return mxfp8_moe(x, scores, ids, w1, w3, w2, recipe=recipe, backend=backend)

        return gradients(layer, *(t.to(BF16) for t in (x[:96], scores, w1, w3, w2)))

    def gpt_oss(backend: str) -> list[torch.Tensor]:
        def layer(x, scores, w1, w3, w2, b1, b3, b2):
            biases = {"b1": cut_out(b1), "b3": cut_out(b3), "b2": b2, "swiglu_limit": 7.0}
            return mxfp8_moe(x, scores, ids, w1, w3, w2, recipe=recipe, backend=backend, **biases)

        return gradients(layer, *(t.to(BF16) for t in (x[:96], scores, w1, w3, w2, bias, bias.flip(0), b2)))

    for layer in (grouped, linear, moe, gpt_oss):
        with scaled_mm.installed() as calls:
            ours = layer("auto")
        called = {"scaled_mm" if layer is linear else "scaled_grouped_mm"}
        assert set(calls) == (set() if recipe == "bf16" else called)
        errors = [relative_rms(a, b) for a, b in zip(ours, layer("reference"), strict=True)]
        # Measured 0. With groups a bias is added to products that are rounded already: 2.4e-3 of y, and 1.5e-2 where
        # such pre-activations are quantised again, which is 0.037 from fp32. E5M2 has half of E4M3's precision.
        limits = {grouped: (3e-3, 1e-3), gpt_oss: (2e-2, 4e-2 if "e5m2" in recipe else 2e-2)}.get(layer, (1e-3, 1e-3))
        assert errors[0] < limits[0] and max(errors[1:]) < limits[1], (layer.__name__, errors)


@pytest.mark.usefixtures("chosen")
def test_operators_have_the_shapes_that_compilers_are_told() -> None:
    offs, x, w = make_offs(SIZES), torch.randn(160, 96, dtype=BF16), torch.randn(7, 64, 96, dtype=BF16)
    key, rows = BLOCKED.key, OperandSpec().key
    scale = reference.quantize(x, 1, OperandSpec())
    for operator, *arguments in (
        (library.quantize, x, 1, key, offs),
        (library.quantize, x, 1, key, None),
        (library.quantize, x, 0, key, offs),
        (library.quantize, w, 1, key, None),
        (library.quantize_both, x, key, key, offs),
        (library.requantize, scale.data, scale.scale, rows, 1, key, offs),
        (library.requantize, scale.data, scale.scale, rows, 0, key, offs),
    ):
        real = operator(*arguments, "auto")
        with FakeTensorMode() as mode:
            moved = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            fake = operator.overload(*moved, "auto")
        assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in fake], operator.overload
