"""Text of others on a terminal or a page: control characters, which move cursors and colour screens, are taken out."""

from __future__ import annotations

import re

SPELLED = "\\"
"""Instead of a control character: what Python writes for it, such as \\x1b."""
REPLACED = "\N{REPLACEMENT CHARACTER}"
KEPT = "\n\t"
"""What a block of text keeps."""


def printable(text: str, keep: str = "", instead: str = "") -> str:
    """`text` without characters that cannot be printed, but for those of `keep`; `instead` stands in for each."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else
                   c.encode("unicode_escape").decode() if instead == SPELLED else instead for c in text)


def slug(name: str) -> str:
    """A study name as the name of a systemd unit, container or Kubernetes object (RFC 1123, at most 50 characters)."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return f"autotune-{plain}" if plain else "autotune"
