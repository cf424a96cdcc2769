"""Gradients that the optimizer clips while it reads them (``titan.clipping``)."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torchtitan.distributed.utils import clip_grad_norm_

import titan_mxfp8.plugin  # noqa: F401 - what a run's config loads
from titan_mxfp8 import convert_model
from titan_mxfp8.titan.clipping import clip_in_optimizers_of


class Trainer:
    """What ``clip_in_optimizers_of`` takes for a trainer, of a pipeline with two optimizers. ``seen`` are the gradients
    of each step when its optimizers began, and after them."""

    def __init__(self, convert: bool = True, kind: type = torch.optim.AdamW, **options: object) -> None:
        torch.manual_seed(0)
        self.model_parts = [nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(2)]
        if convert:
            for part in self.model_parts:
                convert_model(part)
        options = options or {"lr": 1e-2, "fused": True}
        self.optimizers = [kind(part.parameters(), **options) for part in self.model_parts]
        self.norms: list[Tensor] = []
        self.seen: list[list[Tensor]] = []

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for part in self.model_parts for param in part.parameters()]

    def grads(self) -> list[Tensor]:
        return [param.grad.clone() for param in self.params]

    def clip(self, max_norm: float) -> None:
        self.norms.append(clip_grad_norm_(self.params, max_norm, foreach=True))

    def train_step(self, clip: Callable[["Trainer"], None], factor: float = 1.0, steps: bool = True) -> str:
        for param in self.params:
            param.grad = torch.randn_like(param) * factor
        clip(self)
        self.seen.append(self.grads())
        if steps:
            for optimizer in self.optimizers:
                optimizer.step()
        self.seen.append(self.grads())
        return "done"

    def state(self) -> list[Tensor]:
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        return [*self.params, *(state[name] for state in states for name in ("exp_avg", "exp_avg_sq"))]


def both(*clips: Callable[[Trainer], None], factor: float = 1.0, **how: object) -> tuple[Trainer, Trainer]:
    """A trainer whose gradients torch clips, and one whose optimizers do, after a step for each of ``clips``."""
    plain, ours = Trainer(convert=False, **how), Trainer(**how)
    clip_in_optimizers_of(ours)
    for trainer in (plain, ours):
        torch.manual_seed(1)
        for clip in clips:
            assert trainer.train_step(clip, factor) == "done"
    return plain, ours


def equal(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def clip_to(max_norm: float) -> Callable[[Trainer], None]:
    return lambda trainer: trainer.clip(max_norm)


def test_gradients_are_clipped_as_they_are_read() -> None:
    plain, ours = both(clip_to(0.5), clip_to(0.25))
    found, left = ours.seen[-2:]
    assert torch.stack(plain.norms).equal(torch.stack(ours.norms)) and ours.norms[0] > 10
    assert not equal(found, plain.seen[-2]), "they were multiplied before"
    for grad, wanted in zip(left, plain.seen[-1], strict=True):
        torch.testing.assert_close(grad, wanted, rtol=3e-7, atol=0)
    for value, wanted in zip(ours.state(), plain.state(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=2e-6, atol=1e-8)
    assert all(optimizer.grad_scale is None for optimizer in ours.optimizers)


def test_gradients_within_the_norm_keep_their_bits() -> None:
    plain, ours = both(clip_to(1e6))
    assert equal(ours.seen[-1], plain.seen[-1]) and equal(ours.state(), plain.state())


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e30])
def test_norms_that_are_not_finite(factor: float) -> None:
    plain, ours = both(clip_to(1.0), factor=factor)
    assert not plain.norms[0].isfinite()
    for grad, wanted in zip(ours.seen[-1], plain.seen[-1], strict=True):
        torch.testing.assert_close(grad, wanted, equal_nan=True, rtol=0, atol=0)


def a_part(trainer: Trainer) -> None:
    torch.nn.utils.clip_grads_with_norm_(trainer.params[:3], 0.5, torch.tensor(2.0))


def two_norms(trainer: Trainer) -> None:
    for part in trainer.model_parts:
        clip_grad_norm_(list(part.parameters()), 0.5)


@pytest.mark.parametrize("clip", [a_part, two_norms])
def test_torch_clips_what_is_not_all_by_one_norm(clip: Callable[[Trainer], None]) -> None:
    plain, ours = both(clip)
    assert equal(ours.seen[-1], plain.seen[-1]) and equal(ours.state(), plain.state())


def test_gradients_that_no_optimizer_reads_are_clipped_at_the_end_of_a_step() -> None:
    plain, ours = Trainer(convert=False), Trainer()
    clip_in_optimizers_of(ours)
    for trainer in (plain, ours):
        torch.manual_seed(1)
        trainer.train_step(clip_to(0.5), steps=False)
    assert equal(ours.grads(), plain.grads())
    assert not equal(ours.seen[-1], ours.grads())


def test_outside_of_a_step_torch_clips() -> None:
    _, ours = both(clip_to(0.5))
    before = ours.grads()
    ours.clip(0.1)
    assert not equal(ours.grads(), before)


@pytest.mark.parametrize(
    "how",
    [
        {"convert": False},
        {"lr": 1e-2, "foreach": True},
        {"kind": torch.optim.SGD, "lr": 1e-2, "fused": True},
    ],
)
def test_who_keeps_torchs_clipping(how: dict[str, object]) -> None:
    trainer = Trainer(**how)
    step = trainer.train_step
    clip_in_optimizers_of(trainer)
    assert trainer.train_step == step
    trainer.train_step(clip_to(0.5))
    assert equal(trainer.seen[0], trainer.seen[1])


def test_an_error_in_a_step_leaves_nothing_behind() -> None:
    _, ours = both()

    def fails(trainer: Trainer) -> None:
        trainer.clip(0.5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ours.train_step(fails)
    before = ours.grads()
    ours.clip(0.1)
    assert not equal(ours.grads(), before)
    ours.train_step(lambda trainer: None)
    assert equal(ours.seen[-2], ours.seen[-1]), "clipped by the norm of the step that failed"
