"""Student's t for differences of few pairs: intervals of a mean, and equivalence.

Two one-sided tests at level alpha (TOST; Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987) find a mean equivalent to
zero within a margin exactly where its interval of confidence 1 - 2 alpha lies in [-margin, +margin]. Alpha is 5% here,
so the interval is that of 90%.
"""

import math
from collections.abc import Sequence
from functools import cache
from statistics import fmean, stdev

EQUIVALENCE = 0.90  # confidence of the interval that two one-sided tests at 5% look at


def t_between(angle: float, freedom: int) -> float:
    """P(abs(T) < t) of Student's t with ``freedom`` degrees of freedom, where t = sqrt(freedom) * tan(angle).

    The finite sums of Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 (odd) and 26.7.4 (even).
    """
    odd, cosine = freedom % 2, math.cos(angle)
    total, term = 0.0, cosine if odd else 1.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= (k - 1) / k * cosine**2
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


@cache
def critical_t(confidence: float, freedom: int) -> float:
    """The t with P(abs(T) < t) = ``confidence``: 12.706 for 0.95 and 1 degree of freedom.

    Raises:
        ValueError: a confidence that is not between 0 and 1, or no degree of freedom.
    """
    if not 0 < confidence < 1 or freedom < 1:
        raise ValueError(f"confidence lies between 0 and 1 and freedom is at least 1, got {confidence} and {freedom}")
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # the last bits of a double
        middle = (low + high) / 2
        low, high = (middle, high) if t_between(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """The t interval of the mean of two or more independent, normally distributed values: its ends."""
    half = critical_t(confidence, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def is_equivalent(values: Sequence[float], margin: float) -> bool:
    """Whether two one-sided tests at 5% each find the mean within ``margin`` of zero."""
    low, high = interval(values, EQUIVALENCE)
    return -margin <= low and high <= margin
