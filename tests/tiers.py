"""Which of many alike cases run each time. pyproject.toml says what tiers of tests there are."""

from collections.abc import Callable, Iterable

import pytest

# What files take, in CPU seconds, where it is more than 20.
SECONDS = {
    "test_triton_interpreter.py": 102,
    "test_plugin_moe.py": 94,
    "test_smoke03.py": 76,
    "test_configs.py": 52,
    "test_models.py": 48,
    "test_moe_layer.py": 46,
    "test_late_compilation.py": 43,
    "test_layouts.py": 40,
    "test_quantize_aot.py": 38,
    "test_benches.py": 36,
    "test_checkpoints.py": 35,
    "test_rerun.py": 33,
    "test_hopper_gemm_aot.py": 31,
    "test_modules.py": 30,
    "test_smoke.py": 28,
    "test_bench_training.py": 26,
    "test_plugin.py": 25,
    "test_compare_runs.py": 23,
    "test_moe_aot.py": 21,
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
