"""Which of many alike cases run each time. pyproject.toml says what tiers of tests there are."""

from collections.abc import Callable, Iterable

import pytest

# What files take, in CPU seconds, the longest ones; those that are not here take less.
SECONDS = {}


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
