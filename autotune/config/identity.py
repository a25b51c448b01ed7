"""Origin of results: the conditions under which they may be compared, and the versions that made them."""

from __future__ import annotations

import contextlib
import pathlib
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.config.settings import Settings
from autotune.engine.gpus import Gpu, Gpus
from autotune.engine.host import cpu_name
from autotune.records import UsageError, canonical, digest
from autotune.utils.text import SPELLED, printable


def devices(gpus: Sequence[Gpu], cpu: str) -> list[str]:
    """The measured hardware: number and model of the GPUs, else the processor."""
    names = [gpu.name for gpu in gpus]
    return [f"{names.count(name)} x {name}" for name in sorted(set(names))] or [cpu]


def identity(settings: Settings, version: str | None, found: Gpus) -> dict[str, Any]:
    """Conditions under which results may be compared; `version` is the engine's, `found` the GPUs of the host."""
    gpus = found.gpus if settings.device != "cpu" else ()
    work = settings.workload
    slots = settings.parallel.count if settings.parallel.count != 1 else None  # without GPUs: groups of cores
    return {
        "space": settings.space.name, "space_digest": settings.space.digest, "engine": settings.engine.name,
        "engine_version": version, "engine_file": _engine_file(settings), "model": dict(settings.space.model),
        "devices": devices(gpus, cpu_name()), "slots": None if gpus else slots, "objective": settings.objective.name,
        "limits": dict(settings.limits),
        "workload": {"prompts": _content(work.prompts), "contexts": list(work.contexts),
                     "output_tokens": work.output_tokens, "spread": work.spread, "temperature": work.temperature,
                     "shared_prefix": work.shared_prefix, "rate_per_s": work.rate_per_s},
    }


def _engine_file(settings: Settings) -> str:
    """Digest of the engine file's part of the command, without the interpreter and secrets."""
    engine = settings.redactor.mapping(settings.composed["engine"])
    return digest(canonical({key: engine.get(key) for key in ("command", "args", "env", "params", "vars")}))


def command_line(settings: Settings, verb: str) -> str:
    """The command that does `verb` with these settings, for a shell, without secrets."""
    return printable(shlex.join(settings.redactor.argv(settings.command(verb))), instead=SPELLED)


def provenance(settings: Settings, version: str | None, found: Gpus) -> dict[str, Any]:
    """Origin of a study: versions, host, command."""
    import importlib.metadata

    import autotune

    packages = {}
    for name in ("optuna", "hydra-core", "torch", "httpx", "nvidia-ml-py", settings.engine.package):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[str(name)] = importlib.metadata.version(str(name))
    return {"autotune": autotune.__version__, "python": platform.python_version(), "packages": packages,
            "engine_version": version, "driver": found.driver, "cpu": cpu_name(),
            "gpu": [g.hashed for g in found.gpus], "kernel": platform.release(),
            "command": command_line(settings, "tune"), "folder": str(pathlib.Path.cwd()),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def versions(provenance: Mapping[str, Any]) -> dict[str, str]:
    """The versions and hardware that a bug report lists."""
    shown = {"autotune": provenance["autotune"], "python": provenance["python"], **provenance["packages"],
             "engine": provenance["engine_version"], "driver": provenance["driver"], "kernel": provenance["kernel"],
             "GPUs": len(provenance["gpu"]) or None, "CPU": provenance["cpu"]}
    return {name: str(value) for name, value in shown.items() if value}


def _content(prompts: str | None) -> str | None:
    if prompts is None:
        return None
    try:
        return digest(pathlib.Path(prompts).read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise UsageError(f"workload.prompts: {prompts} cannot be read: {error.strerror}") from error
