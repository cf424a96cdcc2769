"""scripts/train_multinode.sh: two agents on one machine train a job that survives a dead worker and a dead agent."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from slurm_cluster import joined_namespaces
from training import ROOT, descendants, losses, train

pytestmark = pytest.mark.integration

FLAGS = ["--training.steps=15", "--training.seq_len=256", "--checkpoint.enable", "--checkpoint.interval=5"]
FLAGS += ["--parallelism.expert_parallel_degree=2"]


@dataclass(frozen=True)
class Machine:
    """How to run a command on it, and what the launcher must be told there."""

    prefix: list[str]
    environment: dict[str, str]


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
        yield [Machine(prefix, common | {"LOCAL_ADDR": address}) for prefix, address in found]


def launch(machine: Machine, out: Path, log: Path) -> subprocess.Popen:
    settings = {"NNODES": "2", "NGPU": "1", "OUT": str(out), "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as file:
        return subprocess.Popen(
            [*machine.prefix, "scripts/train_multinode.sh", *FLAGS],
            cwd=ROOT,
            env=os.environ | settings | {"OMP_NUM_THREADS": "1"} | machine.environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )


def wait_for(line: str, agents: list[subprocess.Popen], logs: list[Path], timeout: float = 240) -> None:
    deadline = time.monotonic() + timeout
    while not all(line in log.read_text() for log in logs):
        ended = any(agent.poll() is not None for agent in agents)
        if ended or time.monotonic() > deadline:
            pytest.fail("\n\n".join(log.read_text()[-3000:] for log in logs))
        time.sleep(0.02)


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
def test_a_job_on_two_machines_survives_a_dead_worker_and_a_dead_machine(
    machines: list[Machine], tmp_path: Path
) -> None:
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
