"""For every test: this checkout's scripts can be imported, and random numbers do not depend on which tests ran before.

Processes that test on one GPU at a time share its memory. Tests of the other TorchTitan are not collected.
"""

import importlib
import os
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

collect_ignore_glob = ["titan03/*"] if version("torchtitan").startswith("0.2.") else ["test_*.py", "interpreted/*"]


def pytest_configure() -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers > 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(0.9 / workers)  # contexts and kernels take some besides


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run tests marked nightly too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked nightly. Files with few tests first: they train, for minutes, and one that came last
    would keep one process waiting."""
    if not config.getoption("--all"):
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: tests[item.path])


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def launches_are_replayed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the latest from the third of calls that are alike on. What other tests launched is forgotten: they may have
    changed it."""
    if "titan_mxfp8.backends.common.replay" in sys.modules or torch.cuda.is_available():
        replay = importlib.import_module("titan_mxfp8.backends.common.replay")
        monkeypatch.setattr(replay, "_UNWATCHED", 1)
        replay.forget()
