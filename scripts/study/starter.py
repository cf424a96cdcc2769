"""Starts trainings one after the other; the processes of the next one import torch and TorchTitan meanwhile.

That takes over 10 s, where a benchmark's training takes 20. They import while this training compiles, before the steps
that count. The file is also the program of these processes, which wait for the arguments of the training that they are
to be: scripts/study/starter.py torchtitan.train ARGUMENTS.json.
"""

import importlib
import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory


class Starter(AbstractContextManager):
    """Runs of a program in so many processes each. Its end as a context ends the processes that wait, which else would
    wait for ever: within, SIGTERM is taken for Ctrl-C.

    Args:
        folder: for the log of the processes that wait.
    """

    def __init__(self, processes: int, folder: Path, program: str = "torchtitan.train") -> None:
        self._processes, self._folder, self._program = processes, folder, program
        self._waiting: tuple[subprocess.Popen, Path, Path] | None = None
        self._arguments = TemporaryDirectory()
        self._numbers = itertools.count()

    def __enter__(self) -> "Starter":
        self._former = signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGTERM, self._former)
        if self._waiting is not None:
            process, _, log = self._waiting
            process.terminate()
            process.wait()
            log.unlink()
        self._arguments.cleanup()

    def start(self, flags: Sequence[str], log: Path) -> subprocess.Popen:
        """Starts a run with these arguments, whose first process prints to ``log``."""
        process, arguments, own_log = self._waiting or self._prepare()
        own_log.replace(log)  # which moves what the open file writes to
        part = arguments.with_suffix(".part")
        part.write_text(json.dumps(list(flags)))
        part.replace(arguments)
        self._waiting = self._prepare()
        return process

    def _prepare(self) -> tuple[subprocess.Popen, Path, Path]:
        from scripts.study.runs import launch  # not at the top: the program imports nothing of titan_mxfp8

        self._folder.mkdir(parents=True, exist_ok=True)
        arguments = Path(self._arguments.name) / f"{next(self._numbers)}.json"
        log = self._folder / f"waiting-{os.getpid()}.log"
        program = ["--local-ranks-filter=0", __file__, self._program, str(arguments)]
        return launch(self._processes, program, log), arguments, log


def wait_and_run(program: str, arguments: Path) -> None:
    """Imports the program, a module, and waits for the file that holds its arguments."""
    importlib.import_module(program)
    sys.modules.pop(program)  # it is to be __main__
    while not arguments.exists():
        time.sleep(0.05)
    flags = json.loads(arguments.read_text())
    sys.path[0] = os.getcwd()  # as python -m has it
    sys.argv = [program, *flags]
    if config := sys.modules.get("torchtitan.config"):
        config.ConfigManager.parse_args.__defaults__ = (flags,)  # it was the command line when it was imported
    runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print(__doc__)
        sys.exit("--help" not in sys.argv)
    wait_and_run(sys.argv[1], Path(sys.argv[2]))
