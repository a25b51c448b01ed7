"""An engine file of conf/engine/, read into frozen values. It says what choices mean; it runs nothing.

    engine = EngineSpec.parse(mapping, where="conf/engine/sglang.yaml")

See docs/engines.md for the format. Unknown keys and malformed entries raise UsageError.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.engine.regexes import compiled
from autotune.records import Stage, UsageError, Value
from autotune.space.constraints import Rule, WrittenRule, parse_rules
from autotune.space.constraints import text as text
from autotune.space.space import Space

KEYS = {"name", "describe", "command", "python", "env", "vars", "args", "params", "rules", "version", "ready",
        "stages", "stage_limits_s", "request", "metrics", "info", "config_file", "stop"}
ACTION_KEYS = {"flag", "switch", "off_switch", "args", "env", "gpus", "versions", "needs"}
PLACEHOLDER = re.compile(r"\{([a-z_][a-z0-9_.]*)\}")
PATH = re.compile(r"/[!-~]*")
PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
KINDS: Mapping[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"), float: ((int, float), "a number"), str: ((str,), "a text")}
"""By the type of a setting's default, what it may be; without one it is a text."""
FLAG = re.compile(r"--?[A-Za-z][A-Za-z0-9-]{0,99}")
APIS = ("openai_completions", "sglang_generate")
PARAM_KEYS = ACTION_KEYS | {"choices", "default"}


@dataclasses.dataclass(frozen=True)
class Action:
    """What one choice adds to a command: arguments, environment, and how many times more GPUs it takes.

    `versions` is a PEP 440 specifier ("" = any). `gpus` is a number or "value" (the choice itself). `needs` are words
    beside its flags that the installed engine must know: an algorithm, a variable of the environment.
    """

    args: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gpus: int | str = 1
    versions: str = ""
    needs: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """How one parameter reaches the command line: per choice, or for any value; alternatives by version.

    `default` is the value that a server gets when its configuration does not have the parameter (it may name
    placeholders); None leaves it to the engine.
    """

    choices: Mapping[str, tuple[Action, ...]]
    any_value: tuple[Action, ...]
    switch: bool = False
    default: Value | None = None

    def alternatives(self, value: Value) -> tuple[Action, ...] | None:
        """Actions for a value, one per version range; None when the engine does not know the value."""
        if text(value) in self.choices:
            return self.choices[text(value)]
        return self.any_value or None


@dataclasses.dataclass(frozen=True)
class EngineRule:
    """A combination that the engine is known to reject, in some of its versions."""

    written: WrittenRule
    versions: str = ""


@dataclasses.dataclass(frozen=True)
class StageMark:
    """A log line matching `pattern` means that the launch has reached `stage`."""

    stage: Stage
    pattern: re.Pattern[str]


