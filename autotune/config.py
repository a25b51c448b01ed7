"""Settings: Hydra composes conf/ and a space; this module turns the result into frozen values.

    settings = load(["+space=local", "study.launches=12"])

Every fault of the input is a UsageError of one line. Defaults live in conf/, types and checks here.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.engine.server import ServerSettings
from autotune.engine.spec import EngineSpec
from autotune.records import UsageError
from autotune.space import OVERLAYS, Space

PACKAGE = pathlib.Path(__file__).resolve().parent
OBJECTIVES = ("tokens_per_joule", "tokens_per_s", "goodput_per_joule", "cost")
STRATEGIES = ("autotune", "tpe", "random", "grid")
METERS = ("auto", "nvml", "rapl", "cpu_time", "none")
SPACES_VARIABLE = "AUTOTUNE_SPACES"
MISREAD = {"on", "off", "yes", "no", "y", "n"}


@dataclasses.dataclass(frozen=True)
class PowerSettings:
    """conf/power: which meter, and what cpu_time assumes."""

    meter: str
    sample_s: float
    watts_per_core: float
    max_disagreement: float

    def __post_init__(self) -> None:
        _one_of("power.meter", self.meter, METERS)
        _positive("power", self, "sample_s", "watts_per_core", "max_disagreement")


@dataclasses.dataclass(frozen=True)
class WorkloadSettings:
    """conf/workload: prompts, lengths, and when a window starts and ends."""

    prompts: str | None
    contexts: list[int]
    output_tokens: int
    spread: float
    temperature: float
    shared_prefix: float
    rate_per_s: float | None
    warmup_s: float
    warmup_max_s: float
    window_s: float
    window_max_s: float
    precision: float
    max_error_rate: float
    request_timeout_s: float
    seed: int

    def __post_init__(self) -> None:
        _positive(
            "workload",
            self,
            "output_tokens",
            "window_s",
            "window_max_s",
            "precision",
            "request_timeout_s",
            "warmup_max_s",
        )
        if not self.contexts or min(self.contexts) <= 0:
            raise UsageError("workload.contexts must list at least one positive prompt length in tokens")
        if not 0 <= self.spread < 1 or not 0 <= self.shared_prefix <= 1 or not 0 <= self.max_error_rate <= 1:
            raise UsageError("workload.spread, shared_prefix and max_error_rate are shares between 0 and 1")
        if self.temperature < 0 or self.warmup_s < 0 or (self.rate_per_s is not None and self.rate_per_s <= 0):
            raise UsageError("workload.temperature and warmup_s must not be negative, rate_per_s must be positive")
        if self.window_max_s < self.window_s or self.warmup_max_s < self.warmup_s:
            raise UsageError("workload.window_max_s and warmup_max_s must not be below window_s and warmup_s")


@dataclasses.dataclass(frozen=True)
class StudySettings:
    """conf/study: how to search and when to stop."""

    name: str | None
    storage: str | None
    strategy: str
    seed: int
    launches: int | None
    trials: int | None
    hours: float | None
    min_gain: float
    confirm: bool
    warm_start: list[str]

    def __post_init__(self) -> None:
        _one_of("study.strategy", self.strategy, STRATEGIES)
        for name in ("launches", "trials", "hours"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"study.{name} must be positive (or null for no limit), not {value}")
        if not 0 <= self.min_gain < 1:
            raise UsageError("study.min_gain is a share between 0 and 1")
        if self.name is not None and (
            not self.name.strip() or set(self.name) & set("/\\\0") or self.name.startswith(".")
        ):
            raise UsageError(f"study.name {self.name!r} must be a plain folder name")


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
        _one_of("report.format", self.format, ("text", "json"))


@dataclasses.dataclass(frozen=True)
class Settings:
    space: Space
    engine: EngineSpec
    power: PowerSettings
    workload: WorkloadSettings
    server: ServerSettings
    study: StudySettings
    matrix: MatrixSettings
    report: ReportSettings
    limits: Mapping[str, float]
    objective: str
    device: str
    outputs: pathlib.Path
    config: str
    trial: int | None
    format: str
    out: str | None
    overrides: tuple[str, ...]
    composed: Mapping[str, Any]
    """The whole composed configuration as plain data, for provenance."""

    @property
    def study_name(self) -> str:
        return self.study.name or self.space.name

    @property
    def folder(self) -> pathlib.Path:
        """outputs/STUDY"""
        return self.outputs / self.study_name


SECTIONS: dict[str, type[Any]] = {
    "power": PowerSettings,
    "workload": WorkloadSettings,
    "server": ServerSettings,
    "study": StudySettings,
    "matrix": MatrixSettings,
    "report": ReportSettings,
}
SCALARS = {"objective": str, "device": str, "outputs": str, "config": str, "format": str}


def data_folder(name: str) -> pathlib.Path:
    """conf or search_spaces: beside the package in a checkout, inside it in an installed wheel."""
    beside = PACKAGE.parent / name
    return beside if (PACKAGE.parent / "pyproject.toml").exists() and beside.is_dir() else PACKAGE / name


def space_files(extra: Sequence[str] = ()) -> dict[str, pathlib.Path]:
    """Every space by name: packaged ones, ./search_spaces, $AUTOTUNE_SPACES, then `--spaces` folders; later wins.

    Raises UsageError for a folder that does not exist.
    """
    named = [p for p in os.environ.get(SPACES_VARIABLE, "").split(os.pathsep) if p] + list(extra)
    for folder in named:
        if not pathlib.Path(folder).is_dir():
            raise UsageError(f"the folder of spaces {folder} does not exist")
    folders = [data_folder("search_spaces"), pathlib.Path("search_spaces"), *map(pathlib.Path, named)]
    return {file.stem: file for folder in folders if folder.is_dir() for file in sorted(folder.glob("*.yaml"))}


def load(overrides: Sequence[str], extra_spaces: Sequence[str] = ()) -> Settings:
    """Compose and check everything. Raises UsageError (one line) for any fault of the input."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    files = space_files(extra_spaces)
    try:
        return _load(list(overrides), files)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise UsageError(_one_line(error)) from error


