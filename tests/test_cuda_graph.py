"""``training.cuda_graph`` on a machine without a GPU: what is refused at parse, and what the log says."""

import os
import re

import pytest
import torch
from test_plugin import GROUPED, parse
from torchtitan.config import JobConfig

from titan_mxfp8.backends.hardware import CLUSTER_GPUS
from titan_mxfp8.plugin import checks
from titan_mxfp8.titan.cuda_graph import why_not_captured

ON, EP = "--training.cuda_graph=on", "--parallelism.expert_parallel_degree=2"
ROWS, DISPATCH = f"--{GROUPED}.dispatch_rows", f"--{GROUPED}.dispatch"
CONVERT = f"--model.converters={GROUPED}"


def parse_on_a_gpu(monkeypatch: pytest.MonkeyPatch, *flags: str) -> JobConfig:
    """As if there were one."""
    monkeypatch.setattr(checks, "training_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(checks, "hardware_of", lambda _: CLUSTER_GPUS["H200"])
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    return parse("--model.name=deepseek_v3", "--model.flavor=debugmodel", *flags)


def test_off_is_the_default_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_on_a_gpu(monkeypatch, CONVERT).training.cuda_graph == "off"
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
    assert "training.cuda_graph = 'auto' is off here: it does not work with" in caplog.text and words in caplog.text
    assert "NCCL_GRAPH_REGISTER" not in os.environ


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
    assert parse_on_a_gpu(monkeypatch, *flags, f"--training.cuda_graph={value}").training.cuda_graph == "on"
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


def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(ValueError, match="training on cpu: it needs NVIDIA GPUs"):
        parse(ON)