@dataclasses.dataclass(frozen=True)
class Ready:
    """When a server counts as ready: process alive, log mark seen, health 200, one completion generated."""

    path: str = "/health"
    log: re.Pattern[str] | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """How completions are asked for: `api` is openai_completions or sglang_generate.

    `continuous_usage`: the server can give token counts in every streamed chunk when asked.
    """

    api: str = "openai_completions"
    model: str | None = None
    continuous_usage: bool = False


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Prometheus names, each None when the engine has no such series.

    Acceptance length, where responses do not tell it, is `accept_bonus` + growth of `accept_tokens` over growth of
    `accept_steps` (bonus 1 for engines that count only draft tokens).
    """

    path: str | None = None
    running: str | None = None
    queued: str | None = None
    retracted: str | None = None
    accept_tokens: str | None = None
    accept_steps: str | None = None
    accept_bonus: float = 0.0


@dataclasses.dataclass(frozen=True)
class Info:
    """Where the server tells what it resolved, and which of those keys make two servers the same.

    `identity` and `ignore` are names or shell patterns. Without `identity` every key counts that `ignore` does not
    name: a setting that we do not know must never make two different servers look the same.
    """

    path: str | None = None
    identity: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def same(self, resolved: Mapping[str, Any]) -> dict[str, Any]:
        """The part of what a server resolved that two servers have in common when they are the same one."""
        return {key: value for key, value in sorted(resolved.items())
                if _listed(key, self.identity or ("*",)) and not _listed(key, self.ignore)}


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    name: str
    command: tuple[str, ...]
    params: Mapping[str, ParamSpec]
    python: str | None = None
    python_of_file: bool = False
    """The interpreter was named by a file, not by the user: it is not started but to start the engine."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    vars: Mapping[str, str] = dataclasses.field(default_factory=dict)
    args: tuple[Action, ...] = ()
    rules: tuple[EngineRule, ...] = ()
    package: str | None = None
    version: str | None = None
    spelled_in: tuple[str, ...] = ()
    """Files and folders of the installed module that spell every flag it knows (see `engine.spelling`)."""
    named_in: tuple[str, ...] = ()
    """Those that name what else it knows: variables of the environment, algorithms."""
    ready: Ready = Ready()
    stages: tuple[StageMark, ...] = ()
    stage_limits_s: Mapping[Stage, float] = dataclasses.field(default_factory=dict)
    request: Request = Request()
    metrics: Metrics = Metrics()
    info: Info = Info()
    config_file: str | None = None
    stop_s: float = 10.0

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> EngineSpec:
        """Build from plain YAML data. Raises UsageError naming the offending key."""
        _known(raw, KEYS, where)
        command = raw.get("command")
        if not isinstance(command, list) or not command:
            raise UsageError(f"{where}: command must be a list such as ['{{python}}', -m, package]")
        if not isinstance(raw.get("python") or "", str):
            raise UsageError(f"{where}: python must be the path of an interpreter, not {raw.get('python')!r}")
        version = raw.get("version") or {}
        _known(version, {"package", "use", "spelled_in", "named_in"}, f"{where}: version")
        params = {str(name): _param(spec, f"{where}: params.{name}")
                  for name, spec in _mapping(raw.get("params"), f"{where}: params").items() if spec is not None}
        return cls(
            name=str(raw.get("name")), command=tuple(map(str, command)), params=params,
            python=raw.get("python"), env=_texts(raw.get("env"), f"{where}: env"),
            vars=_texts(raw.get("vars"), f"{where}: vars"),
            args=tuple(_action(item, f"{where}: args") for item in _entries(raw.get("args"), f"{where}: args")),
            rules=tuple(_engine_rule(i, f"{where}: rules") for i in _entries(raw.get("rules"), f"{where}: rules")),
            package=_package(version.get("package"), where), version=_version(version.get("use"), where),
            spelled_in=_inside(version.get("spelled_in"), f"{where}: version.spelled_in"),
            named_in=_inside(version.get("named_in"), f"{where}: version.named_in"),
            ready=_ready(raw.get("ready") or {}, where),
            stages=tuple(_mark(item, where) for item in _entries(raw.get("stages"), f"{where}: stages")),
            stage_limits_s={_stage(k, where): float(v) for k, v in _seconds(
                raw.get("stage_limits_s") or {}, f"{where}: stage_limits_s").items()},
            request=_request(raw.get("request"), f"{where}: request"),
            metrics=_metrics(raw.get("metrics"), f"{where}: metrics"),
            info=_info(raw.get("info") or {}, where),
            config_file=_flag(raw.get("config_file"), where), stop_s=_stop(raw.get("stop") or {}, where),
        )

    def rules_for(self, space: Space, version: str | None = None) -> tuple[Rule, ...]:
        """The rules that say something about `space` under an engine version, in terms of its own parameters.

        A condition on a parameter that a configuration does not have is decided by that parameter's default: it holds
        and is left out, or the rule can never match and is dropped. So is one on values that are not among the choices.
        What is left names choices of the space as the space spells them.
        """
        constants = self.constants(space)

        def default(name: str) -> Value | None:
            value = self.params[name].default if name in self.params else None
            return PLACEHOLDER.sub(lambda found: constants.get(found[1], found[0]), value) \
                if isinstance(value, str) else value

        return tuple(found for rule in self.rules if matches(rule.versions, version)
                     for found in space.said_by(rule.written, default))

    def constants(self, space: Space) -> dict[str, str]:
        """What placeholders stand for in every server of a space alike."""
        return {**{f"model.{key}": path for key, path in space.model.items()}, **self.vars,
                "max_concurrency": str(space.largest("concurrency") or 1),
                "max_context": str(space.largest("context") or 0)}


def matches(specifier: str, version: str | None) -> bool:
    """Whether a version fulfils a PEP 440 specifier; an unknown version fulfils only "" and the newest range.

    What is built on the way to a release (0.5.23.dev12, 0.5.23rc1) counts as the release. A version that is not of
    PEP 440 (a fork's own scheme) is unknown. Raises UsageError for what is no specifier.
    """
    if not specifier:
        return True
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import Version

    try:
        wanted = SpecifierSet(specifier)
    except InvalidSpecifier as error:
        raise UsageError(f"versions: {specifier!r} is not a version range such as '>=0.5.16,<0.5.23'") from error
    if version is None or not is_version(version):
        return not specifier.lstrip().startswith("<")
    return wanted.contains(Version(version).base_version)


def is_version(version: str) -> bool:
    """Whether a text is a version that can be compared (PEP 440)."""
    from packaging.version import InvalidVersion, Version

    try:
        Version(version)
    except InvalidVersion:
        return False
    return True


