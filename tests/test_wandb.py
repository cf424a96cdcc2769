"""What wandb is told of a run, and that a run outlasts an outage of it."""

import importlib
import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import training
from torchtitan.config import ConfigManager

from titan_mxfp8.plugin.wandb_run import git_commit, name_run

ROOT = Path(__file__).parent.parent


def named(monkeypatch: pytest.MonkeyPatch, *flags: str, **environment: str) -> tuple[str, str]:
    """WANDB_RUN_NAME and WANDB_TAGS after ``name_run`` of the debug config with these flags."""
    monkeypatch.chdir(ROOT)
    for name in ("WANDB_RUN_NAME", "WANDB_TAGS", "WANDB_RUN_TAGS"):
        monkeypatch.setenv(name, "")  # registers them: what name_run sets is undone
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    name_run(ConfigManager().parse_args(["--job.config_file=train_configs/debug_llama4.toml", *flags]))
    return os.environ["WANDB_RUN_NAME"], os.environ["WANDB_TAGS"]


def test_name_and_tags_come_from_the_config_and_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    model = "llama4,debugmodel_2layers"
    assert named(monkeypatch, "--model.converters=") == ("debug_llama4-bf16", f"{model},bf16")
    alias = "--quantize.linear.mx.recipe_name=mxfp8_cublas"
    formats = ("experts_mxfp8", "linears_mxfp8_floor")
    assert named(monkeypatch, alias) == ("-".join(("debug_llama4", *formats)), ",".join((model, *formats)))
    rebased = named(monkeypatch, "--model.converters=quantize.linear.mx", "--quantize.linear.mx.hopper_rebase")
    assert rebased == ("debug_llama4-linears_mxfp8_rebased", f"{model},linears_mxfp8_rebased")
    assert named(monkeypatch, WANDB_RUN_NAME="mine", WANDB_RUN_TAGS="a,b") == ("mine", "a,b")


def test_the_commit_is_that_of_the_files(tmp_path: Path) -> None:
    assert git_commit(tmp_path) == "", "no repository"
    identity = ("-c", "user.name=n", "-c", "user.email=e")

    def git(*arguments: str) -> str:
        command = ("git", "-C", str(tmp_path), *identity, *arguments)
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    assert git_commit(tmp_path) == git("rev-parse", "HEAD") and len(git_commit(tmp_path)) == 40
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path).endswith("-dirty")


def test_an_outage_does_not_stop_a_run_and_its_log_can_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.syspath_prepend(ROOT / "scripts")
    wandb_records = importlib.import_module("compare_runs").wandb_records
    outage = {
        "WANDB_MODE": "online",
        "WANDB_BASE_URL": "http://127.0.0.1:9",  # nobody listens there
        "WANDB_API_KEY": "0123456789" * 4,
        "WANDB_INIT_TIMEOUT": "2",
    }
    flags = ("--training.steps=2", "--training.seq_len=128", "--quantize.health_every=2", "--job.git_commit=abc")
    start = time.monotonic()
    assert len(training.train(tmp_path, "llama4", *flags, environment=outage)) == 2
    assert time.monotonic() - start < 240  # measured: 85 s, of which wandb's start 14 s, on two cores with a load of 8
    log = (tmp_path / "log").read_text()
    assert "wandb could not start" in log and "Logging offline; `wandb sync` uploads it later" in log

    (path,) = tmp_path.rglob("offline-run-*/*.wandb")
    records = [Record.FromString(data) for data in wandb_records(path.read_bytes())]
    assert records[-1].WhichOneof("record_type") == "exit", "the log is complete"
    (run,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    assert run.display_name == "debug_llama4-experts_mxfp8-linears_mxfp8"
    assert list(run.tags) == ["llama4", "debugmodel_2layers", "experts_mxfp8", "linears_mxfp8"]
    config = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert config["job"]["git_commit"] == "abc" and config["training"]["seq_len"] == 128
    assert config == config | json.loads((tmp_path / "job_config.json").read_text())
    logged = {}
    for record in records:
        for item in record.history.item:
            logged.setdefault(record.history.step.num, set()).add(item.key or "/".join(item.nested_key))
    wanted = {"loss_metrics/global_avg_loss", "grad_norm", "throughput(tps)", "tflops", "mfu(%)"}
    assert wanted | {"memory/max_reserved(GiB)", "lr"} <= logged[1] & logged[2]
    health = {key for key in logged[2] if key.startswith("mx_health/")}
    assert "mx_health/gradients/flushed_to_zero/layers.1.moe.experts" in health and not health & logged[1]
