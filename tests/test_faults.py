"""Layouts that a model does not fit: a clear end. Nightly, ranks that die under torchrun, and their checkpoints.
That a rank ends whose peer is gone is in test_checkpoints.py too."""

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from models import dims_of
from torchtitan.protocols.train_spec import get_train_spec
from training import ROOT, kill_rank_1, pid_of_rank_1, start, train, wait_until

from titan_mxfp8 import convert_model
from titan_mxfp8.modules import training_device
from titan_mxfp8.tools.dry_run import converted_model, fake_processes, parse_config

GROUPED = "--model.converters=quantize.grouped_mm.mx"


def parallelize(model: str, *flags: str, **degrees: int) -> None:
    """Converts a debug model on meta, and splits it as TorchTitan does among 32 ranks."""
    config = parse_config(f"{ROOT}/train_configs/debug_{model}.toml", flags)
    dims = dims_of(32, dp_shard=-1, **degrees)
    with fake_processes(32):
        get_train_spec(model).parallelize_fn(converted_model(config, dims)[0], dims, config)


@pytest.mark.parametrize(
    "model, flags, degrees, message",
    [
        ("llama4", [], {"tp": 16}, r"attention\.wq\.weight of shape \(256, 256\).* 16 tp ranks.* 16 of 256 features"),
        ("deepseek_v3", [GROUPED], {"tp": 16}, r"moe\.experts\.w1.* 16 tp ranks.* 16 of 256 features.*divides 8,"),
        ("llama4", [GROUPED], {"tp": 32, "ep": 1}, r"moe\.experts\.w1 of shape \(8, 512, 256\).* 32 tp ranks"),
        ("deepseek_v3", [GROUPED], {"tp": 16, "ep": 2, "etp": 16}, r"moe\.experts\.w1.* 16 etp ranks.* 16 of 256"),
        ("llama4", [GROUPED], {"ep": 16}, r"moe\.experts\.w1.* 16 ep ranks.* 0\.5 of 8 experts.*not whole"),
    ],
)
def test_a_split_without_whole_blocks_is_refused(model: str, flags: list[str], degrees: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parallelize(model, *flags, **degrees)


@pytest.mark.parametrize("degrees", [{"tp": 8}, {"tp": 4, "ep": 8}, {"tp": 8, "ep": 2, "etp": 8}])
def test_a_split_into_whole_blocks_is_not(degrees: dict) -> None:
    parallelize("llama4", **degrees)  # 256 and 512 features: 32 and 64 each


def test_torch_built_for_gpus_on_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert training_device() == torch.device("cpu")
    with torch.device("meta"):
        linears = torch.nn.Sequential(torch.nn.Linear(64, 64))
    convert_model(linears)
    assert linears[0].mxfp8.backend == "reference"


LONG = ("--training.steps=200", "--checkpoint.enable", "--checkpoint.interval=2", "--training.seq_len=128")


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run one of whose two ranks was killed after step 3. Its MoE layers send tokens themselves: the other rank waits
    in one of them, or for gradients."""
    out = tmp_path_factory.mktemp("killed")
    flags = *LONG, "--quantize.grouped_mm.mx.dispatch=collective"
    process = start(out, "llama4", *flags, layout="FSDP 2 + EP 2", torchrun=True)
    wait_until(lambda: "step:  3" in (out / "log").read_text(), process, logs=[out / "log"])
    assert kill_rank_1(process) != 0
    return out


@pytest.mark.integration
@pytest.mark.nightly
def test_a_killed_rank_ends_the_job_with_a_message(killed_run: Path) -> None:
    log = (killed_run / "log").read_text()
    # torchrun may read what rank 0 writes of its lost connection before it is written, and fails then itself
    half_read = "in _capture_process_failures" in log and "json.decoder.JSONDecodeError" in log
    assert "Signal 9 (SIGKILL) received" in log or half_read


@pytest.mark.integration
@pytest.mark.nightly
def test_a_rank_that_hangs_is_noticed_after_the_timeout(tmp_path: Path) -> None:
    """torchrun sees that a rank is gone, but not that it stands still."""
    flags = ("--training.steps=200", "--training.seq_len=128", "--comm.train_timeout_seconds=10")
    process = start(tmp_path, "llama4", *flags, layout="FSDP 2 + EP 2", torchrun=True)
    log = tmp_path / "log"
    wait_until(lambda: "step:  3" in log.read_text(), process, logs=[log])
    rank = pid_of_rank_1(process)
    os.kill(rank, signal.SIGSTOP)
    stopped = time.monotonic()
    wait_until(lambda: "Timed out waiting 10000ms" in log.read_text(), process, logs=[log])
    assert time.monotonic() - stopped < 30
    os.kill(rank, signal.SIGKILL)  # torchrun would give it 30 s to heed SIGTERM
    assert process.wait(60) != 0


@pytest.mark.integration
@pytest.mark.nightly
def test_the_last_checkpoint_of_a_killed_job_is_whole(killed_run: Path, tmp_path: Path) -> None:
    shutil.copytree(killed_run / "checkpoint", tmp_path / "checkpoint")
    saved = sorted(int(path.parent.name.removeprefix("step-")) for path in tmp_path.rglob(".metadata"))
    assert saved[-1] >= 2
    torn = tmp_path / "checkpoint" / f"step-{saved[-1] + 2}"  # as a kill in the middle of a save leaves it
    torn.mkdir(exist_ok=True)
    shutil.copy(tmp_path / "checkpoint" / f"step-{saved[-1]}" / "__0_0.distcp", torn)
    losses = train(tmp_path, "llama4", *LONG[1:], f"--training.steps={saved[-1] + 1}", layout="FSDP 2 + EP 2")
    assert list(losses) == [saved[-1] + 1]
    assert f"Training starts at step {saved[-1] + 1}" in (tmp_path / "log").read_text()


@pytest.mark.integration
@pytest.mark.nightly
def test_a_checkpoint_of_another_model_is_refused(killed_run: Path, tmp_path: Path) -> None:
    checkpoint = next(iter((killed_run / "checkpoint").glob("*/.metadata"))).parent
    flags = ["--checkpoint.enable", f"--checkpoint.initial_load_path={checkpoint}", "--training.steps=1"]
    assert start(tmp_path, "deepseek_v3", *flags).wait() != 0
    assert re.search(r"Missing key in checkpoint state_dict: \S*attention", (tmp_path / "log").read_text())