def _param(spec: Any, where: str) -> ParamSpec:
    if not isinstance(spec, Mapping | list):
        raise UsageError(f"{where}: write {{flag: --name}}, {{switch: --name}} or {{choices: ...}}")
    if isinstance(spec, list):
        return ParamSpec({}, tuple(_action(item, where, valued=True) for item in spec))
    _known(spec, PARAM_KEYS, where)
    choices = {text(k): _alternatives(v, f"{where}.{text(k)}")
               for k, v in _mapping(spec.get("choices"), f"{where}.choices").items()}
    default = spec.get("default")
    if default is not None and not isinstance(default, str | int | float):
        raise UsageError(f"{where}: default must be a text, number or boolean, not {str(default)[:60]!r}")
    rest = {k: v for k, v in spec.items() if k not in ("choices", "default") and v is not None}
    if "switch" in rest or "off_switch" in rest:
        on, off = rest.pop("switch", None), rest.pop("off_switch", None)
        choices.setdefault("true", (_action({**rest, "args": _words(on, f"{where}: switch")}, where),))
        choices.setdefault("false", (_action({"args": _words(off, f"{where}: off_switch")}, where),))
        return ParamSpec(choices, (), True, default)
    any_value = (_action(rest, where, valued=True),) if rest else ()
    if default is not None and not any_value and text(default) not in choices:
        raise UsageError(f"{where}: default {text(default)} is none of its choices ({', '.join(choices)})")
    return ParamSpec(choices, any_value, False, default)


def _entries(raw: Any, where: str) -> list[Any]:
    """The items of a list, or of a mapping with names (which a file based on this one can replace, or drop by null)."""
    if isinstance(raw, Mapping):
        return [item for item in raw.values() if item is not None]
    if raw is not None and not isinstance(raw, list):
        raise UsageError(f"{where}: must be a list, or a mapping from names of your choice to entries")
    return raw or []


def _engine_rule(item: Any, where: str) -> EngineRule:
    versions = str(item.get("versions") or "") if isinstance(item, Mapping) else ""
    bare = {k: v for k, v in item.items() if k != "versions"} if isinstance(item, Mapping) else item
    (rule,) = parse_rules([bare], where)
    return EngineRule(rule, versions)


def _alternatives(spec: Any, where: str) -> tuple[Action, ...]:
    if spec == [] or (isinstance(spec, list) and any(isinstance(item, str) for item in spec)):
        raise UsageError(f"{where}: a list here means alternatives by version; write {{args: [...]}}, "
                         "or {} for nothing")
    items: Sequence[Any] = spec if isinstance(spec, list) else [spec or {}]
    return tuple(_action(item, where) for item in items)


def _action(spec: Any, where: str, valued: bool = False) -> Action:
    if isinstance(spec, list):
        spec = {"args": spec}
    if not isinstance(spec, Mapping):
        raise UsageError(f"{where}: expected a mapping with args, env, flag or gpus, not {spec!r}")
    _known(spec, ACTION_KEYS, where)
    spec = {k: v for k, v in spec.items() if v is not None}
    args = spec.get("args") or []
    if not isinstance(args, list) or not all(isinstance(a, str | int | float) for a in args):
        raise UsageError(f"{where}: args must be a list of words, not {str(args)[:60]!r}")
    words = [*map(text, args)]
    if "flag" in spec:
        words = [*_words(spec["flag"], f"{where}: flag"), "{value}", *words]
    gpus = spec.get("gpus", 1)
    if not (gpus == "value" and valued) and not (isinstance(gpus, int) and not isinstance(gpus, bool) and gpus >= 1):
        raise UsageError(f"{where}: gpus must be a whole number" + (" or the word value" if valued else ""))
    return Action(tuple(words), _texts(spec.get("env"), f"{where}: env"), gpus, str(spec.get("versions") or ""),
                  _names(spec.get("needs"), f"{where}: needs"))


def _words(word: Any, where: str) -> list[str]:
    """A flag as a list of one word, [] for none. Raises UsageError."""
    if word and not isinstance(word, str):
        raise UsageError(f"{where} must be a flag such as --name, not {str(word)[:60]!r}")
    return [word] if word else []


def _mapping(raw: Any, where: str) -> Mapping[Any, Any]:
    if raw is not None and not isinstance(raw, Mapping):
        raise UsageError(f"{where} must be a mapping, not {str(raw)[:60]!r}")
    return raw or {}


def _names(raw: Any, where: str) -> tuple[str, ...]:
    if raw is not None and not (isinstance(raw, list) and all(isinstance(item, str) and item for item in raw)):
        raise UsageError(f"{where}: must be a list of texts, not {raw!r}")
    return tuple(raw or ())


def _inside(raw: Any, where: str) -> tuple[str, ...]:
    """Paths below a folder. Raises UsageError for one that leads out of it."""
    for name in (names := _names(raw, where)):
        path = pathlib.PurePath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise UsageError(f"{where}: {name!r} must be a file or folder below the module's own")
    return names


