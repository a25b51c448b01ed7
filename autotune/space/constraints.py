"""Static rules as people write them, and what they say of the choices that there are.

    (written,) = parse_rules([{"tree_topk": {"above": "tree_budget"}, "because": "no room"}], "forbid")
    written.among({"tree_budget": (4, 8), "tree_topk": (2, 8)})    # one Rule: tree_budget=4 with tree_topk=8

A condition on a parameter lists values, or compares with a number or with what another parameter has. Whatever reads
rules later (search, report, preflight) sees lists only.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autotune.records import Config, UsageError, Value

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le,
    "other_than": operator.ne, "no_multiple_of": lambda value, than: bool(than) and value % than != 0}
BESIDE = ("times", "otherwise")
FORMS = (*COMPARISONS, *BESIDE, "none_of", "like", "unlike", "given")


@dataclasses.dataclass(frozen=True)
class Rule:
    """A combination known not to work: every parameter of `when` has one of the listed values."""

    when: Mapping[str, tuple[Value, ...]]
    because: str

    def matches(self, config: Config) -> bool:
        return all(name in config and among(config[name], values) for name, values in self.when.items())


@dataclasses.dataclass(frozen=True)
class Bound:
    """A comparison with a number, or with `times` what the parameter `than` has.

    `otherwise` is the number to compare with where there is no such parameter; None: the comparison does not hold.
    """

    holds: Callable[[float, float], bool]
    than: float | str
    times: float = 1.0
    otherwise: float | None = None

    def met(self, value: float, config: Config) -> bool:
        than = number(config.get(self.than)) if isinstance(self.than, str) else self.than
        limit = self.otherwise if than is None else than * (self.times if isinstance(self.than, str) else 1.0)
        return limit is not None and self.holds(value, limit)


@dataclasses.dataclass(frozen=True)
class Condition:
    """What one parameter must be for a rule to apply. All parts that are there must hold.

    given: whether the parameter must have a value at all; False: the configuration lacks it, and it has no default.
    """

    given: bool = True
    listed: tuple[Value, ...] | None = None
    none_of: tuple[Value, ...] = ()
    like: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    bounds: tuple[Bound, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters that it compares with."""
        return tuple(bound.than for bound in self.bounds if isinstance(bound.than, str))

    def holds(self, value: Value, config: Config) -> bool:
        if not self.given or same_as(value, self.none_of):
            return False
        if self.listed is not None and not same_as(value, self.listed):
            return False
        if self.like and not _fits(value, self.like) or _fits(value, self.unlike):
            return False
        numeric = number(value)
        return not self.bounds or numeric is not None and all(bound.met(numeric, config) for bound in self.bounds)


@dataclasses.dataclass(frozen=True)
class WrittenRule:
    """A rule as a file has it."""

    when: Mapping[str, Condition]
    because: str

    @property
    def names(self) -> tuple[str, ...]:
        """Every parameter that it names."""
        return tuple(dict.fromkeys([*self.when, *(n for condition in self.when.values() for n in condition.names)]))

    def among(self, choices: Mapping[str, tuple[Value, ...]],
              default: Callable[[str], Value | None] = lambda name: None,
              conditions: Mapping[str, Mapping[str, tuple[Value, ...]]] | None = None) -> tuple[Rule, ...]:
        """What it says of these choices; nothing where it cannot apply.

        A parameter that a configuration does not have has its default; without one, a condition on it never holds. That
        is one that is not among the choices, or whose own condition (`conditions`, by name) is not fulfilled.
        """
        conditions = conditions or {}
        optional = [name for name in self.names if name in choices and conditions.get(name)]
        found: list[Rule] = []
        for count in range(len(optional) + 1):
            for lacking in itertools.combinations(optional, count):
                there = {name: values for name, values in choices.items() if name not in lacking}
                ways = [list(_ways_without(name, choices, conditions)) for name in lacking]
                for when in self._said(there, default):
                    for way in itertools.product(*ways):
                        full = _together([when, *way])
                        if full is not None and not set(full) & set(lacking):
                            found.append(Rule(full, self.because))
        return tuple(found)

    def _said(self, choices: Mapping[str, tuple[Value, ...]],
              default: Callable[[str], Value | None]) -> Iterator[Mapping[str, tuple[Value, ...]]]:
        """What it says where every configuration has all of these parameters, and of the others the defaults."""
        compared = [n for n in dict.fromkeys(n for c in self.when.values() for n in c.names)]
        inside = [name for name in compared if name in choices]
        outside = {name: value for name in compared if name not in choices and (value := default(name)) is not None}
        for values in itertools.product(*(choices[name] for name in inside)):
            yield from self._where(choices, default, dict(zip(inside, values, strict=True)), outside)

    def _where(self, choices: Mapping[str, tuple[Value, ...]], default: Callable[[str], Value | None],
               fixed: Config, outside: Config) -> Iterator[Mapping[str, tuple[Value, ...]]]:
        """What it says where the parameters that it compares with have the values of `fixed`."""
        when: dict[str, tuple[Value, ...]] = {name: (value,) for name, value in fixed.items()}
        for name, condition in self.when.items():
            if name in choices:
                when[name] = tuple(c for c in when.get(name, choices[name]) if condition.holds(c, {**outside, **fixed}))
                if not when[name]:
                    return
            elif (value := default(name)) is None:
                if condition.given:
                    return
            elif not condition.holds(value, {**outside, **fixed}):
                return
        yield when


