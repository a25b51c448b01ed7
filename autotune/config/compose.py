"""Composition: Hydra composes conf/ with a space; the result becomes `Settings`.

    settings = load(["+space=local", "study.launches=12"])

Bad input raises UsageError with one line. Defaults live in conf/, types and checks in settings.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from autotune.config.settings import Sections, Settings
from autotune.engine.host import engine_version
from autotune.engine.spec import EngineSpec
from autotune.measure.limits import Limits
from autotune.measure.objective import Objective
from autotune.power import check_source
from autotune.records import UsageError
from autotune.space.space import OVERLAYS, Space
from autotune.utils.redact import HIDDEN, Redactor
from autotune.utils.validation import Number, convert

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
SPACES_VARIABLE = "AUTOTUNE_SPACES"
# Settings that name a database: a space must not choose the file that is written to, or the host that learns of it.
COMMAND_LINE_ONLY = {"study": ("storage", "warm_start")}
MOST_BYTES = 4 << 20  # of a space or engine file
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")  # without a path to another folder
REFERENCE = re.compile(r"\$\{[\w.\[\]-]*\}")  # an interpolation that only names another key
MISREAD = {"on", "off", "yes", "no", "y", "n"}  # YAML 1.1 reads them as booleans


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Composed(Sections):
    """The composed configuration: all keys of conf/config.yaml."""

    space: dict[str, Any]
    engine: Any
    limits: dict[str, Number] | None
    objective: str
    price_per_device_hour: Annotated[float, msgspec.Meta(ge=0, le=1e12, description="a price")] | None
    outputs: str

    def __post_init__(self) -> None:
        for name, path in (("outputs", self.outputs), ("out", self.out)):  # shown in reports and launch files
            if path and not path.isprintable():
                raise UsageError(f"{name}={path!r}: a path without control characters is needed")
        if self.executor.kind == "ray" and self.parallel.count != 1:
            raise UsageError("parallel.slots is for launches on this host: with executor=ray, Ray places them "
                             "(executor.at_once)")
        if self.price_per_device_hour is not None and self.objective != "cost":
            raise UsageError(f"price_per_device_hour is for objective=cost: objective={self.objective} would ignore it")
        check_source(self.power)
        Limits(self.limits or {})


def data_folder(name: str) -> pathlib.Path:
    """conf or search_spaces: beside the package in a checkout, inside it in an installed wheel."""
    beside = PACKAGE.parent / name
    return beside if (PACKAGE.parent / "pyproject.toml").exists() and beside.is_dir() else PACKAGE / name


def space_files(extra: Sequence[str] = ()) -> dict[str, pathlib.Path]:
    """Every space by name: packaged ones, ./search_spaces, $AUTOTUNE_SPACES, then `--spaces` folders; the last wins.

    Raises UsageError for a folder that does not exist.
    """
    named = [p for p in os.environ.get(SPACES_VARIABLE, "").split(os.pathsep) if p] + list(extra)
    for folder in named:
        if not pathlib.Path(folder).is_dir():
            raise UsageError(f"the folder of spaces {folder} does not exist")
    folders = [data_folder("search_spaces"), pathlib.Path("search_spaces"), *map(pathlib.Path, named)]
    return {file.stem: file for folder in folders if folder.is_dir() for file in plain_files(folder, "*.yaml")}


def plain_files(folder: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    """The regular files of a folder by name, without pipes and devices, on which a read could block for ever."""
    return sorted(path for path in folder.glob(pattern) if path.is_file())


def load(overrides: Sequence[str], extra_spaces: Sequence[str] = (), installed: bool = True) -> Settings:
    """Settings from a command line's overrides and its `--spaces` folders.

    installed: with the rules of the engine version on this host; else without any rules of the engine. Raises
    UsageError (one line) for bad input.
    """
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    files = space_files(extra_spaces)
    try:
        composed, given = _compose(list(overrides), files)
    except RecursionError as error:
        raise UsageError("the space refers to itself (a YAML anchor or a defaults list)") from error
    except OverrideParseException as error:
        raise UsageError(f"cannot read {error.override!r}: not of the form key=value, or its value needs quotes of its "
                         "own inside the shell's (for ~ ' \" , = brackets and line breaks): \"key='value'\"") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(_one_line(error)) from error
    settings = _settings(composed, given, tuple(overrides), tuple(extra_spaces))
    _refuse_secrets(settings)
    return settings.ruled(engine_version(settings.engine)) if installed else settings


def _compose(overrides: list[str], files: Mapping[str, pathlib.Path]) -> tuple[dict[str, Any], set[str]]:
    """(the configuration as plain data, the keys that the command line sets). Hydra reads no space or engine file."""
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except ValueError as error:  # a number of thousands of digits
        raise UsageError(_one_line(error)) from error
    given = {override.key_or_group: override.value() for override in parsed}
    known = f"spaces: {', '.join(sorted(files))}"
    if "space" not in given:
        close = difflib.get_close_matches("space", given, n=1)
        raise UsageError(f"pass +space=NAME{f' (not {close[0]})' if close else ''}; {known}")
    file = files.get(str(given["space"]))
    if file is None:
        raise UsageError(f"there is no space {given['space']!r}; {known}")
    store, spaces, waiting = ConfigStore.instance(), dict[str, Any](), [file.stem]
    while waiting:  # the space and its bases
        name = waiting.pop(0)
        if name not in spaces and name in files:
            node, bases = _read(files[name], misread_words=True)
            spaces[name] = OmegaConf.to_container(node, resolve=False)
            store.store(group="space", name=name, node=node, provider=str(files[name]))
            waiting += bases
    for path in plain_files(file.parent, "engine/*.yaml"):
        store.store(group="engine", name=path.stem, node=_read(path)[0], provider=str(path))
    # space=NAME means +space=NAME, and open mappings take new keys without a plus.
    wanted = ["+" + o if o.startswith("space=") else "++" + o if o.startswith(("engine.", "limits.")) else o
              for o in overrides]
    if "engine" not in given:
        engines = [given.get("space.engine"), *(s.get("engine") for s in spaces.values() if isinstance(s, dict))]
        name = next((name for name in engines if isinstance(name, str)), "")  # the space's own before its bases'
        if not FILE_NAME.fullmatch(name):
            raise UsageError(f"{file}: engine {name[:60]!r} must be the plain name of an engine file, such as sglang")
        wanted.insert(0, f"engine={name}")
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(data_folder("conf"))):
        try:
            composed = OmegaConf.to_container(compose("config", overrides=wanted), resolve=True)
        except (ValueError, TypeError, AttributeError, LookupError, AssertionError) as error:
            # Hydra's errors for a group set to null or to a list, and for defaults that are no list
            raise UsageError(_one_line(error)) from error
    assert isinstance(composed, dict)
    return {str(key): value for key, value in composed.items()}, set(given)


def _read(path: pathlib.Path, misread_words: bool = False) -> tuple[DictConfig | ListConfig, list[str]]:
    """(the content of a space or engine file, the names in its `defaults`).

    misread_words: refuse a bare on, off, yes or no. Raises UsageError, also for an interpolation that reads more than
    another key (the environment, say).
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path}: larger than {MOST_BYTES >> 20} MiB, which no space or engine file needs")
        text = path.read_text(encoding="utf-8")
        for token in yaml.scan(text, Loader=yaml.SafeLoader) if misread_words else ():
            if isinstance(token, yaml.ScalarToken) and token.plain and token.value.lower() in MISREAD:
                raise UsageError(f"{path}, line {token.start_mark.line + 1}: YAML reads {token.value} as a boolean: "
                                 f'write true or false, or quote it: "{token.value}"')
        node = OmegaConf.create(text)
        plain = OmegaConf.to_container(node, resolve=False)
        encoded = json.dumps(plain, ensure_ascii=False)
        encoded.encode()
    except RecursionError as error:
        raise UsageError(f"{path}: nested too deeply, or an anchor that refers to itself") from error
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UsageError(f"{path}: cannot be read as YAML: {_one_line(error)}") from error
    left = REFERENCE.sub("", encoded)
    if "${" in left:
        raise UsageError(f"{path}: {left[left.index('${'):][:60]!r} asks for more than another key of the settings, "
                         "which a file may not: give the value itself, or set it on the command line")
    defaults = plain.get("defaults") if isinstance(plain, dict) else None
    if defaults is not None and not isinstance(defaults, list):
        raise UsageError(f"{path}: defaults must be a list such as [NAME, _self_], not {str(defaults)[:60]!r}")
    for name in defaults or ():
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            raise UsageError(f"{path}: defaults: {str(name)[:60]!r} is not the plain name of another file of its kind "
                             "(letters, digits, _ - and dots)")
    return node, [name for name in defaults or () if name != "_self_"]


