"""Python tracebacks in a cleaned log, including truncated and interleaved ones."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

from autotune.crash.log import Line

FRAME = re.compile(r'^File ["“](?P<file>[^"“”]+)["”], line \d+(?:,? in (?P<func>.+))?')
HEADER = "Traceback (most recent call last)"
EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Died)"
    r"|Exception|OutOfResources))(?:: ?(?P<message>.*))?$")
MARKS = re.compile(r"^[~^ ]+$")
MAX_GAP = MAX_MESSAGE_LINES = 8


class Block(NamedTuple):
    """One traceback: lines first..last of a log; `at` is its exception line, None if cut off.

    `frames`: (file, function), outermost first. `code`: the last source line shown.
    """

    first: int
    last: int
    frames: tuple[tuple[str, str], ...]
    at: int | None = None
    type: str = ""
    message: str = ""
    code: str = ""


def find(lines: Sequence[Line]) -> list[Block]:
    """All tracebacks, in order of their first line. A bare exception line is a block without frames."""
    blocks: list[Block] = []
    opened: dict[str, _Open] = {}  # by writer: ranks print at the same time
    writer = ""
    for index, line in enumerate(lines):
        writer = line.writer or writer
        here = opened.get(writer)
        frame = FRAME.match(line.text)
        if HEADER in line.text:
            _close(here, blocks)
            opened[writer] = _Open(index, index)
        elif frame:
            here = opened.setdefault(writer, _Open(index, index))
            here.frames.append((frame["file"], (frame["func"] or "").strip()))
            here.last = index
        elif found := EXCEPTION.match(line.text):
            here = opened.pop(writer, _Open(index, index))
            last, message = _message(lines, index, found["message"] or "")
            blocks.append(Block(here.first, last, tuple(here.frames), index, found["type"], message, here.code))
        elif here is not None and index - here.last > MAX_GAP + len(opened) * MAX_GAP:
            _close(opened.pop(writer), blocks)
        elif here is not None and line.text and not MARKS.match(line.text):
            here.code = line.text
    for here in opened.values():
        _close(here, blocks)
    return sorted(blocks, key=lambda block: block.first)


@dataclasses.dataclass
class _Open:
    first: int
    last: int
    frames: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    code: str = ""


def _close(open_: _Open | None, blocks: list[Block]) -> None:
    if open_ is not None and open_.frames:
        blocks.append(Block(open_.first, open_.last, tuple(open_.frames), code=open_.code))


def _message(lines: Sequence[Line], at: int, message: str) -> tuple[int, str]:
    """(last line, message) of an exception with a multi-line message."""
    last = at
    for line in lines[at + 1:at + 1 + MAX_MESSAGE_LINES]:
        if (HEADER in line.text or FRAME.match(line.text) or EXCEPTION.match(line.text)
                or line.text.startswith(("During handling of", "The above exception was"))
                or (line.prefixed and not lines[at].prefixed) or line.writer != lines[at].writer):
            break
        message, last = f"{message}\n{line.text}", last + 1
    return last, message.strip()