def _ways_without(name: str, choices: Mapping[str, tuple[Value, ...]],
                  conditions: Mapping[str, Mapping[str, tuple[Value, ...]]]) -> Iterator[dict[str, tuple[Value, ...]]]:
    """What a configuration that lacks a parameter has instead: each way by itself is enough."""
    for other, values in conditions.get(name, {}).items():
        if rest := tuple(choice for choice in choices[other] if not among(choice, values)):
            yield {other: rest}
        yield from _ways_without(other, choices, conditions)


def _together(parts: Sequence[Mapping[str, tuple[Value, ...]]]) -> dict[str, tuple[Value, ...]] | None:
    """All of these lists of values at once; None where they leave a parameter none."""
    when: dict[str, tuple[Value, ...]] = {}
    for name, values in (item for part in parts for item in part.items()):
        when[name] = tuple(value for value in when.get(name, values) if among(value, values))
    return when if all(when.values()) else None


def parse_rules(items: Any, where: str) -> tuple[WrittenRule, ...]:
    """The rules of a space's `forbid`, or of an engine file. Raises UsageError."""
    if not isinstance(items or [], list):
        raise UsageError(f"{where}: forbid must be a list of rules, not {items!r}")
    return tuple(_rule(item, where) for item in items or [])


def _rule(item: Any, where: str) -> WrittenRule:
    if not isinstance(item, Mapping):
        raise UsageError(f"{where}: forbid must be a mapping" + (" (it is missing)" if item is None else ""))
    because = item.get("because")
    when = {str(k): _condition(v, f"{where}: {k}") for k, v in item.items() if k != "because"}
    if not because or not when:
        raise UsageError(f"{where}: each forbid rule names at least one parameter and says because")
    return WrittenRule(when, str(because))


def _condition(raw: Any, where: str) -> Condition:
    if not isinstance(raw, Mapping):
        return Condition(listed=tuple(raw) if isinstance(raw, list | tuple) else (raw,))
    unknown = sorted(str(key) for key in raw if key not in FORMS)
    if unknown or set(raw) <= set(BESIDE):
        wrong = f"unknown key {unknown[0]}" if unknown else "nothing to compare with"
        raise UsageError(f"{where}: {wrong}: a condition is a value, a list of them, or a mapping with "
                         f"{', '.join(FORMS)}")
    beside = {key: raw[key] for key in BESIDE if key in raw}
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in beside.values()):
        raise UsageError(f"{where}: times and otherwise are numbers")
    bounds = []
    for key in (key for key in COMPARISONS if key in raw):
        than = raw[key]
        if isinstance(than, bool) or not isinstance(than, int | float | str):
            raise UsageError(f"{where}: {key} takes a number or the name of a parameter, not {than!r}")
        bounds.append(Bound(COMPARISONS[key], than if isinstance(than, str) else float(than), **beside))
    if beside and not any(isinstance(bound.than, str) for bound in bounds):
        raise UsageError(f"{where}: times and otherwise go with a comparison with a parameter")
    lists = {key: tuple(v) if isinstance(v := raw[key], list) else (v,) for key in ("none_of", "like", "unlike")
             if key in raw}
    if not isinstance(raw.get("given", True), bool) or raw.get("given") is False and len(raw) > 1:
        raise UsageError(f"{where}: given is true, or false and then alone")
    return Condition(raw.get("given", True), bounds=tuple(bounds), none_of=lists.get("none_of", ()),
                     like=tuple(map(str, lists.get("like", ()))), unlike=tuple(map(str, lists.get("unlike", ()))))


def number(value: Any) -> float | None:
    """A choice as a number, also where it is written as a text; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def text(value: Any) -> str:
    """A choice as YAML and command lines spell it: true/false for booleans."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def among(value: Value, values: Sequence[Value]) -> bool:
    """Membership that does not take True for 1, as Python and JSON round trips would."""
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)


def same_as(value: Value, values: Sequence[Value]) -> bool:
    """Whether a value is one of these, or is spelled like one."""
    return among(value, values) or text(value) in {text(v) for v in values}


def _fits(value: Value, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(text(value), pattern) for pattern in patterns)
