"""Whether the engine that is installed knows the flags that an engine file passes, told from its source text.

    lacking(engine, ["--speculative-ddtree-budget", "DDTREE"])    # those that no file of it names

Nothing of the engine is imported: that can take it 20 s, and a GPU. An engine file says in `version.spelled_in` which
files and folders of the module to read; without it, or where there is none of them, nothing is said to be lacking.
"""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Iterable

from autotune.engine.probe import installed
from autotune.engine.spec import EngineSpec

WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def lacking(engine: EngineSpec, words: Iterable[str]) -> tuple[str, ...]:
    """Those of these flags and names that the installed engine does not know, each once, in their order.

    A flag is known where the source has it, or the name that argparse makes of it (--page-size: page_size).
    """
    folder = installed(engine).folder
    known = _known(folder, engine.spelled_in) if folder and engine.spelled_in else frozenset()
    return tuple(word for word in dict.fromkeys(words) if _plain(word) not in known) if known else ()


@functools.cache
def _known(folder: str, spelled_in: tuple[str, ...]) -> frozenset[str]:
    """Every word in these files of a module; none when they cannot be read."""
    words: set[str] = set()
    for name in spelled_in:
        place = pathlib.Path(folder, name)
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            try:
                words.update(WORD.findall(file.read_text(encoding="utf-8", errors="replace").replace("-", "_")))
            except OSError:
                continue
    return frozenset(words)


def _plain(word: str) -> str:
    return word.lstrip("-").partition("=")[0].replace("-", "_")
