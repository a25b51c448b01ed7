"""The replay's clock: all of its processes share it, it runs faster than the real one, and it can be put forward.

A launch of nine minutes is told by putting the clock forward, stage by stage; a window really runs, `pace` times
faster. Nothing else of a process is touched: `install` replaces what Python asks for the time and sleeps by.
"""

from __future__ import annotations

import mmap
import os
import pathlib
import select
import struct
import time
from typing import Any

VARIABLE = "REPLAY"
"""Names the folder of a running replay; without it there is none."""
LAYOUT = struct.Struct("ddq")
"""Pace, seconds put forward, launches so far."""
REAL, SLEEP, SELECT = time.monotonic, time.sleep, select.select


class Clock:
    """`folder` holds the shared file; `pace` told seconds pass in a real one."""

    def __init__(self, folder: pathlib.Path) -> None:
        with (folder / "clock").open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), LAYOUT.size)
        self.pace: float = LAYOUT.unpack_from(self._shared)[0]

    @classmethod
    def create(cls, folder: pathlib.Path, pace: float) -> Clock:
        (folder / "clock").write_bytes(LAYOUT.pack(pace, 0.0, 0))
        return cls(folder)

    @classmethod
    def shared(cls) -> Clock | None:
        """The clock of the replay that this process belongs to."""
        folder = os.environ.get(VARIABLE)
        return cls(pathlib.Path(folder)) if folder else None

    def now(self) -> float:
        """Told seconds; takes the place of time.monotonic."""
        return REAL() * self.pace + float(LAYOUT.unpack_from(self._shared)[1])

    def put_forward(self, seconds: float) -> None:
        """Told time passes at once. Only the one server that runs does this."""
        _, ahead, launches = LAYOUT.unpack_from(self._shared)
        LAYOUT.pack_into(self._shared, 0, self.pace, ahead + seconds, launches)

    def next_launch(self) -> int:
        """Count a launch; its number."""
        _, ahead, launches = LAYOUT.unpack_from(self._shared)
        LAYOUT.pack_into(self._shared, 0, self.pace, ahead, launches + 1)
        return int(launches) + 1

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
