"""Starts programs as torchrun does, in processes forked from one that has imported torch and TorchTitan.

Each process that torchrun starts imports for 5 s, and the tests start more than a hundred. Python's own fork server
imports once, before it has any threads. What is about torchrun itself is tested with it.
"""

import atexit
import functools
import importlib
import math
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

import cpu_products
import torch
import tyro
from torch.distributed import TCPStore

ROOT = Path(__file__).parent.parent
SERVER = multiprocessing.get_context("forkserver")
# What a process of a training imports; nothing of this package, whose import changes TorchTitan.
IMPORTS = "datasets.distributed tensorboard torch.distributed.pipelining torch.utils.tensorboard"
IMPORTS += " torchdata.stateful_dataloader torchtitan.train wandb"


@functools.cache
def start_server() -> None:
    """Once in this process."""
    SERVER.set_forkserver_preload(IMPORTS.split())
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()


class Job:
    """Processes of one job, with as much of ``subprocess.Popen`` as the tests use. If one fails, the others are
    killed."""

    def __init__(self, processes: Sequence[multiprocessing.Process], store: TCPStore) -> None:
        self._processes, self._store = processes, store  # which lives as long as those that meet in it
        self.pids = [process.pid for process in processes]

    @property
    def returncode(self) -> int | None:
        """0 once all have ended well, that of one that has not, or None while any runs."""
        codes = [process.exitcode for process in self._processes]
        failed = [code for code in codes if code]
        return failed[0] if failed else None if None in codes else 0

    def poll(self) -> int | None:
        code = self.returncode
        if code:
            self.kill()
        return code

    def wait(self, timeout: float = math.inf) -> int:
        """Raises TimeoutError: it has not ended so many seconds later, and was killed."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"no end within {timeout} s")
            wait([process.sentinel for process in self._processes if process.exitcode is None], 1)
        return self.returncode

    def end_of(self, rank: int, timeout: float) -> int | None:
        """The exit code of one process, whatever becomes of the others; None where it goes on for longer."""
        self._processes[rank].join(timeout)
        return self._processes[rank].exitcode

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    terminate = kill


def launch(
    processes: int,
    program: Sequence[object],
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    jobs: int = 1,
    cwd: Path | None = None,
) -> Job | subprocess.Popen:
    """As ``scripts.study.runs.launch``, which it calls where there are GPUs: what looks at one must not be forked."""
    if torch.accelerator.is_available():
        runs = importlib.import_module("scripts.study.runs")
        return runs.launch(processes, program, log, environment, jobs=jobs, cwd=cwd)
    start_server()
    log.touch()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    common = {"OMP_NUM_THREADS": "1"} | os.environ | (environment or {}) | {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    started = []
    for rank in map(str, range(processes)):
        own = common | {"RANK": rank, "LOCAL_RANK": rank}
        arguments = [*map(str, program)], own, log, cwd or Path.cwd()
        started.append(SERVER.Process(target=_run, args=arguments, daemon=True))
        started[-1].start()
    return Job(started, store)


def check(processes: int, *program: object, **environment: str) -> None:
    """Runs a program of tests/ to its end, and prints what its processes do."""
    folders = ROOT, ROOT / "tests", os.environ.get("PYTHONPATH")
    own = {"PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder)}
    own |= {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
    print(_output(processes, [ROOT / "tests" / program[0], *program[1:]], own | environment, ROOT)[-10000:])


def python(code: str, *arguments: str, **environment: str) -> str:
    """What a program prints, run where torch and TorchTitan have been imported already."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(code)
        return _output(1, [program, *arguments], environment)


def _output(processes: int, program: Sequence[object], environment: dict[str, str], cwd: Path | None = None) -> str:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        code = launch(processes, [*map(str, program)], log, environment, cwd=cwd).wait(600)
        text = log.read_text()
    assert code == 0, text[-10000:]
    return text


def _run(program: list[str], environment: dict[str, str], log: Path, cwd: Path) -> None:
    """Becomes the program: a script and its arguments, or ``-m`` and a module and those."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, file), (2, file)):
        os.dup2(source, target)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # several processes write whole lines
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    cpu_products.speed_up()
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    is_module = program[0] == "-m"
    sys.argv = program[is_module:]
    # torchtitan.train is the program's __main__, and its command line was read when it was imported
    sys.modules.pop("torchtitan.train", None)
    importlib.import_module("torchtitan.config").ConfigManager.parse_args.__defaults__ = (sys.argv[1:],)
    tyro._docstrings.get_field_docstring = lambda cls, name, markers: None  # as in conftest.py
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(0 if seconds == 2 else seconds)  # which rank 0 does after its last step
    try:
        if is_module:
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(program[0]).parent))
            runpy.run_path(program[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a forked process ends without them
