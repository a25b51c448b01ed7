"""Whether this machine, or this process, slept: a laptop's lid, a frozen VM, SIGSTOP. Nothing timed across it counts.

    with Awake() as awake:
        began = time.monotonic()
        ...
        awake.lost_s(began)    # seconds since `began` in which nothing here ran

A thread looks at the clock twice a second; CLOCK_BOOTTIME goes on while the machine is suspended, CLOCK_MONOTONIC
does not.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

LOOK_S = 0.5
LOST_S = 4.0
"""A look that comes so much too late was slept through; a busy machine is late by less."""


class Awake:
    def __init__(self) -> None:
        self._gaps: list[tuple[float, float]] = []  # (CLOCK_MONOTONIC at the end, seconds lost)
        self._ended = threading.Event()
        self._looked = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._mutex = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="awake", daemon=True)

    def __enter__(self) -> Awake:
        self._looked = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._ended.set()

    def lost_s(self, since: float) -> float:
        """Seconds lost to sleep since `since` (CLOCK_MONOTONIC seconds), or in a sleep that ended after it."""
        self._look()
        return sum(lost for end, lost in self._gaps if end > since)

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        with self._mutex:
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            lost = now - self._looked - LOOK_S
            self._looked = now
            if lost > LOST_S:
                self._gaps.append((time.monotonic(), lost))