def _settings(cfg: dict[str, Any], given: set[str], overrides: tuple[str, ...], spaces: tuple[str, ...]) -> Settings:
    overlays = cfg["space"] if isinstance(cfg.get("space"), dict) else {}
    for name in OVERLAYS:
        if overlays.get(name) is not None:
            cfg[name] = _overlay(cfg.get(name) or {}, overlays[name], name, given)
    composed = convert(cfg, _Composed, "", typed=True)
    space = Space.parse(composed.space, f"space {composed.space.get('name')}")
    if not isinstance(composed.engine, dict):
        raise UsageError(f"space {space.name}: engine {space.engine!r} is not a file of conf/engine/")
    engine = EngineSpec.parse(composed.engine, f"engine {composed.engine.get('name')}")
    engine = dataclasses.replace(engine, python_of_file=engine.python is not None and "engine.python" not in given)
    templates = str({key: value for key, value in composed.engine.items() if key != "vars"})
    for key in sorted(given):
        if key.startswith("engine.vars.") and f"{{{(name := key.removeprefix('engine.vars.'))}}}" not in templates:
            raise UsageError(f"{key}: engine {engine.name} has no {{{name}}} and would ignore it; it has "
                             f"{', '.join(sorted(engine.vars)) or 'no vars'}")
    sections = {field.name: getattr(composed, field.name) for field in dataclasses.fields(Sections)}
    objective = Objective(composed.objective, composed.price_per_device_hour, int(space.needs.get("gpus", 1)))
    return Settings(**sections, space=space, engine=engine, objective=objective, outputs=pathlib.Path(composed.outputs),
                    limits=composed.limits or {}, overrides=overrides, composed=cfg, spaces=spaces)


