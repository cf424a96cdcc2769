"""Runs TorchTitan's own ``torchtitan.train`` on the debug TOMLs in subprocesses, and reads their losses back."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import processes
import pytest
from processes import Job

from scripts.study import runs
from scripts.study.runs import LOSS, read_tensorboard

ROOT = Path(__file__).parent.parent
BF16 = "--model.converters="
LAYOUTS = {
    "1 process": (1, []),
    "FSDP 2": (2, []),
    "FSDP 2 + EP 2": (2, ["--parallelism.expert_parallel_degree=2"]),
    "TP 2": (2, ["--parallelism.tensor_parallel_degree=2"]),
    "PP 2": (2, ["--parallelism.pipeline_parallel_degree=2", "--parallelism.data_parallel_shard_degree=1"]),
}


def start(out: Path, model: str, *flags: str, layout: str = "1 process", **how: object) -> Job | subprocess.Popen:
    """``start_torchtitan`` with ``train_configs/debug_<model>.toml``."""
    own = [f"--job.config_file=train_configs/debug_{model}.toml", f"--job.dump_folder={out}"]
    return start_torchtitan(out, [*own, *flags], layout, **how)


def start_torchtitan(
    out: Path, flags: Sequence[str], layout: str, environment: dict[str, str] | None = None, torchrun: bool = False
) -> Job | subprocess.Popen:
    """Starts ``torchtitan.train``, whichever version is installed, by torchrun or in forked processes (processes.py);
    its output goes to ``out/log``."""
    count, layout_flags = LAYOUTS[layout]
    out.mkdir(parents=True, exist_ok=True)
    program = ["-m", "torchtitan.train", *layout_flags, *flags]
    own = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
    launch = runs.launch if torchrun else processes.launch
    return launch(count, program, out / "log", own | (environment or {}), cwd=ROOT)


def train(out: Path, model: str, *flags: str, **kwargs) -> dict[int, float]:
    """Runs it to the end and returns the loss of each step."""
    return finish(start(out, model, *flags, **kwargs), out)


def finish(process: Job | subprocess.Popen, out: Path) -> dict[int, float]:
    """Waits for a run to end well and returns the loss of each step."""
    status = process.wait()
    log = (out / "log").read_text()
    assert status == 0, log[-6000:]
    return losses(out)


def check_tracking(what: str, bf16: dict[int, float], mxfp8: dict[int, float], fall: float, band: float) -> None:
    """MXFP8 learns: its loss falls by so much, and is nowhere further than ``band`` from bf16's, but not the same."""
    gap, last = max(abs(mxfp8[step] - bf16[step]) for step in bf16), max(mxfp8)
    print(f"{what}: {mxfp8[1]:.4f} -> {mxfp8[last]:.4f}, largest gap {gap:.4f}")
    assert list(mxfp8) == list(range(1, last + 1))
    assert mxfp8[1] - mxfp8[last] > fall and 0 < gap < band


def check_exchange(after: dict[int, float], before: dict[int, float], band: float) -> None:
    """Losses after step 4 of a run that went on in another number format, beside those of the run that stayed."""
    assert list(after) == list(range(5, 9))
    assert all(abs(after[step] - before[step]) < band for step in after)
    assert after != {step: before[step] for step in after}


def wait_until(ready: Callable[[], bool], *processes: Job | subprocess.Popen, logs: Sequence[Path] = ()) -> None:
    """Waits until ``ready()``, of runs that must not end before."""
    deadline = time.monotonic() + 300
    while not ready():
        ended = any(process.poll() is not None for process in processes)
        if ended or time.monotonic() > deadline:
            why = "a run ended too early" if ended else "it never got there"
            pytest.fail("\n\n".join([why, *(log.read_text()[-3000:] for log in logs)]))
        time.sleep(0.02)


def kill_when(process: Job | subprocess.Popen, ready: Callable[[], bool]) -> None:
    """Sends SIGKILL to all its processes, and to a launcher, once ``ready()``."""
    wait_until(ready, process)
    if isinstance(process, Job):
        return process.kill()
    for pid in (process.pid, *descendants(process.pid)):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def pid_of_rank_1(launcher: subprocess.Popen) -> int:
    """The worker itself comes before its children, which have its environment."""
    pids = descendants(launcher.pid)
    return next(pid for pid in pids if b"\0LOCAL_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())


def kill_rank_1(process: Job | subprocess.Popen) -> int | None:
    """Sends it SIGKILL. Returns the exit code of rank 0, or of a launcher, that ends by itself within 60 s."""
    if not isinstance(process, Job):
        os.kill(pid_of_rank_1(process), signal.SIGKILL)
        return process.wait(60)
    os.kill(process.pids[1], signal.SIGKILL)
    code = process.end_of(0, 60)
    process.kill()
    return code


def descendants(pid: int) -> list[int]:
    """The processes below ``pid``, read from /proc."""
    below = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for path in below for child in path.read_text().split()]
    return children + [pid for child in children for pid in descendants(child)]


def losses(out: Path) -> dict[int, float]:
    """Loss by step from all TensorBoard logs of a run; a step that was run again counts as the later run had it."""
    return read_tensorboard(out).get(LOSS, {})
