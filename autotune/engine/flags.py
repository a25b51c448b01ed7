"""Flags of an engine file that the installed engine does not know, found in the engine's source text.

    lacking(engine, ["--speculative-ddtree-budget", "DDTREE"])    # the unknown ones

Nothing of the engine is imported: that can take it 20 s, and a GPU. An engine file says in `version.spelled_in` which
files and folders of the module spell its flags, and in `version.named_in` which others name what is no flag (variables,
algorithms). Without the first, or where none of them can be read, nothing is said to be lacking.
"""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Iterable

from autotune.engine.host import installed
from autotune.engine.spec import EngineSpec

WORD = re.compile(r"[A-Za-z]\w*", re.ASCII)
FLAG = re.compile(r"(?<![\w-])--([A-Za-z][\w-]*)", re.ASCII)
# An annotated name at the beginning of a line: a field of the dataclass that flags are made of.
FIELD = re.compile(r"^[ \t]*([A-Za-z]\w*)[ \t]*:", re.ASCII | re.MULTILINE)
NEGATABLE = "BooleanOptionalAction"


def lacking(engine: EngineSpec, words: Iterable[str]) -> tuple[str, ...]:
    """The flags and names that the installed engine does not know, each once, in order.

    A flag is known where the source spells it (--page-size), or has a field of its name (page_size: int), and --no-X
    with X where the source uses argparse's action for that. Another name is known where it is any word of the source.
    """
    folder = installed(engine).folder
    flags, names = _known(folder, engine.spelled_in) if folder and engine.spelled_in else (frozenset(), frozenset())
    if not names:
        return ()
    beside = _known(folder, engine.named_in)[1] if folder else frozenset()

    def known(word: str) -> bool:
        plain = word.lstrip("-").partition("=")[0].replace("-", "_")
        if not word.startswith("--"):
            return plain in names or plain in beside
        return plain in flags or (plain.startswith("no_") and plain[3:] in flags and NEGATABLE in names)

    return tuple(word for word in dict.fromkeys(words) if not known(word))


@functools.cache
def _known(folder: str, places: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """(every flag as argparse names it, every word) in these files of a module; none when they cannot be read."""
    flags: set[str] = set()
    words: set[str] = set()
    for name in places:
        place = pathlib.Path(folder, name)
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            try:
                text = file.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            flags.update(flag.replace("-", "_") for flag in FLAG.findall(text))
            flags.update(FIELD.findall(text))
            words.update(WORD.findall(text.replace("-", "_")))
    return frozenset(flags), frozenset(words)
