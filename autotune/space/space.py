"""The search space: parameters, conditions, rules, baseline. Knows neither engines nor Optuna.

    space = Space.parse(mapping, where="search_spaces/local.yaml")
    server, load = space.split(config)

A parameter's choices are ordered. `load: true` marks a load parameter, which changes on a live server.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from autotune.records import Config, UsageError, Value, canonical, config_key, digest
from autotune.space.constraints import Rule, RuleFile, WrittenRule, among, as_tuple, text
from autotune.utils.redact import Redactor
from autotune.utils.text import printable
from autotune.utils.validation import Number, convert

# Sections of a space that overlay the settings of the same name in conf/.
OVERLAYS = ("workload", "limits", "study", "power", "server", "agreement")
ENUMERABLE = 200_000  # configurations that a grid may hold
MOST_CHOICES = 1000
MOST_CONCURRENCY = 65536  # each request in flight takes a port of this machine
TOKEN_LOADS, MOST_TOKENS = ("context", "output_tokens"), 10**9  # load parameters that count the tokens of a request
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}\Z", description=(
    "letters, digits, _, - and dots (at most 100, no dot first)"))]  # a study's folder is named after it
ModelName = Annotated[str, Meta(pattern=r"^[a-z_][a-z0-9_.]{0,99}\Z", description=(
    "small letters, digits, dots and _, and begin with a letter or _"))]
Amount = Annotated[int, Meta(ge=0, le=10**9)] | Annotated[float, Meta(ge=0, le=1e9)]
Factors = Annotated[tuple[Number, Number], Meta(description="[low, high], factors with 0 < low <= high")]


class _ParamFile(msgspec.Struct, forbid_unknown_fields=True):
    choices: Annotated[list[Value], Meta(description="a list such as [1, 2]")] | None = None
    range: Annotated[tuple[Number, Number], Meta(description="[low, high]")] | None = None
    step: Number | None = None
    when: dict[str, Value | list[Value]] | None = None
    load: bool = False


class _Needs(msgspec.Struct, forbid_unknown_fields=True):
    gpus: Amount | None = None
    gpu_name: str | Amount | None = None
    gpu_memory_gib: Amount | None = None


class _SpaceFile(msgspec.Struct, forbid_unknown_fields=True):
    name: Name
    engine: Annotated[str, Meta(min_length=1)]
    params: dict[str, _ParamFile]
    baseline: dict[str, Value]
    model: dict[ModelName, str | Amount | None] | None = None
    needs: _Needs | None = None
    forbid: list[RuleFile] | None = None
    belief: dict[str, dict[Value, Factors]] | None = None
    describe: Value | None = None
    workload: Any = None
    limits: Any = None
    study: Any = None
    power: Any = None
    server: Any = None
    agreement: Any = None


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter: its ordered choices, the condition for its presence, and `load` (no launch needed).

    step: set if the choices are an arithmetic range.
    """

    name: str
    choices: tuple[Value, ...]
    when: Mapping[str, tuple[Value, ...]] = dataclasses.field(default_factory=dict)
    load: bool = False
    step: float | None = None

    @property
    def numeric(self) -> bool:
        """True if the choices are numbers with a meaningful distance (booleans have none)."""
        return all(isinstance(c, int | float) and not isinstance(c, bool) for c in self.choices)


