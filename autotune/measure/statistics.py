"""Statistics of a window: tokens and latencies from arrival times, confidence intervals from dependent blocks."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autotune.loadgen.result import Reply
from autotune.records import QUANTILES, Percentiles

Floats = npt.NDArray[np.float64]
MIN_BLOCKS = 8
TARGET_BATCHES = 16


def token_arrivals(replies: Sequence[Reply]) -> tuple[Floats, Floats]:
    """(times in s, tokens) of every arrival of all requests, in no order.

    Where the server counted, each arrival has its own tokens; tokens that a batched read found (`read_batching`) are
    spread evenly over the time since the read before. Otherwise a request's final count is spread evenly over its
    events, and unfinished requests take the mean of the finished ones.
    """
    loose = [r for r in replies if not r.counted and r.completion_tokens is not None and r.times]
    events = sum(len(r.times) for r in loose)
    mean = sum(r.tokens for r in loose) / events if events else 1.0
    times, tokens = [np.empty(0)], [np.empty(0)]
    for r in (r for r in replies if r.times):
        at = np.frombuffer(r.times, dtype=np.float64)
        if r.counted:
            counts = np.maximum.accumulate(np.frombuffer(r.counts, dtype=np.int64))
            gained = np.diff(counts, prepend=0).astype(np.float64)
            if r.completion_tokens is not None:
                gained[-1] += r.completion_tokens - counts[-1]
            if not r.watched:
                at, gained = _spread(at, gained)
        else:
            gained = np.full(len(r.times), mean if r.completion_tokens is None else r.tokens / len(r.times))
        times.append(at)
        tokens.append(gained)
    return np.concatenate(times), np.concatenate(tokens)


def _spread(times: Floats, gained: Floats) -> tuple[Floats, Floats]:
    """Arrivals of one token each, evenly between the arrival before and the one that brought several."""
    several = np.maximum(gained, 1).astype(np.int64)
    several[0] = 1
    last = np.repeat(np.cumsum(several), several)  # tokens up to the end of each token's group
    left = (last - 1 - np.arange(len(last))) / np.repeat(several, several)
    apart = np.diff(times, prepend=times[0])
    return np.repeat(times, several) - left * np.repeat(apart, several), np.repeat(gained / several, several)


def tokens_between(arrivals: tuple[Floats, Floats], edges: Sequence[float]) -> list[float]:
    """Tokens that arrived in each of the intervals [edges[i], edges[i + 1])."""
    counts, _ = np.histogram(arrivals[0], bins=np.asarray(edges), weights=arrivals[1])
    return [float(c) for c in counts]


def percentiles(seconds: Sequence[float | None] | Floats) -> Percentiles | None:
    """Percentiles in ms of durations in s with their standard errors, without unknown ones; None if there is none.

    Requests count as independent. Errors of percentiles: Maritz and Jarrett 1978, the spread of order statistics whose
    ranks are Beta(n q, n (1 - q)), by 400 fixed draws. With too few requests to bound the percentile (fewer than three
    above it) at least 0.8 of the mean excess of the largest tenth: the spread of the maximum of an exponential tail is
    that excess times 1.28, of a normal one 0.9.
    """
    values = np.asarray(seconds, dtype=np.float64) * 1000
    values = values[~np.isnan(values)]
    if not values.size:
        return None
    values.sort()
    n = values.size
    found = {name: float(np.quantile(values, q)) for name, q in QUANTILES.items()} | {"mean": float(values.mean())}
    errors: dict[str, float] = {}
    if n > 1:
        draw = np.random.default_rng(0).beta
        errors = {name: float(np.std(np.quantile(values, draw((n + 1) * q, (n + 1) * (1 - q), 400))))
                  for name, q in QUANTILES.items()} | {"mean": float(values.std(ddof=1)) / math.sqrt(n)}
        top = max(1, n // 10)
        excess = float(values[-top:].mean() - values[-top - 1])
        errors |= {name: max(errors[name], 0.8 * excess) for name, q in QUANTILES.items() if n * (1 - q) < 3}
    return Percentiles(**found, n=int(n), errors={name: error / found[name] for name, error in errors.items()
                                                  if found[name] > 0})


def gaps(replies: Sequence[Reply], start: float, end: float) -> Floats:
    """Seconds between successive arrivals of one watched request, for arrivals in [start, end)."""
    found = [np.empty(0)]
    for times in (np.frombuffer(r.times, dtype=np.float64) for r in replies if r.watched and r.times):
        found.append(np.diff(times)[(times[1:] >= start) & (times[1:] < end)])
    return np.concatenate(found)


def relative_half_width(gains: Sequence[float], costs: Sequence[float], confidence: float = 0.95) -> float | None:
    """Half-width of the interval of sum(gains) / sum(costs), as a share of it.

    `gains` and `costs` are the tokens, and the joules or seconds, of successive blocks of equal time. Method: the ratio
    estimator's residuals, averaged over batches of blocks (non-overlapping batch means, Law and Carson 1979), inflated
    by (1 + r) / (1 - r) for the correlation r that remains between neighbouring batches, with Student's t of as many
    independent batches. None with fewer than 8 blocks, or when nothing was gained or spent.
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
    r = max(0.0, min(0.9, r + (0.5 + 3 * r + 14 * r * r) / batches))  # its bias in short series (Kendall 1954; the
    # square, for a nearly persistent series, by simulation: python -m tests.benchmarks.limits)
    variance = square / (batches - 1) / batches * (1 + r) / (1 - r)
    freedom = max(2, min(batches - 1, math.floor(batches * (1 - r) / (1 + r))))
    return student_t(0.5 + confidence / 2, freedom) * math.sqrt(variance) / (ratio * sum(costs) / n)


def trend(values: Sequence[float]) -> tuple[float, float]:
    """(slope per value, its standard error) of a straight line, with the errors' first-order correlation counted."""
    n = len(values)
    if n < 4:
        return 0.0, math.inf
    y, t = np.asarray(values) - np.mean(values), np.arange(n) - (n - 1) / 2
    slope = float(t @ y) / float(t @ t)
    rest = y - slope * t
    squares = float(rest @ rest)
    alike = min(0.9, max(0.0, float(rest[1:] @ rest[:-1]) / squares)) if squares else 0.0
    return slope, math.sqrt(squares / (n - 2) / float(t @ t) * (1 + alike) / (1 - alike))


def halves_differ(gains: Sequence[float], costs: Sequence[float], share: float) -> bool:
    """True if the two halves of a window differ by more than `share` and by more than their noise explains.

    Noise: twice the 99 % half-width of the mean, of blocks without their linear trend. False below 16 blocks.
    """
    n = len(gains)
    if n < 2 * MIN_BLOCKS or min(costs) <= 0:
        return False
    speed, t = np.asarray(gains) / np.asarray(costs), np.arange(n) - (n - 1) / 2
    level = speed - t * float(t @ speed) / float(t @ t)
    noise = relative_half_width(level.tolist(), [1.0] * n, confidence=0.99)
    first, second = float(speed[:n // 2].mean()), float(speed[n - n // 2:].mean())
    return noise is not None and abs(second - first) > max(share, 2 * noise) * float(speed.mean())


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
