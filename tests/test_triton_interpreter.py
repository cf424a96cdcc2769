"""Runs the tests of ``interpreted/`` in Triton's CPU interpreter, repaired (``interpreter.py``).

``TRITON_INTERPRET`` counts when triton is imported and a process that interprets cannot compile, so they get a process
of their own. By hand: ``TRITON_INTERPRET=1 PYTHONPATH=tests pytest tests/interpreted``.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(version("triton").startswith(("3.6.", "3.7.", "3.8.")), reason="needs the interpreter of 3.9"),
]

TESTS = Path(__file__).parent


def test_in_interpreter(request: pytest.FixtureRequest) -> None:
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent)))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / "interpreted")]
    command += ["--all"] if request.config.getoption("--all") else []
    run = subprocess.run(command, env=env, cwd=TESTS.parent, capture_output=True, text=True)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
