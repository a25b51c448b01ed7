"""The replay's clock: all of its processes share it, it runs faster than the real one, and it can be put forward.

A launch of nine minutes is told by putting the clock forward, stage by stage; a window really runs, `pace` times
faster, or slower where the machine is too busy: the server then lets no more time pass than it has worked for. Nothing
else of a process is touched: `install` replaces what Python asks for the time and sleeps by.
"""

from __future__ import annotations

import math
import mmap
import os
import pathlib
import select
import struct
import time
from typing import Any

# Names the folder of a running replay; without it there is none.
VARIABLE = "REPLAY"
# The shared file holds a double of each: told seconds in a real one, seconds put forward, the told time at which the
# clock stands still until the server lets it go on, launches so far.
PACE, AHEAD, CEILING, LAUNCHES = range(4)
REAL, SLEEP, SELECT = time.monotonic, time.sleep, select.select


class Clock:
    """`folder` holds the shared file; `pace` told seconds pass in a real one."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.file = folder / "clock"
        with self.file.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 4 * 8)
        self._shared = memoryview(mapped).cast("d")  # one at a time: a double is stored at once, never half
        self.pace = self._shared[PACE]

    @classmethod
    def create(cls, folder: pathlib.Path, pace: float) -> Clock:
        (folder / "clock").write_bytes(struct.pack("4d", pace, 0.0, math.inf, 0.0))
        return cls(folder)

    @classmethod
    def shared(cls) -> Clock | None:
        """The clock of the replay that this process belongs to."""
        folder = os.environ.get(VARIABLE)
        return cls(pathlib.Path(folder)) if folder else None

    def now(self) -> float:
        """Told seconds; takes the place of time.monotonic."""
        return min(REAL() * self.pace + self._shared[AHEAD], self._shared[CEILING])

    def put_forward(self, seconds: float) -> None:
        """Told time passes at once. Only the one server that runs does this."""
        self._resume()
        self._shared[AHEAD] += seconds
        self._shared[CEILING] += seconds

    def allow(self, seconds: float) -> None:
        """Let told time pass for `seconds` from now (inf: freely); it goes on from where it stood still."""
        self._resume()
        self._shared[CEILING] = self.now() + seconds

    def _resume(self) -> None:
        if self.now() == self._shared[CEILING]:
            self._shared[AHEAD] = self._shared[CEILING] - REAL() * self.pace

    def next_launch(self) -> int:
        """Count a launch; its number."""
        self._shared[LAUNCHES] += 1
        return int(self._shared[LAUNCHES])

    def install(self) -> None:
        """This process lives by told time from here on."""
        def select_told(r: Any, w: Any, x: Any, timeout: float | None = None) -> Any:
            return SELECT(r, w, x, None if timeout is None else timeout / self.pace)

        time.monotonic = self.now
        time.sleep = lambda seconds: SLEEP(float(seconds) / self.pace)
        select.select = select_told

    @staticmethod
    def uninstall() -> None:
        """Back to real time: for the server, whose event loop must not see jumps."""
        time.monotonic, time.sleep, select.select = REAL, SLEEP, SELECT