def _overlay(base: dict[str, Any], overlay: Any, name: str, given: set[str]) -> dict[str, Any]:
    """The space's section over conf/'s, except for the keys that the command line sets (`given`, dotted).

    Raises UsageError for settings that only the command line may set.
    """
    if not isinstance(overlay, dict):
        raise UsageError(f"the space's {name} must be a mapping, not {overlay!r}")
    merged = dict(base)
    for key, value in overlay.items():
        here = f"{name}.{key}"
        if key in COMMAND_LINE_ONLY.get(name, ()) and value and here not in given and name not in given:
            raise UsageError(f"the space names {here}, which only the command line may: "
                             f"{here}={'[...]' if isinstance(value, list) else '...'}")
        if here in given:
            continue
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = _overlay(base[key], value, here, given)
        elif not any(k.startswith(f"{here}.") for k in given):
            merged[key] = value
    return merged


def _refuse_secrets(settings: Settings) -> None:
    """Raises UsageError if the space holds a secret of the command line or engine, or choices for a secret flag.

    A space is written to the study, to reports and to launch files.
    """
    space, known = settings.space, Redactor.from_command(settings.overrides, settings.composed)
    texts = {"describe": space.describe, **{f"model.{k}": v for k, v in space.model.items()}}
    texts |= {f"forbid {number}": rule.because for number, rule in enumerate(space.rules)}
    texts |= {f"params.{p.name}={c}": c for p in space.params for c in p.choices if isinstance(c, str)}
    for where, text in texts.items():
        if any(secret in text for secret in known.values):
            raise UsageError(f"space {space.name}: {known.text(where)} holds a secret of the settings, and spaces are "
                             "written to every report: leave it to the engine's environment")
    for param in space.server_params:
        spec = settings.engine.params.get(param.name)
        for action in spec.any_value if spec is not None else ():
            args = [arg.replace("{value}", "a-choice") for arg in action.args]
            env = {name: value.replace("{value}", "a-choice") for name, value in action.env.items()}
            redacted = [*Redactor().argv(args), *Redactor().mapping(env).values()]
            if any(HIDDEN in str(word) for word in redacted) and any(isinstance(c, str) for c in param.choices):
                raise UsageError(f"space {space.name}: params.{param.name} goes to a flag or variable that takes a "
                                 "secret, and choices are written to every report: use an environment variable")


def _one_line(error: Exception) -> str:
    """The informative lines of a library's message, joined."""
    lines = []
    for line in str(error).splitlines():
        if line.startswith(("Config search path", "See https", "object_type", "    object_type")):
            break
        if line.strip():
            lines.append(" ".join(line.split()).rstrip(".;"))
    return "; ".join(lines)[:600].replace(":; ", ": ") or type(error).__name__
