"""Settings: frozen values that the rest of autotune reads, with their types and checks; `compose.load` makes them.

Defaults live in conf/. A value that makes no sense raises UsageError with one line. A study stores `identity`, the
conditions under which results may be compared, and `provenance`, the versions that made them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from autotune.engine.gpus import Gpu, Gpus
from autotune.engine.host import cpu_name, engine_version
from autotune.engine.server import ServerSettings
from autotune.engine.spec import EngineSpec
from autotune.loadgen.workload import WorkloadSettings
from autotune.measure.correctness import AgreementSettings
from autotune.measure.finalists import ConfirmSettings
from autotune.measure.objective import Objective
from autotune.power.meter import PowerSettings
from autotune.records import UsageError, canonical, digest
from autotune.space.constraints import Rule
from autotune.space.space import Space
from autotune.storage.database import backend, passwords, sqlite_file
from autotune.utils.redact import Redactor
from autotune.utils.text import one_line
from autotune.utils.validation import AtLeastOne, Count, NotNegative, Positive

Format = Literal["sh", "systemd", "compose", "k8s", "yaml"]
FORMATS: tuple[str, ...] = get_args(Format)
# Settings that only some verbs read. Every other setting describes the study, so every verb takes it.
OF_VERBS: dict[str, tuple[str, ...]] = {
    "config": ("check", "matrix"), "matrix": ("matrix",), "trial": ("export",), "format": ("export", "tune"),
    "out": ("export", "report", "tune"), "report": ("report", "tune")}


@dataclasses.dataclass(frozen=True)
class StudySettings:
    """conf/study: the search strategy, its budget, and the study's storage."""

    name: str | None
    storage: str | None
    storage_wait_s: NotNegative
    strategy: Literal["autotune", "tpe", "random", "grid"]
    seed: int
    launches: AtLeastOne | None
    trials: AtLeastOne | None
    hours: Positive | None
    min_gain: Annotated[float, Meta(ge=0, lt=1, description="a share between 0 and 1")]
    confirm: ConfirmSettings
    warm_start: list[str]
    isolate: Count  # launches
    lost_after_s: Annotated[float, Meta(ge=2, description="a time of 2 s or more")]

    def __post_init__(self) -> None:
        if self.storage and backend(self.storage) == "sqlite" and sqlite_file(self.storage) is None:
            raise UsageError("study.storage: a database in memory keeps nothing: write sqlite:///FILE")
        if self.launches is not None and (self.confirm.launches or 0) >= self.launches:
            raise UsageError(f"study.confirm.launches={self.confirm.launches} is a part of study.launches="
                             f"{self.launches}: leave at least one launch to the search")
        name = self.name
        if name is not None and (not name.strip() or not name.isprintable() or set(name) & set("/\\")
                                 or name.startswith(".") or len(os.fsencode(name)) > 100):
            raise UsageError(f"study.name {name[:120]!r} must be a plain folder name of at most 100 bytes, without "
                             "control characters")


@dataclasses.dataclass(frozen=True)
class ExecutorSettings:
    """conf/executor: the hosts that launches run on."""

    kind: Literal["local", "ray"] = "local"
    address: str = "auto"
    at_once: AtLeastOne = 1
    gpu_type: str | None = None
    cpus: Positive = 1.0


@dataclasses.dataclass(frozen=True)
class ParallelSettings:
    """parallel: launches side by side on this host."""

    slots: Annotated[str, Meta(pattern="^(auto|0*[1-9][0-9]*)$",
                               description="auto or a number of launches side by side")]
    check: bool

    @property
    def count(self) -> int | None:
        """None: as many as the host's GPUs allow."""
        return None if self.slots == "auto" else int(self.slots)


@dataclasses.dataclass(frozen=True)
class MatrixSettings:
    """Load levels of the verb matrix; None: those of the space."""

    concurrency: list[int] | None
    contexts: list[int] | None


