"""Static rules as files write them, and their expansion over a space's choices.

    written = WrittenRule.parse({"tree_topk": Condition(above="tree_budget"), "because": "no room"}, "forbid[0]")
    written.expand({"tree_budget": (4, 8), "tree_topk": (2, 8)})    # one Rule: tree_budget=4 with tree_topk=8

A condition on a parameter lists values, or compares with a number or with another parameter. All later readers of rules
(search, report, preflight) see lists only.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from autotune.records import Config, UsageError, Value
from autotune.utils.validation import Number

Values = tuple[Value, ...]
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le,
    "other_than": operator.ne, "no_multiple_of": lambda value, than: bool(than) and value % than != 0}
Operand = Annotated[Number | str, msgspec.Meta(description="a number or the name of a parameter")] | None
Listed = list[Value] | Value | None


class Condition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The values of one parameter under which a rule applies. All keys that are given must hold.

    A comparison is with a number, or with `times` the value of another parameter; `otherwise` replaces a parameter that
    has no value, and without it the comparison fails. `like` and `unlike` are shell patterns. `given: false` requires
    a configuration without the parameter, and no default for it.
    """

    above: Operand = None
    at_least: Operand = None
    below: Operand = None
    at_most: Operand = None
    other_than: Operand = None
    no_multiple_of: Operand = None
    times: Number | None = None
    otherwise: Number | None = None
    one_of: Listed = None
    none_of: Listed = None
    like: Listed = None
    unlike: Listed = None
    given: bool | None = None

    def __post_init__(self) -> None:
        present = {name for name in self.__struct_fields__ if getattr(self, name) is not None}
        if present <= {"times", "otherwise"}:
            raise ValueError("nothing to compare with: a condition is a value, a list of them, or a mapping with "
                             f"{', '.join(self.__struct_fields__)}")
        if present & {"times", "otherwise"} and not self.names:
            raise ValueError("times and otherwise go with a comparison with a parameter")
        if self.given is False and present != {"given"}:
            raise ValueError("given is true, or false and then alone")

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters on the other side of a comparison."""
        return tuple(than for name in COMPARISONS if isinstance(than := getattr(self, name), str))

    def holds(self, value: Value, config: Config) -> bool:
        if self.given is False or same_as(value, as_tuple(self.none_of)):
            return False
        if self.one_of is not None and not same_as(value, as_tuple(self.one_of)):
            return False
        if self.like is not None and not _fits(value, self.like) or _fits(value, self.unlike):
            return False
        return all(self._compare(holds, value, than, config) for name, holds in COMPARISONS.items()
                   if (than := getattr(self, name)) is not None)

    def _compare(self, holds: Callable[[float, float], bool], value: Value, than: Number | str, config: Config) -> bool:
        limit: float | None = than if not isinstance(than, str) else number(config.get(than))
        if isinstance(than, str):
            limit = self.otherwise if limit is None else limit * (1 if self.times is None else self.times)
        numeric = number(value)
        return numeric is not None and limit is not None and holds(numeric, limit)


RuleFile = dict[str, Value | list[Value] | Condition]  # conditions by parameter, and `because`


@dataclasses.dataclass(frozen=True)
class Rule:
    """A combination known not to work: every parameter of `when` has one of the listed values."""

    when: Mapping[str, Values]
    because: str

    def matches(self, config: Config) -> bool:
        return all(name in config and among(config[name], values) for name, values in self.when.items())


@dataclasses.dataclass(frozen=True)
class WrittenRule:
    """A rule of a file."""

    when: Mapping[str, Condition]
    because: str

    @classmethod
    def parse(cls, raw: RuleFile, where: str) -> WrittenRule:
        """Raises UsageError for a rule without a parameter or without `because`."""
        because = raw.get("because")
        when = {name: condition if isinstance(condition, Condition) else Condition(one_of=condition)
                for name, condition in raw.items() if name != "because"}
        if not because or not when or isinstance(because, list | Condition):
            raise UsageError(f"{where}: each forbid rule names at least one parameter and says because")
        return cls(when, str(because))

    @property
    def names(self) -> tuple[str, ...]:
        """Every parameter that the rule names."""
        return tuple(dict.fromkeys([*self.when, *(n for condition in self.when.values() for n in condition.names)]))

    def expand(self, choices: Mapping[str, Values], default: Callable[[str], Value | None] = lambda name: None,
               conditions: Mapping[str, Mapping[str, Values]] | None = None) -> tuple[Rule, ...]:
        """The rule in terms of these choices; () where it cannot apply.

        conditions: the `when` of each parameter. A configuration lacks a parameter that is not among the choices or
        whose condition is not met. A lacking parameter has its default; without a default, no condition on it holds.
        """
        conditions = conditions or {}
        optional = [name for name in self.names if name in choices and conditions.get(name)]
        found: list[Rule] = []
        for count in range(len(optional) + 1):
            for lacking in itertools.combinations(optional, count):
                present = {name: values for name, values in choices.items() if name not in lacking}
                absences = [list(_absences(name, choices, conditions)) for name in lacking]
                for when in self._expand_present(present, default):
                    for absence in itertools.product(*absences):
                        full = _intersection([when, *absence])
                        if full is not None and not set(full) & set(lacking):
                            found.append(Rule(full, self.because))
        return tuple(found)

    def _expand_present(self, choices: Mapping[str, Values],
                        default: Callable[[str], Value | None]) -> Iterator[Mapping[str, Values]]:
        """The rule where every configuration has all of `choices` and the defaults of all other parameters."""
        compared = dict.fromkeys(n for condition in self.when.values() for n in condition.names)
        inside = [name for name in compared if name in choices]
        outside = {name: value for name in compared if name not in choices and (value := default(name)) is not None}
        for values in itertools.product(*(choices[name] for name in inside)):
            when: dict[str, Values] = {name: (value,) for name, value in zip(inside, values, strict=True)}
            config = {**outside, **dict(zip(inside, values, strict=True))}
            for name, condition in self.when.items():
                if name in choices:
                    when[name] = tuple(c for c in when.get(name, choices[name]) if condition.holds(c, config))
                    possible = bool(when[name])
                else:
                    value = default(name)
                    possible = condition.given is False if value is None else condition.holds(value, config)
                if not possible:
                    break
            else:
                yield when


def _absences(name: str, choices: Mapping[str, Values],
              conditions: Mapping[str, Mapping[str, Values]]) -> Iterator[dict[str, Values]]:
    """The choices of other parameters under which a configuration lacks `name`; each item suffices alone."""
    for other, values in conditions.get(name, {}).items():
        if rest := tuple(choice for choice in choices[other] if not among(choice, values)):
            yield {other: rest}
        yield from _absences(other, choices, conditions)


def _intersection(parts: Sequence[Mapping[str, Values]]) -> dict[str, Values] | None:
    """The values that all parts allow; None if a parameter has none left."""
    when: dict[str, Values] = {}
    for name, values in (item for part in parts for item in part.items()):
        when[name] = tuple(value for value in when.get(name, values) if among(value, values))
    return when if all(when.values()) else None


def number(value: Any) -> float | None:
    """A choice as a number, also if it is a text such as "16"; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def text(value: Any) -> str:
    """A choice in the spelling of YAML and command lines: true/false for booleans."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def among(value: Value, values: Sequence[Value]) -> bool:
    """Membership that tells True from 1; Python and a JSON round trip do not."""
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)


def same_as(value: Value, values: Sequence[Value]) -> bool:
    """Membership by value or by spelling."""
    return among(value, values) or text(value) in {text(v) for v in values}


def _fits(value: Value, patterns: Listed) -> bool:
    return any(fnmatch.fnmatchcase(text(value), str(pattern)) for pattern in as_tuple(patterns))


def as_tuple(value: Listed) -> Values:
    """A list, or a single value, of a file; () for none."""
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)
