"""An engine file of conf/engine/, read into frozen values. It says what choices mean; it runs nothing.

    engine = EngineSpec.parse(mapping, where="conf/engine/sglang.yaml")

See docs/engines.md for the format. Unknown keys and malformed entries raise UsageError.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.records import Stage, UsageError, Value
from autotune.space import Rule, parse_rules

KEYS = {
    "name",
    "describe",
    "command",
    "python",
    "env",
    "vars",
    "args",
    "params",
    "rules",
    "version",
    "ready",
    "stages",
    "stage_limits_s",
    "request",
    "metrics",
    "info",
    "config_file",
    "model_files",
    "stop",
}
ACTION_KEYS = {"flag", "switch", "off_switch", "args", "env", "gpus", "versions", "rules"}


@dataclasses.dataclass(frozen=True)
class Action:
    """What one choice adds to a command: arguments, environment, and how many times more GPUs it takes.

    `versions` is a PEP 440 specifier ("" = any). `gpus` is a number or "value" (the choice itself).
    """

    args: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gpus: int | str = 1
    versions: str = ""


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """How one parameter reaches the command line: per choice, or for any value; alternatives by version."""

    choices: Mapping[str, tuple[Action, ...]]
    any_value: tuple[Action, ...]
    switch: bool = False

    def alternatives(self, value: Value) -> tuple[Action, ...] | None:
        """Actions for a value, one per version range; None when the engine does not know the value."""
        if text(value) in self.choices:
            return self.choices[text(value)]
        return self.any_value or None


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
    """How completions are asked for: `api` is openai_completions or sglang_generate."""

    api: str = "openai_completions"
    model: str | None = None


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Prometheus names, each None when the engine has no such series."""

    path: str | None = None
    generation_tokens: str | None = None
    verify_steps: str | None = None
    accepted_tokens: str | None = None
    accept_length: str | None = None
    running: str | None = None
    queued: str | None = None
    retracted: str | None = None


@dataclasses.dataclass(frozen=True)
class Info:
    """Where the server tells what it resolved, and which of those keys make two servers the same."""

    path: str | None = None
    identity: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    name: str
    command: tuple[str, ...]
    params: Mapping[str, ParamSpec]
    python: str | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    vars: Mapping[str, str] = dataclasses.field(default_factory=dict)
    args: tuple[Action, ...] = ()
    rules: tuple[Rule, ...] = ()
    package: str | None = None
    version: str | None = None
    ready: Ready = Ready()
    stages: tuple[StageMark, ...] = ()
    stage_limits_s: Mapping[Stage, float] = dataclasses.field(default_factory=dict)
    request: Request = Request()
    metrics: Metrics = Metrics()
    info: Info = Info()
    config_file: str | None = None
    model_files: tuple[str, ...] = ()
    stop_s: float = 10.0

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> EngineSpec:
        """Build from plain YAML data. Raises UsageError naming the offending key."""
        _known(raw, KEYS, where)
        command = raw.get("command")
        if not isinstance(command, list) or not command:
            raise UsageError(f"{where}: command must be a list such as ['{{python}}', -m, package]")
        version = raw.get("version") or {}
        _known(version, {"package", "use"}, f"{where}: version")
        params = {
            str(name): _param(spec, f"{where}: params.{name}") for name, spec in (raw.get("params") or {}).items()
        }
        return cls(
            name=str(raw.get("name")),
            command=tuple(map(str, command)),
            params=params,
            python=raw.get("python"),
            env=_texts(raw.get("env")),
            vars=_texts(raw.get("vars")),
            args=tuple(_action(item, f"{where}: args") for item in raw.get("args") or []),
            rules=parse_rules(raw.get("rules"), f"{where}: rules"),
            package=version.get("package"),
            version=_optional(version.get("use")),
            ready=_ready(raw.get("ready") or {}, where),
            stages=tuple(_mark(item, where) for item in raw.get("stages") or []),
            stage_limits_s={_stage(k, where): float(v) for k, v in (raw.get("stage_limits_s") or {}).items()},
            request=_section(Request, raw.get("request"), f"{where}: request"),
            metrics=_section(Metrics, raw.get("metrics"), f"{where}: metrics"),
            info=_info(raw.get("info") or {}, where),
            config_file=raw.get("config_file"),
            model_files=tuple(raw.get("model_files") or ()),
            stop_s=float(raw.get("stop", {}).get("term_s", 10.0)),
        )