@dataclasses.dataclass(frozen=True)
class ReportSettings:
    """report: the format of the summary, and past studies to compare with."""

    format: Literal["text", "json"]
    compare: list[str] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sections:
    """The keys of conf/config.yaml that need no more than a check of their types."""

    power: PowerSettings
    agreement: AgreementSettings
    workload: WorkloadSettings
    server: ServerSettings
    study: StudySettings
    matrix: MatrixSettings
    report: ReportSettings
    executor: ExecutorSettings
    parallel: ParallelSettings
    device: Literal["auto", "cpu", "cuda"]
    config: str
    trial: Count | None
    format: Annotated[str, Meta(pattern=rf"^({'|'.join(FORMATS)})\Z", description=f"one of {', '.join(FORMATS)}")]
    out: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Sections):
    """Everything that a verb needs to know.

    `composed` is the whole configuration as plain data, for provenance. `spaces` are the folders of `--spaces`.
    """

    space: Space
    engine: EngineSpec
    limits: Mapping[str, float]
    objective: Objective
    outputs: pathlib.Path
    overrides: tuple[str, ...]
    composed: Mapping[str, Any]
    spaces: tuple[str, ...] = ()

    def command(self, verb: str) -> list[str]:
        """The command line of `verb` with these settings. It holds secrets: show it through `redactor`."""
        overrides = [override for override in self.overrides if verb in OF_VERBS.get(section_of(override), (verb,))]
        return ["python", "-m", "autotune", verb, *overrides, *(f"--spaces={folder}" for folder in self.spaces)]

    def shown_command(self, verb: str) -> str:
        """The command line of `verb` for a shell, without secrets."""
        return one_line(shlex.join(self.redactor.argv(self.command(verb))))

    @functools.cached_property
    def redactor(self) -> Redactor:
        """Redacts the secrets of the command line, of the composed files, and of the environment."""
        found = Redactor.from_command(self.overrides, self.composed, os.environ)
        return Redactor([*found.values, *passwords([self.study.storage, *self.study.warm_start])])

    def ruled(self, version: str | None) -> Settings:
        """The settings with the engine's rules of one version. Raises UsageError if they forbid the baseline."""
        origin = f"engine {self.engine.name} {version or '(version unknown)'}"
        rules = self.engine.rules_for(self.space, version)
        return dataclasses.replace(self, space=self.space.with_rules(rules, origin))

    def without(self, unavailable: Sequence[Rule]) -> Settings:
        """The settings with rules on choices that this host cannot run. Rules that match the baseline are dropped."""
        rules = [rule for rule in unavailable if not rule.matches(self.space.baseline)]
        return dataclasses.replace(self, space=self.space.with_rules(rules, "this host"))

    def asking(self) -> Settings:
        """The settings with the rules of the installed version, even if only the engine file names its interpreter.

        The interpreter is started: call this once the user has seen its path.
        """
        trusted = dataclasses.replace(self, engine=dataclasses.replace(self.engine, python_of_file=False))
        return trusted.ruled(engine_version(trusted.engine))

    @property
    def study_name(self) -> str:
        return self.study.name or self.space.name

    @property
    def folder(self) -> pathlib.Path:
        """outputs/STUDY"""
        return self.outputs / self.study_name


def section_of(override: str) -> str:
    """The first name in an override's key: `report` for `++report.format=json`."""
    return override.lstrip("+~").partition("=")[0].partition(".")[0]


def refuse_unused(verb: str, overrides: Sequence[str]) -> None:
    """Raises UsageError for a setting that `verb` would ignore."""
    for name in map(section_of, overrides):
        if verb not in (readers := OF_VERBS.get(name, (verb,))):
            raise UsageError(f"{name}= is for {' and '.join(readers)}, and {verb} would ignore it: leave it out")


def devices(gpus: Sequence[Gpu], cpu: str) -> list[str]:
    """The measured hardware: number and model of the GPUs, else the processor."""
    names = [gpu.name for gpu in gpus]
    return [f"{names.count(name)} x {name}" for name in sorted(set(names))] or [cpu]


def identity(settings: Settings, version: str | None, found: Gpus) -> dict[str, Any]:
    """Conditions under which results may be compared; `version` is the engine's, `found` the GPUs of the host."""
    gpus = found.gpus if settings.device != "cpu" else ()
    work, engine = settings.workload, settings.redactor.mapping(settings.composed["engine"])
    command = {key: engine.get(key) for key in ("command", "args", "env", "params", "vars")}  # not the interpreter
    command["params"] = {name: {key: value for key, value in param.items() if key != "relieves"}
                         if isinstance(param, Mapping) else param for name, param in (command["params"] or {}).items()}
    prompts = None if work.prompts is None else pathlib.Path(work.prompts).read_text("utf-8", "replace")
    slots = settings.parallel.count if settings.parallel.count != 1 else None  # without GPUs: groups of cores
    return {
        "space": settings.space.name, "space_digest": settings.space.digest, "engine": settings.engine.name,
        "engine_version": version, "engine_file": digest(canonical(command)), "model": dict(settings.space.model),
        "devices": devices(gpus, cpu_name()), "slots": None if gpus else slots, "objective": settings.objective.name,
        "limits": dict(settings.limits),
        "workload": {"prompts": None if prompts is None else digest(prompts), "contexts": list(work.contexts),
                     "output_tokens": work.output_tokens, "spread": work.spread, "temperature": work.temperature,
                     "shared_prefix": work.shared_prefix, "rate_per_s": work.rate_per_s},
    }


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
            "command": settings.shown_command("tune"), "folder": str(pathlib.Path.cwd()),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def versions(provenance: Mapping[str, Any]) -> dict[str, str]:
    """The versions and hardware that a bug report lists."""
    shown = {"autotune": provenance["autotune"], "python": provenance["python"], **provenance["packages"],
             "engine": provenance["engine_version"], "driver": provenance["driver"], "kernel": provenance["kernel"],
             "GPUs": len(provenance["gpu"]) or None, "CPU": provenance["cpu"]}
    return {name: str(value) for name, value in shown.items() if value}
