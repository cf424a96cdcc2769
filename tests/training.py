"""Runs TorchTitan's own ``torchtitan.train`` on the debug TOMLs in subprocesses, and reads their losses back."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.study.runs import LOSS, launch, read_tensorboard

ROOT = Path(__file__).parent.parent
BF16 = "--model.converters="
LAYOUTS = {
    "1 process": (1, []),
    "FSDP 2": (2, []),
    "FSDP 2 + EP 2": (2, ["--parallelism.expert_parallel_degree=2"]),
    "TP 2": (2, ["--parallelism.tensor_parallel_degree=2"]),
    "PP 2": (2, ["--parallelism.pipeline_parallel_degree=2", "--parallelism.data_parallel_shard_degree=1"]),
}


def start(
    out: Path,
    model: str,
    *flags: str,
    layout: str = "1 process",
    environment: dict[str, str] | None = None,
) -> subprocess.Popen:
    """Starts a training run of ``train_configs/debug_<model>.toml``; its output goes to ``out/log``."""
    own = [f"--job.config_file=train_configs/debug_{model}.toml", f"--job.dump_folder={out}"]
    return start_torchtitan(out, [*own, *flags], layout, environment)


def start_torchtitan(
    out: Path, flags: Sequence[str], layout: str, environment: dict[str, str] | None = None
) -> subprocess.Popen:
    """Starts ``torchtitan.train``, whichever version is installed; its output goes to ``out/log``."""
    processes, layout_flags = LAYOUTS[layout]
    out.mkdir(parents=True, exist_ok=True)
    program = ["-m", "torchtitan.train", *layout_flags, *flags]
    own = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
    return launch(processes, program, out / "log", own | (environment or {}), cwd=ROOT)


def train(out: Path, model: str, *flags: str, **kwargs) -> dict[int, float]:
    """Runs it to the end and returns the loss of each step."""
    return finish(start(out, model, *flags, **kwargs), out)


def finish(process: subprocess.Popen, out: Path) -> dict[int, float]:
    """Waits for a run to end well and returns the loss of each step."""
    status = process.wait()
    log = (out / "log").read_text()
    assert status == 0, log[-6000:]
    return losses(out)


def wait_until(process: subprocess.Popen, ready: Callable[[], bool], timeout: float = 240) -> None:
    """Waits until ``ready()``, of a run that must not end before."""
    deadline = time.monotonic() + timeout
    while not ready():
        assert process.poll() is None, "the run ended too early"
        assert time.monotonic() < deadline, "the run never got there"
        time.sleep(0.02)


def kill_when(process: subprocess.Popen, ready: Callable[[], bool]) -> None:
    """Sends SIGKILL to the launcher and all its workers, which have sessions of their own, once ``ready()``."""
    wait_until(process, ready)
    for pid in (process.pid, *descendants(process.pid)):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """The processes below ``pid``, read from /proc."""
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    return children + [pid for child in children for pid in descendants(child)]


def losses(out: Path) -> dict[int, float]:
    """Loss by step from all TensorBoard logs of a run; a step that was run again counts as the later run had it."""
    return read_tensorboard(out).get(LOSS, {})


def check_reruns(*arguments: str, processes: int = 2) -> None:
    """Runs tests/parallel_rerun.py."""
    folders = ROOT, ROOT / "tests", os.environ.get("PYTHONPATH")
    own = {"PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder), "HF_HUB_OFFLINE": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    result = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "tests" / "parallel_rerun.py"), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"} | own,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(result.stdout)
    assert result.returncode == 0 and result.stdout.count("passed") == processes, result.stdout + result.stderr[-6000:]
