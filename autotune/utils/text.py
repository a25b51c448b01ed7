"""Text of others for a terminal, a page or a file name: control characters move cursors and colour screens."""

from __future__ import annotations

import re

SPELLED = "\\"  # `instead` of printable(): the escape that Python writes, such as \x1b
REPLACED = "\N{REPLACEMENT CHARACTER}"
KEPT = "\n\t"  # `keep` of printable() for a block of text


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
