"""What tests of scripts share: calls of scripts, logs of runs, a TorchTitan that trains nothing."""

import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
SHELL_SCRIPTS = [str(path.relative_to(SCRIPTS)) for end in ("sh", "slurm") for path in SCRIPTS.rglob(f"*.{end}")]


def programs(folder: Path, texts: Mapping[str, str]) -> None:
    """Writes shell scripts below a folder, by name."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)


def shell(*command: str, **environment: str) -> subprocess.CompletedProcess:
    env = os.environ | environment
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def interrupted(
    *command: str, number: signal.Signals = signal.SIGINT, once: str = "began\n", **environment: str
) -> tuple[int, str, str]:
    """Status and further output of a script that gets a signal as soon as it prints ``once``: of Ctrl-C its group does,
    as in a terminal."""
    script = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # nohup has the tests ignore SIGHUP
    )
    any(once in line for line in script.stdout)
    time.sleep(0.5)  # a signal that comes while a shell, or timeout, forks what it waits for is lost
    (os.killpg if number == signal.SIGINT else os.kill)(script.pid, number)
    output, errors = script.communicate(timeout=120)
    return script.returncode, output, errors


def write_run(folder: Path, losses: Sequence[float], config: dict | None = None, speeds: Sequence[float] = ()) -> Path:
    with SummaryWriter(str(folder / "tb" / "20260101-0000")) as writer:
        for step, loss in enumerate(losses, 1):
            writer.add_scalar("loss_metrics/global_avg_loss", loss, step)
            writer.add_scalar("throughput(tps)", speeds[step - 1] if speeds else 100.0 * step, step)
            writer.add_scalar("memory/max_reserved(GiB)", 1.0 + step, step)
    if config is not None:
        (folder / "job_config.json").write_text(json.dumps(config))
    return folder


def call(script: str, *arguments: object) -> str:
    """What ``scripts/<script>.py``, or one below, prints with these arguments in this process; or what it ends with."""
    (path,), printed = SCRIPTS.rglob(f"{script}.py"), io.StringIO()
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    try:
        with contextlib.redirect_stdout(printed):
            module.main([*map(str, arguments)])
    except SystemExit as exit:
        if exit.code:
            return str(exit.code)
    return printed.getvalue()


def stub_of(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``-m torchtitan.train`` writes a finished run's log after STUB_SECONDS, or fails.

    It adds its arguments to ``calls``. A folder with a checkpoint ends at once.
    """
    log = next(write_run(tmp_path / "log", [8.0, 7.0, 6.0]).rglob("events*"))
    (tmp_path / "stub" / "torchtitan").mkdir(parents=True)
    (tmp_path / "stub" / "torchtitan" / "__init__.py").write_text(
        "import pkgutil\n__path__ = pkgutil.extend_path(__path__, __name__)"  # the other modules are TorchTitan's
    )
    (tmp_path / "stub" / "torchtitan" / "train.py").write_text(
        f"""
import os, pathlib, shutil, sys, time
with open({str(tmp_path / "calls")!r}, "a") as calls:
    print(*sys.argv[1:], "gpus", os.environ.get("CUDA_VISIBLE_DEVICES"), file=calls)
out = pathlib.Path(next(flag for flag in sys.argv if flag.startswith("--job.dump_folder=")).partition("=")[2])
if out.name in os.environ.get("STUB_FAIL", "").split():
    sys.exit("no luck")
if not (out / "checkpoint/step-2/.metadata").exists():
    time.sleep(float(os.environ.get("STUB_SECONDS", 0)))
(out / "tb").mkdir(exist_ok=True)
shutil.copy({str(log)!r}, out / "tb")
"""
    )
    return {"PYTHONPATH": f"{tmp_path / 'stub'}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
