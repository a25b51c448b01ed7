"""Composition: Hydra composes conf/ and a space; this module turns the result into `Settings`.

    settings = load(["+space=local", "study.launches=12"])

Every fault of the input is a UsageError of one line. Defaults live in conf/, types and checks in settings.py.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.config import yaml_file
from autotune.config.settings import (
    ExecutorSettings,
    MatrixSettings,
    ParallelSettings,
    ReportSettings,
    Settings,
    StudySettings,
    one_of,
)
from autotune.engine.host import engine_version
from autotune.engine.server import ServerSettings
from autotune.engine.spec import EngineSpec
from autotune.measure.correctness import AgreementSettings
from autotune.measure.limits import Limits
from autotune.measure.objective import Objective
from autotune.measure.workload import WorkloadSettings
from autotune.power.meter import PowerSettings
from autotune.power.registry import check_source
from autotune.records import UsageError
from autotune.space.space import OVERLAYS, Space
from autotune.utils.redact import HIDDEN, Redactor

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
FORMATS = ("sh", "systemd", "compose", "k8s", "yaml")
"""What an export may be."""
SPACES_VARIABLE = "AUTOTUNE_SPACES"
SECTIONS: dict[str, type[Any]] = {
    "power": PowerSettings, "agreement": AgreementSettings, "workload": WorkloadSettings, "server": ServerSettings,
    "study": StudySettings, "matrix": MatrixSettings, "report": ReportSettings,
    "executor": ExecutorSettings, "parallel": ParallelSettings}
PLACES = {"study": ("storage", "warm_start")}
"""Settings that name a database, which a space must not."""
DEVICES = ("auto", "cpu", "cuda")
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
        if "/" in key or (key in groups and (odd or not all(map(yaml_file.NAME.fullmatch, names)))):
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

    yaml_file.check(path, misread_words)
    node = OmegaConf.load(path)
    return node, yaml_file.bases(path, OmegaConf.to_container(node, resolve=False))


def _engine_of(given: Any, file: pathlib.Path, spaces: Mapping[str, Any]) -> str:
    """The engine that the command line, a space, or the nearest space it inherits from, names."""
    from omegaconf import OmegaConf

    plain = [OmegaConf.to_container(node, resolve=False) for node in spaces.values()]
    named = [given, *(space.get("engine") for space in plain if isinstance(space, dict))]
    name = next((name for name in named if isinstance(name, str)), None)
    if name is None:
        raise UsageError(f"{file}: names no engine: it needs a line like engine: sglang")
    if not yaml_file.NAME.fullmatch(name):
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
    check_source(sections["power"])
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
    one_of("device", cfg["device"], DEVICES)
    one_of("format", cfg["format"], FORMATS)
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
