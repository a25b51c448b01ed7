"""Progress of a launch: marks of an engine file, looked for in the growing log with bounded memory."""

from __future__ import annotations

import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import regex

from autotune.records import Stage

ORDER = list(Stage)
CHUNK = 1 << 20
MATCH_CHARS = 2000  # of a log line: marks stand at its beginning
MATCH_TIMEOUT_S = 0.1  # for one pattern on one line
Pattern = Annotated[str, msgspec.Meta(description="a regular expression")]


class StageMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A log line matching `log` means that the launch has reached `stage`, a name of records.Stage."""

    stage: str
    log: Pattern

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "stage", Stage.parse(self.stage))
        compiled(self.log)


@functools.cache
def compiled(pattern: str) -> Any:
    """A pattern of the `regex` package. Raises ValueError."""
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern[:80]!r} is not a regular expression: {error}") from error


def found(pattern: str, line: str) -> bool:
    """True if the beginning of a log line holds a pattern; a search longer than MATCH_TIMEOUT_S counts as no match."""
    try:
        return compiled(pattern).search(line[:MATCH_CHARS], timeout=MATCH_TIMEOUT_S) is not None
    except TimeoutError:
        return False


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
            if mark.log not in self.seen and found(mark.log, line):
                self.seen.add(mark.log)
                self.enter(Stage(mark.stage))
