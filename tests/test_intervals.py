"""Student's t against tables, and verdicts against simulation."""

import random
from statistics import fmean

import pytest

from scripts.study.compare_runs import critical_t, verdict_on


@pytest.mark.parametrize(
    "confidence, values",  # as printed in tables of Student's t, by degrees of freedom
    [
        (0.90, {1: 6.314, 2: 2.920, 5: 2.015, 11: 1.796, 30: 1.697, 120: 1.658}),
        (0.95, {1: 12.706, 2: 4.303, 5: 2.571, 11: 2.201, 30: 2.042, 120: 1.980}),
        (0.99, {1: 63.657, 2: 9.925, 5: 4.032, 11: 3.106, 30: 2.750, 120: 2.617}),
        (0.999, {1: 636.619, 2: 31.599, 5: 6.869, 11: 4.437, 30: 3.646, 120: 3.373}),
    ],
)
def test_critical_t_is_that_of_the_tables(confidence: float, values: dict[int, float]) -> None:
    for freedom, value in values.items():
        assert critical_t(confidence, freedom) == pytest.approx(value, abs=6e-4), freedom


def samples(mean: float, pairs: int, count: int) -> list[list[float]]:
    """``count`` times ``pairs`` normal numbers with a standard deviation of 1."""
    numbers = random.Random(0)
    return [[numbers.gauss(mean, 1) for _ in range(pairs)] for _ in range(count)]


@pytest.mark.parametrize("difference", [-1.5, 1.5])
def test_a_difference_of_the_margin_is_called_equivalent_once_in_twenty(difference: float) -> None:
    called = [verdict_on(values, 1.5, 0.005) for values in samples(difference, 12, 4000)]
    assert fmean(verdict.startswith("equivalent") for verdict in called) == pytest.approx(0.05, abs=0.01)


def test_no_difference_is_called_worse_or_higher_once_in_forty() -> None:
    """Whatever the margin, which decides how it is called."""
    for nats in (0.1, 1.0):
        verdicts = [verdict_on(values, nats, 0.005) for values in samples(0.0, 12, 4000)]
        up = fmean(verdict == "worse" or verdict.endswith("higher") for verdict in verdicts)
        down = fmean(verdict == "better" or verdict.endswith("lower") for verdict in verdicts)
        assert (up, down) == pytest.approx((0.025, 0.025), abs=0.0075)