@dataclasses.dataclass(frozen=True)
class Space:
    """belief[param][choice] = (low, high): the factor on the objective that an expert expects."""

    name: str
    engine: str
    params: tuple[Param, ...]
    baseline: Config
    rules: tuple[Rule, ...] = ()
    model: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    belief: Mapping[str, Mapping[Value, tuple[float, float]]] = dataclasses.field(default_factory=dict)
    describe: str = ""

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str = "space") -> Space:
        """A space from plain YAML data. Raises UsageError naming the offending key."""
        file = convert(raw, _SpaceFile, f"{where}: ")
        if not file.params:
            raise UsageError(f"{where}: params is empty: name at least one parameter with choices")
        written = [WrittenRule.parse(rule, f"{where}: forbid[{i}]") for i, rule in enumerate(file.forbid or ())]
        needs = msgspec.structs.asdict(file.needs) if file.needs else {}
        space = cls(
            name=file.name, engine=file.engine, baseline=file.baseline,
            params=tuple(_param(name, param, f"{where}: params.{name}") for name, param in file.params.items()),
            model=_models(file.model or {}, where), needs={k: v for k, v in needs.items() if v is not None},
            belief={name: {choice: (float(low), float(high)) for choice, (low, high) in factors.items()}
                    for name, factors in (file.belief or {}).items()},
            describe=Redactor().text(printable(str(file.describe or ""), keep="\n")))
        space._check_names(where, written)
        space = dataclasses.replace(space, baseline=space.check(file.baseline, f"{where}: baseline"), rules=tuple(
            rule for one in written for rule in space.expand(one)))
        space._check_baseline(where)
        return space

    def with_rules(self, rules: Sequence[Rule], origin: str) -> Space:
        """The same space with more rules on its own parameters and choices.

        origin: the owner of the rules, for the message. Raises UsageError if the rules forbid the baseline.
        """
        space = dataclasses.replace(self, rules=self.rules + tuple(rules))
        space._check_baseline(f"space {self.name}", f" by a rule of {origin}")
        return space

    def expand(self, rule: WrittenRule, default: Callable[[str], Value | None] = lambda name: None) -> tuple[Rule, ...]:
        """A file's rule in terms of the space's choices; `default` gives the value of a parameter that is absent."""
        return rule.expand({p.name: p.choices for p in self.params}, default, {p.name: p.when for p in self.params})

    def largest(self, name: str) -> int | None:
        """The largest choice of a numeric parameter, rounded up; None without such a parameter."""
        numbers = [c for p in self.params if p.name == name for c in p.choices if isinstance(c, int | float)]
        return math.ceil(max(numbers)) if numbers else None

    def param(self, name: str) -> Param:
        return next(p for p in self.params if p.name == name)

    @property
    def server_params(self) -> tuple[Param, ...]:
        return tuple(p for p in self.params if not p.load)

    @property
    def load_params(self) -> tuple[Param, ...]:
        return tuple(p for p in self.params if p.load)

    @property
    def digest(self) -> str:
        """Identity of the search: parameters, conditions, engine and model.

        Rules are left out: they only save launches and follow the engine's version. So are names and prose.
        """
        parts = [[p.name, list(p.choices), sorted((k, list(v)) for k, v in p.when.items()), p.load]
                 for p in self.params]
        return digest(canonical([parts, self.engine, dict(self.model)]))

    def split(self, config: Config) -> tuple[dict[str, Value], dict[str, Value]]:
        """(server part, load part) of a configuration."""
        load = {p.name for p in self.load_params}
        return ({k: v for k, v in config.items() if k not in load}, {k: v for k, v in config.items() if k in load})

    def active(self, param: Param, config: Config) -> bool:
        """True if `param` is present, given the parameters chosen before it."""
        return all(name in config and among(config[name], values) for name, values in param.when.items())

    def forbidden(self, config: Config) -> str | None:
        """The reason of the first rule that forbids a configuration, or None."""
        return next((rule.because for rule in self.rules if rule.matches(config)), None)

    def check(self, config: Config, where: str = "configuration") -> dict[str, Value]:
        """The configuration with values taken from the choices. Raises UsageError for one outside the space."""
        unknown = sorted(map(str, set(config) - {p.name for p in self.params}))
        if unknown:
            raise UsageError(f"{where}: unknown parameter {', '.join(unknown)}; "
                             f"the space has {', '.join(p.name for p in self.params)}")
        clean: dict[str, Value] = {}
        for param in self.params:
            if not self.active(param, clean):
                if param.name in config:
                    needed = " and ".join(f"{name} in ({_list(values)})" for name, values in param.when.items())
                    raise UsageError(f"{where}: {param.name} does not exist there: it needs {needed}")
                continue
            if param.name not in config:
                raise UsageError(f"{where}: {param.name} is missing (choices: {_list(param.choices)})")
            found = [c for c in param.choices if among(config[param.name], (c,))]
            if not found:
                raise UsageError(f"{where}: {param.name}={config[param.name]!r} is not a choice "
                                 f"({_list(param.choices)})")
            clean[param.name] = found[0]
        return clean

    def size(self) -> int:
        """Upper bound of the number of server parts (conditions and rules not subtracted)."""
        return math.prod(len(p.choices) for p in self.server_params)

    def _check_names(self, where: str, rules: Sequence[WrittenRule]) -> None:
        """Raises UsageError for conditions, rules and beliefs on unknown parameters and choices."""
        loads = dict[str, bool]()
        for param in self.params:
            at = f"{where}: params.{param.name}"
            for other, values in param.when.items():
                if other not in loads:
                    raise UsageError(f"{at}.when names {other}, which is not a parameter listed before it")
                self._check_values(other, values, f"{at}.when")
                if not param.load and loads[other]:
                    raise UsageError(f"{at} needs a launch, so its when cannot name the load parameter {other}")
            loads[param.name] = param.load
        for rule in rules:
            for name in rule.names:
                listed = as_tuple(rule.when[name].one_of) if name in rule.when else ()
                self._check_values(name, listed, f"{where}: forbid", "'~space.forbid' leaves the rules out")
        for name, factors in self.belief.items():
            self._check_values(name, tuple(factors), f"{where}: belief", f"'~space.belief.{name}' leaves it out")
            for choice, (low, high) in factors.items():
                if not 0 < low <= high < math.inf:
                    raise UsageError(f"{where}: belief.{name}.{choice} must be [low, high], factors with "
                                     "0 < low <= high")

    def _check_baseline(self, where: str, by: str = "") -> None:
        reason = self.forbidden(self.baseline)
        if reason:
            raise UsageError(f"{where}: the baseline is forbidden{by}: {reason}")

    def _check_values(self, name: str, values: Sequence[Value], where: str, remedy: str = "") -> None:
        """Raises UsageError for values that are no choices; `remedy` is for choices that were narrowed on purpose."""
        choices = next((param.choices for param in self.params if param.name == name), None)
        if choices is None:
            raise UsageError(f"{where} names the unknown parameter {name}")
        if unknown := [repr(value) for value in values if not among(value, choices)]:
            raise UsageError(f"{where}: {name} has no choice {' or '.join(unknown)} ({_list(choices)})"
                             + (f"; {remedy}" if remedy else ""))


