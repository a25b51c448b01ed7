"""The search space: parameters, conditions, rules, baseline. Knows neither engines nor Optuna.

    space = Space.parse(mapping, where="search_spaces/local.yaml")
    server, load = space.split(config)

A parameter's choices are ordered. `load: true` marks a load part, changed on a live server.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autotune.records import Config, UsageError, Value, canonical, config_key, digest
from autotune.space.constraints import Rule, WrittenRule, among, parse_rules, text
from autotune.utils.redact import Redactor
from autotune.utils.text import printable

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
MODEL = re.compile(r"[a-z_][a-z0-9_.]{0,99}")
KEYS = {"name", "engine", "model", "needs", "params", "forbid", "belief", "baseline", "describe",
        "workload", "limits", "study", "power", "server", "agreement"}
NEEDS = {"gpus", "gpu_name", "gpu_memory_gib"}
OVERLAYS = ("workload", "limits", "study", "power", "server", "agreement")
"""Sections of a space that overlay the settings of the same name in conf/."""
ENUMERABLE = 200_000
MOST_CHOICES = 1000
MOST_AT_ONCE = 65536
"""Requests in flight: each takes a port of this machine."""
LARGEST = 2**63


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter: its ordered choices, when it exists at all, and whether it needs a launch."""

    name: str
    choices: tuple[Value, ...]
    when: Mapping[str, tuple[Value, ...]] = dataclasses.field(default_factory=dict)
    load: bool = False
    step: float | None = None  # set when the choices are an arithmetic range

    @property
    def numeric(self) -> bool:
        """Whether the choices are numbers with a meaningful distance (booleans are not)."""
        return all(isinstance(c, int | float) and not isinstance(c, bool) for c in self.choices)


