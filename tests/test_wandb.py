"""What wandb is told of a run, and that a run outlasts an outage of it, with a whole log for `wandb sync`."""

import json
import logging
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import training
import wandb
from script_calls import ROOT
from torchtitan.components.metrics import WandBLogger
from torchtitan.config import JobConfig

from titan_mxfp8.plugin import wandb_run
from titan_mxfp8.plugin.wandb_run import git_commit, name_run
from titan_mxfp8.tools.dry_run import parse_config
from titan_mxfp8.workarounds import wandb_offline

TOML, KEY = f"{ROOT}/train_configs/debug_llama4.toml", "0123456789" * 4
COMMIT = "git init && git add . && git -c user.name=n -c user.email=e commit -m one"


def unset(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """What is set in their place is undone too."""
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def named(monkeypatch: pytest.MonkeyPatch, *flags: str, **environment: str) -> tuple[str, str]:
    """WANDB_RUN_NAME and WANDB_TAGS after ``name_run`` of the debug config with these flags."""
    unset(monkeypatch, "WANDB_RUN_NAME", "WANDB_TAGS", "WANDB_RUN_TAGS")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    name_run(parse_config(TOML, flags))
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


def test_the_commit_is_that_of_a_tracked_file(tmp_path: Path) -> None:
    file, untracked = tmp_path / "file", tmp_path / "installed" / "file"
    file.write_text("1")
    assert git_commit(file) == "", "no repository"
    subprocess.run(["sh", "-c", COMMIT], cwd=tmp_path, check=True, capture_output=True)
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tmp_path, text=True).strip()
    assert git_commit(file) == head and len(head) == 40
    untracked.parent.mkdir()
    untracked.write_text("1")
    assert git_commit(untracked) == "", "installed inside somebody's repository"
    file.write_text("2")
    assert git_commit(file).endswith("-dirty")


@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_git_tells_the_commit_of_another_users_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose code runs all the same. Of other repositories of theirs nothing is asked."""
    (tmp_path / "file").touch()
    subprocess.run(["sh", "-c", f"{COMMIT} && chown -R 1234 ."], cwd=tmp_path, check=True, capture_output=True)
    assert git_commit(tmp_path / "file") == "", "git refuses it"
    monkeypatch.setattr("titan_mxfp8.plugin.wandb_run.ROOT", tmp_path)
    assert len(git_commit(tmp_path / "file")) == 40


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str | None, str]]:
    """WANDB_MODE and commit of each start of TorchTitan's wandb logger, for a user who never heard of wandb and whose
    home and working folder is ``tmp_path``."""
    started = []

    def start(self: WandBLogger, log_dir: str, job_config: JobConfig, tag: str | None = None) -> None:
        started.append((os.environ.get("WANDB_MODE"), job_config.job.git_commit))
        if "refuse" in log_dir and len(started) == 1:
            raise TimeoutError

    wandb.teardown()
    unset(monkeypatch, *(name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"))
    unset(monkeypatch, "WANDB_MODE", "WANDB_RUN_NAME", "WANDB_TAGS", "WANDB_INIT_TIMEOUT", "WANDB_FINISH_TIMEOUT")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(WandBLogger, "__init__", start)
    wandb_offline.log_offline_where_wandb_is_out_of_reach()
    wandb_run.name_and_start()
    yield started
    wandb.teardown()


def test_a_start_that_fails_without_a_message_goes_offline_too(
    starts: list, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On the last rank of a pipeline, which asks git for the commit itself."""
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(wandb_run, "git_commit", lambda file: "0123abc")
    with caplog.at_level(logging.WARNING, logger="titan_mxfp8"):  # whatever earlier tests made of the root's
        WandBLogger("refuse", parse_config(TOML))
    assert starts == [("online", "0123abc"), ("offline", "0123abc")]
    assert "wandb could not start: TimeoutError(). Logging offline" in caplog.text


@pytest.mark.parametrize(
    "files, environment, mode",
    [
        ({}, {}, "offline"),
        ({}, {"WANDB_API_KEY": ""}, "offline"),
        ({}, {"WANDB_API_KEY": KEY}, None),
        ({".netrc": f"machine wandb.corp login user password {KEY}"}, {"WANDB_BASE_URL": "http://wandb.corp"}, None),
        ({".netrc": f"machine github.com login user password {KEY}"}, {}, "offline"),
        ({"wandb/settings": "[default]\nmode = disabled"}, {}, None),  # `wandb disabled`
    ],
)
def test_a_run_without_a_login_logs_offline_unless_a_mode_was_chosen(
    files: dict, environment: dict, mode: str | None, starts: list, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # which asks the server
    monkeypatch.setattr("wandb.sdk.wandb_login._print_logged_in_message", lambda *args, **kwargs: None)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
        (tmp_path / file).chmod(0o600)
    WandBLogger("logs", parse_config(TOML))
    assert [started for started, _ in starts] == [mode]
    assert "WANDB_PROJECT" not in os.environ, "the user's runs stay in their project"


def wandb_records(log: bytes) -> Iterator[bytes]:
    """The records of a ``.wandb`` file: 7 bytes that name the format, then LevelDB's log format.

    Blocks of 32 KiB, the first with the 7 bytes in it, hold fragments: checksum (4 bytes), length (2), type (1: whole
    record, 2: first, 3: middle, 4: last part), data. No fragment starts in the last 6 bytes of a block.
    """
    position, parts = 7, b""
    while position < len(log):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", log, position + 4)
        data = log[position + 7 : position + 7 + length]
        position += 7 + length
        parts = data if kind in (1, 2) else parts + data
        if kind in (1, 4):
            yield parts


@pytest.mark.integration
def test_an_outage_does_not_stop_a_run_and_its_log_is_whole(tmp_path: Path) -> None:
    """One that was to log online when no server answered."""
    from wandb.proto.wandb_internal_pb2 import Record

    server = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": KEY}  # nobody listens there
    flags = ("--training.steps=2", "--training.seq_len=128", "--quantize.health_every=2", "--job.git_commit=abc")
    start = time.monotonic()
    environment = {"WANDB_MODE": "online", "WANDB_INIT_TIMEOUT": "2"} | server
    assert len(training.train(tmp_path, "llama4", *flags, environment=environment)) == 2
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