def server_key(space: Space, config: Config) -> str:
    """Canonical text of the part of a configuration that needs its own launch."""
    return config_key(space.split(config)[0])


def _param(name: str, file: _ParamFile, at: str) -> Param:
    step: float | None = None
    if file.range is not None:
        if file.choices is not None:
            raise UsageError(f"{at}: give choices or range, not both")
        choices, step = _range(file.range, file.step, at)
    else:
        if file.step is not None:
            raise UsageError(f"{at}: step belongs to range")
        if not file.choices:
            raise UsageError(f"{at}: choices is empty: list at least one value")
        choices = tuple(file.choices)
    if len(choices) > MOST_CHOICES:
        raise UsageError(f"{at}: {len(choices)} choices, at most {MOST_CHOICES}: take a coarser grid")
    equal, spelled = dict[Value, Value](), dict[str, Value]()
    for choice in choices:
        if isinstance(choice, str):
            _refuse_secret(choice, name, at)
        other = equal.get(choice, spelled.get(text(choice)))  # storage takes 1 for true, a command line "1" for 1
        if other is not None:
            raise UsageError(f"{at}: a choice is listed twice" if among(choice, (other,)) else
                             f"{at}: {other!r} and {choice!r} cannot be told apart: leave one out")
        equal[choice] = spelled[text(choice)] = choice
    most = MOST_CONCURRENCY if name == "concurrency" else MOST_TOKENS if file.load and name in TOKEN_LOADS else None
    if most and not all(isinstance(c, int) and not isinstance(c, bool) and 0 < c <= most for c in choices):
        raise UsageError(f"{at}: {name} takes positive whole numbers up to {most}, not {_list(choices)}")
    when = {other: as_tuple(values) for other, values in (file.when or {}).items()}
    return Param(name, choices, when, file.load, step)


def _range(bounds: tuple[Number, Number], step: Number | None, at: str) -> tuple[tuple[Value, ...], float]:
    if step is None:
        raise UsageError(f"{at}: range takes [low, high] with a step, all numbers")
    low, high = bounds
    if not all(map(math.isfinite, (low, high, step))) or step <= 0 or low > high:
        raise UsageError(f"{at}: range needs low <= high and step > 0, all finite")
    if (high - low) / step >= MOST_CHOICES:
        raise UsageError(f"{at}: more than {MOST_CHOICES} choices: take a larger step")
    count = math.floor((high - low) / step + 1e-9) + 1
    whole = all(isinstance(x, int) for x in (low, high, step))
    return tuple(low + i * step if whole else round(low + i * step, 10) for i in range(count)), float(step)


def _models(raw: Mapping[str, Value | None], where: str) -> dict[str, str]:
    """Models by their names in engine files. Raises UsageError for a secret."""
    found = {key: str(value) for key, value in raw.items() if value is not None}
    for key, value in found.items():
        _refuse_secret(value, key, f"{where}: model.{key}")
    return found


def _refuse_secret(value: str, name: str, at: str) -> None:
    """Raises UsageError for a value that looks like a secret, by itself or by its name."""
    redacted = Redactor().argv([f"{name}={value}"])[0]
    if redacted != f"{name}={value}":
        raise UsageError(f"{at}: {redacted!r} holds what looks like a secret, and choices and models are written "
                         "to every report: put it into an environment variable")


def _list(values: Sequence[Value]) -> str:
    return ", ".join(str(v) for v in values)
