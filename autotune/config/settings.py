"""Settings: frozen values that the rest of autotune reads, with their types and checks; `compose.load` makes them.

Defaults live in conf/. A value that makes no sense raises UsageError with one line.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from autotune.engine.host import engine_version
from autotune.engine.server import ServerSettings
from autotune.engine.spec import EngineSpec
from autotune.loadgen.workload import WorkloadSettings
from autotune.measure.correctness import AgreementSettings
from autotune.measure.finalists import ConfirmSettings
from autotune.measure.objective import Objective
from autotune.power.meter import PowerSettings
from autotune.records import UsageError
from autotune.space.constraints import Rule
from autotune.space.space import Space
from autotune.storage.database import backend, passwords, sqlite_file
from autotune.utils.redact import Redactor
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
