"""scripts/train.slurm under a real SLURM: two nodes train a job that is put back in the queue, and goes on."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import missing, slurm_cluster
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training import ROOT

pytestmark = pytest.mark.integration

FLAGS = ["--training.steps=8", "--training.seq_len=128", "--checkpoint.enable", "--checkpoint.interval=4"]


def wait_until(ready: Callable[[], object], log: Path, timeout: float = 300) -> None:
    deadline = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.1)


@pytest.mark.nightly
@pytest.mark.skipif(missing() != "", reason=missing())
def test_a_requeued_job_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    settings = {"OUT": str(tmp_path / "out"), "CHECK": "0", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    names = ",".join([*settings, "PATH", "HOME", "PYTHONPATH"])  # the launcher's own must reach the nodes all the same
    log = tmp_path / "log"
    with slurm_cluster(tmp_path / "cluster") as cluster:
        sbatch = ["sbatch", "--parsable", f"--export={names}", "--nodes=2", "--gpus-per-node=1", f"--output={log}"]
        job = cluster.run(*sbatch, f"--chdir={ROOT}", f"{ROOT}/scripts/train.slurm", *FLAGS, cwd=tmp_path, **settings)
        log.touch()
        wait_until(lambda: "step:  6" in log.read_text(), log)
        workers = [pid for node in (1, 2) for pid in cluster.pids(node) if trains(pid)]
        assert len(workers) == 2
        assert [os.sched_getaffinity(pid) for pid in workers] == 2 * [os.sched_getaffinity(0)], "not all CPUs"
        assert "mem=8000M" in cluster.run("scontrol", "show", "job", job)
        cluster.run("scontrol", "requeue", job)
        wait_until(lambda: "PENDING" in cluster.run("scontrol", "show", "job", job), log)
        cluster.run("scontrol", "update", f"jobid={job}", "starttime=now")  # SLURM would wait two minutes
        done = ("COMPLETED", "FAILED")
        wait_until(lambda: any(state in cluster.run("scontrol", "show", "job", job) for state in done), log)
    text = log.read_text()
    assert text.count(f"train.slurm: job {job}, restart 1, nodes node1 node2") == 1, text[-3000:]
    for node in (0, 1):
        starts = [line for line in text.splitlines() if line.startswith(f"{node}: ") and "Training starts at" in line]
        assert [line.rpartition(" ")[2] for line in starts] == ["1", "5"]
    first, second = (losses(path) for path in sorted((tmp_path / "out").rglob("events.out.tfevents.*")))
    assert first.keys() >= {1, 2, 3, 4, 5, 6} and second.keys() == {5, 6, 7, 8}
    assert all(first[step] == second[step] for step in first.keys() & second.keys())


def trains(pid: int) -> bool:
    return b"-u\0-m\0torchtitan.train\0" in Path(f"/proc/{pid}/cmdline").read_bytes()


def losses(path: Path) -> dict[int, float]:
    log = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    return {event.step: event.value for event in log.Scalars("loss_metrics/global_avg_loss")}
