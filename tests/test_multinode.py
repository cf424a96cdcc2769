"""scripts/train_multinode.sh: two agents on one machine train one job, and it survives the death of a worker."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from training import ROOT, descendants, losses, train

FLAGS = [
    "--training.steps=12",
    "--checkpoint.enable",
    "--checkpoint.interval=5",
    "--parallelism.expert_parallel_degree=2",
]


def ip(*arguments: str) -> bool:
    try:
        return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def machines() -> Iterator[list[tuple[list[str], dict[str, str]]]]:
    """For each of two machines: how to run a command there, and what its environment must say.

    Two network namespaces joined by a cable, which reach each other by address only. Where the kernel or the user's
    rights do not allow them: twice this machine.
    """
    names, links = [f"titan{os.getpid()}{end}" for end in "ab"], [f"tt{os.getpid()}{end}" for end in "ab"]
    if not all(ip("netns", "add", name) for name in names) or not ip(
        "link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1]
    ):
        for name in names:
            ip("netns", "del", name)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            endpoint = f"localhost:{free.getsockname()[1]}"
        yield [([], {"RDZV_ENDPOINT": endpoint})] * 2
        return
    with ExitStack() as stack:
        for i, (name, link) in enumerate(zip(names, links, strict=True), 1):
            stack.callback(ip, "netns", "del", name)
            assert ip("-n", name, "addr", "add", f"10.99.0.{i}/24", "dev", link)
            assert ip("-n", name, "link", "set", link, "up") and ip("-n", name, "link", "set", "lo", "up")
        yield [
            (
                ["ip", "netns", "exec", name],
                {"LOCAL_ADDR": f"10.99.0.{i}", "GLOO_SOCKET_IFNAME": link, "RDZV_ENDPOINT": "10.99.0.1:29500"},
            )
            for i, (name, link) in enumerate(zip(names, links, strict=True), 1)
        ]


def worker(agent: subprocess.Popen) -> int | None:
    """The agent's training process, once there is one."""
    for pid in descendants(agent.pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except FileNotFoundError:
            continue
        if b"torchtitan.train" in command and b"--local-ranks-filter=0" not in command:
            return pid
    return None


def test_two_machines_train_one_job_and_a_dead_worker_costs_no_step(machines, tmp_path: Path) -> None:
    one_machine = train(tmp_path / "one", "llama4", *FLAGS, layout="FSDP 2")
    out, agents, logs = tmp_path / "two", [], []
    for number, (prefix, environment) in enumerate(machines):
        settings = environment | {"NNODES": "2", "NGPU": "1", "OUT": str(out), "MAX_RESTARTS": "1"}
        settings |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
        logs.append(tmp_path / f"log{number}")
        with logs[-1].open("w") as log:
            agents.append(
                subprocess.Popen(
                    [*prefix, "scripts/train_multinode.sh", *FLAGS],
                    cwd=ROOT,
                    env=os.environ | settings,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                )
            )
    try:
        deadline = time.monotonic() + 240
        # the rank that logs is on either machine
        while not any("step:  8" in log.read_text() for log in logs):
            assert all(agent.poll() is None for agent in agents), "\n".join(log.read_text()[-3000:] for log in logs)
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(worker(agents[1]), signal.SIGKILL)
        for agent in agents:
            assert agent.wait(240) == 0, "\n".join(log.read_text()[-3000:] for log in logs)
    finally:
        for agent in agents:
            if agent.poll() is None:
                for pid in (agent.pid, *descendants(agent.pid)):
                    os.kill(pid, signal.SIGKILL)
    assert any("Training starts at step 6" in log.read_text() for log in logs)
    # The steps before the death, those after it, and those that were run twice: all as on one machine.
    assert losses(out / "mxfp8") == one_machine
    assert list(one_machine) == list(range(1, 13))
