"""TorchTitan 0.3's CUDA graphs with expert parallelism: who decides, on what, and what the log says."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from test_titan03 import EXPERTS, LINEARS, build, config
from torchtitan.config.override import OverrideConfig
from torchtitan.trainer import Trainer

from titan_mxfp8.backends.hardware import Hardware, override_hardware
from titan_mxfp8.titan03 import cuda_graph

BATCH = (torch.ones(2), torch.zeros(2), torch.tensor(2), {"positions": torch.arange(2)})
BOUNDED = {"recipe": "mxfp8_2d", "dispatch": "collective", "dispatch_rows": "bounded"}


@pytest.fixture(autouse=True)
def with_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """As debug models have it on GPUs; they are converted for a CPU all the same."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)


def parallel(model: str, *imports: str | tuple[str, dict]) -> Trainer.Config:
    """A config with graphs and expert parallelism after the overrides."""
    changed = config(model, *imports)
    changed.training.disable_cuda_graphs = False
    changed.parallelism.expert_parallel_degree = 2
    return changed


def test_torchtitan_asks_nothing_of_dispatchers_that_we_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = pytest.raises(ValueError, match="without CPU synchronization")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    parallel("deepseek_v3", (EXPERTS, BOUNDED))._validate_cuda_graphs()
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"
    for imports in ([], [LINEARS]):
        with refused:
            parallel("deepseek_v3", *imports)._validate_cuda_graphs()
    parsed = parallel("deepseek_v3")  # before overrides are applied
    replace(parsed, override=OverrideConfig(imports=[(EXPERTS, BOUNDED)]))
    replace(parsed, override=OverrideConfig(imports=[EXPERTS]))
    with refused:
        replace(parsed, override=OverrideConfig(imports=[LINEARS]))
    parsed.override = OverrideConfig(imports=[EXPERTS])
    parsed.parallelism.pipeline_parallel_degree = 2
    with pytest.raises(ValueError, match="do not support pipeline parallelism"):
        parsed._validate_cuda_graphs()


class FakeTrainer:
    """What a trainer has when it wraps its step."""

    device = torch.device("cpu")

    def __init__(self, config: Trainer.Config) -> None:
        self.config, self.model_parts, self.ran = config, [build(config)], []
        self.parallel_dims = Mock(get_optional_mesh=lambda name: None)

    def body(self, *batch: object) -> str:
        self.ran.append(batch)
        return "eager"


class FakeGraph:
    """Runs what it would capture."""

    def __init__(self, step: Callable, model: object, device: object, group: object) -> None:
        self.step = step
        assert group is None, "one rank"

    def run(self, batch: dict, valid_tokens: object) -> str:
        self.batch = batch
        assert self.step(dict(batch), valid_tokens) == "eager"
        return "ours"


def wrapped(trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """The step that the trainer takes, with its arguments: the word ``ours`` or ``TorchTitan's`` where it is captured,
    and else what the trainer's own returns."""
    from torchtitan import trainer as titan

    monkeypatch.setattr(cuda_graph, "StepGraph", FakeGraph)
    monkeypatch.setattr(titan, "wrap_with_cuda_graph", lambda body: lambda *batch: "TorchTitan's")
    cuda_graph.capture_where_nothing_waits()
    return partial(titan.wrap_with_cuda_graph(trainer.body), *BATCH)


@pytest.mark.parametrize(
    "options, words",
    [
        (BOUNDED, ""),
        (BOUNDED | {"dispatch_rows": "counted"}, "layers.1.moe.routed_experts (dispatch_rows = 'counted'): set"),
        (BOUNDED | {"dispatch": "off", "dispatch_rows": "counted"}, "TorchTitan dispatches the tokens of layers.1"),
    ],
)
def test_nothing_is_captured_where_the_host_waits(
    options: dict, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for degree in (2, 1):
        trainer = FakeTrainer(parallel("deepseek_v3", (EXPERTS, options)))
        trainer.config.parallelism.expert_parallel_degree = degree
        step = wrapped(trainer, monkeypatch)
        off = bool(words) and degree == 2
        assert step() == ("eager" if off else "ours")
        said = "no CUDA graphs, as if --training.disable_cuda_graphs were set" in caplog.text
        assert said == off and trainer.config.training.disable_cuda_graphs
        assert words in caplog.text or not off
        caplog.clear()


@pytest.mark.parametrize("arch, fqns, captured", [("sm_80", "layers.1", False), ("sm_90", "layers.1", True)])
def test_nothing_is_captured_where_experts_in_bf16_wait(
    arch: str, fqns: str, captured: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with override_hardware(Hardware(arch, "NVIDIA")):
        for names, expected in ((fqns, captured), ("experts", True)):
            trainer = FakeTrainer(parallel("qwen3", (EXPERTS, BOUNDED | {"fqns": names})))
            trainer.config.parallelism.expert_parallel_degree = 1
            assert wrapped(trainer, monkeypatch)() == ("ours" if expected else "eager")
    assert ("waits on this GPU for the rows of layers.0.moe.routed_experts" in caplog.text) != captured


@pytest.mark.parametrize("attention, step", [("varlen", "eager"), ("flex", "TorchTitan's")])
def test_what_else_is_not_ours_to_capture(attention: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of kind varlen, which no graph can hold, and a model without converted modules."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: attention == "flex")
    trainer = FakeTrainer(config("deepseek_v3"))
    trainer.config.training.disable_cuda_graphs = False
    assert wrapped(trainer, monkeypatch)() == step
    assert trainer.config.training.disable_cuda_graphs == (step == "eager")


def test_the_graph_gets_tensors_and_the_step_what_they_were_taken_from(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = FakeTrainer(parallel("deepseek_v3", (EXPERTS, BOUNDED)))
    assert wrapped(trainer, monkeypatch)() == "ours"
    graph = trainer.mxfp8_graph
    assert list(map(id, graph.batch.values())) == list(map(id, (BATCH[0], BATCH[1], BATCH[3]["positions"])))
    assert trainer.ran == [BATCH], "the trainer's own step, once, with its arguments"
    closed = []
    graph.discard = lambda: closed.append("graph")
    trainer.close = lambda: closed.append("trainer")
    monkeypatch.setattr(Trainer, "close", lambda trainer: trainer.close())
    cuda_graph.destroy_graphs()
    Trainer.close(trainer)
    assert closed == ["graph", "trainer"]
