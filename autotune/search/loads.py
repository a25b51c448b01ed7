"""Which load part to measure next on a live server.

The loop pays little for a further measurement and much for a launch, so the question is only whether the best
measurement left gains more per second than the best launch elsewhere. Nothing is taken to be monotone: every load
part keeps its own mean and spread. A load part that may end the server is put last by its own chance to.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LEAST = 1e-4
"""Gains below this are not worth a measurement."""


def next_load(gains: NDArray[np.float64], measure_s: float, bar: float, fresh: bool, fallback: int) -> int | None:
    """Index of the load part, None to stop the server.

    gains: (L,) expected gain under each; bar: gain per second of the best launch elsewhere. A fresh server
    is always measured once: under `fallback` when nothing promises a gain.
    """
    index = int(np.argmax(gains))
    if fresh:
        return index if gains[index] > LEAST else fallback
    if gains[index] < LEAST or gains[index] / measure_s < bar:
        return None
    return index
