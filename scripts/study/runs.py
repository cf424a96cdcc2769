"""TorchTitan runs, for the other scripts: starting them, and reading back what they logged."""

import csv
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.watch import message

TRAIN = ("--local-ranks-filter=0", "-m", "torchtitan.train")  # of the processes, the first one's output
LOSS = "loss_metrics/global_avg_loss"
HELD_OUT = "validation_metrics/loss"
# TensorBoard's, of a Run.
SCALARS = {"loss": LOSS, "tps": "throughput(tps)", "memory": "memory/max_reserved(GiB)", "held_out": HELD_OUT}


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A script's own arguments, and those behind ``--``, which go to TorchTitan."""
    own = list(argv)
    return (own[: own.index("--")], own[own.index("--") + 1 :]) if "--" in own else (own, [])


def field_of(flag: str) -> str:
    """The field of TorchTitan's config that a flag sets; tyro takes ``-`` for ``_``, and ``no-`` before a name."""
    section, _, name = flag.partition("=")[0].removeprefix("--").replace("-", "_").rpartition(".")
    return f"{section}.{name.removeprefix('no_')}"


def value_of(name: str, config: Path, flags: Sequence[str]) -> object:
    """What a run has in a field such as ``training.steps``, by the flags and then the TOML; None where neither says."""
    section, _, key = name.partition(".")
    value = tomllib.loads(config.read_text()).get(section, {}).get(key)
    for flag, behind in zip(flags, [*flags, ""][1:], strict=True):
        if flag.startswith("--") and field_of(flag) == name:
            value = flag.partition("=")[2] or behind
    return value


def torchrun(processes: int, *program: str) -> list[str]:
    """The command that runs a program (a script, or ``-m`` and a module) in so many processes of this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *program]


def cores_each(processes: int) -> int:
    """This machine's CPU cores for each of so many processes."""
    return max(1, (os.cpu_count() or 1) // processes)


def launch(
    processes: int,
    program: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    jobs: int = 1,
    cwd: Path | None = None,
    start_new_session: bool = False,
) -> subprocess.Popen:
    """Starts ``torchrun(processes, *program)``; what it prints goes behind what ``log`` holds.

    Args:
        environment: set besides this process's own.
        jobs: so many launches run at a time, and share the cores among their threads, unless OMP_NUM_THREADS is set.
    """
    threads = {"OMP_NUM_THREADS": str(cores_each(jobs * processes))}
    with log.open("a") as file:
        return subprocess.Popen(
            torchrun(processes, *program),
            cwd=cwd,
            env=threads | os.environ | (environment or {}),
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=start_new_session,
        )


def ending(log: Path) -> str:
    """Why a run failed, and the last that it printed, for a message."""
    text = log.read_text(errors="replace")
    return f"{message(text) or 'no exception'}; {log} ends:\n{text[-3000:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Scalars by step: mean loss in nats per token, tokens per second per device, peak memory in GiB, and where there
    was validation its loss.

    ``config`` is TorchTitan's, as the run saved it in ``job_config.json``; empty where it saved none.
    """

    name: str
    loss: dict[int, float]
    tps: dict[int, float]
    memory: dict[int, float]
    config: dict[str, dict]
    held_out: dict[int, float] = field(default_factory=dict)

    @property
    def group(self) -> str:
        return re.sub(r"-seed\d+$", "", self.name)

    @property
    def seed(self) -> int | None:
        """Of a name that ends in ``-seed<k>``: what two runs of a pair have in common."""
        found = re.search(r"-seed(\d+)$", self.name)
        return int(found[1]) if found else None


def read_run(folder: Path) -> Run:
    """Reads a run's dump folder: its TensorBoard logs, and its config where it saved one. Raises ValueError for no such
    folder, no log there, those of several runs, one without losses, or a ``job_config.json`` that is none."""
    folder = folder.resolve()
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    logs, scalars = tensorboard_logs(folder), read_tensorboard(folder)
    if not logs:
        raise ValueError(f"{folder} holds no TensorBoard log: train with metrics.enable_tensorboard = true")
    if not scalars.get(LOSS):
        raise ValueError(f"{logs[-1]} holds no {LOSS}: the run ended before its first log")
    saved = folder / "job_config.json"
    try:
        config = json.loads(saved.read_text()) if saved.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{saved} is no JSON: {error}; without it configs are not compared") from error
    return Run(name=folder.name, config=config, **{name: scalars.get(tag, {}) for name, tag in SCALARS.items()})


def read_losses(path: Path) -> list[Run]:
    """The runs of a ``losses.csv`` that compare_runs.py wrote, without memory and config. Raises ValueError if the file
    is none."""
    runs = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file, restkey=""))  # of lines that are longer than the first
        for name in [column.removesuffix(" loss") for column in (rows or [{}])[0] if column.endswith(" loss")]:
            loss, tps, held_out = (
                {int(float(row["step"])): float(row[column]) for row in rows if row.get(column)}
                for column in (f"{name} loss", f"{name} tps", f"{name} held-out")
            )
            runs.append(Run(name=name, loss=loss, tps=tps, memory={}, config={}, held_out=held_out))
    except (ValueError, KeyError, csv.Error) as error:
        others = f"name the folders of runs, of a study {path.parent}/*-seed*, or a losses.csv"
        raise ValueError(f"{path} is no losses.csv of compare_runs.py: {error}; {others}") from error
    if not runs or not all(run.loss for run in runs):
        raise ValueError(f"{path} is no losses.csv of compare_runs.py: it needs columns 'step' and '<run> loss'")
    return runs


def unique_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, or where two have the same name their ways from the folder above them all. Raises ValueError
    if a folder is given twice."""
    paths = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, paths, strict=True):
        if paths.count(path) > 1:
            raise ValueError(f"{folder} is given twice")
    names = [path.name for path in paths]
    above = os.path.commonpath(paths)
    return names if len(set(names)) == len(names) else [str(path.relative_to(above)) for path in paths]


def tensorboard_logs(folder: Path) -> list[Path]:
    """A run's event files, the oldest first: one for each time that it was started. Raises ValueError if the folder
    holds several runs."""
    dumps = sorted({path.parent for name in ("job_config.json", "tb") for path in folder.rglob(name)})
    if len(dumps) > 1:
        among = f"{dumps[0]} and {dumps[1]} among them: name their own folders, of a study {folder}/*-seed*"
        raise ValueError(f"{folder} holds several runs, {among}")

    # by the time in its name, as copies are all new, and within a second by the file's
    files = folder.rglob("events.out.tfevents.*")
    return sorted(files, key=lambda path: (re.findall(r"tfevents\.\d+", path.name), path.stat().st_mtime))


def read_tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    """All scalars by tag and step, as ``resume`` puts together those of several logs. Raises ValueError if the folder
    holds several runs."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars: dict[str, dict[int, float]] = {}
    for path in tensorboard_logs(folder):
        log = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        resume(scalars, {tag: {event.step: event.value for event in log.Scalars(tag)} for tag in log.Tags()["scalars"]})
    return scalars


def resume(scalars: dict[str, dict[int, float]], newer: dict[str, dict[int, float]]) -> None:
    """Adds those of a newer log. It replaces all from its first step on: what it has not reached is another run's."""
    first = min((step for tag in newer.keys() & scalars.keys() for step in newer[tag]), default=math.inf)
    for values in scalars.values():
        for step in [step for step in values if step >= first]:
            del values[step]
    for tag, values in newer.items():
        scalars.setdefault(tag, {}).update(values)
