"""Which load part to measure next on a live server, or again.

The loop pays little for a further measurement and much for a launch, so the question is only whether the best
measurement left is worth more per second than the best launch elsewhere. Nothing is taken to be monotone: every load
part keeps its own mean and spread, and further ones are also judged by the sceptic who takes interactions with the load
to be large, since they are cheap. Measuring the same again is worth what a surer choice of the winner is worth.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from autotune.search.memory import MOST_REPEATS, NOISE, Key, Memory
from autotune.search.value import Posterior, expected_improvement

Floats = NDArray[np.float64]

LEAST = 1e-4
"""Gains below this are not worth a measurement."""


def next_load(gains: Floats, repeats: Floats, measure_s: float, bar: float, fresh: bool, fallback: int) -> int | None:
    """Index of the load part, None to stop the server.

    gains: (L,) expected gain of measuring under each that was not measured yet; repeats: (L,) the worth of measuring
    again; bar: gain per second of the best launch elsewhere. A fresh server is always measured once: under
    `fallback` when nothing promises a gain.
    """
    worth = np.maximum(gains, repeats)
    index = int(np.argmax(worth))
    if fresh:
        return int(np.argmax(gains)) if gains.max() > LEAST else fallback
    if worth[index] < LEAST or worth[index] / measure_s < bar:
        return None
    return index


def repeats(memory: Memory, posterior: Posterior, key: Key) -> Floats:
    """(L,) what measuring each load part of a live server again is worth for the choice of the winner."""
    out = np.zeros(len(memory.grid.load_rows))
    feasible = memory.feasible()
    if len(feasible) < 2 or not any(k == key for k, _ in feasible):
        return out
    rows = np.array([k for k, _ in feasible], dtype=np.int16)
    loads = np.array([load for _, load in feasible], dtype=np.intp)
    seen = posterior.predict(rows)
    mean, sd = seen.mean[np.arange(len(rows)), loads], seen.sd[np.arange(len(rows)), loads]
    for i, (k, load) in enumerate(feasible):
        again = memory.servers[k].values[load]
        if k == key and len(again) < MOST_REPEATS:
            noise = again[-1].relative_noise or NOISE
            out[load] = worth_of_repeat(mean[i], sd[i], noise, np.delete(mean, i).max())
    return out


def worth_of_repeat(mean: float, sd: float, noise: float, rival: float) -> float:
    """Expected gain of one more measurement (noise sd) of something believed to be mean +- sd, against a rival's mean.

    The knowledge gradient of Frazier, Powell and Dayanik (2009) for one normal among known others.
    """
    shift = sd * sd / math.hypot(sd, noise)
    return float(expected_improvement(np.array(-abs(mean - rival)), np.array(max(shift, 1e-9)), 0.0))
