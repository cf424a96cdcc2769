"""progress.py: how far a run is, by its log; how scripts end."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from script_calls import interrupted, programs

from scripts import progress

pytestmark = pytest.mark.integration


def test_the_last_step_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert progress.step_of(log) == 0, "not there yet"
    log.write_text("Training starts at step 1\n\x1b[31mstep:  9  \x1b[32mloss: 8.1\nvalidate step: 10\n")
    assert progress.step_of(log) == 10
    log.write_text("step: 11\n" + "x" * (1 << 17))
    assert progress.step_of(log) == 0, "of a large log the end is read"


def test_a_bar_follows_a_training_and_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    bar = progress.tqdm
    monkeypatch.setattr(
        progress, "tqdm", lambda **given: bar(**given | {"file": shown, "disable": False, "ncols": 150})
    )
    log, program = tmp_path / "log", "import sys, time; print('step: 3', flush=True); time.sleep(1.5); sys.exit(5)"
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=file)
    assert progress.follow(process, log, 4, "bf16") == 5
    assert "bf16:  75%" in shown.getvalue() and "3/4" in shown.getvalue() and "log /" in shown.getvalue()


def test_ctrl_c_says_how_to_go_on_and_errors_are_one_line() -> None:
    for error, said in ((KeyboardInterrupt(), "x: interrupted; the same command goes on"), (ValueError("no"), "x: no")):
        with pytest.raises(SystemExit) as ended, progress.ends_in_words("x"):
            raise error
        assert ended.value.code == said


def test_train_says_after_ctrl_c_where_its_logs_are(tmp_path: Path) -> None:
    """With a Python whose torchrun waits, in a process group of its own, as on a terminal."""
    programs(tmp_path, {"python": 'case "$*" in *distributed.run*) echo began; sleep 60 ;; *watch.py*) cat ;; esac'})
    settings = {"PYTHON": str(tmp_path / "python"), "OUT": str(tmp_path / "out"), "TITAN": "0.2"}
    status, _, errors = interrupted("scripts/train.sh", **settings)
    assert status == 130 and f"with OUT={tmp_path}/out goes on" in errors, errors
