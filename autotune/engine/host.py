"""What is installed and which GPUs are there: facts about this host for preflight and provenance."""

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
from autotune.records import digest

PROBE_S = 60.0
OURSELVES = "autotune"
"""The package of the embedded engine, which is a part of this one."""
IDLE_SHARE = 0.05
"""Of a GPU's memory: what the driver itself keeps is less."""
ASK_INSTALLED = ("import importlib.metadata as m, importlib.util as u, sys\n"
                 "package, module = sys.argv[1:]\n"
                 "print(next((d.version for d in m.distributions(name=package)), '') if package else '')\n"
                 "spec = u.find_spec(module) if module else None\n"
                 "print(int(not module or spec is not None))\n"
                 "print(next(iter(spec.submodule_search_locations or ()), '') if spec else '')")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU: its UUID (kept hashed wherever it is written), name and memory in GiB."""

    uuid: str
    name: str
    memory_gib: float

    @property
    def hashed(self) -> str:
        return f"{self.name} {digest(self.uuid, 8)}"


@dataclasses.dataclass(frozen=True)
class Gpus:
    """The GPUs that a server started here may use, and why there are none if so."""

    gpus: tuple[Gpu, ...]
    driver: str | None = None
    why_none: str = ""


@dataclasses.dataclass(frozen=True)
class Installed:
    """What an interpreter has of an engine: its package's version (None: no such package), whether it finds the module.

    asked: False for an interpreter that a file names, which nothing starts before the engine itself.
    `folder` is where the module lies; None where that is not known.
    """

    version: str | None
    found: bool
    asked: bool = True
    folder: str | None = None


def engine_version(engine: EngineSpec) -> str | None:
    """The engine's version: given in the engine file, else that of its package in its interpreter; None: unknown.

    An interpreter that the engine file names is not asked: a file of others runs nothing before its command was shown.
    """
    return engine.version or installed(engine).version


def installed(engine: EngineSpec) -> Installed:
    """What the engine's interpreter has of it, asked once a process; one that cannot be asked has nothing."""
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
    """Why the engine's interpreter or program cannot be started; None when it can be found."""
    program = engine.command[0].replace("{python}", engine.python or sys.executable)
    if shutil.which(program) is None:
        mend = "set engine.python=/path/to/python" if "{python}" in engine.command[0] else \
            f"put it on PATH, or its path into the command of engine {engine.name}"
        return f"the program {program} is not found, or cannot be run ({mend})"
    return None


def visible_gpus() -> Gpus:
    """GPUs through NVML, limited to CUDA_VISIBLE_DEVICES when it is set. Never raises: says why instead."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # the binding raises its own classes, ImportError or OSError
        return Gpus((), None, f"no NVIDIA GPU is visible here ({type(error).__name__}: {error})")
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30
            found.append(Gpu(str(pynvml.nvmlDeviceGetUUID(handle)), str(pynvml.nvmlDeviceGetName(handle)), memory))
        kept = chosen(found, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return Gpus(tuple(kept), driver, "" if kept else "CUDA_VISIBLE_DEVICES leaves no GPU")
    except pynvml.NVMLError as error:
        return Gpus((), None, f"NVML does not answer ({error})")
    finally:
        with contextlib.suppress(Exception):
            pynvml.nvmlShutdown()


def gpu_users(gpus: Gpus) -> list[str]:
    """Who computes on these GPUs or keeps their memory, one sentence a GPU; [] when they are free."""
    found: list[str] = []
    if not gpus.gpus:
        return found
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for gpu in gpus.gpus:
            with contextlib.suppress(pynvml.NVMLError):
                handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                used = pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**20
                pids: list[int] = []
                with contextlib.suppress(pynvml.NVMLError):
                    pids = sorted({int(p.pid) for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)})
                if pids:
                    found.append(f"{gpu.hashed} is in use by {', '.join(map(process_text, pids))}")
                elif used > IDLE_SHARE * gpu.memory_gib * 1024:
                    found.append(f"{gpu.hashed} has {used:.0f} MiB in use by processes that cannot be seen from here")
        pynvml.nvmlShutdown()
    return found


def process_text(pid: int) -> str:
    """A process for people: pid, owner and the start of its command line, as far as they can be seen."""
    import psutil

    from autotune.utils.redact import Redactor

    try:
        process = psutil.Process(pid)
        line = " ".join(Redactor().argv(process.cmdline()))[:80] or process.name()
        return f"pid {pid} ({line}, user {process.username()})"
    except (psutil.Error, KeyError):
        return f"pid {pid}"


def chosen(found: list[Gpu], variable: str | None) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; entries are indexes or UUID prefixes."""
    if variable is None:
        return found
    kept: list[Gpu] = []
    for entry in (e.strip() for e in variable.split(",")):
        match = ([found[int(entry)]] if entry.isdecimal() and int(entry) < len(found) else
                 [g for g in found if entry and g.uuid.startswith(entry)])
        if not match:
            break  # CUDA ignores everything after the first invalid entry
        kept += match[:1]
    return kept


def cpu_name() -> str:
    """The processor's name and the number of usable cores."""
    name = "CPU"
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name} x{len(os.sched_getaffinity(0))}"


def gpu_memory_used_mib(uuids: list[str]) -> dict[str, float]:
    """Memory in use per GPU in MiB, by UUID; a GPU that cannot be read is left out."""
    used: dict[str, float] = {}
    if not uuids:
        return used
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for uuid in uuids:
            with contextlib.suppress(pynvml.NVMLError):
                used[uuid] = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).used / 2**20
        pynvml.nvmlShutdown()
    return used
