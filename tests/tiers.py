"""Which of many alike cases run each time. pyproject.toml says what tiers of tests there are."""

from collections.abc import Callable, Iterable

import pytest

# What files take, in CPU seconds, where it is more than 14.
SECONDS = {
    "test_triton_interpreter.py": 95,
    "test_smoke03.py": 80,
    "test_plugin_moe.py": 73,
    "test_configs.py": 40,
    "test_launchers.py": 40,
    "test_layouts.py": 30,
    "test_faults.py": 30,
    "test_models.py": 28,
    "test_benches.py": 28,
    "test_checkpoints.py": 27,
    "test_rerun.py": 27,
    "test_modules.py": 25,
    "test_plugin.py": 23,
    "test_late_compilation.py": 21,
    "test_bench_training.py": 19,
    "test_health.py": 15,
    "test_compare_runs.py": 15,
}


def daily(cases: Iterable[object], *keep: object, ids: Callable[[object], str] | None = None) -> list:
    """Parameters of a test, of which all but ``keep`` are nightly. A tuple is several arguments, and may be kept by the
    first of them."""
    made = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        kept = case in keep or (isinstance(case, tuple) and values[0] in keep)
        marks = () if kept else pytest.mark.nightly
        made.append(pytest.param(*values, marks=marks, id=ids(case) if ids else None))
    assert any(not parameter.marks for parameter in made)
    return made