@dataclasses.dataclass(frozen=True)
class Space:
    name: str
    engine: str
    params: tuple[Param, ...]
    baseline: Config
    rules: tuple[Rule, ...] = ()
    model: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    belief: Mapping[str, Mapping[Value, tuple[float, float]]] = dataclasses.field(default_factory=dict)
    """belief[param][choice] = (low, high): the factor on the objective that an expert expects."""
    describe: str = ""

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str = "space") -> Space:
        """Build a Space from plain YAML data. Raises UsageError naming the offending key."""
        _only_keys(raw, KEYS, where)
        _only_keys(_mapping(raw.get("needs") or {}, where, "needs"), NEEDS, f"{where}: needs")
        params = tuple(_param(name, spec, where) for name, spec in _mapping(raw.get("params"), where, "params").items())
        if not params:
            raise UsageError(f"{where}: params is empty: name at least one parameter with choices")
        written = parse_rules(raw.get("forbid"), where)
        space = cls(
            name=_text(raw.get("name"), where, "name"), engine=_text(raw.get("engine"), where, "engine"),
            params=params, baseline=dict(_mapping(raw.get("baseline"), where, "baseline")),
            model=_models(_scalars(raw.get("model"), where, "model"), where),
            needs=dict(_scalars(raw.get("needs"), where, "needs")), belief=_beliefs(raw.get("belief") or {}, where),
            describe=Redactor().text(printable(str(raw.get("describe") or ""), keep="\n")),
        )
        space._check(where, written)
        space = dataclasses.replace(space, rules=tuple(rule for one in written for rule in space.said_by(one)))
        space._check_baseline(where)
        return space

    def with_rules(self, rules: Sequence[Rule], origin: str) -> Space:
        """The same space with more rules, of its own parameters and choices.

        Raises UsageError when they forbid the baseline; `origin` says in the message whose rules they are.
        """
        space = dataclasses.replace(self, rules=self.rules + tuple(rules))
        space._check_baseline(f"space {self.name}", f" by a rule of {origin}")
        return space

    def said_by(self, rule: WrittenRule, default: Callable[[str], Value | None] = lambda name: None
                ) -> tuple[Rule, ...]:
        """What a rule says of the space's own choices; `default` is what a server without a parameter has."""
        return rule.among({p.name: p.choices for p in self.params}, default, {p.name: p.when for p in self.params})

    def largest(self, name: str) -> int | None:
        """The largest choice of a numeric parameter; None when the space has no such parameter."""
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
        """Identity of what is searched: parameters, conditions and model.

        Not rules, which only save launches and follow the engine's version, nor names or prose.
        """
        parts = [[p.name, list(p.choices), sorted((k, list(v)) for k, v in p.when.items()), p.load]
                 for p in self.params]
        return digest(canonical([parts, self.engine, dict(self.model)]))

    def split(self, config: Config) -> tuple[dict[str, Value], dict[str, Value]]:
        """(server part, load part) of a configuration."""
        load = {p.name for p in self.load_params}
        return ({k: v for k, v in config.items() if k not in load}, {k: v for k, v in config.items() if k in load})

    def active(self, param: Param, config: Config) -> bool:
        """Whether `param` exists given the parameters chosen before it."""
        return all(name in config and among(config[name], values) for name, values in param.when.items())

    def forbidden(self, config: Config) -> str | None:
        """Why a configuration is known not to work; None when no rule speaks against it."""
        return next((rule.because for rule in self.rules if rule.matches(config)), None)

    def check(self, config: Config, where: str = "configuration") -> dict[str, Value]:
        """The configuration with values taken from the choices. Raises UsageError when it is not in the space."""
        unknown = sorted(map(str, set(config) - {p.name for p in self.params}))
        if unknown:
            raise UsageError(f"{where}: unknown parameter {', '.join(unknown)}; "
                             f"the space has {', '.join(p.name for p in self.params)}")
        clean: dict[str, Value] = {}
        for param in self.params:
            if not self.active(param, clean):
                if param.name in config:
                    raise UsageError(f"{where}: {param.name} does not exist there: it needs {_when_text(param.when)}")
                continue
            if param.name not in config:
                raise UsageError(f"{where}: {param.name} is missing (choices: {_list(param.choices)})")
            found = [c for c in param.choices if among(config[param.name], (c,))]
            if not found:
                raise UsageError(f"{where}: {param.name}={config[param.name]!r} is not a choice "
                                 f"({_list(param.choices)})")
            clean[param.name] = found[0]
        return clean

    def servers(self) -> Iterator[dict[str, Value]]:
        """Every allowed server part, in order of the choices. Check `size` first: this may be long."""
        yield from self._walk(self.server_params)

    def loads(self, server: Config | None = None) -> list[dict[str, Value]]:
        """Every load part that is allowed on `server` (on some server, without one)."""
        loads = [{k: v for k, v in full.items() if self.param(k).load}
                 for full in self._walk(self.load_params, dict(server or {}), bool(server))]
        return loads or [{}]

    def size(self) -> int:
        """Upper bound of the number of server parts (conditions and rules not subtracted)."""
        return math.prod(len(p.choices) for p in self.server_params)

    def sample(self, rng: random.Random) -> dict[str, Value]:
        """A random allowed configuration. Raises UsageError when the rules leave none in 10,000 draws."""
        for _ in range(10_000):
            config: dict[str, Value] = {}
            for param in self.params:
                if self.active(param, config):
                    config[param.name] = rng.choice(param.choices)
            if self.forbidden(config) is None:
                return config
        raise UsageError(f"{self.name}: the forbid rules leave (almost) no configuration")

    def _walk(self, params: Sequence[Param], start: dict[str, Value] | None = None,
              ruled: bool = True) -> Iterator[dict[str, Value]]:
        def extend(index: int, config: dict[str, Value]) -> Iterator[dict[str, Value]]:
            if index == len(params):
                if not ruled or self.forbidden(config) is None:
                    yield dict(config)
                return
            param = params[index]
            if not self.active(param, config):
                yield from extend(index + 1, config)
                return
            for choice in param.choices:
                config[param.name] = choice
                yield from extend(index + 1, config)
            del config[param.name]

        yield from extend(0, dict(start or {}))

    def _check(self, where: str, written: Sequence[WrittenRule]) -> None:
        if not NAME.fullmatch(self.name):  # a study's folder is named after it
            raise UsageError(f"{where}: name {self.name!r} must be letters, digits, _, - and dots (at most "
                             "100), and begin with none of these")
        names = [p.name for p in self.params]
        seen: set[str] = set()
        for param in self.params:
            for other, values in param.when.items():
                if other not in seen:
                    raise UsageError(f"{where}: params.{param.name}.when names {other}, "
                                     "which is not a parameter listed before it")
                self._check_values(other, values, f"{where}: params.{param.name}.when")
                if not param.load and self.param(other).load:
                    raise UsageError(f"{where}: params.{param.name} needs a launch, so its when cannot name "
                                     f"the load parameter {other}")
            seen.add(param.name)
        self._check_written(written, where)
        for name, factors in self.belief.items():
            if name not in names:
                raise UsageError(f"{where}: belief names the unknown parameter {name}")
            self._check_values(name, tuple(factors), f"{where}: belief", f"'~space.belief.{name}' leaves it out")
        object.__setattr__(self, "baseline", self.check(self.baseline, f"{where}: baseline"))

    def _check_written(self, rules: Sequence[WrittenRule], where: str) -> None:
        names = {p.name for p in self.params}
        for rule in rules:
            for other in rule.names:
                if other not in names:
                    raise UsageError(f"{where}: forbid names the unknown parameter {other}")
            for other, condition in rule.when.items():
                self._check_values(other, condition.listed or (), f"{where}: forbid",
                                   "'~space.forbid' leaves the rules out")

    def _check_baseline(self, where: str, by: str = "") -> None:
        reason = self.forbidden(self.baseline)
        if reason:
            raise UsageError(f"{where}: the baseline is forbidden{by}: {reason}")

    def _check_values(self, name: str, values: Sequence[Value], where: str, remedy: str = "") -> None:
        """Raises UsageError for what is no choice; `remedy`: what to do where the choices were narrowed on purpose."""
        unknown = [value for value in values if not among(value, self.param(name).choices)]
        if unknown:
            said = " or ".join(map(repr, unknown))
            raise UsageError(f"{where}: {name} has no choice {said} ({_list(self.param(name).choices)})"
                             + (f"; {remedy}" if remedy else ""))


