"""Patterns of the table, rewritten so that no line of a log, whoever wrote it, is searched for long.

    forward(r"assert[^\\n]*heads[^\\n]*== 0")      # assert(?>[^\\n]*?heads)(?>[^\\n]*?== 0)

A pattern that asks for several things on one line would try every place of the first with every one of the second, and
so on: a line of a thousand characters takes minutes. The nearest of each is enough to say whether they stand in order.
"""

from __future__ import annotations

import re
from typing import Any

ANYTHING = r"[^\n]*"
"""What the table writes for the rest of a line."""
TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.S)
"""An escape, a set of characters, or a character."""


def forward(pattern: str) -> str:
    """`pattern` with each part that follows any text of its line taken where it stands first. Matches the same
    lines, but for a part that may end in what the next one begins with.
    """
    return "|".join(_chained(one) for one in _split(pattern, "|"))


def _chained(pattern: str) -> str:
    first, *rest = _split(pattern, ANYTHING)
    return first + "".join(f"(?>{ANYTHING}?{part})" if _width(part) else ANYTHING + part for part in rest)


def _width(pattern: str) -> int:
    """The length of the shortest text that a pattern matches."""
    parser: Any = re._parser  # type: ignore[attr-defined]
    return int(parser.parse(pattern).getwidth()[0])


def _split(pattern: str, separator: str) -> list[str]:
    """The pieces of a pattern between separators that stand in no group and in no set of characters."""
    pieces, depth, at = [""], 0, 0
    while at < len(pattern):
        if depth == 0 and pattern.startswith(separator, at) and pattern[at + len(separator):at + len(separator) + 1] \
                not in ("?", "+"):
            pieces.append("")
            at += len(separator)
            continue
        token = TOKEN.match(pattern, at)[0]  # type: ignore[index]
        depth += {"(": 1, ")": -1}.get(token, 0)
        pieces[-1] += token
        at += len(token)
    return pieces
