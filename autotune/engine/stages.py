"""The start-up stage of a server, read from its growing log with bounded memory."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Sequence

from autotune.engine.spec import StageMark, found
from autotune.records import Stage

ORDER = list(Stage)
CHUNK = 1 << 20


class StageReader:
    """Follows one log file: `update` reads its new part and moves `stage` forward, never back."""

    def __init__(self, path: pathlib.Path, marks: Sequence[StageMark],
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self.marks, self.clock = path, marks, clock
        self.stage = Stage.ARG_PARSE
        self.entered = self.grew = clock()
        self.seen: set[str] = set()
        self._offset = 0
        self._rest = ""

    def update(self) -> Stage:
        """Read the new part of the log and return the stage reached so far."""
        if not self.path.is_file():
            return self.stage
        size = self.path.stat().st_size
        if size < self._offset:
            self._offset = max(0, size - CHUNK)
        with self.path.open("rb") as file:
            file.seek(self._offset)
            while chunk := file.read(CHUNK):
                self._offset += len(chunk)
                self.grew = self.clock()
                lines = (self._rest + chunk.decode("utf-8", "replace")).replace("\r", "\n").split("\n")
                self._rest = lines.pop()[-CHUNK:]
                for line in lines:
                    self._line(line)
        return self.stage

    def enter(self, stage: Stage) -> None:
        """Move forward to `stage` (earlier stages are ignored) and note when."""
        if ORDER.index(stage) > ORDER.index(self.stage):
            self.stage, self.entered = stage, self.clock()

    def _line(self, line: str) -> None:
        for mark in self.marks:
            if mark.pattern not in self.seen and found(mark.pattern, line):
                self.seen.add(mark.pattern)
                self.enter(mark.stage)
