"""An engine file of conf/engine/ as frozen values: the meaning of choices. This module runs nothing.

    engine = EngineSpec.parse(mapping, where="conf/engine/sglang.yaml")

See docs/engines.md for the format.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from autotune.engine.stages import Pattern, StageMark, compiled
from autotune.loadgen.wire_formats import Api
from autotune.loadgen.workload import Metrics, UrlPath
from autotune.records import Stage, UsageError, Value
from autotune.space.constraints import Rule, RuleFile, WrittenRule
from autotune.space.constraints import text as text
from autotune.space.space import Space
from autotune.utils.validation import AtLeastOne, convert

T = TypeVar("T")
PLACEHOLDER = re.compile(r"\{([a-z_][a-z0-9_.]*)\}")

InnerPath = Annotated[str, Meta(pattern=r"^(?!/|\.\Z|(.*/)?\.\.(/|\Z)).+\Z",
                                description="a file or folder below the module's own")]
Flag = Annotated[str, Meta(description="a flag such as --name")]
Seconds = Annotated[float, Meta(ge=0, description="a number of seconds")]
Words = Annotated[list[Value], Meta(description="a list of words")]


@dataclasses.dataclass(frozen=True)
class Action:
    """The effect of one choice on a command: arguments, environment, and the factor on the number of GPUs.

    `versions` is a PEP 440 specifier ("" = any). `gpus` is a number or "value" (the choice itself). `needs` are words
    other than its flags that the installed engine must know: an algorithm, an environment variable.
    """

    args: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gpus: int | str = 1
    versions: str = ""
    needs: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """The actions of one parameter: per choice, or for any value, with alternatives by version.

    `default` is the value of a server whose configuration lacks the parameter (it may name placeholders); None leaves
    it to the engine.
    """

    choices: Mapping[str, tuple[Action, ...]]
    any_value: tuple[Action, ...] = ()
    default: Value | None = None

    def alternatives(self, value: Value) -> tuple[Action, ...] | None:
        """Actions for a value, one per version range; None if the engine does not know the value."""
        if text(value) in self.choices:
            return self.choices[text(value)]
        return self.any_value or None


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server is ready when its process lives, the log mark was seen, `path` answers 200 and a completion came."""

    path: UrlPath = "/health"
    log: Pattern | None = None

    def __post_init__(self) -> None:
        if self.log is not None:
            compiled(self.log)


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The protocol of completions. `continuous_usage`: the server can put token counts into every streamed chunk."""

    api: Api = "openai_completions"
    model: str | None = None
    continuous_usage: bool = False


class Info(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The URL path of the settings that a server resolved, and the keys that identify a server.

    `identity` and `ignore` are names or shell patterns. Without `identity` every key counts that `ignore` does not
    name: an unknown setting must never make two different servers look the same.
    """

    path: UrlPath | None = None
    identity: tuple[str, ...] | None = None
    ignore: tuple[str, ...] | None = None

    def same(self, resolved: Mapping[str, Any]) -> dict[str, Any]:
        """The resolved settings that are equal on equal servers."""
        return {key: value for key, value in sorted(resolved.items())
                if _listed(key, self.identity or ("*",)) and not _listed(key, self.ignore or ())}


