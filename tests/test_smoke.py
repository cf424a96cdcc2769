"""Both debug models trained by stock TorchTitan on CPU with both converters, and what a user does with such runs."""

import re
import shutil
from pathlib import Path

import pytest
from training import BF16, kill_when, losses, start, train

STEPS = "--training.steps=20"
MODELS = ("llama4", "deepseek_v3")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    """Trains a (model, layout, bf16 or mxfp8) once, 20 steps with a checkpoint at 10; gives its folder and losses."""
    done = {}

    def get(model: str, layout: str, kind: str) -> tuple[Path, dict[int, float]]:
        key = (model, layout, kind)
        if key not in done:
            out = tmp_path_factory.mktemp(kind)
            flags = [STEPS, "--checkpoint.enable", "--checkpoint.interval=10", *([BF16] if kind == "bf16" else [])]
            done[key] = out, train(out, model, *flags, layout=layout)
        return done[key]

    return get


# Fall of the loss from step 1 to step 20, nats per token; measured 2.35 and 2.18 (llama4), 2.21 and 2.00 (deepseek_v3).
FALL = {"llama4": 2.0, "deepseek_v3": 1.9}
# Largest difference from bf16 at any of the 20 steps; measured 0.0045 and 0.0026 (llama4), 0.0039 and 0.0034.
BAND = 0.01


@pytest.mark.parametrize("layout", ["1 process", "FSDP 2 + EP 2"])
@pytest.mark.parametrize("model", MODELS)
def test_mxfp8_learns_and_tracks_bf16(run, model: str, layout: str) -> None:
    _, bf16 = run(model, layout, "bf16")
    out, mxfp8 = run(model, layout, "mxfp8")
    assert list(mxfp8) == list(range(1, 21))
    gaps = [mxfp8[step] - bf16[step] for step in bf16]
    print(f"{model} {layout}: {mxfp8[1]:.4f} -> {mxfp8[20]:.4f}, largest gap {max(map(abs, gaps)):.4f}")
    assert mxfp8[1] - mxfp8[20] > FALL[model]
    assert 0 < max(map(abs, gaps)) < BAND
    log = (out / "log").read_text()
    assert "converted 1 expert module (recipe mxfp8, backend reference)" in log
    assert re.search(r"converted \d+ Linears \(recipe mxfp8, backend reference\)", log)


# Fall from step 1 to step 8 and largest difference from bf16 at any of them; measured 1.26 and 0.0045 (llama3),
# 0.76 and 0.0034 (qwen3).
OTHER_MODELS = {"llama3": ("--training.seq_len=512", 1.1, 0.01), "qwen3": ("--training.seq_len=128", 0.6, 0.01)}


@pytest.mark.parametrize("model", OTHER_MODELS)
def test_other_models_learn_and_track_bf16(tmp_path: Path, model: str) -> None:
    """A dense one, whose linears alone are MXFP8, and one with 64 experts. gpt_oss needs a GPU."""
    length, fall, band = OTHER_MODELS[model]
    bf16, mxfp8 = (
        train(tmp_path / kind, model, "--training.steps=8", length, *flags)
        for kind, flags in (("bf16", [BF16]), ("mxfp8", []))
    )
    gaps = [mxfp8[step] - bf16[step] for step in bf16]
    print(f"{model}: {mxfp8[1]:.4f} -> {mxfp8[8]:.4f}, largest gap {max(map(abs, gaps)):.4f}")
    assert mxfp8[1] - mxfp8[8] > fall
    assert 0 < max(map(abs, gaps)) < band


def test_a_killed_run_goes_on_from_its_checkpoint(run, tmp_path: Path) -> None:
    _, whole = run("llama4", "FSDP 2 + EP 2", "mxfp8")
    flags = (STEPS, "--checkpoint.enable", "--checkpoint.interval=10")
    process = start(tmp_path, "llama4", *flags, layout="FSDP 2 + EP 2")
    kill_when(process, lambda: "step: 13" in (tmp_path / "log").read_text())
    assert not (tmp_path / "checkpoint" / "step-20").exists()
    resumed = train(tmp_path, "llama4", *flags, layout="FSDP 2 + EP 2")
    assert "Training starts at step 11" in (tmp_path / "log").read_text()
    assert [resumed[step] for step in range(11, 21)] == [whole[step] for step in range(11, 21)]


def test_without_a_login_wandb_logs_offline(tmp_path: Path) -> None:
    """No key, no prompt (standard input is closed), no network: the run is on disk, ready for `wandb sync`."""
    environment = {"WANDB_MODE": "", "WANDB_API_KEY": "", "HOME": str(tmp_path)}
    train(tmp_path / "run", "llama4", "--training.steps=2", environment=environment)
    (offline_run,) = (tmp_path / "run").rglob("wandb/offline-run-*/run-*.wandb")
    assert b"global_avg_loss" in offline_run.read_bytes()
    assert "WandB logging enabled" in (tmp_path / "run" / "log").read_text()


@pytest.mark.parametrize("written, read", [("bf16", "mxfp8"), ("mxfp8", "bf16")])
@pytest.mark.parametrize("model", MODELS)
def test_bf16_and_mxfp8_exchange_checkpoints(run, tmp_path: Path, model: str, written: str, read: str) -> None:
    out, before = run(model, "1 process", written)
    shutil.copytree(out / "checkpoint" / "step-10", tmp_path / "checkpoint" / "step-10")
    flags = [STEPS, "--checkpoint.enable", "--checkpoint.interval=100", *([BF16] if read == "bf16" else [])]
    after = train(tmp_path, model, *flags)
    assert list(after) == list(range(11, 21))
    assert all(abs(after[step] - before[step]) < BAND for step in after)
    assert after != {step: before[step] for step in after}
    assert losses(tmp_path) == after
