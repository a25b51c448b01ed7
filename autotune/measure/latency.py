"""Tokens and latencies of a window, from the arrival times of its requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autotune.loadgen.result import Reply
from autotune.records import Percentiles

Floats = npt.NDArray[np.float64]


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
    """Percentiles in ms of durations in s, without unknown ones; None if there is none."""
    values = np.asarray(seconds, dtype=np.float64) * 1000
    values = values[~np.isnan(values)]
    if not values.size:
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return Percentiles(p50=float(p50), p90=float(p90), p99=float(p99), mean=float(values.mean()), n=int(values.size))


def gaps(replies: Sequence[Reply], start: float, end: float) -> Floats:
    """Seconds between successive arrivals of one watched request, for arrivals in [start, end)."""
    found = [np.empty(0)]
    for times in (np.frombuffer(r.times, dtype=np.float64) for r in replies if r.watched and r.times):
        found.append(np.diff(times)[(times[1:] >= start) & (times[1:] < end)])
    return np.concatenate(found)