def server_key(space: Space, config: Config) -> str:
    """Canonical text of the part of a configuration that needs its own launch."""
    return config_key(space.split(config)[0])


def _param(name: Any, spec: Any, where: str) -> Param:
    at = f"{where}: params.{name}"
    if not isinstance(name, str):
        raise UsageError(f"{at}: a parameter's name must be text (YAML reads on/off/yes/no as booleans: quote it)")
    spec = _mapping(spec, where, f"params.{name}")
    _only_keys(spec, {"choices", "range", "step", "when", "load"}, at)
    if not isinstance(spec.get("load", False), bool):
        raise UsageError(f"{at}: load must be true or false")
    step: float | None = None
    if "range" in spec:
        if "choices" in spec:
            raise UsageError(f"{at}: give choices or range, not both")
        choices, step = _range(spec["range"], spec.get("step"), at)
    else:
        if "step" in spec:
            raise UsageError(f"{at}: step belongs to range")
        raw = spec.get("choices")
        if raw is not None and not isinstance(raw, list):
            raise UsageError(f"{at}: choices must be a list such as [{raw}], not {raw!r}")
        if not raw:
            raise UsageError(f"{at}: choices is empty: list at least one value")
        choices = tuple(raw)
    if len(choices) > MOST_CHOICES:
        raise UsageError(f"{at}: {len(choices)} choices, at most {MOST_CHOICES}: take a coarser grid")
    for choice in choices:
        finite = math.isfinite(choice) if isinstance(choice, float) else \
            not isinstance(choice, int) or abs(choice) < LARGEST
        if not isinstance(choice, str | int | float | bool) or not finite:
            raise UsageError(f"{at}: {_short(choice)} is not a text, number or boolean")
        if isinstance(choice, str):
            _public(choice, name, at)
    equal, spelled = dict[Value, Value](), dict[str, Value]()
    for choice in choices:  # the storage takes 1 for true, and a command line "1" for 1
        other = equal.get(choice, spelled.get(text(choice)))
        if other is not None:
            raise UsageError(f"{at}: a choice is listed twice" if among(choice, (other,)) else
                             f"{at}: {other!r} and {choice!r} cannot be told apart: leave one out")
        equal[choice] = spelled[text(choice)] = choice
    if name == "concurrency" and not all(isinstance(c, int) and not isinstance(c, bool) and 0 < c <= MOST_AT_ONCE
                                         for c in choices):
        raise UsageError(f"{at}: concurrency takes positive whole numbers up to {MOST_AT_ONCE}, not {_list(choices)}")
    when = {str(k): _as_tuple(v) for k, v in _mapping(spec.get("when") or {}, where, f"params.{name}.when").items()}
    return Param(name, choices, when, spec.get("load", False), step)


