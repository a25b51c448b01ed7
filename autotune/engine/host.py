"""Facts about this host: the engine's interpreter, its version and the flags that it knows; the CPU.

    lacking(engine, ["--speculative-ddtree-budget", "DDTREE"])    # the names that the engine's source does not hold

The engine is not imported: that can take 20 s, and a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable

from autotune.engine.spec import EngineSpec

WORD = re.compile(r"[A-Za-z]\w*", re.ASCII)
FLAG = re.compile(r"(?<![\w-])--([A-Za-z][\w-]*)", re.ASCII)
FIELD = re.compile(r"^[ \t]*([A-Za-z]\w*)[ \t]*:", re.ASCII | re.MULTILINE)  # of the dataclass that flags are made of
PROBE_S = 60.0
OURSELVES = "autotune"  # the package that the embedded engine is part of
ASK_INSTALLED = ("import importlib.metadata as m, importlib.util as u, sys\n"
                 "package, module = sys.argv[1:]\n"
                 "print(next((d.version for d in m.distributions(name=package)), '') if package else '')\n"
                 "spec = u.find_spec(module) if module else None\n"
                 "print(int(not module or spec is not None))\n"
                 "print(next(iter(spec.submodule_search_locations or ()), '') if spec else '')")


@dataclasses.dataclass(frozen=True)
class Installed:
    """An engine in its interpreter."""

    version: str | None  # of the package; None: no such package
    found: bool  # the module
    asked: bool = True  # False for an interpreter that the engine file names: only the engine starts it
    folder: str | None = None  # of the module


def engine_version(engine: EngineSpec) -> str | None:
    """The engine's version: from the engine file, else its package's in its interpreter; None: unknown.

    An interpreter that the engine file names is not asked: a foreign file runs nothing before its command was shown.
    """
    return engine.version or installed(engine).version


def installed(engine: EngineSpec) -> Installed:
    """The engine in its interpreter, asked once per process; an interpreter that cannot run has nothing."""
    if engine.package == OURSELVES:
        import autotune

        return Installed(autotune.__version__, True)
    if engine.python_of_file:
        return Installed(None, True, asked=False)
    module = engine.command[2].split(".")[0] if engine.command[:2] == ("{python}", "-m") else ""
    return _asked(engine.python or sys.executable, engine.package or "", module)


@functools.cache
def _asked(python: str, package: str, module: str) -> Installed:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run([python, "-c", ASK_INSTALLED, package, module], capture_output=True, timeout=PROBE_S)
        if asked.returncode == 0:
            version, found, folder = asked.stdout.decode().split("\n")[:3]
            return Installed(version or None, found == "1", folder=folder or None)
    return Installed(None, False)


def lacking(engine: EngineSpec, words: Iterable[str]) -> tuple[str, ...]:
    """The flags and names of `words` that the installed engine does not know, each once, in their order.

    A flag is known if the source spells it (--page-size) or has a field of its name (page_size: int), and --no-X as
    well as X if the source uses argparse's BooleanOptionalAction. Another name is known if it is any word of the
    source. Nothing is lacking when the engine file lists no `spelled_in`, or when none of its files can be read.
    """
    folder = installed(engine).folder
    flags, names = _spelled(folder, engine.spelled_in) if folder else (frozenset(), frozenset())
    if not folder or not names:
        return ()
    named = names | _spelled(folder, engine.named_in)[1]

    def known(word: str) -> bool:
        plain = word.lstrip("-").partition("=")[0].replace("-", "_")
        if not word.startswith("--"):
            return plain in named
        return plain in flags or "BooleanOptionalAction" in names and plain.removeprefix("no_") in flags

    return tuple(word for word in dict.fromkeys(words) if not known(word))


@functools.cache
def _spelled(folder: str, places: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """(flags as argparse names them, all words) of these files of a module; unreadable files have none."""
    flags: set[str] = set()
    words: set[str] = set()
    for place in (pathlib.Path(folder, name) for name in places):
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            with contextlib.suppress(OSError):
                text = file.read_text(encoding="utf-8", errors="replace")
                flags.update(FIELD.findall(text), (flag.replace("-", "_") for flag in FLAG.findall(text)))
                words.update(WORD.findall(text.replace("-", "_")))
    return frozenset(flags), frozenset(words)


def interpreter_problem(engine: EngineSpec) -> str | None:
    """The reason why the engine's interpreter or program cannot start; None when it is found."""
    program = engine.command[0].replace("{python}", engine.python or sys.executable)
    if shutil.which(program):
        return None
    mend = ("set engine.python=/path/to/python" if "{python}" in engine.command[0] else
            f"put it on PATH, or its path into the command of engine {engine.name}")
    return f"the program {program} is not found, or cannot be run ({mend})"


def cpu_name() -> str:
    """The processor's name and the number of usable cores."""
    name = re.search(r"^model name[ \t]*: (.*\S)", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
    return f"{name[1] if name else 'CPU'} x{len(os.sched_getaffinity(0))}"
