"""Text for people: figures with units, and foreign text without control characters (they move cursors of terminals)."""

from __future__ import annotations

import math
import re

SPELLED = "\\"  # `instead` of printable(): the escape that Python writes, such as \x1b
REPLACED = "\N{REPLACEMENT CHARACTER}"
KEPT = "\n\t"  # `keep` of printable() for a block of text
UNKNOWN = "-"


def printable(text: str, keep: str = "", instead: str = "") -> str:
    """`text` with `instead` (or, for SPELLED, an escape) for each unprintable character that is not in `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else
                   c.encode("unicode_escape").decode() if instead == SPELLED else instead for c in text)


def slug(name: str) -> str:
    """A study name as the name of a systemd unit, container or Kubernetes object (RFC 1123, at most 50 characters)."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return f"autotune-{plain}" if plain else "autotune"


def one_line(words: object) -> str:
    """Any text on one line, control characters spelled out, so that it cannot leave a comment or a table cell."""
    return printable(str(words), instead=SPELLED)


def number(value: float | None, digits: int = 4) -> str:
    """A figure with `digits` significant digits and thousands separators; "-" when unknown."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 12)}f}"


def with_unit(value: float | None, unit: str) -> str:
    """A figure and its unit; "-" when unknown."""
    shown = number(value)
    return f"{shown} {unit}" if unit and shown != UNKNOWN else shown


def percent(share: float | None, signed: bool = False) -> str:
    """A share as per cent: one decimal, none from 100 % on; "-" when unknown."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    shown = 100 * share
    decimals = 0 if abs(shown) >= 99.95 else 1
    return f"{shown:{'+' if signed else ''},.{decimals}f} %"


def duration(seconds: float | None) -> str:
    """Seconds in the usual units: 41 s, 3 min 5 s, 2 h 10 min; "-" when unknown."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if minutes else f"{hours:,} h"


def count(n: int, noun: str, plural: str = "") -> str:
    """1 launch, 2 launches."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"
