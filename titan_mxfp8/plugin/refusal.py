"""What a process that torchrun started says last, where its config is refused."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def in_one_line() -> Iterator[None]:
    """A ValueError that ends this process is printed without its traceback, and ends torchrun's report, which comes
    behind it and says what stands in a file, where torch writes what TorchTitan's trainer raises, and nothing yet while
    the config is parsed."""
    try:
        yield
    except ValueError as error:
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            refused, said, usual = error, f"ValueError: {error}", sys.excepthook
            message = {"message": said, "extraInfo": {"timestamp": str(int(time.time()))}}
            Path(path).write_text(json.dumps({"message": message}))

            def hook(kind: type[BaseException], value: BaseException, traceback: object) -> None:
                print(said, file=sys.stderr) if value is refused else usual(kind, value, traceback)

            sys.excepthook = hook
        raise
