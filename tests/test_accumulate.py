"""Weight gradients in fp32 are made once, where ``.grad`` is, and later ones added to them by the GEMM: with what
autograd would give in any case, hooks and all."""

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint
from watch import look_at, process_group

from scripts.bench.problems import make_offs
from titan_mxfp8 import mxfp8_moe
from titan_mxfp8.backends import reference
from titan_mxfp8.ops import accumulate, expert_operators
from titan_mxfp8.ops.config import config_of
from titan_mxfp8.ops.experts import Weights
from titan_mxfp8.ops.grouped_experts import grouped_experts
from titan_mxfp8.recipe import get_recipe

E, D, H, T = 4, 64, 96, 50
IDS = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(i))[:2] for i in range(T)])
Layer = Callable[[torch.Tensor, list[torch.Tensor], str], torch.Tensor]


def moe(x: torch.Tensor, weights: list[torch.Tensor], recipe: str = "mxfp8_2d") -> torch.Tensor:
    return mxfp8_moe(x, torch.ones(T, 2), IDS, *weights, recipe=recipe)


def sorted_rows(x: torch.Tensor, weights: list[torch.Tensor], recipe: str = "mxfp8_2d") -> torch.Tensor:
    config = config_of(get_recipe(recipe).key, "reference", x.device)
    offs = make_offs([10, 0, 25, 15])
    return grouped_experts(x.bfloat16(), Weights(*weights), offs, config).float()


LAYERS: dict[str, Layer] = {"moe": moe, "sorted rows": sorted_rows}


def made() -> tuple[torch.Tensor, list[nn.Parameter]]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(T, D, generator=random)
    shapes = ((E, H, D), (E, H, D), (E, D, H))
    return x.requires_grad_(), [nn.Parameter(torch.randn(shape, generator=random) * 0.1) for shape in shapes]


def pointers(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What weight gradients were added to by GEMMs."""
    seen = []
    look_at(monkeypatch, reference, "gemm_k_grouped", lambda *args: seen.extend(x for x in args[4:] if x is not None))
    return seen


@pytest.mark.parametrize("recipe", ["mxfp8_2d", "mxfp8_2d_rebased", "mxfp8_wgrad_bf16", "bf16"])
@pytest.mark.parametrize("name", LAYERS)
def test_grad_is_what_the_gemm_wrote(name: str, recipe: str, added: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel of autograd's touches it, in the first microbatch and in later ones, whoever else holds it."""
    (x, weights), returned, held, first = made(), [], [], []
    # not the gradients, which autograd would copy
    look_at(monkeypatch, expert_operators, "gradients_of", after=lambda grads, *_: returned.append(pointers(grads[:3])))
    for microbatch in range(3):
        versions = [grad._version for grad in held]
        LAYERS[name](x, weights, recipe).square().sum().backward()
        held = [w.grad for w in weights]
        first = first or [grad.clone() for grad in held]
        assert pointers(held) == returned.pop()
        assert len(added) == 3 * microbatch
        assert all(torch.allclose(grad, (microbatch + 1) * one) for grad, one in zip(held, first, strict=True))
        assert all(grad._version > version for grad, version in zip(held, versions, strict=False))
    assert {*pointers(added)} == {*pointers(held)}


def hook_of_a_parameter(step, x, weights) -> list[torch.Tensor]:
    seen = []
    weights[1].register_hook(lambda grad: seen.append(grad.clone()))
    step(), step()
    return seen


def hook_behind_accumulation(step, x, weights) -> list[torch.Tensor]:
    seen = []
    weights[1].register_post_accumulate_grad_hook(lambda w: seen.append(w.grad.clone()))
    step(), step()
    return seen


def autograd_grad(step, x, weights) -> list[torch.Tensor]:
    step()
    return [*torch.autograd.grad(step(False), weights), *torch.autograd.grad(step(False), [x, weights[0]])]


def backward_of_some_inputs(step, x, weights) -> None:
    step()
    step(False).backward(inputs=[x])
    step(False).backward(inputs=[weights[0]])


def frozen(step, x, weights) -> None:
    weights[0].requires_grad_(False)
    step(), step()


def retained(step, x, weights) -> None:
    loss = step(False)
    loss.backward(retain_graph=True), loss.backward(retain_graph=True), loss.backward()


def kept_differentiable(step, x, weights) -> list[torch.Tensor]:
    step()
    before = [w.grad for w in weights]
    step(False).backward(create_graph=True)
    return before


def twice_in_one_graph(step, x, weights) -> None:
    step()
    (step(False) + 2 * step(False)).backward()


def one_weight_thrice(step, x, weights) -> None:
    weights[1] = weights[0]
    step(), step()


def gradient_that_lies_otherwise(step, x, weights) -> None:
    weights[0].grad = torch.ones(E, D, H).mT
    step()


def parts_of_a_buffer(step, x, weights) -> list[torch.Tensor]:
    """That somebody reads, and in which autograd leaves them, whatever else in the graph uses the weights."""
    buffer = torch.zeros(sum(w.numel() for w in weights))
    for w, part in zip(weights, buffer.split([w.numel() for w in weights]), strict=True):
        w.grad = part.view_as(w)
    step(), (step(False) + weights[0].square().sum()).backward()
    return [buffer]


def checkpointed(step, x, weights) -> None:
    step(), checkpoint(lambda: step(False), use_reentrant=False).backward()


def in_bf16(step, x, weights) -> None:
    weights[:] = [nn.Parameter(w.detach().bfloat16()) for w in weights]
    step(), step()


# What is done, and how often a GEMM adds.
CASES = {
    hook_of_a_parameter: 0,
    hook_behind_accumulation: 3,
    autograd_grad: 0,
    backward_of_some_inputs: 0,
    frozen: 0,
    retained: 6,
    kept_differentiable: 0,
    twice_in_one_graph: 3,
    one_weight_thrice: 0,
    gradient_that_lies_otherwise: 0,
    parts_of_a_buffer: 0,
    checkpointed: 3,
    in_bf16: 0,
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_gradients_are_autograds(case: Callable, name: str, added: list, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[torch.Tensor]:
        x, weights = made()

        def step(backward: bool = True) -> torch.Tensor:
            loss = LAYERS[name](x, weights).square().sum()
            return loss.backward() if backward else loss

        returned = case(step, x, weights) or []
        return [*returned, *[t.grad.clone() for t in (x, *weights) if t.grad is not None]]

    got = run()
    assert len(added) == CASES[case]
    monkeypatch.setattr(accumulate, "_will_execute", None)
    expected = run()
    assert len(added) == CASES[case] and len(got) == len(expected) >= 3
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("placement, adds", [(Shard(0), 3), (Replicate(), 0)], ids=str)
@process_group("fake", 2)
def test_what_ranks_hold_of_dtensors(placement, adds: int, added: list) -> None:
    """Of replicated ones gradients are partial sums, which autograd knows how to add."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    x, weights = made()
    params = [nn.Parameter(DTensor.from_local(w.detach(), mesh, [placement], run_check=False)) for w in weights]
    found = []
    for _ in range(2):
        moe(x, [param.to_local() for param in params]).square().sum().backward()
        moe(x, weights).square().sum().backward()
        found.append(pointers(param.grad.to_local() for param in params))
    assert len(added) == adds + 3 and found[0] == found[1]
    for param, w in zip(params, weights, strict=True):
        assert param.grad.placements == (placement,) and torch.equal(param.grad.to_local(), w.grad)
