"""scripts/train_multinode.sh: two agents on one machine train a job that survives a dead worker and a dead agent; and
scripts/train.slurm under a real SLURM: two nodes train a job that is put back in the queue, and goes on."""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from slurm_cluster import joined_namespaces, missing, slurm_cluster
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training import LOSS, ROOT, descendants, losses, train, wait_until

pytestmark = pytest.mark.integration

FLAGS = ["--training.steps=15", "--training.seq_len=256", "--checkpoint.enable", "--checkpoint.interval=5"]
FLAGS += ["--parallelism.expert_parallel_degree=2"]


Machine = tuple[list[str], dict[str, str]]  # how to run a command on it, and what the launcher must be told there


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    """Two network namespaces joined by a cable; where those may not be made, two loopback addresses."""
    with ExitStack() as stack:
        try:
            names = stack.enter_context(joined_namespaces("10.99.0"))
            found = [(["ip", "netns", "exec", name], f"10.99.0.{i}") for i, name in enumerate(names, 1)]
            endpoint, link = "10.99.0.1:29500", "eth0"
        except (OSError, subprocess.CalledProcessError):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                endpoint, link = f"127.0.0.1:{free.getsockname()[1]}", "lo"
            found = [([], "127.0.0.1"), ([], "127.0.0.2")]
        common = {"RDZV_ENDPOINT": endpoint, "GLOO_SOCKET_IFNAME": link}
        yield [(prefix, common | {"LOCAL_ADDR": address}) for prefix, address in found]


def launch(machine: Machine, out: Path, log: Path) -> subprocess.Popen:
    settings = {"NNODES": "2", "NGPU": "1", "OUT": str(out), "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
    settings |= {"OMP_NUM_THREADS": "1"}
    prefix, environment = machine
    command, env = [*prefix, "scripts/train_multinode.sh", *FLAGS], os.environ | settings | environment
    with log.open("w") as file:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file, stdin=subprocess.DEVNULL)


def wait_for(line: str, agents: list[subprocess.Popen], logs: list[Path]) -> None:
    wait_until(lambda: all(line in log.read_text() for log in logs), *agents, logs=logs)


def kill(agent: subprocess.Popen, *, whole: bool) -> None:
    """SIGKILL to the agent's training process and, with ``whole``, to the agent."""
    for pid in (agent.pid, *descendants(agent.pid)):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        is_launcher = any(name in command for name in (b"torchrun", b"torch.distributed.run", b"multinode"))
        if whole or (b"torchtitan.train" in command and not is_launcher):
            os.kill(pid, signal.SIGKILL)
    if whole:
        agent.wait()


@pytest.mark.nightly
def test_a_job_on_two_machines_survives_a_dead_worker_and_machine(machines: list[Machine], tmp_path: Path) -> None:
    one_machine = train(tmp_path / "one", "llama4", *FLAGS, layout="FSDP 2")
    out, logs = tmp_path / "two", [tmp_path / f"log{i}" for i in range(3)]
    agents = [launch(machine, out, log) for machine, log in zip(machines, logs, strict=False)]
    try:
        wait_for("step:  6", agents, logs[:2])  # four steps before the next checkpoint
        kill(agents[1], whole=False)
        wait_for("local rank 0 was killed by SIGKILL: restarting, attempt 1 of 3", agents, logs[1:2])
        wait_for(": restarting", agents, logs[:1])  # an attempt too, or it noticed that the other one waits
        wait_for("Training starts at step 6", agents, logs[:2])
        wait_for("step: 11", agents, logs[:2])
        kill(agents[1], whole=True)
        agents[1] = launch(machines[1], out, logs[2])
        wait_for("Training starts at step 11", agents, [logs[0], logs[2]])
        for agent in agents:
            assert agent.wait(240) == 0, "\n\n".join(log.read_text()[-3000:] for log in logs)
    finally:
        for agent in agents:
            if agent.poll() is None:
                kill(agent, whole=True)
    shown, whole = logs[0].read_text(), [log.read_text() for log in (out / "mxfp8" / "logs").glob("*/*.log")]
    assert "Traceback" not in shown, "lost connections are one line each"
    assert len(whole) == 3 and any("Traceback" in text and "by peer" in text for text in whole)
    # The steps before, between and after the deaths are those of one machine that nothing happened to.
    assert losses(out / "mxfp8") == one_machine
    assert list(one_machine) == list(range(1, 16))


@pytest.mark.nightly
@pytest.mark.skipif(missing() != "", reason=missing())
def test_a_requeued_job_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    settings = {"OUT": str(tmp_path / "out"), "CHECK": "0", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    names = ",".join([*settings, "PATH", "HOME", "PYTHONPATH"])  # the launcher's own must reach the nodes all the same
    log = tmp_path / "log"
    flags = "--training.steps=8", "--training.seq_len=128", "--checkpoint.enable", "--checkpoint.interval=4"
    with slurm_cluster(tmp_path / "cluster") as cluster:
        sbatch = ["sbatch", "--parsable", f"--export={names}", "--nodes=2", "--gpus-per-node=1", f"--output={log}"]
        job = cluster.run(*sbatch, f"--chdir={ROOT}", f"{ROOT}/scripts/train.slurm", *flags, cwd=tmp_path, **settings)
        log.touch()
        wait_until(lambda: "step:  6" in log.read_text(), logs=[log])
        workers = [pid for node in (1, 2) for pid in cluster.pids(node) if trains(pid)]
        assert len(workers) == 2
        assert [os.sched_getaffinity(pid) for pid in workers] == 2 * [os.sched_getaffinity(0)], "not all CPUs"
        assert "mem=8000M" in cluster.run("scontrol", "show", "job", job)
        cluster.run("scontrol", "requeue", job)
        state = partial(cluster.run, "scontrol", "show", "job", job)
        wait_until(lambda: "PENDING" in state(), logs=[log])
        cluster.run("scontrol", "update", f"jobid={job}", "starttime=now")  # SLURM would wait two minutes
        wait_until(lambda: re.search("COMPLETED|FAILED", state()), logs=[log])
    text = log.read_text()
    assert text.count(f"train.slurm: job {job}, restart 1, nodes node1 node2") == 1, text[-3000:]
    for node in (0, 1):
        starts = [line for line in text.splitlines() if line.startswith(f"{node}: ") and "Training starts at" in line]
        assert [line.rpartition(" ")[2] for line in starts] == ["1", "5"]
    first, second = map(losses_of, sorted((tmp_path / "out").rglob("events.out.tfevents.*")))
    assert first.keys() >= {1, 2, 3, 4, 5, 6} and second.keys() == {5, 6, 7, 8}
    assert all(first[step] == second[step] for step in first.keys() & second.keys())


def losses_of(path: Path) -> dict[int, float]:
    log = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    return {event.step: event.value for event in log.Scalars(LOSS)}


def trains(pid: int) -> bool:
    return b"-u\0-m\0torchtitan.train\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
