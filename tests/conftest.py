"""For every test: this checkout's scripts can be imported, and random numbers do not depend on which tests ran before.

Processes that test on one GPU at a time share its memory. Tests of the other TorchTitan are not collected.
"""

import importlib
import os
import sys
from importlib.metadata import version
from pathlib import Path

import cpu_products
import pytest
import torch
import tyro
from tiers import SECONDS

sys.path.insert(0, str(Path(__file__).parent.parent))

# What --help says of a field is read from its class's source, which takes half of the time that a config is parsed.
tyro._docstrings.get_field_docstring = lambda cls, name, markers: None

collect_ignore_glob = ["titan03/*"] if version("torchtitan").startswith("0.2.") else ["test_*.py", "interpreted/*"]


def pytest_configure() -> None:
    cpu_products.speed_up()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers > 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(0.9 / workers)  # contexts and kernels take some besides


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run tests marked nightly too")
    parser.addoption("--fast", action="store_true", help="run none marked integration: those that start no process")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is of another tier. The longest files first: one that came last would keep a process waiting."""
    left_out = [] if config.getoption("--all") else ["nightly"]
    left_out += ["integration"] if config.getoption("--fast") else []
    others = {item for item in items if any(map(item.get_closest_marker, left_out))}
    config.hook.pytest_deselected(items=list(others))
    items[:] = sorted((item for item in items if item not in others), key=lambda item: -SECONDS.get(item.path.name, 0))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Names a test that failed at once, and its error: a run that is cut short shows no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        error = f": {crash.message[:2000]}" if crash else ""
        print(f"\n{report.nodeid} failed{error}", file=sys.__stderr__, flush=True)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture
def stub(tmp_path: Path) -> dict[str, str]:
    return importlib.import_module("script_calls").stub_of(tmp_path)  # whose imports few tests need


@pytest.fixture(autouse=True)
def launches_are_replayed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the latest from the third of calls that are alike on. What other tests launched is forgotten: they may have
    changed it."""
    if "titan_mxfp8.backends.common.replay" in sys.modules or torch.cuda.is_available():
        replay = importlib.import_module("titan_mxfp8.backends.common.replay")
        monkeypatch.setattr(replay, "_UNWATCHED", 1)
        replay.forget()