def _load(overrides: list[str], files: Mapping[str, pathlib.Path]) -> Settings:
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    parsed = OverridesParser.create().parse_overrides(overrides)
    keys = {override.key_or_group for override in parsed}
    if "space" not in keys:
        raise UsageError(f"pass +space=NAME{_typo(keys)}; spaces: {', '.join(sorted(files))}")
    store = ConfigStore.instance()
    for name, file in files.items():
        _no_misread_words(file)
        store.store(group="space", name=name, node=OmegaConf.load(file), provider=str(file))
        for engine in sorted(file.parent.glob("engine/*.yaml")):
            store.store(group="engine", name=engine.stem, node=OmegaConf.load(engine), provider=str(engine))
    # `space: null` in config.yaml makes +space=NAME a group choice; plain space=NAME is accepted too.
    wanted = ["+" + o if o.startswith("space=") else o for o in overrides]
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(data_folder("conf"))):
        if "engine" not in keys:
            only_space = [
                w
                for w, p in zip(wanted, parsed, strict=True)
                if p.key_or_group == "space" or p.key_or_group.startswith("space.")
            ]
            first = compose("config", overrides=only_space)
            name = OmegaConf.select(first, "space.engine")
            if not isinstance(name, str):
                raise UsageError("the space names no engine: it needs a line like engine: sglang")
            wanted.insert(0, f"engine={name}")
        composed = compose("config", overrides=wanted)
    plain = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(plain, dict)
    return _settings({str(k): v for k, v in plain.items()}, keys, tuple(overrides), files)


