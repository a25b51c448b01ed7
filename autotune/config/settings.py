"""Settings: frozen values that the rest of autotune reads, with their types and checks; `config.load` makes them.

Defaults live in conf/. Every value that makes no sense is a UsageError of one line.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.engine.host import engine_version
from autotune.engine.server import ServerSettings
from autotune.engine.spec import EngineSpec
from autotune.measure.correctness import AgreementSettings
from autotune.measure.finalists import ConfirmSettings
from autotune.measure.objective import Objective
from autotune.measure.workload import WorkloadSettings
from autotune.power.meter import PowerSettings
from autotune.records import UsageError
from autotune.space.constraints import Rule
from autotune.space.space import Space
from autotune.storage.urls import backend, passwords, sqlite_file
from autotune.utils.redact import Redactor

OF_VERBS: dict[str, tuple[str, ...]] = {
    "config": ("check", "matrix"), "matrix": ("matrix",), "trial": ("export",), "format": ("export", "tune"),
    "out": ("export", "report", "tune"), "report": ("report", "tune")}
"""Settings of single verbs, and which. All others describe the study: every verb takes them."""
STRATEGIES = ("autotune", "tpe", "random", "grid")


@dataclasses.dataclass(frozen=True)
class ConfirmationSettings:
    """conf/study: how finalists are measured again before the verdict; 0 finalists: not at all."""

    finalists: int
    alpha: float
    min_rounds: int
    max_rounds: int
    worth: float

    def __post_init__(self) -> None:
        if self.finalists < 0:
            raise UsageError("study.confirm.finalists must not be negative")
        ConfirmSettings(self.alpha, self.min_rounds, self.max_rounds, self.worth)


@dataclasses.dataclass(frozen=True)
class StudySettings:
    """conf/study: how to search and when to stop."""

    name: str | None
    storage: str | None
    storage_wait_s: float
    strategy: str
    seed: int
    launches: int | None
    trials: int | None
    hours: float | None
    min_gain: float
    confirm: ConfirmationSettings
    warm_start: list[str]
    isolate: int  # launches
    lost_after_s: float

    def __post_init__(self) -> None:
        one_of("study.strategy", self.strategy, STRATEGIES)
        for name in ("launches", "trials", "hours"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"study.{name} must be positive (or null for no limit), not {value}")
        if self.storage and backend(self.storage) == "sqlite" and sqlite_file(self.storage) is None:
            raise UsageError("study.storage: a database in memory keeps nothing: write sqlite:///FILE")
        if self.storage_wait_s < 0:
            raise UsageError(f"study.storage_wait_s is a time in seconds, not {self.storage_wait_s}")
        if not self.lost_after_s >= 2:
            raise UsageError(f"study.lost_after_s must be 2 s or more, not {self.lost_after_s}")
        if self.isolate < 0:
            raise UsageError(f"study.isolate is a number of launches, not {self.isolate}")
        if not 0 <= self.min_gain < 1:
            raise UsageError("study.min_gain is a share between 0 and 1")
        name = self.name or "-"
        if not name.strip() or not name.isprintable() or set(name) & set("/\\") or name.startswith(".") or \
                len(os.fsencode(name)) > 100 or self.name == "":
            raise UsageError(f"study.name {name[:120]!r} must be a plain folder name of at most 100 bytes, without "
                             "control characters")


@dataclasses.dataclass(frozen=True)
class ExecutorSettings:
    """conf/executor: where launches are made."""

    kind: str = "local"
    address: str = "auto"
    at_once: int = 1
    gpu_type: str | None = None
    cpus: float = 1.0

    def __post_init__(self) -> None:
        one_of("executor.kind", self.kind, ("local", "ray"))
        if self.at_once < 1 or not self.cpus > 0:
            raise UsageError("executor.at_once and executor.cpus must be positive")


@dataclasses.dataclass(frozen=True)
class ParallelSettings:
    """parallel: launches side by side on this host."""

    slots: str
    check: bool

    def __post_init__(self) -> None:
        if self.slots != "auto" and not (self.slots.isdecimal() and int(self.slots) > 0):
            raise UsageError(f"parallel.slots is a number of launches side by side, or auto, not {self.slots!r}")

    @property
    def count(self) -> int | None:
        """None: as many as the host's GPUs take."""
        return None if self.slots == "auto" else int(self.slots)


