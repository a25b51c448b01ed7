"""Settings: Hydra composes conf/ and a space; this module turns the result into frozen values.

    settings = load(["+space=local", "study.launches=12"])

Every fault of the input is a UsageError of one line. Defaults live in conf/, types and checks here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from autotune import yamlfile
from autotune.engine.probe import engine_version
from autotune.engine.server import ServerSettings
from autotune.engine.spec import EngineSpec
from autotune.measure.agreement import AgreementSettings
from autotune.measure.confirm import ConfirmSettings
from autotune.measure.limits import Limits
from autotune.measure.objective import Objective
from autotune.measure.power.meter import PowerSettings
from autotune.records import UsageError
from autotune.redact import HIDDEN, Redactor
from autotune.rules import Rule
from autotune.space import OVERLAYS, Space
from autotune.storage import backend, passwords, sqlite_file
from autotune.workload import WorkloadSettings

PACKAGE = pathlib.Path(__file__).resolve().parent
FORMATS = ("sh", "systemd", "compose", "k8s", "yaml")
"""What an export may be."""
OF_VERBS: dict[str, tuple[str, ...]] = {
    "config": ("check", "matrix"), "matrix": ("matrix",), "trial": ("export",), "format": ("export", "tune"),
    "out": ("export", "report", "tune"), "report": ("report", "tune")}
"""Settings of single verbs, and which. All others describe the study: every verb takes them."""
STRATEGIES = ("autotune", "tpe", "random", "grid")
SPACES_VARIABLE = "AUTOTUNE_SPACES"


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
        _one_of("study.strategy", self.strategy, STRATEGIES)
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
        _one_of("executor.kind", self.kind, ("local", "ray"))
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
        _one_of("report.format", self.format, ("text", "json"))


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


SECTIONS: dict[str, type[Any]] = {
    "power": PowerSettings, "agreement": AgreementSettings, "workload": WorkloadSettings, "server": ServerSettings,
    "study": StudySettings, "matrix": MatrixSettings, "report": ReportSettings,
    "executor": ExecutorSettings, "parallel": ParallelSettings}
PLACES = {"study": ("storage", "warm_start")}
"""Settings that name a database, which a space must not."""
DEVICES = ("auto", "cpu", "cuda")
SCALARS = {"objective": str, "device": str, "outputs": str, "config": str, "format": str}


def section_of(override: str) -> str:
    """The first name of what an override sets: report of `++report.format=json`."""
    return override.lstrip("+~").partition("=")[0].partition(".")[0]


def refuse_unused(verb: str, overrides: Sequence[str]) -> None:
    """Raises UsageError for a setting that a verb would ignore."""
    for name in map(section_of, overrides):
        if verb not in (takes := OF_VERBS.get(name, (verb,))):
            raise UsageError(f"{name}= is for {' and '.join(takes)}, and {verb} would ignore it: leave it out")


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
    return {file.stem: file for folder in folders if folder.is_dir() for file in plain_files(folder, "*.yaml")}


def plain_files(folder: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    """The files of a folder by name; no pipes and devices, which reading would wait for, or never end."""
    return sorted(path for path in folder.glob(pattern) if path.is_file())


class _Composition(Exception):
    """Hydra could not compose, and said so with a plain ValueError."""


def load(overrides: Sequence[str], extra_spaces: Sequence[str] = (), installed: bool = True) -> Settings:
    """Compose and check everything. Raises UsageError (one line) for any fault of the input.

    installed: with the rules of the engine as it is installed here; else without any, see `Settings.ruled`.
    """
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    files = space_files(extra_spaces)
    try:
        settings = dataclasses.replace(_load(list(overrides), files), spaces=tuple(extra_spaces))
    except RecursionError as error:
        raise UsageError("the space refers to itself (a YAML anchor or a defaults list)") from error
    except OverrideParseException as error:
        raise UsageError(f"cannot read {error.override!r}: not of the form key=value, or its value needs quotes of its "
                         "own inside the shell's (for ~ ' \" , = brackets and line breaks): \"key='value'\"") from error
    except (HydraException, OmegaConfBaseException, YAMLError, _Composition) as error:
        raise UsageError(_one_line(error)) from error
    _public_space(settings)
    return settings.ruled(engine_version(settings.engine)) if installed else settings


def _public_space(settings: Settings) -> None:
    """Refuse a space that holds a secret of the command line or of the engine, or gives choices to a secret flag.

    What a space says is written everywhere. Raises UsageError.
    """
    space, known = settings.space, Redactor.from_command(settings.overrides, settings.composed)
    texts = {"describe": space.describe, **{f"model.{k}": v for k, v in space.model.items()}}
    texts |= {f"forbid {number}": rule.because for number, rule in enumerate(space.rules)}
    texts |= {f"params.{p.name}={c}": c for p in space.params for c in p.choices if isinstance(c, str)}
    for where, said in texts.items():
        if any(secret in said for secret in known.values):
            raise UsageError(f"space {space.name}: {known.text(where)} holds a secret of the settings, and spaces are "
                             "written everywhere: leave it to the engine's environment")
    for param in space.server_params:
        spec = settings.engine.params.get(param.name)
        for action in spec.any_value if spec is not None else ():
            told = [arg.replace("{value}", "a-choice") for arg in action.args]
            env = {name: value.replace("{value}", "a-choice") for name, value in action.env.items()}
            shown = [*Redactor().argv(told), *Redactor().mapping(env).values()]
            if any(HIDDEN in str(word) for word in shown) and any(isinstance(c, str) for c in param.choices):
                raise UsageError(f"space {space.name}: params.{param.name} goes to a flag or variable that takes a "
                                 "secret, and choices are written everywhere: put it into an environment variable")


def _load(overrides: list[str], files: Mapping[str, pathlib.Path]) -> Settings:
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except ValueError as error:  # a number of thousands of digits
        raise _Composition(_one_line(error)) from error
    given = {override.key_or_group: override.value() for override in parsed}
    if "space" not in given:
        raise UsageError(f"pass +space=NAME{_typo(set(given))}; spaces: {', '.join(sorted(files))}")
    file = files.get(str(given["space"]))
    if file is None:
        raise UsageError(f"there is no space {given['space']!r}; spaces: {', '.join(sorted(files))}")
    groups = sorted(folder.name for folder in data_folder("conf").iterdir() if folder.is_dir())
    for key, value in given.items():
        names = [str(name) for name in (value if isinstance(value, list) else [value]) if name is not None]
        odd = isinstance(value, list | dict) and not all(isinstance(name, str) for name in value)
        if "/" in key or (key in groups and (odd or not all(map(yamlfile.NAME.fullmatch, names)))):
            raise UsageError(f"{key}={value}: a group ({', '.join(groups)}) takes the plain name of a file in it")
    store, spaces, waiting = ConfigStore.instance(), dict[str, Any](), [file.stem]
    while waiting:  # the space and what it is based on
        name = waiting.pop(0)
        if name not in spaces and name in files:
            spaces[name], bases = _stranger(files[name], misread_words=True)
            store.store(group="space", name=name, node=spaces[name], provider=str(files[name]))
            waiting += bases
    for path in plain_files(file.parent, "engine/*.yaml"):
        store.store(group="engine", name=path.stem, node=_stranger(path)[0], provider=str(path))
    # space=NAME means +space=NAME, and open mappings take new keys without a plus.
    wanted = ["+" + o if o.startswith("space=") else "++" + o if o.startswith(("engine.", "limits.")) else o
              for o in overrides]
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(data_folder("conf"))):
        if "engine" not in given:
            wanted.insert(0, f"engine={_engine_of(given.get('space.engine'), file, spaces)}")
        try:
            composed = compose("config", overrides=wanted)
        except (ValueError, TypeError, AttributeError, LookupError, AssertionError) as error:
            # Hydra's own words for a group set to null or to lists, or defaults that are no list
            raise _Composition(_one_line(error)) from error
    plain = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(plain, dict)
    return _settings({str(k): v for k, v in plain.items()}, set(given), tuple(overrides), files)


def _stranger(path: pathlib.Path, misread_words: bool = False) -> tuple[Any, list[str]]:
    """(a checked file, what it is based on), so that Hydra reads no file of others on its own. Raises UsageError."""
    from omegaconf import OmegaConf

    yamlfile.check(path, misread_words)
    node = OmegaConf.load(path)
    return node, yamlfile.bases(path, OmegaConf.to_container(node, resolve=False))


def _engine_of(given: Any, file: pathlib.Path, spaces: Mapping[str, Any]) -> str:
    """The engine that the command line, a space, or the nearest space it inherits from, names."""
    from omegaconf import OmegaConf

    plain = [OmegaConf.to_container(node, resolve=False) for node in spaces.values()]
    named = [given, *(space.get("engine") for space in plain if isinstance(space, dict))]
    name = next((name for name in named if isinstance(name, str)), None)
    if name is None:
        raise UsageError(f"{file}: names no engine: it needs a line like engine: sglang")
    if not yamlfile.NAME.fullmatch(name):
        raise UsageError(f"{file}: engine {name[:60]!r} must be the plain name of an engine file, such as sglang")
    return name


def _settings(cfg: dict[str, Any], keys: set[str], overrides: tuple[str, ...],
              files: Mapping[str, pathlib.Path]) -> Settings:
    if not isinstance(cfg.get("space"), dict):
        raise UsageError(f"pass +space=NAME; spaces: {', '.join(sorted(files))}")
    known = {*SECTIONS, *SCALARS, "space", "engine", "limits", "trial", "out", "price_per_device_hour"}
    unknown = sorted(set(cfg) - known)
    if unknown:
        raise UsageError(f"unknown key {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    missing = sorted({*SECTIONS, *SCALARS, "limits"} - set(cfg))
    if missing:
        raise UsageError(f"{missing[0]} is needed: it cannot be removed")
    for name in OVERLAYS:
        overlay = cfg["space"].get(name)
        if overlay is not None:
            _no_places(overlay, name, keys)
            cfg[name] = _overlay(cfg[name] or {}, overlay, name, keys)
    space = Space.parse(cfg["space"], f"space {cfg['space'].get('name')}")
    if not isinstance(cfg.get("engine"), dict):
        raise UsageError(f"space {space.name}: engine {space.engine!r} is not a file of conf/engine/")
    engine = EngineSpec.parse(cfg["engine"], f"engine {cfg['engine'].get('name')}")
    engine = dataclasses.replace(engine, python_of_file=engine.python is not None and "engine.python" not in keys)
    templates = str({key: value for key, value in cfg["engine"].items() if key != "vars"})
    for key in sorted(keys):
        if key.startswith("engine.vars.") and f"{{{(name := key.removeprefix('engine.vars.'))}}}" not in templates:
            raise UsageError(f"{key}: engine {engine.name} has no {{{name}}} and would ignore it; it has "
                             f"{', '.join(sorted(engine.vars)) or 'no vars'}")
    sections = {name: section(kind, cfg[name], name) for name, kind in SECTIONS.items()}
    if sections["executor"].kind == "ray" and sections["parallel"].count != 1:
        raise UsageError("parallel.slots is for launches on this host: with executor=ray, Ray places them "
                         "(executor.at_once)")
    if isinstance(cfg["config"], int) and not isinstance(cfg["config"], bool):
        cfg["config"] = str(cfg["config"])
    for name, kind in SCALARS.items():
        if not isinstance(cfg[name], kind):
            raise UsageError(f"{name} must be a text, not {cfg[name]!r}")
    for name in ("outputs", "out"):  # they are printed, and stand in reports and launch files
        if isinstance(cfg[name], str) and not cfg[name].isprintable():
            raise UsageError(f"{name}={cfg[name]!r}: a path without control characters is needed")
    _one_of("device", cfg["device"], DEVICES)
    _one_of("format", cfg["format"], FORMATS)
    if not isinstance(cfg["limits"] or {}, dict):
        raise UsageError(f"limits must be a mapping, not {cfg['limits']!r}")
    limits = {str(k): v for k, v in (cfg["limits"] or {}).items()}
    Limits(limits)
    if cfg["out"] is not None and not isinstance(cfg["out"], str):
        raise UsageError(f"out must be a file or a folder, not {cfg['out']!r}")
    if cfg["trial"] is not None and (not isinstance(cfg["trial"], int) or cfg["trial"] < 0):
        raise UsageError(f"trial must be a trial's number, not {cfg['trial']!r}")
    return Settings(
        space=space, engine=engine, limits=limits, objective=_objective(cfg),
        device=cfg["device"], outputs=pathlib.Path(cfg["outputs"]), config=str(cfg["config"]), trial=cfg["trial"],
        format=cfg["format"], out=cfg["out"], overrides=overrides, composed=cfg, **sections)


def _objective(cfg: Mapping[str, Any]) -> Objective:
    price = cfg["price_per_device_hour"]
    if price is not None and (not isinstance(price, int | float) or isinstance(price, bool) or not abs(price) < 1e12):
        raise UsageError(f"price_per_device_hour must be a number, not {price!r}")
    if price is not None and cfg["objective"] != "cost":
        raise UsageError(f"price_per_device_hour is for objective=cost: objective={cfg['objective']} would ignore it")
    if cfg["objective"] == "pareto":
        raise UsageError("objective=pareto: the search has one objective; the report shows tokens/s against tokens/J")
    devices = cfg["space"].get("needs", {}).get("gpus", 1) if isinstance(cfg["space"].get("needs"), dict) else 1
    return Objective(cfg["objective"], price, int(devices))


def section(kind: type[Any], raw: Any, name: str) -> Any:
    """One section as its dataclass, checked by OmegaConf's structured configs. Raises UsageError."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(raw, dict):
        raise UsageError(f"{name} must be a mapping, not {raw!r}")
    try:
        schema = OmegaConf.structured(kind)
        for key in schema:  # frozen dataclasses inside frozen ones come out read-only, also for merging
            if OmegaConf.is_config(node := schema._get_node(key)):
                OmegaConf.set_readonly(node, False)
        _finite(raw, name)
        made = OmegaConf.to_object(OmegaConf.merge(schema, raw))
    except OmegaConfBaseException as error:
        if "is not a ListConfig" in str(error):
            raise UsageError(f"{name}.{error.full_key} is a list: {name}.{error.full_key}=[A,B]") from error
        raise UsageError(f"{name}: {_one_line(error)}") from error
    return made