def _settings(
    cfg: dict[str, Any], keys: set[str], overrides: tuple[str, ...], files: Mapping[str, pathlib.Path]
) -> Settings:
    if not isinstance(cfg.get("space"), dict):
        raise UsageError(f"pass +space=NAME; spaces: {', '.join(sorted(files))}")
    known = {*SECTIONS, *SCALARS, "space", "engine", "limits", "trial", "out"}
    unknown = sorted(set(cfg) - known)
    if unknown:
        raise UsageError(f"unknown key {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    for name in OVERLAYS:
        overlay = cfg["space"].get(name)
        if overlay is not None:
            cfg[name] = _overlay(cfg[name] or {}, overlay, name, keys)
    space = Space.parse(cfg["space"], f"space {cfg['space'].get('name')}")
    if not isinstance(cfg.get("engine"), dict):
        raise UsageError(f"space {space.name}: engine {space.engine!r} is not a file of conf/engine/")
    engine = EngineSpec.parse(cfg["engine"], f"engine {cfg['engine'].get('name')}")
    sections = {name: section(kind, cfg[name], name) for name, kind in SECTIONS.items()}
    for name, kind in SCALARS.items():
        if not isinstance(cfg[name], kind):
            raise UsageError(f"{name} must be a text, not {cfg[name]!r}")
    _one_of("objective", cfg["objective"], OBJECTIVES)
    limits = {str(k): v for k, v in (cfg["limits"] or {}).items()}
    for name, value in limits.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
            raise UsageError(f"limits.{name} must be a number that is not negative, not {value!r}")
    if cfg["trial"] is not None and (not isinstance(cfg["trial"], int) or cfg["trial"] < 0):
        raise UsageError(f"trial must be a trial's number, not {cfg['trial']!r}")
    return Settings(
        space=space.with_rules(engine.rules),
        engine=engine,
        limits=limits,
        objective=cfg["objective"],
        device=cfg["device"],
        outputs=pathlib.Path(cfg["outputs"]),
        config=str(cfg["config"]),
        trial=cfg["trial"],
        format=cfg["format"],
        out=cfg["out"],
        overrides=overrides,
        composed=cfg,
        **sections,
    )


def section(kind: type[Any], raw: Any, name: str) -> Any:
    """One section as its dataclass, checked by OmegaConf's structured configs. Raises UsageError."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(raw, dict):
        raise UsageError(f"{name} must be a mapping, not {raw!r}")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(kind), raw)
        made = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UsageError(f"{name}: {_one_line(error)}") from error
    return made


def _overlay(base: dict[str, Any], overlay: Any, name: str, keys: set[str]) -> dict[str, Any]:
    """The space's section over conf/'s, except for what the command line set."""
    if not isinstance(overlay, dict):
        raise UsageError(f"the space's {name} must be a mapping, not {overlay!r}")
    given = {k for k in overlay if any(key == f"{name}.{k}" or key.startswith(f"{name}.{k}.") for key in keys)}
    return {**base, **{k: v for k, v in overlay.items() if k not in given}}


def _no_misread_words(file: pathlib.Path) -> None:
    """Refuse plain on/off/yes/no, which YAML 1.1 reads as booleans behind the author's back."""
    import yaml

    try:
        tokens = list(yaml.scan(file.read_text(encoding="utf-8")))
    except yaml.YAMLError as error:
        raise UsageError(f"{file}: not valid YAML: {_one_line(error)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot be read: {_one_line(error)}") from error
    for token in tokens:
        if isinstance(token, yaml.ScalarToken) and token.plain and token.value.lower() in MISREAD:
            raise UsageError(
                f"{file}, line {token.start_mark.line + 1}: YAML reads {token.value} as a boolean: "
                f'write true or false, or quote it: "{token.value}"'
            )


def _one_line(error: Exception) -> str:
    """The informative lines of a library's message, joined."""
    lines = []
    for line in str(error).splitlines():
        if line.startswith(("Config search path", "See https", "object_type", "    object_type")):
            break
        if line.strip():
            lines.append(" ".join(line.split()).rstrip(".;"))
    return "; ".join(lines)[:600].replace(":; ", ": ") or type(error).__name__


def _typo(keys: set[str]) -> str:
    import difflib

    close = difflib.get_close_matches("space", keys, n=1)
    return f" (not {close[0]})" if close else ""


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def _positive(where: str, values: Any, *names: str) -> None:
    for name in names:
        if not getattr(values, name) > 0:
            raise UsageError(f"{where}.{name} must be positive, not {getattr(values, name)}")
