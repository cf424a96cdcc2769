"""Weights that a step of several microbatches quantises once (``titan.once``)."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_plugin import GROUPED
from test_plugin_moe import DISPATCH, RECIPE, D, convert, layer
from torch import nn
from torch.utils.checkpoint import checkpoint
from watch import look_at

from titan_mxfp8.backends import reference, triton
from titan_mxfp8.ops.experts import quantize_ahead
from titan_mxfp8.plugin.experts import RoutedExperts
from titan_mxfp8.recipe import get_recipe
from titan_mxfp8.titan import once
from titan_mxfp8.titan.gather import BlocksParam
from titan_mxfp8.titan.once import QuantizedOnce, quantize_once

MICROBATCHES = 4


def plainly(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return made(x)


class Trainer:
    """What ``quantize_once`` takes for a trainer. ``run`` is how a forward pass calls its model."""

    def __init__(self, model: nn.Module, run: Callable = plainly, on: bool = True) -> None:
        self.model, self.run = model, run
        self.model_parts, self.device = [model], torch.device("cpu")
        self.gradient_accumulation_steps = MICROBATCHES
        self.parallel_dims = SimpleNamespace(pp_enabled=False, get_optional_mesh=lambda name: None)
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.5)]
        if on:
            self.quantize_once()

    def quantize_once(self) -> None:
        modules = [each for each in self.model.modules() if isinstance(each, RoutedExperts)]
        quantize_once(self, {each: partial(each.weights, False) for each in modules})

    def forward_backward_step(self, *, x: torch.Tensor) -> torch.Tensor:
        loss = self.run(self.model, x).square().mean()
        loss.backward()
        return loss.detach()

    def steps(self, count: int = 2) -> list[torch.Tensor]:
        """Losses of ``count`` steps, and the weights after them."""
        generator, losses = torch.Generator().manual_seed(1), []
        for _ in range(count):
            for _ in range(MICROBATCHES):
                losses.append(self.forward_backward_step(x=torch.randn(2, 17, D, generator=generator)))
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [*losses, *self.model.parameters()]


def of_layer(*flags: str, model: str = "deepseek_v3", **options: object) -> Trainer:
    torch.manual_seed(0)
    return Trainer(convert(layer(model), *flags), **options)


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The axes along which weights were quantised."""
    axes = []
    for owner in (reference.reference, reference):
        look_at(monkeypatch, owner, "quantize", lambda x, axis, *_: axes.extend([axis] * (x.ndim == 3)))
    return axes


def experts_of(model: nn.Module) -> RoutedExperts:
    return next(module for module in model.modules() if isinstance(module, RoutedExperts))


ONCE = [1, 1, 1, 2, 2, 2]
# Flags, model, and how a forward pass calls it.
CASES = {
    "checkpointed": ([f"{RECIPE}=mxfp8_2d"], "deepseek_v3", partial(checkpoint, use_reentrant=False)),
    "compiled": (
        [f"{RECIPE}=mxfp8_2d_rebased"],
        "deepseek_v3",
        torch.compile(plainly, backend="aot_eager", fullgraph=True),
    ),
    "scores first": ([f"{RECIPE}=mxfp8"], "llama4", plainly),
    "sorted by TorchTitan": ([f"{RECIPE}=mxfp8", f"{DISPATCH}=off"], "gpt_oss", plainly),
    "bf16": ([f"{RECIPE}=bf16"], "deepseek_v3", plainly),
}


@pytest.mark.parametrize("case", CASES)
def test_a_weight_is_quantised_once_for_each_gemm_and_bits_are_the_same(case: str, quantized: list[int]) -> None:
    flags, model, run = CASES[case]
    expected = of_layer(*flags, model=model, on=False).steps()
    each_time = len(quantized)
    quantized.clear()
    trainer = of_layer(*flags, model=model, run=run)
    actual = trainer.steps()
    if case != "bf16":
        assert sorted(quantized) == sorted(2 * ONCE) and each_time >= MICROBATCHES * len(quantized)
    assert all(map(torch.equal, actual, expected)) and len(set(map(float, actual[: 2 * MICROBATCHES]))) > 4
    assert not experts_of(trainer.model).kept


