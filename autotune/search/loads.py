"""Which load part to measure next on a live server, or again.

The loop pays little for a further measurement and much for a launch, so the question is only whether the best
measurement left is worth more per second than the best launch elsewhere. Nothing is taken to be monotone: every load
part keeps its own mean and spread. Measuring the same again is worth what a surer choice of the winner is worth.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from autotune.search.value import expected_improvement

Floats = NDArray[np.float64]

LEAST = 1e-4
"""Gains below this are not worth a measurement."""
MOST_REPEATS = 3
"""Measurements of one configuration on one launch."""


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


def worth_of_repeat(mean: float, sd: float, noise: float, rival: float) -> float:
    """Expected gain of one more measurement (noise sd) of something believed to be mean +- sd, against a rival's mean.

    The knowledge gradient of Frazier, Powell and Dayanik (2009) for one normal among known others.
    """
    shift = sd * sd / math.hypot(sd, noise)
    return float(expected_improvement(np.array(-abs(mean - rival)), np.array(max(shift, 1e-9)), 0.0))
