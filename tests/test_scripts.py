"""The scripts a user calls: what they would run, what they print, and what bad input gets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

ROOT = Path(__file__).parent.parent


def shell(*command: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def write_run(folder: Path, losses: list[float]) -> Path:
    with SummaryWriter(str(folder / "tb" / "20260101-0000")) as writer:
        for step, loss in enumerate(losses, 1):
            writer.add_scalar("loss_metrics/global_avg_loss", loss, step)
            writer.add_scalar("throughput(tps)", 100.0 * step, step)
    return folder


def compare(*arguments: object) -> subprocess.CompletedProcess:
    return shell(sys.executable, "scripts/compare_runs.py", *map(str, arguments))


def test_compare_runs_prints_and_plots_the_difference(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "bf16", [8.0, 7.0, 6.0]), write_run(tmp_path / "mxfp8", [8.5, 7.0, 5.75])
    result = compare(a, b, "--out", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0] == ["step", "bf16", "mxfp8", "mxfp8", "-", "bf16"]
    assert rows[1] == ["1", "8.0000", "8.5000", "+0.5000"] and rows[3] == ["3", "6.0000", "5.7500", "-0.2500"]
    assert "bf16: 3 steps logged, median 300 tokens/s" in result.stdout
    assert (tmp_path / "out" / "losses.csv").read_text().splitlines()[2] == "2,7.0,200.0,7.0,200.0"
    assert (tmp_path / "out" / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_compare_runs_says_what_is_missing(tmp_path: Path) -> None:
    result = compare(tmp_path / "nothing")
    assert result.returncode == 1 and "holds no TensorBoard log" in result.stderr
    with SummaryWriter(str(tmp_path / "empty")) as writer:
        writer.add_scalar("lr", 0.1, 1)
    assert "ended before its first log" in compare(tmp_path / "empty").stderr


def test_train_runs_bf16_and_then_the_config_as_it_is() -> None:
    result = shell("scripts/train.sh", "--training.steps=3", DRYRUN="1", NGPU="2", OUT="outputs/x", WANDB_RUN_NAME="n")
    assert result.returncode == 0, result.stderr
    launch = "torchrun --standalone --nproc-per-node=2 --local-ranks-filter=0 -m torchtitan.train"
    flags = "--job.config_file=train_configs/debug_llama4.toml --job.dump_folder=outputs/x"
    assert result.stdout.splitlines() == [
        f"+ WANDB_RUN_NAME=n {launch} {flags}/bf16 --model.converters= --training.steps=3",
        f"+ WANDB_RUN_NAME=n {launch} {flags}/mxfp8 --training.steps=3",
    ]


def test_train_explains_itself_and_refuses_what_it_does_not_know() -> None:
    assert "CONFIG" in shell("scripts/train.sh", "--help").stdout
    result = shell("scripts/train.sh", CONFIG="train_configs/none.toml", DRYRUN="1")
    assert result.returncode == 2 and "train_configs/none.toml is no file" in result.stderr
    result = shell("scripts/train.sh", RUNS="fp4", DRYRUN="1")
    assert result.returncode == 2 and "not 'fp4'" in result.stderr


@pytest.mark.parametrize("script", ["setup.sh", "train.sh", "test.sh"])
def test_shell_scripts_parse(script: str) -> None:
    assert shell("bash", "-n", f"scripts/{script}").returncode == 0