def _finite(raw: Any, name: str) -> None:
    """Refuse nan and infinity, which slip through comparisons. Raises UsageError."""
    if isinstance(raw, dict):
        for key, value in raw.items():
            _finite(value, f"{name}.{key}")
    elif isinstance(raw, float) and not math.isfinite(raw):
        raise UsageError(f"{name} must be a finite number, not {raw}")


def _overlay(base: dict[str, Any], overlay: Any, name: str, keys: set[str]) -> dict[str, Any]:
    """The space's section over conf/'s, except for what the command line set."""
    if not isinstance(overlay, dict):
        raise UsageError(f"the space's {name} must be a mapping, not {overlay!r}")
    given = {k for k in overlay if any(key == f"{name}.{k}" or key.startswith(f"{name}.{k}.") for key in keys)}
    merged = {**base, **{k: v for k, v in overlay.items() if k not in given}}
    for key, value in overlay.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            deeper = {k.split(".", 1)[1] for k in keys if k.startswith(f"{name}.")}
            merged[key] = _overlay(base[key], value, key, deeper)
    return merged


def _no_places(overlay: Any, name: str, keys: set[str]) -> None:
    """Refuse a space that says where results go or come from: its author would choose the file that is written to, or
    the host that learns of them. Raises UsageError."""
    for key in PLACES.get(name, ()):
        if isinstance(overlay, dict) and overlay.get(key) and f"{name}.{key}" not in keys and name not in keys:
            raise UsageError(f"the space names {name}.{key}, which only the command line may: "
                             f"{name}.{key}={'[...]' if isinstance(overlay[key], list) else '...'}")


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
