"""What the launchers show of torchrun's output, and why a run failed, in one line.

    torchrun --log-dir=FOLDER --tee=3 --role=rank ... 2>&1 | python scripts/watch.py show FOLDER "run 1 of 2"
    python scripts/watch.py cause FOLDER    # of all machines that share it; of several folders the newest

``show`` passes on torchrun's output without its own notes and tracebacks, and those of processes that lost the
connection to one that had ended. All of it goes to FOLDER/<host>-<pid>.log. It says when processes are restarted, for
which torchrun must log at the level INFO, and on a terminal it shows how far the run is. Where the disk is full it says
so once, and the training goes on: torchrun would end if nobody read its output.
"""

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = re.compile(r"(?:\[rank\d+\]: ?)*")  # of --tee, then of torch in a process group
NOTE = re.compile(r"I\d{4} [\d:.]+ \d+ \S*torch/distributed/")
FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
REPORTED = re.compile(r"rank\s*: \d+ \(local_rank: (\d+)\)\s+exitcode\s*: (-?\d+)")
RESTART = re.compile(r"(\d+)/(\d+) attempts left; will restart worker group")
STEP, TOTAL = re.compile(r"(?<!validate )step: *(\d+)"), re.compile(r"total steps (\d+)")  # in TorchTitan's log
TRACEBACK = "Traceback (most recent call last):"
LOGGED = "[titan] "  # a line of TorchTitan's log, which another thread may write in the middle of a traceback
REPORT = "ChildFailedError"  # torchrun's own, which ends its output
LOST_CONNECTION = re.compile(
    r"Connection (?:closed|reset) by peer|Broken pipe|Connection refused|[Rr]emote process exit|ncclRemoteError"
)


def end_of(status: int) -> str:
    """How a process with this exit status ended: minus a signal's number where one killed it."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def shortened(lines: Iterable[str]) -> Iterator[str]:
    """torchrun's lines without those that are no news; see the module's docstring."""
    tracebacks: dict[str, list[str]] = {}  # by process, torchrun's own included, as far as they have come
    failure, reported = "a process failed", False
    for line in lines:
        prefix = PREFIX.match(line)[0]
        text, process = line[len(prefix) :], prefix.partition(":")[0]
        if NOTE.match(text):
            if restart := RESTART.search(text):
                left, attempts = map(int, restart.groups())
                yield f"{failure}: restarting, attempt {attempts - left + 1} of {attempts}\n"
            elif "new nodes from group_rank" in text:
                yield "another machine waits to train with this one: restarting\n"
        elif process in tracebacks and not text.startswith(LOGGED):
            tracebacks[process].append(line)
            if text.strip() and not text[0].isspace():
                whole = tracebacks.pop(process)
                reported = reported or REPORT in text
                if process and not LOST_CONNECTION.search(text):
                    yield from whole
                elif REPORT not in text:
                    yield line
        elif text.startswith(TRACEBACK):
            tracebacks[process] = [line]
        elif process or not reported:
            if failed := FAILED.search(text):
                failure = f"local rank {failed[2]} {end_of(int(failed[1]))}"
            yield line
    for unfinished in tracebacks.values():
        yield from unfinished


def message(text: str) -> str | None:
    """The last exception of a program's output, or what TorchTitan's command line printed in a frame, or what
    torchrun's report has of a process that died of a signal."""
    found, inside, in_report = None, False, False
    for line in text.splitlines():
        line = line[PREFIX.match(line).end() :]
        if line.startswith(f"  traceback : {TRACEBACK}"):
            in_report = True
        elif in_report and re.match(r"  \S", line):
            found, in_report = found or line.strip(), False
        elif line.startswith(TRACEBACK):
            inside = True
        elif inside and line.strip() and not line[0].isspace() and not line.startswith(LOGGED):
            found, inside = found if REPORT in line else line, False
        elif found is None and line.startswith("│"):
            found = line.strip("│ ")
    return found