@dataclasses.dataclass(frozen=True)
class MatrixSettings:
    """Load levels of the verb matrix; None: the space's own."""

    concurrency: list[int] | None
    contexts: list[int] | None


@dataclasses.dataclass(frozen=True)
class ReportSettings:
    format: str
    compare: list[str] | None

    def __post_init__(self) -> None:
        one_of("report.format", self.format, ("text", "json"))


@dataclasses.dataclass(frozen=True)
class Settings:
    space: Space
    engine: EngineSpec
    power: PowerSettings
    agreement: AgreementSettings
    workload: WorkloadSettings
    server: ServerSettings
    study: StudySettings
    matrix: MatrixSettings
    report: ReportSettings
    executor: ExecutorSettings
    parallel: ParallelSettings
    limits: Mapping[str, float]
    objective: Objective
    device: str
    outputs: pathlib.Path
    config: str
    trial: int | None
    format: str
    out: str | None
    overrides: tuple[str, ...]
    composed: Mapping[str, Any]
    """The whole composed configuration as plain data, for provenance."""
    spaces: tuple[str, ...] = ()
    """Folders of spaces named on the command line."""

    def command(self, verb: str) -> list[str]:
        """The command line that does `verb` with these settings, secrets and all: `redactor` is for showing it."""
        overrides = [override for override in self.overrides if verb in OF_VERBS.get(section_of(override), (verb,))]
        return ["python", "-m", "autotune", verb, *overrides, *(f"--spaces={folder}" for folder in self.spaces)]

    @functools.cached_property
    def redactor(self) -> Redactor:
        """Knows the secrets of the command line, of the files that were composed, and of the environment."""
        found = Redactor.from_command(self.overrides, self.composed, os.environ)
        return Redactor([*found.values, *passwords([self.study.storage, *self.study.warm_start])])

    def ruled(self, version: str | None) -> Settings:
        """With the rules that the engine has in a version. Raises UsageError when they forbid the baseline."""
        origin = f"engine {self.engine.name} {version or '(version unknown)'}"
        rules = self.engine.rules_for(self.space, version)
        return dataclasses.replace(self, space=self.space.with_rules(rules, origin))

    def without(self, barred: Sequence[Rule]) -> Settings:
        """With these rules on choices that cannot run where the study does, none of them the baseline's."""
        rules = [rule for rule in barred if not rule.matches(self.space.baseline)]
        return dataclasses.replace(self, space=self.space.with_rules(rules, "this host"))

    def asking(self) -> Settings:
        """With the engine's version asked of an interpreter that only its file names, which the user was shown."""
        asked = dataclasses.replace(self, engine=dataclasses.replace(self.engine, python_of_file=False))
        return asked.ruled(engine_version(asked.engine))

    @property
    def study_name(self) -> str:
        return self.study.name or self.space.name

    @property
    def folder(self) -> pathlib.Path:
        """outputs/STUDY"""
        return self.outputs / self.study_name


def section_of(override: str) -> str:
    """The first name of what an override sets: report of `++report.format=json`."""
    return override.lstrip("+~").partition("=")[0].partition(".")[0]


def refuse_unused(verb: str, overrides: Sequence[str]) -> None:
    """Raises UsageError for a setting that a verb would ignore."""
    for name in map(section_of, overrides):
        if verb not in (takes := OF_VERBS.get(name, (verb,))):
            raise UsageError(f"{name}= is for {' and '.join(takes)}, and {verb} would ignore it: leave it out")


def one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
