"""What a type checker says of programs that call the public functions (``typed_api.py``)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.integration
def test_the_public_api_is_typed() -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", f"--cache-dir={os.devnull}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
