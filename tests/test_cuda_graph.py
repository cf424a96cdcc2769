"""``training.cuda_graph`` on a machine without a GPU: what is refused or lacks memory, and what the log says."""

import os
import re
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from test_plugin import GROUPED, convert, parse
from torchtitan.config import JobConfig

from titan_mxfp8.backends.hardware import CLUSTER_GPUS, Hardware, override_hardware
from titan_mxfp8.ops import observe
from titan_mxfp8.plugin import checks, trainer
from titan_mxfp8.titan import cuda_graph
from titan_mxfp8.titan.cuda_graph import GIB, WARM_UP, StepGraph, why_not_captured

ON, EP = "--training.cuda_graph=on", "--parallelism.expert_parallel_degree=2"
ROWS, DISPATCH = f"--{GROUPED}.dispatch_rows", f"--{GROUPED}.dispatch"
CONVERT = f"--model.converters={GROUPED}"


def parse_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, *flags: str, hardware: Hardware = CLUSTER_GPUS["H200"]
) -> JobConfig:
    """As if there were one."""
    monkeypatch.setattr(checks, "training_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(checks, "hardware_of", lambda _: hardware)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    return parse("--model.name=deepseek_v3", "--model.flavor=debugmodel", *flags)


def test_auto_is_the_default_and_off_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_on_a_gpu(monkeypatch, CONVERT).training.cuda_graph == "auto"
    assert parse_on_a_gpu(monkeypatch, CONVERT, "--training.cuda_graph=off").training.cuda_graph == "off"
    assert "NCCL_GRAPH_REGISTER" not in os.environ


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--parallelism.pipeline_parallel_degree=2"], "pipeline parallelism: set pipeline_parallel_degree = 1"),
        (["--parallelism.tensor_parallel_degree=2"], "tensor parallelism"),
        (["--parallelism.context_parallel_degree=2"], "context parallelism"),
        (["--parallelism.data_parallel_replicate_degree=2"], "DDP and HSDP"),
        (["--training.enable_cpu_offload"], "training.enable_cpu_offload: set it to false"),
        (["--optimizer.early_step_in_backward"], "optimizer.early_step_in_backward: set it to false"),
        (["--fault_tolerance.enable"], "TorchFT"),
        (["--model.name=llama3", "--model.flavor=debugmodel_varlen_attn"], "varlen"),
        ([EP, "--model.converters="], "TorchTitan dispatches the tokens"),
        ([EP, CONVERT, f"{DISPATCH}=off"], "TorchTitan dispatches the tokens"),
        ([EP, CONVERT, f"--{GROUPED}.recipe_name=mxfp8_wgrad_bf16"], "TorchTitan dispatches the tokens"),
        ([EP, CONVERT, f"{ROWS}=counted"], "dispatch_rows = 'counted'"),
        ([EP, CONVERT, f"{ROWS}=bounded", "--parallelism.expert_parallel_comm_backend=deepep"], "comm_backend"),
        (["--model.name=gpt_oss", "--model.converters="], "gpt_oss's own experts"),
    ],
)
def test_what_cannot_be_captured_is_refused_or_left_with_a_log_line(
    flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=f"'on' does not work with .*{words}.*, or set cuda_graph = 'off'"):
        parse_on_a_gpu(monkeypatch, *flags, ON)
    assert parse_on_a_gpu(monkeypatch, *flags, "--training.cuda_graph=auto").training.cuda_graph == "off"
    assert "no CUDA graphs (training.cuda_graph = 'auto') with" in caplog.text
    assert words in caplog.text and "NCCL_GRAPH_REGISTER" not in os.environ


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120", "sm_90", "sm_100"])
def test_experts_in_bf16_are_captured_where_torch_does_not_wait(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does, TorchTitan or torch._grouped_mm copies the numbers of rows to the host."""
    parse_here = partial(parse_on_a_gpu, monkeypatch, hardware=Hardware(arch, "NVIDIA"))
    waits = arch not in ("sm_90", "sm_100")
    qwen3 = "--model.name=qwen3", "--model.flavor=debugmodel_moe"
    for flags in ((), ("--model.converters=quantize.linear.mx",), qwen3):
        assert parse_here(*flags).training.cuda_graph == ("off" if waits else "auto")
    if waits:
        with pytest.raises(ValueError, match="'on' does not work with experts in bf16 on NVIDIA"):
            parse_here(ON)
    for flags in ((CONVERT,), ("--model.name=qwen3", "--model.flavor=debugmodel"), ("--model.name=llama3",)):
        assert parse_here(*flags, ON).training.cuda_graph == "on"


@pytest.mark.parametrize(
    "model, arch, ep, fqns, grouped_mm, captured",
    [
        ("qwen3", "sm_80", 1, "layers.1", True, False),
        ("qwen3", "sm_120", 1, "layers.1", True, False),
        ("qwen3", "sm_120", 1, "experts", True, True),
        ("qwen3", "sm_90", 1, "layers.1", True, True),
        ("qwen3", "sm_90", 1, "layers.1", False, False),
        ("qwen3", "sm_90", 2, "layers.1", True, False),
        ("qwen3", "sm_90", 2, "experts", True, True),
        ("gpt_oss", "sm_90", 1, "layers.1", True, False),
    ],
)
def test_no_capture_where_the_host_waits_for_experts_that_fqns_leave(
    model: str,
    arch: str,
    ep: int,
    fqns: str,
    grouped_mm: bool,
    captured: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(trainer, "StepGraph", MagicMock())
    monkeypatch.setattr(trainer, "group_of", lambda _: None)
    flavor = "debugmodel_moe_2layers" if model == "qwen3" else "debugmodel_2layers"
    converted = convert(parse(CONVERT, f"--{GROUPED}.fqns={fqns}"), model, flavor)
    for each in converted.modules():
        if hasattr(each, "use_grouped_mm"):
            each.use_grouped_mm = grouped_mm
    dims, eager = SimpleNamespace(ep=ep), object()
    ours = SimpleNamespace(
        model_parts=[converted], device=torch.device("cpu"), parallel_dims=dims, forward_backward_step=eager
    )
    with override_hardware(Hardware(arch, "NVIDIA")):
        trainer._capture(ours, required=False)
        assert (ours.forward_backward_step is not eager) == captured
        assert ("(training.cuda_graph = 'auto') with experts left in bf16" in caplog.text) != captured
        if not captured:
            with pytest.raises(ValueError, match="'on' does not work with experts left in bf16"):
                trainer._capture(ours, required=True)


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--model.converters=quantize.linear.float8", "model converter 'quantize.linear.float8'"),
        ("--experimental.custom_import=this", "custom_import 'this'"),
        ("--model.name=llama3_ft", "model 'llama3_ft'"),
    ],
)
def test_auto_leaves_what_was_never_tried(
    flag: str, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert parse_on_a_gpu(monkeypatch, flag).training.cuda_graph == "off"
    assert f"{words}, with which it was never tried: set cuda_graph = 'on' to try" in caplog.text
    assert parse_on_a_gpu(monkeypatch, flag, ON).training.cuda_graph == "on"


@pytest.mark.parametrize(
    "flags",
    [
        [CONVERT],  # one rank counts nothing
        ["--model.converters="],
        [CONVERT, f"{DISPATCH}=off"],
        [CONVERT, EP],  # rows are bounded, unless they are counted as the log then says
        [CONVERT, EP, f"{ROWS}=bounded"],
        [CONVERT, "--activation_checkpoint.mode=full", "--validation.enable"],
    ],
)
@pytest.mark.parametrize("value", ["on", "auto"])
def test_the_rest_is_captured(flags: list[str], value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_on_a_gpu(monkeypatch, *flags, f"--training.cuda_graph={value}").training.cuda_graph == value
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"  # expandable segments


@pytest.mark.parametrize(
    "cause, words",
    [
        (RuntimeError("operation not permitted\nlong"), r"graph \(operation not permitted\): something in them waits"),
        (torch.OutOfMemoryError("out of memory\nlong"), r"graph \(out of memory\): .* Take fewer tokens"),
    ],
)
def test_a_capture_that_failed_says_what_to_do(cause: RuntimeError, words: str) -> None:
    ended = RuntimeError("the end of the capture failed too")
    ended.__context__ = cause
    for error in (cause, ended):
        assert re.search(words, why_not_captured(error)) and "training.cuda_graph = 'off'" in why_not_captured(error)


def test_without_a_gpu_it_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="training on cpu: it needs NVIDIA GPUs"):
        parse(ON)
    assert parse().training.cuda_graph == "off" and "CUDA graph" not in caplog.text


@pytest.mark.parametrize(
    "free, of_others, required, captured",
    [(52, 0, False, True), (50, 0, False, False), (52, 2, False, False), (1, 0, True, True)],
)
def test_a_graph_that_would_not_fit_on_all_ranks_is_not_captured(
    free: int,
    of_others: int,
    required: bool,
    captured: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It takes 1.1 times 40 GiB and 2 here, and 5 are left free; ``of_others``: how many less another rank has."""
    gpu, calls = MagicMock(), []  # of 100 GiB
    gpu.is_current_stream_capturing.return_value = False
    gpu.memory_allocated.return_value, gpu.max_memory_allocated.return_value = 10 * GIB, 50 * GIB
    gpu.mem_get_info.return_value = free * GIB, 100 * GIB
    monkeypatch.setattr(cuda_graph.torch, "cuda", gpu)
    monkeypatch.setattr(cuda_graph.dist, "all_reduce", lambda least, *_, **__: least.sub_(of_others * GIB))

    class Graph(StepGraph):
        def _capture(self, adds: bool) -> None:
            calls.append("captured")
            self._graphs[adds], self._bytes = (MagicMock(), torch.zeros(())), 40 * GIB

    model = torch.nn.Linear(1, 1)

    def step(batch: dict[str, torch.Tensor], _: torch.Tensor) -> torch.Tensor:
        calls.append("eager")
        return model(batch["x"]).sum()

    graph = Graph(step, model, torch.device("cpu"), group=object(), required=required)
    for _ in range(WARM_UP + 2):
        graph.run({"x": torch.ones(1)}, 1.0)
    assert calls == ["eager"] * WARM_UP + (["captured"] if captured else ["eager"] * 2)
    assert caplog.text.count("no CUDA graphs from here on: one would need 51.0 GiB") == (not captured)
    if captured:
        gpu.mem_get_info.return_value = 41 * GIB, 100 * GIB
        model(torch.ones(1))  # a validation's
        assert graph._graphs, "there is room for both"
        gpu.mem_get_info.return_value = 39 * GIB, 100 * GIB
        model(torch.ones(1))
        assert not graph._graphs


def test_what_is_measured_runs_eagerly() -> None:
    model = torch.nn.Linear(1, 1)
    assert not cuda_graph.must_run_eagerly(model)
    with observe.recording():
        assert cuda_graph.must_run_eagerly(model)


def test_the_first_microbatch_of_a_step_says_what_there_was_before_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones add to gradients, which are a graph's too."""
    gpu, needed = MagicMock(), []
    gpu.is_current_stream_capturing.return_value = False
    gpu.max_memory_allocated.return_value = 50 * GIB
    gpu.memory_allocated.side_effect = [10 * GIB, 20 * GIB, 20 * GIB]  # of the steps that begin
    monkeypatch.setattr(cuda_graph.torch, "cuda", gpu)
    model = torch.nn.Linear(1, 1)

    def step(batch: dict[str, torch.Tensor], _: torch.Tensor) -> torch.Tensor:
        loss = model(batch["x"]).sum()
        loss.backward()
        return loss

    graph = StepGraph(step, model, torch.device("cpu"))
    monkeypatch.setattr(graph, "_fits", lambda: needed.append(graph._eager_bytes))
    for _ in range(3):
        model.zero_grad()
        for _ in range(2):
            graph.run({"x": torch.ones(1)}, 1.0)
    assert needed == [30 * GIB]
