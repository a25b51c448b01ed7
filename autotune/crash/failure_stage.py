"""The stage of a failure, from the log alone: what the traceback was doing, else how far the start got."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence

from autotune.crash.log import Log
from autotune.crash.tracebacks import Block
from autotune.records import Stage

AFTER, BEFORE = 40, 30
"""How far from a line a traceback may be that belongs to it (lines)."""


class Stages:
    """Answers `at(line)` for one log. `given` is what a caller who watched the launch knows; it wins."""

    def __init__(self, log: Log, text: str, blocks: Sequence[Block], markers: Sequence[tuple[Stage, re.Pattern[str]]],
                 frames: Sequence[tuple[Stage, re.Pattern[str]]], given: Stage | None = None) -> None:
        self.log, self.blocks, self.frames, self.given = log, blocks, frames, given
        self.reached = next((stage for stage, pattern in markers if pattern.search(text)), None)
        if self.reached is Stage.WARMUP and "application startup complete" in text and "vllm" in text:
            self.reached = Stage.SERVING  # vLLM warms up before this line, SGLang after it
        self.at = functools.cache(self._at)

    def _near(self, line: int) -> Iterator[Block]:
        """The tracebacks that a line is part of or belongs to: around it, after it (also chained ones), before it."""
        yield from sorted((b for b in self.blocks if b.first <= line <= b.last), key=lambda b: b.last - b.first)
        yield from (b for b in self.blocks if line < b.first <= line + AFTER)
        yield from (b for b in reversed(self.blocks) if line - BEFORE <= b.last < line)

    def _at(self, line: int) -> Stage | None:
        if self.given is not None:
            return self.given
        doing = next((stage for stage in map(self._doing, self._near(line)) if stage is not None), None)
        if doing is Stage.SERVING and self.reached is Stage.WARMUP:
            return Stage.WARMUP  # the first request, by the server itself
        return doing or self.reached

    def _doing(self, block: Block) -> Stage | None:
        text = "\n".join(f"{file} {function}" for file, function in block.frames).lower()
        return next((stage for stage, pattern in self.frames if pattern.search(text)), None)