def _range(bounds: Any, step: Any, at: str) -> tuple[tuple[Value, ...], float]:
    numbers = [*bounds, step] if isinstance(bounds, list) and len(bounds) == 2 else []
    if len(numbers) != 3 or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in numbers):
        raise UsageError(f"{at}: range takes [low, high] with a step, all numbers")
    low, high = bounds
    if not all(map(math.isfinite, numbers)) or step <= 0 or low > high:
        raise UsageError(f"{at}: range needs low <= high and step > 0, all finite")
    if (high - low) / step >= MOST_CHOICES:
        raise UsageError(f"{at}: more than {MOST_CHOICES} choices: take a larger step")
    count = math.floor((high - low) / step + 1e-9) + 1
    whole = all(isinstance(x, int) for x in numbers)
    return tuple(low + i * step if whole else round(low + i * step, 10) for i in range(count)), float(step)


def _beliefs(raw: Any, where: str) -> dict[str, dict[Value, tuple[float, float]]]:
    beliefs: dict[str, dict[Value, tuple[float, float]]] = {}
    for name, factors in _mapping(raw, where, "belief").items():
        beliefs[str(name)] = {}
        for choice, pair in _mapping(factors, where, f"belief.{name}").items():
            good = isinstance(pair, list) and len(pair) == 2 and all(
                isinstance(x, int | float) and not isinstance(x, bool) for x in pair)
            if not good or not 0 < pair[0] <= pair[1] < math.inf:
                raise UsageError(f"{where}: belief.{name}.{choice} must be [low, high], factors with 0 < low <= high")
            beliefs[str(name)][choice] = (float(pair[0]), float(pair[1]))
    return beliefs


def _as_tuple(value: Any) -> tuple[Value, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _mapping(value: Any, where: str, key: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{where}: {key} must be a mapping" + (" (it is missing)" if value is None else ""))
    return value


def _public(value: str, name: str, at: str) -> str:
    """`value`, unless it looks like a secret, by itself or by the name that it goes by. Raises UsageError."""
    shown = Redactor().argv([f"{name}={value}"])[0]
    if shown != f"{name}={value}":
        raise UsageError(f"{at}: {shown!r} holds what looks like a secret, and choices and models are written "
                         "everywhere: put it into an environment variable")
    return value


def _models(raw: Mapping[Any, Any], where: str) -> dict[str, str]:
    """Models by the names that engine files use for them, each of which an export can tell from the others."""
    found: dict[str, str] = {}
    for key, value in raw.items():
        if not isinstance(key, str) or not MODEL.fullmatch(key):
            raise UsageError(f"{where}: model: the name {key!r} must be small letters, digits, dots and _, and begin "
                             "with a letter or _")
        if twin := next((other for other in found if other.replace(".", "_") == key.replace(".", "_")), None):
            raise UsageError(f"{where}: model: {twin} and {key} are the same name to an export: rename one")
        found[key] = _public(str(value), key, f"{where}: model.{key}")
    return found


def _scalars(value: Any, where: str, key: str) -> Mapping[Any, Any]:
    """A mapping to texts and numbers. What is null is left out; `needs` has numbers but for its gpu_name."""
    found = {k: v for k, v in _mapping({} if value is None else value, where, key).items() if v is not None}
    for name, item in found.items():
        number = isinstance(item, int | float) and not isinstance(item, bool) and 0 <= item <= 1e9
        if not number and (not isinstance(item, str) or (key == "needs" and name in ("gpus", "gpu_memory_gib"))):
            raise UsageError(f"{where}: {key}.{name} must be a {'number' if key == 'needs' else 'text'}, not {item!r}")
    return found


def _text(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{where}: {key} must be a text" + (" (it is missing)" if value is None else ""))
    return value


def _only_keys(raw: Mapping[Any, Any], known: set[str], where: str) -> None:
    unknown = [str(k) for k in raw if k not in known]
    if unknown:
        raise UsageError(f"{where}: unknown key {', '.join(unknown)}; known: {', '.join(sorted(known))}")


def _short(value: object) -> str:
    """A value for a message; a number of thousands of digits cannot be written at all."""
    return f"a whole number of {value.bit_length()} bits (at most 64)" if isinstance(value, int) else repr(value)[:80]


def _list(values: Sequence[Value]) -> str:
    return ", ".join(str(v) for v in values)


def _when_text(when: Mapping[str, Sequence[Value]]) -> str:
    return " and ".join(f"{name} in ({_list(values)})" for name, values in when.items())
