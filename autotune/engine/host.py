"""Facts about this host for preflight and provenance: the engine's interpreter and version, the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import shutil
import subprocess
import sys

from autotune.engine.spec import EngineSpec

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
    """An engine in its interpreter: the package's version (None: no such package), and whether the module is found.

    asked: False for an interpreter that the engine file names; only the engine itself starts it.
    folder: the module's folder, None when unknown.
    """

    version: str | None
    found: bool
    asked: bool = True
    folder: str | None = None


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
        asked = subprocess.run([python, "-c", ASK_INSTALLED, package, module], capture_output=True, text=True,
                               timeout=PROBE_S)
        if asked.returncode == 0:
            version, found, folder = asked.stdout.split("\n")[:3]
            return Installed(version or None, found == "1", folder=folder or None)
    return Installed(None, False)


def interpreter_problem(engine: EngineSpec) -> str | None:
    """The reason why the engine's interpreter or program cannot start; None when it is found."""
    program = engine.command[0].replace("{python}", engine.python or sys.executable)
    if shutil.which(program) is None:
        mend = "set engine.python=/path/to/python" if "{python}" in engine.command[0] else \
            f"put it on PATH, or its path into the command of engine {engine.name}"
        return f"the program {program} is not found, or cannot be run ({mend})"
    return None


def cpu_name() -> str:
    """The processor's name and the number of usable cores."""
    name = "CPU"
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name} x{len(os.sched_getaffinity(0))}"
