"""Confidence intervals of a ratio such as tokens per joule, from dependent blocks of a window."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

MIN_BLOCKS = 8
TARGET_BATCHES = 16


def relative_half_width(gains: Sequence[float], costs: Sequence[float], confidence: float = 0.95) -> float | None:
    """Half-width of the interval of sum(gains) / sum(costs), as a share of it.

    `gains` and `costs` are the tokens, and the joules or seconds, of successive blocks of equal time. Method: the ratio
    estimator's residuals, averaged over batches of blocks (non-overlapping batch means, Law and Carson 1979), inflated
    by (1 + r) / (1 - r) for the correlation r that remains between neighbouring batches, with Student's t. None with
    fewer than 8 blocks, or when nothing was gained or spent.
    """
    n = len(gains)
    if n < MIN_BLOCKS or n != len(costs) or sum(gains) <= 0 or sum(costs) <= 0:
        return None
    ratio = sum(gains) / sum(costs)
    size = max(1, n // TARGET_BATCHES)
    batches = n // size
    skip = n - batches * size  # the oldest blocks
    residuals = [sum(gains[i] - ratio * costs[i] for i in range(skip + b * size, skip + (b + 1) * size)) / size
                 for b in range(batches)]
    mean = sum(residuals) / batches
    spread = [r - mean for r in residuals]
    square = sum(s * s for s in spread)
    if square == 0:
        return 0.0
    r = sum(a * b for a, b in zip(spread, spread[1:], strict=False)) / square
    r = max(0.0, min(0.9, r + (1 + 3 * r) / batches))  # corrected for its bias in short series (Kendall 1954)
    variance = square / (batches - 1) / batches * (1 + r) / (1 - r)
    return student_t(0.5 + confidence / 2, batches - 1) * math.sqrt(variance) / (ratio * sum(costs) / n)


def student_t_cdf(t: float, freedom: int) -> float:
    """P(T <= t) of Student's t with whole degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    theta, odd = math.atan2(t, math.sqrt(freedom)), freedom % 2
    cosine = math.cos(theta)
    term = total = cosine if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine ** 2 * (k - 1) / k
        total += term
    if odd:
        return 0.5 + (theta + (math.sin(theta) * total if freedom > 1 else 0.0)) / math.pi
    return 0.5 + math.sin(theta) * total / 2


@functools.lru_cache(maxsize=1024)
def student_t(p: float, freedom: int) -> float:
    """The t with P(T <= t) = p, for 0.5 <= p < 1, by bisection."""
    low, high = 0.0, 1.0
    while student_t_cdf(high, freedom) < p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_t_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2
