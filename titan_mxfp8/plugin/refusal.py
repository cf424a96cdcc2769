"""What a process that torchrun started says last, where its config is refused."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType


@contextmanager
def in_one_line() -> Iterator[None]:
    """A ValueError that ends this process is printed without its traceback, and ends torchrun's report, which comes
    behind it. Without torchrun errors stay as they are.

    The report says what stands in the file that torchrun names in TORCHELASTIC_ERROR_FILE. torch writes there what
    TorchTitan's trainer raises, and nothing yet while the config is parsed.
    """
    try:
        yield
    except ValueError as error:
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            said = f"ValueError: {error}"
            message = {"message": said, "extraInfo": {"timestamp": str(int(time.time()))}}
            Path(path).write_text(json.dumps({"message": message}))
            sys.excepthook = _without_traceback(error, said)
        raise


def _without_traceback(error: ValueError, said: str) -> Callable:
    usual = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if value is error:
            print(said, file=sys.stderr)
        else:
            usual(kind, value, traceback)

    return hook
