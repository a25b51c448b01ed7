"""Patterns of engine files, which strangers may have written: none may hold the tuner for ever on one line of a log.

    pattern = compiled("Load weight (begin|end)")     # raises ValueError for what is none, or could take for ever
    found(pattern, line)
"""

from __future__ import annotations

import re
from typing import Any

LINE_CHARS = 2000
"""So much of a line is looked at: marks stand at its beginning, and some patterns take its length to a power."""
REPEATS = ("MAX_REPEAT", "MIN_REPEAT")


def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern without a repeat, or a choice, within a repeat: those may take a time that doubles with each character.

    Raises ValueError with what is wrong.
    """
    parser: Any = re._parser  # type: ignore[attr-defined]
    try:
        made = re.compile(pattern)
        if _nested(parser.parse(pattern), False):
            raise ValueError("holds a repeat or a choice within a repeat, which can take for ever: write (?>...) "
                             "around the inner one")
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is not a regular expression: {error}") from error
    return made


def found(pattern: re.Pattern[str], line: str) -> bool:
    """Whether a line of a log, as far as it is looked at, holds a pattern."""
    return pattern.search(line[:LINE_CHARS]) is not None


def _nested(parts: Any, within: bool) -> bool:
    """Whether there is a repeat or choice (`within`: in one already) in a repeat; what gives nothing back is none."""
    for operator, argument in parts:
        name = str(operator)
        if name in REPEATS:
            if within and argument[0] != argument[1] or _nested(argument[2], within or argument[1] > 1):
                return True
        elif name == "BRANCH":
            if within or any(_nested(part, False) for part in argument[1]):
                return True
        elif name == "ATOMIC_GROUP" or name == "POSSESSIVE_REPEAT":
            if _nested(argument if name == "ATOMIC_GROUP" else argument[2], False):
                return True
        elif any(_nested(part, within) for part in _inner(name, argument)):
            return True
    return False


def _inner(name: str, argument: Any) -> list[Any]:
    """The patterns within a group, an assertion, or a condition."""
    if name == "SUBPATTERN":
        return [argument[3]]
    if name in ("ASSERT", "ASSERT_NOT"):
        return [argument[1]]
    if name == "GROUPREF_EXISTS":
        return [part for part in argument[1:] if part is not None]
    return []