class RooflineFlags(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Flags that the roofline reads: those whose product is the GPUs of one replica, and the number formats of weights
    and KV cache."""

    model_parallel: tuple[Flag, ...] = ()
    weights: Flag | None = None
    kv_cache: Flag | None = None


class _ActionFile(msgspec.Struct, forbid_unknown_fields=True):
    """The action for a choice, or for any value, which {value} and `gpus: value` stand for."""

    flag: Flag | None = None
    args: Words | None = None
    env: dict[str, Value | None] | None = None
    gpus: Annotated[AtLeastOne | Literal["value"], Meta(
        description="a whole number of at least 1, or the word value for the choice itself")] | None = None
    versions: Value | None = None
    needs: list[Annotated[str, Meta(min_length=1)]] | None = None

    def action(self) -> Action:
        words = [*([self.flag, "{value}"] if self.flag else []), *map(text, self.args or ())]
        return Action(tuple(words), _texts(self.env), self.gpus or 1, str(self.versions or ""), tuple(self.needs or ()))


Alternative = Annotated[_ActionFile | Words, Meta(description=(
    "a mapping (a list here means alternatives by version; write {args: [...]}, or {} for nothing)"))]
ChoiceFile = Annotated[_ActionFile | Annotated[list[Alternative], Meta(min_length=1)] | None, Meta(description=(
    "a mapping, or a list of alternatives by version ({} for nothing)"))]


class _ParamFile(_ActionFile):
    switch: Flag | None = None
    off_switch: Flag | None = None
    choices: dict[Value, ChoiceFile] | None = None
    default: Annotated[Value, Meta(description="a text, number or boolean")] | None = None


class _VersionFile(msgspec.Struct, forbid_unknown_fields=True):
    package: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z",
                                 description="the name of a Python package")] | None = None
    use: Value | None = None
    spelled_in: tuple[InnerPath, ...] | None = None
    named_in: tuple[InnerPath, ...] | None = None


class _StopFile(msgspec.Struct, forbid_unknown_fields=True):
    term_s: Seconds = 10.0


class _EngineFile(msgspec.Struct, forbid_unknown_fields=True):
    command: Annotated[list[Value], Meta(min_length=1, description="a list such as ['{python}', -m, package]")]
    name: Value | None = None
    describe: Any = None
    python: Annotated[str, Meta(description="the path of an interpreter")] | None = None
    env: dict[str, Value | None] | None = None
    vars: dict[str, Value | None] | None = None
    args: list[_ActionFile | Words] | dict[str, _ActionFile | Words | None] | None = None
    params: dict[str, _ParamFile | list[_ActionFile | Words] | None] | None = None
    rules: list[RuleFile] | dict[str, RuleFile | None] | None = None
    version: _VersionFile | None = None
    ready: Ready | None = None
    stages: list[StageMark] | dict[str, StageMark | None] | None = None
    stage_limits_s: dict[str, Seconds] | None = None
    request: Request | None = None
    metrics: Metrics | None = None
    info: Info | None = None
    roofline: RooflineFlags | None = None
    config_file: Annotated[str, Meta(pattern=r"^--?[A-Za-z][A-Za-z0-9-]{0,99}\Z",
                                     description="a flag such as --config")] | None = None
    stop: _StopFile | None = None

    def __post_init__(self) -> None:
        for name in self.stage_limits_s or ():
            Stage.parse(name)
        if self.version and self.version.use is not None and not is_version(str(self.version.use)):
            raise ValueError(f"version.use must be a version such as 0.5.23, not {self.version.use!r}")


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """An engine file.

    python_of_file: a file named the interpreter, not the user; it is run only to start the engine. spelled_in: files
    and folders of the installed module that spell every flag it knows (see `engine.flags`). named_in: files that name
    what else it knows: environment variables, algorithms.
    """

    name: str
    command: tuple[str, ...]
    params: Mapping[str, ParamSpec]
    python: str | None = None
    python_of_file: bool = False
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    vars: Mapping[str, str] = dataclasses.field(default_factory=dict)
    args: tuple[Action, ...] = ()
    rules: tuple[tuple[WrittenRule, str], ...] = ()  # rejected combinations, and the versions that reject them
    package: str | None = None
    version: str | None = None
    spelled_in: tuple[str, ...] = ()
    named_in: tuple[str, ...] = ()
    ready: Ready = Ready()
    stages: tuple[StageMark, ...] = ()
    stage_limits_s: Mapping[Stage, float] = dataclasses.field(default_factory=dict)
    request: Request = Request()
    metrics: Metrics = Metrics()
    info: Info = Info()
    roofline: RooflineFlags | None = None
    config_file: str | None = None
    stop_s: float = 10.0

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> EngineSpec:
        """An engine from plain YAML data. Raises UsageError naming the offending key."""
        file = convert(raw, _EngineFile, f"{where}: ")
        version = file.version or _VersionFile()
        return cls(
            name=str(file.name), command=tuple(map(str, file.command)), python=file.python, env=_texts(file.env),
            vars=_texts(file.vars), args=tuple(_action(item) for item in _entries(file.args)),
            params={name: _param(param, f"{where}: params.{name}") for name, param in (file.params or {}).items()
                    if param is not None},
            rules=tuple(_rule(rule, f"{where}: rules") for rule in _entries(file.rules)),
            package=version.package, version=None if version.use is None else str(version.use),
            spelled_in=version.spelled_in or (), named_in=version.named_in or (), ready=file.ready or Ready(),
            stages=tuple(_entries(file.stages)),
            stage_limits_s={Stage.parse(name): limit_s for name, limit_s in (file.stage_limits_s or {}).items()},
            request=file.request or Request(), metrics=file.metrics or Metrics(), info=file.info or Info(),
            roofline=file.roofline,
            config_file=file.config_file, stop_s=(file.stop or _StopFile()).term_s)

    def rules_for(self, space: Space, version: str | None = None) -> tuple[Rule, ...]:
        """The rules that apply to `space` under an engine version, in terms of the space's own choices.

        The default of a parameter decides a condition on it if a configuration lacks the parameter. Rules that can
        never match are left out.
        """
        constants = self.constants(space)

        def default(name: str) -> Value | None:
            value = self.params[name].default if name in self.params else None
            return PLACEHOLDER.sub(lambda found: constants.get(found[1], found[0]), value) \
                if isinstance(value, str) else value

        return tuple(found for written, versions in self.rules if matches(versions, version)
                     for found in space.expand(written, default))

    def constants(self, space: Space) -> dict[str, str]:
        """The values of placeholders that are the same for every server of a space."""
        return {**{f"model.{key}": path for key, path in space.model.items()}, **self.vars,
                "max_concurrency": str(space.largest("concurrency") or 1),
                "max_context": str(space.largest("context") or 0)}


def matches(specifier: str, version: str | None) -> bool:
    """True if a version meets a PEP 440 specifier; an unknown version meets only "" and the newest range.

    A pre-release (0.5.23.dev12, 0.5.23rc1) counts as the release. A version outside PEP 440 (a fork's own scheme) is
    unknown. Raises UsageError for a bad specifier.
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
    """True for a version that can be compared (PEP 440)."""
    from packaging.version import InvalidVersion, Version

    try:
        Version(version)
    except InvalidVersion:
        return False
    return True


def _param(file: _ParamFile | list[_ActionFile | Words], where: str) -> ParamSpec:
    if isinstance(file, list):
        return ParamSpec({}, tuple(map(_action, file)))
    choices = {text(name): tuple(map(_action, choice if isinstance(choice, list) else [choice or _ActionFile()]))
               for name, choice in (file.choices or {}).items()}
    if file.switch or file.off_switch:
        on = msgspec.structs.replace(file, args=[file.switch] if file.switch else [])
        off = _ActionFile(args=[file.off_switch] if file.off_switch else [])
        return ParamSpec({"true": (on.action(),), "false": (off.action(),), **choices}, (), file.default)
    any_value = any(getattr(file, name) is not None for name in _ActionFile.__struct_fields__)
    if file.default is not None and not any_value and text(file.default) not in choices:
        raise UsageError(f"{where}: default {text(file.default)} is none of its choices ({', '.join(choices)})")
    return ParamSpec(choices, (file.action(),) if any_value else (), file.default)


def _action(file: _ActionFile | Words) -> Action:
    return (_ActionFile(args=file) if isinstance(file, list) else file).action()


def _rule(file: RuleFile, where: str) -> tuple[WrittenRule, str]:
    written = WrittenRule.parse({key: value for key, value in file.items() if key != "versions"}, where)
    return written, str(file.get("versions") or "")


def _entries(entries: list[T] | Mapping[str, T | None] | None) -> Iterable[T]:
    """The items of a list, or of a mapping whose names let a derived file replace an entry, or drop it by null."""
    return [item for item in (entries.values() if isinstance(entries, Mapping) else entries or ()) if item is not None]


def _listed(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _texts(raw: Mapping[str, Value | None] | None) -> dict[str, str]:
    return {key: text(value) for key, value in (raw or {}).items() if value is not None}