def test_what_is_quantised_holds_until_the_step_ends(quantized: list[int]) -> None:
    """Not after an optimizer's step that comes early, an edit between steps, or an error, nor in a validation."""
    results = []
    for on in (False, True):
        trainer = of_layer(f"{RECIPE}=mxfp8_2d", on=on)
        trainer.steps(1)
        experts_of(trainer.model).w1.data.mul_(-1.5)
        with torch.no_grad():
            trainer.run(trainer.model.eval(), torch.ones(1, 5, D))
        trainer.model.train()
        x = torch.randn(2, 17, D, generator=torch.Generator().manual_seed(3))
        losses = [trainer.forward_backward_step(x=x) for _ in range(2)]
        assert bool(experts_of(trainer.model).kept) == on
        trainer.optimizers[0].step()
        quantized.clear()
        losses += [trainer.forward_backward_step(x=x) for _ in range(2)]
        assert not on or sorted(quantized) == sorted(ONCE)
        with pytest.raises(RuntimeError):
            trainer.forward_backward_step(x=x[..., :3])
        assert not experts_of(trainer.model).kept
        experts_of(trainer.model).w2.data.mul_(0.5)
        results.append([*losses, *trainer.steps(1)])
    assert all(map(torch.equal, *results)) and len(set(map(float, results[1][:4]))) == 2


def test_layers_run_again_as_they_ran_where_optimizers_step_in_backward() -> None:
    """TorchTitan's ``early_step_in_backward``: the gain steps before the layer is computed again."""
    results = []
    for on in (False, True):
        trainer = of_layer(f"{RECIPE}=mxfp8", on=False)
        trainer.model.gain = nn.Parameter(torch.ones(()))
        trainer.run = lambda made, x: made.gain * checkpoint(made, x, use_reentrant=False)
        trainer.optimizers = []
        for param in trainer.model.parameters():
            optimizer = torch.optim.SGD([param], lr=0.5)
            trainer.optimizers.append(optimizer)
            param.register_post_accumulate_grad_hook(lambda _, of=optimizer: (of.step(), of.zero_grad())[1])
        if on:
            trainer.quantize_once()
        results.append(trainer.steps())
        assert not experts_of(trainer.model).kept and trainer.model.gain != 1
    assert all(map(torch.equal, *results))


def test_a_pipelines_step_has_several_microbatches_in_one_call(quantized: list[int]) -> None:
    trainer = of_layer(f"{RECIPE}=mxfp8_2d", on=False)
    trainer.gradient_accumulation_steps = 1
    single = trainer.forward_backward_step
    trainer.quantize_once()
    assert trainer.forward_backward_step == single, "one microbatch: nothing to keep"
    trainer.parallel_dims.pp_enabled = True
    trainer.forward_backward_step = lambda *, x: [single(x=part) for part in x.chunk(2)][-1]
    trainer.quantize_once()
    x = torch.randn(2, 17, D)
    for _ in range(2):
        quantized.clear()
        trainer.forward_backward_step(x=x)
        assert sorted(quantized) == sorted(ONCE) and not experts_of(trainer.model).kept


def test_cuda_graphs_find_it_where_it_was() -> None:
    """Steps that have come to stay eager keep nothing for them."""
    trainer, each_time = of_layer(f"{RECIPE}=mxfp8"), of_layer(f"{RECIPE}=mxfp8", on=False)
    setattr(trainer, once.GRAPH, SimpleNamespace(is_eager=False))
    places, run = [], trainer.run
    trainer.run = lambda made, x: places.append([w.data_ptr() for w in made.experts.kept]) or run(made, x)
    assert all(map(torch.equal, trainer.steps(3), each_time.steps(3)))
    assert len(places) == 3 * MICROBATCHES and all(place == places[0] for place in places) and len(set(places[0])) == 12
    getattr(trainer, once.GRAPH).is_eager = True
    kept = []
    trainer.run = lambda made, x: kept.extend(map(weakref.ref, made.experts.kept)) or run(made, x)
    trainer.steps(1)
    assert len(kept) == 12 * MICROBATCHES and not any(ref() is not None for ref in kept)