def text(value: Any) -> str:
    """A choice as YAML and command lines spell it: true/false for booleans."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _param(spec: Any, where: str) -> ParamSpec:
    if not isinstance(spec, Mapping | list):
        raise UsageError(f"{where}: write {{flag: --name}}, {{switch: --name}} or {{choices: ...}}")
    if isinstance(spec, list):
        return ParamSpec({}, tuple(_action(item, where, valued=True) for item in spec))
    _known(spec, ACTION_KEYS | {"choices"}, where)
    choices = {text(k): _alternatives(v, f"{where}.{text(k)}") for k, v in (spec.get("choices") or {}).items()}
    rest = {k: v for k, v in spec.items() if k != "choices"}
    if "switch" in rest or "off_switch" in rest:
        on, off = rest.pop("switch", None), rest.pop("off_switch", None)
        choices.setdefault("true", (_action({**rest, "args": [on] if on else []}, where),))
        choices.setdefault("false", (_action({"args": [off] if off else []}, where),))
        return ParamSpec(choices, (), switch=True)
    return ParamSpec(choices, (_action(rest, where, valued=True),) if rest else ())


def _alternatives(spec: Any, where: str) -> tuple[Action, ...]:
    items: Sequence[Any] = spec if isinstance(spec, list) else [spec or {}]
    return tuple(_action(item, where) for item in items)


def _action(spec: Any, where: str, valued: bool = False) -> Action:
    if isinstance(spec, list):
        spec = {"args": spec}
    if not isinstance(spec, Mapping):
        raise UsageError(f"{where}: expected a mapping with args, env, flag or gpus, not {spec!r}")
    _known(spec, ACTION_KEYS, where)
    args = [text(a) for a in spec.get("args") or []]
    if "flag" in spec:
        args = [str(spec["flag"]), "{value}", *args]
    gpus = spec.get("gpus", 1)
    if not (gpus == "value" and valued) and not (isinstance(gpus, int) and gpus >= 1):
        raise UsageError(f"{where}: gpus must be a whole number" + (" or the word value" if valued else ""))
    return Action(tuple(args), _texts(spec.get("env")), gpus, str(spec.get("versions") or ""))


def _ready(raw: Mapping[str, Any], where: str) -> Ready:
    _known(raw, {"path", "log"}, f"{where}: ready")
    return Ready(str(raw.get("path", "/health")), _regex(raw["log"], where) if raw.get("log") else None)


def _mark(raw: Mapping[str, Any], where: str) -> StageMark:
    _known(raw, {"stage", "log"}, f"{where}: stages")
    return StageMark(_stage(raw.get("stage"), where), _regex(raw.get("log"), where))


def _info(raw: Mapping[str, Any], where: str) -> Info:
    _known(raw, {"path", "identity"}, f"{where}: info")
    return Info(raw.get("path"), tuple(raw.get("identity") or ()))


def _section(kind: type[Any], raw: Any, where: str) -> Any:
    raw = raw or {}
    _known(raw, {f.name for f in dataclasses.fields(kind)}, where)
    return kind(**raw)


def _regex(pattern: Any, where: str) -> re.Pattern[str]:
    try:
        return re.compile(str(pattern))
    except re.error as error:
        raise UsageError(f"{where}: {pattern!r} is not a regular expression: {error}") from error


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


def _texts(raw: Any) -> dict[str, str]:
    return {str(k): text(v) for k, v in (raw or {}).items()}


def _optional(value: Any) -> str | None:
    return None if value is None else str(value)