def _ready(raw: Mapping[str, Any], where: str) -> Ready:
    _known(raw, {"path", "log"}, f"{where}: ready")
    return Ready(_path(raw.get("path", "/health"), f"{where}: ready.path"),
                 _regex(raw["log"], where) if raw.get("log") else None)


def _mark(raw: Mapping[str, Any], where: str) -> StageMark:
    _known(raw, {"stage", "log"}, f"{where}: stages")
    return StageMark(_stage(raw.get("stage"), where), _regex(raw.get("log"), where))


def _info(raw: Mapping[str, Any], where: str) -> Info:
    _known(raw, {"path", "identity", "ignore"}, f"{where}: info")
    path = raw.get("path")
    return Info(None if path is None else _path(path, f"{where}: info.path"),
                _names(raw.get("identity"), f"{where}: info.identity"),
                _names(raw.get("ignore"), f"{where}: info.ignore"))


def _section(kind: type[Any], raw: Any, where: str) -> Any:
    raw = raw or {}
    _known(raw, {f.name for f in dataclasses.fields(kind)}, where)
    for field in dataclasses.fields(kind):
        value = raw.get(field.name, field.default)
        good, words = KINDS.get(type(field.default), ((str, type(None)), "a text"))
        if not isinstance(value, good) or isinstance(value, bool) and bool not in good:
            raise UsageError(f"{where}.{field.name} must be {words}, not {str(value)[:60]!r}")
    return kind(**raw)


def _metrics(raw: Any, where: str) -> Metrics:
    if isinstance(raw, Mapping) and raw.get("path") is not None:
        _path(raw["path"], f"{where}.path")
    metrics: Metrics = _section(Metrics, raw, where)
    return metrics


def _request(raw: Any, where: str) -> Request:
    request: Request = _section(Request, raw, where)
    if request.api not in APIS:
        raise UsageError(f"{where}.api must be one of {', '.join(APIS)}, not {request.api!r}")
    return request


def _path(value: Any, where: str) -> str:
    """A path on the server itself: what follows its address must not make another one of it. Raises UsageError."""
    if not isinstance(value, str) or not PATH.fullmatch(value):
        raise UsageError(f"{where} must be a path on the server such as /health, not {str(value)[:60]!r}")
    return value


def _regex(pattern: Any, where: str) -> re.Pattern[str]:
    try:
        return compiled(str(pattern))
    except ValueError as error:
        raise UsageError(f"{where}: {str(pattern)[:80]!r} {error}") from error


def _stage(name: Any, where: str) -> Stage:
    try:
        return Stage.parse(str(name))
    except ValueError:
        raise UsageError(f"{where}: {name!r} is not a stage ({', '.join(Stage)})") from None


def _known(raw: Any, known: set[str], where: str) -> None:
    if not isinstance(raw, Mapping):
        raise UsageError(f"{where}: must be a mapping, not {raw!r}")
    unknown = sorted(str(k) for k in raw if k not in known)
    if unknown:
        raise UsageError(f"{where}: unknown key {', '.join(unknown)}; known: {', '.join(sorted(known))}")


def _listed(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _texts(raw: Any, where: str) -> dict[str, str]:
    if not isinstance(raw or {}, Mapping):
        raise UsageError(f"{where}: must be a mapping from names to texts, not {raw!r}")
    return {str(k): text(v) for k, v in (raw or {}).items() if v is not None}


def _seconds(raw: Any, where: str) -> Mapping[Any, float]:
    if not isinstance(raw, Mapping):
        raise UsageError(f"{where}: must be a mapping to seconds, not {raw!r}")
    for name, value in raw.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            raise UsageError(f"{where}.{name} must be a number of seconds, not {value!r}")
    return raw


def _stop(raw: Any, where: str) -> float:
    _known(raw, {"term_s"}, f"{where}: stop")
    return float(_seconds(raw, f"{where}: stop").get("term_s", 10.0))


def _package(value: Any, where: str) -> str | None:
    if value is not None and not (isinstance(value, str) and PACKAGE.fullmatch(value)):
        raise UsageError(f"{where}: version.package must be the name of a Python package, not {str(value)[:60]!r}")
    return value


def _flag(value: Any, where: str) -> str | None:
    if value is not None and not (isinstance(value, str) and FLAG.fullmatch(value)):
        raise UsageError(f"{where}: config_file must be a flag such as --config, not {str(value)[:60]!r}")
    return value


def _version(value: Any, where: str) -> str | None:
    if value is not None and not is_version(str(value)):
        raise UsageError(f"{where}: version.use must be a version such as 0.5.23, not {value!r}")
    return None if value is None else str(value)