@pytest.mark.parametrize(
    "free, others, resumed, wanted",
    [(60, 60, False, True), (1, 60, False, False), (60, 1, False, False), (60, 60, True, True), (1, 60, True, False)],
)
def test_auto_leaves_it_where_memory_is_short(
    free: int,
    others: int,
    resumed: bool,
    wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On this rank or another, which the second step knows. The first one is without it if a checkpoint has brought the
    optimizer's state."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * once.GIB, 80 * once.GIB))
    less = min(0, others - free) * once.GIB
    monkeypatch.setattr(once, "least_of_ranks", lambda values, *_: [value + less for value in values])
    trainer, discarded = of_layer(f"{RECIPE}=mxfp8", on=False), []
    experts = experts_of(trainer.model)
    trainer.device = torch.device("cuda")
    made = partial(quantize_ahead, experts.weights(False)[:3], experts.mxfp8)
    steps = QuantizedOnce(trainer, [once._Holder(experts, made, 2**20)], auto=True)
    setattr(trainer, once.GRAPH, SimpleNamespace(is_eager=False, discard=lambda: discarded.append(1)))
    state = {"exp_avg": torch.zeros(3)}
    trainer.optimizers = [SimpleNamespace(state={0: state} if resumed else {})]
    seen = []
    for _ in range(3):
        steps.begin()
        seen.append(bool(experts.kept))
        steps.end()
        trainer.optimizers[0].state[0] = state
    assert seen == [not resumed, wanted, wanted] and len(discarded) == (wanted == resumed)
    assert ("too little memory" in caplog.text) == (not wanted and not resumed)


def test_who_quantises_each_time(caplog: pytest.LogCaptureFixture) -> None:
    of_layer(f"{RECIPE}=mxfp8_2d")
    of_layer(f"{RECIPE}=mxfp8_2d", f"--{GROUPED}.quantize_weights_once=off")
    assert caplog.text.count("quantises the experts' weights") == 1
    elements = 3 * 8 * D * 96
    assert (
        f"quantises the experts' weights of 1 MoE layer once, and keeps {2 * elements / once.GIB:.2f} GiB"
        in caplog.text
    )
    experts, plan = experts_of(of_layer(f"{RECIPE}=mxfp8").model), reference.plan(get_recipe("mxfp8"), None)
    experts._is_fsdp_managed_module = True
    assert "FSDP frees" in once.why_each_time(experts)
    experts.mxfp8 = replace(experts.mxfp8, plan=plan.map(triton.in_bf16))
    assert "with recipe mxfp8 their values are multiplied in bf16" in once.why_each_time(experts)


def test_fsdp_sends_what_is_kept_of_a_shard() -> None:
    """In a run: tests/parallel_gather.py."""
    param = BlocksParam.__new__(BlocksParam)
    param._sharded_param_data, param.sharded_size = torch.randn(2 * 32 * 64), torch.Size((2, 32, 64))
    param.mxfp8_spec, param.mxfp8_backend = reference.plan(get_recipe("mxfp8_2d"), None).forward.b.key, "reference"
    made, (sent, _) = param.quantize_shard(), param.fsdp_pre_all_gather(None, None, None, None, None)
    assert all(map(torch.equal, sent, made)) and [x.shape for x in sent] == [(2, 32, 64), (2, 1, 2)]
    param._sharded_param_data.zero_()
    param.kept = made
    assert all(map(torch.equal, param.fsdp_pre_all_gather(None, None, None, None, None)[0], made))
    param.kept = ()
    assert not param.fsdp_pre_all_gather(None, None, None, None, None)[0][0].any()
