"""Where long work stands: bars of tqdm, which datasets and so both TorchTitans bring; and how scripts end."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from scripts.watch import STEP


def progress(total: int, what: str, unit: str = "run") -> tqdm:
    """A bar on a terminal, nothing elsewhere; ``tqdm.write`` prints above it. It counts ``unit`` up to ``total``."""
    return tqdm(total=total, desc=what, unit=unit, dynamic_ncols=True, disable=None, smoothing=0.1)


def say(text: str) -> None:
    """Prints a line, above the bars if there are any."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


def step_of(log: Path) -> int:
    """The last step that a run's log names in its last 64 KiB; 0 before the first."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - (1 << 16)))
            return int((STEP.findall(file.read().decode(errors="replace")) or [0])[-1])
    except OSError:
        return 0


def follow(process: subprocess.Popen, log: Path, steps: int, what: str) -> int:
    """Waits for a training, with a bar of its steps and the path of its log; its exit status. Ctrl-C ends both."""
    with progress(steps, what, "step") as bar:
        bar.set_postfix_str(f"log {log}")
        while process.poll() is None:
            try:
                process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                bar.update(step_of(log) - bar.n)
            except KeyboardInterrupt:
                process.terminate()
                process.wait()
                raise
    return process.returncode


@contextmanager
def ends_in_words(script: str, go_on: str = "the same command goes on") -> Iterator[None]:
    """Within, errors of users and Ctrl-C end the script with a message, which says how to go on."""
    try:
        yield
    except (ValueError, OSError) as error:
        sys.exit(f"{script}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{script}: interrupted; {go_on}")