def failures(folder: Path) -> Iterator[tuple[int, float, str]]:
    """What went wrong as rank (0 is a cause, larger ones are rather consequences), time, and message."""
    for launched in {path.parent for path in folder.glob("*/attempt_*")}:
        attempt = max(launched.glob("attempt_*"), key=lambda path: int(path.name.partition("_")[2]))
        for process in attempt.iterdir():
            recorded, output = process / "error.json", process / "stderr.log"
            try:
                said = str(json.loads(recorded.read_text())["message"]["message"]).replace("\n", " ")
            except (OSError, ValueError, TypeError, LookupError):  # none, or a part, as where the disk is full
                recorded, outputs = output, (output, process / "stdout.log")
                said = next(filter(None, (message(path.read_text(errors="replace")) for path in outputs)), None)
            if said:
                rank = 2 if LOST_CONNECTION.search(said) else 0
                yield rank, recorded.stat().st_mtime, f"{said[:1000]} (local rank {process.name}: {output})"
    for log in folder.glob("*.log"):
        text, time = log.read_text(errors="replace"), log.stat().st_mtime
        ends = REPORTED.findall(text) or [(rank, status) for status, rank in FAILED.findall(text)[-1:]]
        for rank, status in ends:
            if int(status) != -signal.SIGTERM:  # which torchrun sends to the others
                yield 1 if int(status) < 0 else 4, time, f"local rank {rank} {end_of(int(status))} ({log})"
        if own := message("".join(line for line in text.splitlines(True) if not PREFIX.match(line)[0])):
            yield 3, time, f"{own} ({log})"
        yield 5, time, f"see {log}"


def cause(folders: Sequence[Path]) -> str:
    """Why the run failed that left its logs in the newest of these folders: the first cause, and where it stands."""
    there = [folder for folder in folders if folder.is_dir()]
    if not there:
        return "it has not started"
    newest = max(there, key=lambda folder: folder.stat().st_mtime)
    return min(failures(newest), default=(0, 0, f"nothing was logged in {newest}"))[2]


def show(folder: Path, what: str) -> None:
    from tqdm import tqdm  # of the environment that trains; ``cause`` runs in any

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # torchrun heeds them, and what it says then is wanted
    log = folder / f"{socket.gethostname()}-{os.getpid()}.log"
    failed: set[str] = set()

    @contextmanager
    def writing(where: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if where not in failed:
                failed.add(where)
                with suppress(OSError):
                    words = "the training goes on, and what cannot be written is missing there"
                    tqdm.write(f"watch: {where}: {error.strerror}; {words}", file=sys.stderr)

    def noted() -> Iterator[str]:
        file = None
        with writing(f"{log}"):
            folder.mkdir(parents=True, exist_ok=True)
            file = log.open("wb", buffering=0)  # keeps nothing that it could not write
        for raw in sys.stdin.buffer:
            with writing(f"{log}"):
                if file:
                    file.write(raw)
            yield raw.decode(errors="replace")

    with tqdm(desc=what, unit="step", dynamic_ncols=True, disable=None, postfix=f"log {log}") as bar:
        for line in shortened(noted()):
            with writing("standard output"):
                bar.write(line, end="", file=sys.stdout)
                sys.stdout.flush()
            if found := TOTAL.search(line):
                bar.total = int(found[1])
            if found := STEP.search(line):
                bar.update(int(found[1]) - bar.n)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.close()  # else Python tries again to write what is left, and fails


def main(argv: Sequence[str]) -> None:
    match argv:
        case ["show", folder, *what] if len(what) < 2:
            show(Path(folder), "".join(what))
        case ["cause", *folders] if folders:
            print(cause([Path(folder) for folder in folders]))
        case ["--help" | "-h"]:
            print(__doc__)
        case _:
            sys.exit(f"watch: show FOLDER [WHAT], or cause FOLDER...\n\n{__doc__}")


if __name__ == "__main__":
    main(sys.argv[1:])
