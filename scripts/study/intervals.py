"""Student's t for differences of few pairs: intervals of a mean, equivalence, and how many pairs that takes.

Two one-sided tests at level alpha (TOST; Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987) find a mean equivalent to
zero within a margin exactly where its interval of confidence 1 - 2 alpha lies in [-margin, +margin]. Alpha is 5% here,
so the interval is that of 90%.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist, fmean, stdev

EQUIVALENCE = 0.90  # confidence of the interval that two one-sided tests at 5% look at
MOST = 1000  # pairs that ``pairs_needed`` looks for


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


def equivalence_power(deviation: float, margin: float, pairs: int, difference: float = 0.0) -> float:
    """How probable it is that ``is_equivalent`` is true of ``pairs`` values.

    The mean of normal values and their standard deviation s are independent. So this is the integral, over the density
    of s, of the probability that the mean is no further from zero than margin - t * s / sqrt(pairs).

    Args:
        deviation: the values' true standard deviation.
        difference: their true mean.
    """
    if deviation == 0:
        return float(abs(difference) <= margin)
    freedom, error = pairs - 1, deviation / math.sqrt(pairs)
    t, mean = critical_t(EQUIVALENCE, freedom), NormalDist(difference, error)
    # u = s / deviation: above 1 + 10 / sqrt(2 freedom) its density, a scaled chi's, is nothing
    end, steps = min(margin / (t * error), 1 + 10 / math.sqrt(2 * freedom)), 500
    scale = math.log(2) + freedom / 2 * math.log(freedom / 2) - math.lgamma(freedom / 2)
    power = 0.0
    for step in range(steps):
        u = (step + 0.5) / steps * end
        room = margin - t * u * error
        density = math.exp(scale + (freedom - 1) * math.log(u) - freedom * u * u / 2)
        power += density * (mean.cdf(room) - mean.cdf(-room)) * end / steps
    return power


def pairs_needed(deviation: float, margin: float, power: float, difference: float = 0.0) -> int | None:
    """The fewest pairs with which ``equivalence_power`` reaches ``power``; None if that takes more than ``MOST``."""
    counts = range(2, MOST + 1)
    place = bisect_left(counts, power, key=lambda pairs: equivalence_power(deviation, margin, pairs, difference))
    return counts[place] if place < len(counts) else None
