"""TorchTitan 0.3's CUDA graphs with expert parallelism: who decides, on what, and what the log says."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_titan03 import EXPERTS, LINEARS, build, config
from torchtitan.config.override import OverrideConfig
from torchtitan.trainer import Trainer

from titan_mxfp8.titan03 import cuda_graph

BOUNDED = {"recipe": "mxfp8_2d", "dispatch": "collective", "dispatch_rows": "bounded"}


@pytest.fixture(autouse=True)
def with_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """As debug models have it on GPUs."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)


def parallel(model: str, *imports: str | tuple[str, dict]) -> Trainer.Config:
    """A config with graphs and expert parallelism after the overrides."""
    changed = config(model, *imports)
    changed.training.disable_cuda_graphs = False
    changed.parallelism.expert_parallel_degree = 2
    return changed


def test_torchtitan_asks_nothing_of_dispatchers_that_we_replace() -> None:
    refused = pytest.raises(ValueError, match="without CPU synchronization")
    parallel("deepseek_v3", (EXPERTS, BOUNDED))._validate_cuda_graphs()
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

    def __init__(self, config: Trainer.Config) -> None:
        self.config, self.model_parts, self.ran = config, [build(config)], []

    def body(self, *batch: object) -> str:
        self.ran.append(batch)
        return "eager"


def wrapped(trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch) -> object:
    """What the trainer takes as its step, where TorchTitan's capture gives the word ``graph``."""
    from torchtitan import trainer as titan

    monkeypatch.setattr(titan, "wrap_with_cuda_graph", lambda body: lambda *batch: "graph")
    cuda_graph.capture_where_nothing_waits()
    return titan.wrap_with_cuda_graph(trainer.body)


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
        with caplog.at_level(logging.INFO):
            step = wrapped(trainer, monkeypatch)
        off = bool(words) and degree == 2
        assert step() == ("eager" if off else "graph")
        said = "no CUDA graphs, as if --training.disable_cuda_graphs were set" in caplog.text
        assert trainer.config.training.disable_cuda_graphs == off == said
        assert words in caplog.text or not off
        caplog.clear()


def test_attention_of_kind_varlen_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    trainer = FakeTrainer(config("deepseek_v3"))
    trainer.config.training.disable_cuda_graphs = False
    assert wrapped(trainer, monkeypatch)() == "eager" and trainer.config.training.disable_cuda_graphs


def test_measured_steps_and_whoever_asks_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = FakeTrainer(parallel("deepseek_v3", (EXPERTS, BOUNDED | {"health_every": 2})))
    step, (model,) = wrapped(trainer, monkeypatch), trainer.model_parts
    graph, processor = trainer.mxfp8_graph, SimpleNamespace(model_parts=[])
    assert step("batch") == "eager" and trainer.ran == [("batch",)], "the first step of a run is measured"
    model.mxfp8_recorder.end(processor, 2)
    assert step() == "graph"
    with graph.eager(), graph.eager():
        assert step() == "eager"
    graph.discard()
    assert step() == "graph"
    model.mxfp8_recorder.every = {"health": 0}
    model.mxfp8_recorder._due = True
    assert step() == "eager"


def test_what_validation_left_gathered_is_freed_before_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = FakeTrainer(parallel("deepseek_v3", (EXPERTS, BOUNDED)))
    seen = []
    monkeypatch.setattr(cuda_graph, "fsdp_modules", lambda _: [SimpleNamespace(reshard=lambda: seen.append(1))])
    step = wrapped(trainer, monkeypatch)
    assert step() == "graph" and seen == [1]
