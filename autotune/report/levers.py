"""The effect of each choice: configurations that differ in that choice only, compared pairwise.

The factor is the geometric mean of the ratios; its interval comes from their spread (Student's t on the logarithms), or
from the windows' own errors for a single pair. Parameters that exist only under a choice (`when`) are left out of the
comparison. Choices that were only ever changed together are compared together, against the baseline's server.
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autotune.measure.statistics import student_t
from autotune.records import Value, config_key
from autotune.report.measured import Tested, changed, choice_text, value_text
from autotune.space.space import Param, Space

MOST_TOGETHER = 4  # choices of one lever
MOST_FREEDOM = 200  # degrees of freedom in the table of Student's t


class Lever(NamedTuple):
    """`choices` instead of `bases` multiply the objective by `factor` (95 % interval low to high, where known)."""

    choices: Mapping[str, Value]
    bases: Mapping[str, Value]
    factor: float
    low: float | None
    high: float | None
    pairs: int
    load: bool

    @property
    def name(self) -> str:
        return " and ".join(choice_text(name, value) for name, value in self.choices.items())

    @property
    def instead(self) -> str:
        return " and ".join(value_text(self.bases[name]) for name in self.choices)

    @property
    def key(self) -> str:
        """Identity across studies."""
        return config_key(self.bases) + config_key(self.choices)

    @property
    def sign(self) -> int:
        """+1 a gain, -1 a loss, 0 not distinguishable from no effect."""
        if self.low is None or self.high is None:
            return 0
        return 1 if self.low > 1 else -1 if self.high < 1 else 0


def levers(space: Space, measured: Sequence[Tested]) -> tuple[Lever, ...]:
    """Every choice with at least one pair: choices of the server first, the largest effect first."""
    found: list[Lever] = []
    for param in space.params:
        base = space.baseline.get(param.name, _most_measured(param.name, measured))
        if base is not None:
            found += _of_param(space, param, base, measured)
    found += _together(space, measured, {(n, repr(v)) for lever in found for n, v in lever.choices.items()})
    return tuple(sorted(found, key=lambda lever: (lever.load, -abs(math.log(lever.factor)))))


def _most_measured(name: str, measured: Sequence[Tested]) -> Value | None:
    """The reference choice of a parameter that the baseline does not have."""
    values = [entry.config[name] for entry in measured if name in entry.config]
    counts = collections.Counter(map(repr, values))
    return max(values, key=lambda value: counts[repr(value)], default=None)


def _of_param(space: Space, param: Param, base: Value, measured: Sequence[Tested]) -> list[Lever]:
    name, dependents = param.name, _dependents(space, {param.name})
    entries = [entry for entry in measured if name in entry.config and entry.value > 0]
    groups: dict[str, dict[str, list[Tested]]] = {}
    for entry in entries:
        rest = {k: v for k, v in entry.config.items() if k != name and k not in dependents}
        groups.setdefault(config_key(rest), {}).setdefault(repr(entry.config[name]), []).append(entry)
    found = []
    for key, choice in {repr(entry.config[name]): entry.config[name] for entry in entries}.items():
        pairs = [(a, b) for group in groups.values() for a in group.get(repr(base), []) for b in group.get(key, [])]
        if pairs and key != repr(base):
            found.append(_lever({name: choice}, {name: base}, param.load, pairs))
    return found


def _together(space: Space, measured: Sequence[Tested], known: set[tuple[str, str]]) -> list[Lever]:
    """Servers that differ from the baseline's in several choices, at least one of which has no lever of its own."""
    server, _ = space.split(space.baseline)
    under: dict[str, Tested] = {}
    for entry in measured:
        own, load = space.split(entry.config)
        if config_key(own) == config_key(server) and entry.value > 0:
            under[config_key(load)] = entry
    groups: dict[str, tuple[dict[str, Value], list[tuple[Tested, Tested]]]] = {}
    for entry in measured:
        own, load = space.split(entry.config)
        moved = changed(server, own)
        moved = {n: pair for n, pair in moved.items() if n not in _dependents(space, set(moved))}
        choices = {n: b for n, (a, b) in moved.items() if a is not None and b is not None}
        base = under.get(config_key(load))
        if base is not None and entry.value > 0 and 1 < len(choices) <= MOST_TOGETHER and any(
                (n, repr(v)) not in known for n, v in choices.items()):
            groups.setdefault(config_key(choices), (choices, []))[1].append((base, entry))
    return [_lever(choices, {n: space.baseline[n] for n in choices}, False, pairs)
            for choices, pairs in groups.values()]


def _lever(choices: Mapping[str, Value], bases: Mapping[str, Value], load: bool,
           pairs: Sequence[tuple[Tested, Tested]]) -> Lever:
    logs = [math.log(b.value / a.value) for a, b in pairs]
    mean = statistics.fmean(logs)
    errors = [entry.relative_error for pair in pairs for entry in pair]
    known = [error for error in errors if error is not None]
    half = math.hypot(*known) / len(pairs) if len(known) == len(errors) else None  # from the windows' own errors
    if len(logs) > 1:
        freedom = min(len(logs) - 1, MOST_FREEDOM)
        spread = statistics.stdev(logs) / math.sqrt(len(logs)) * student_t(0.975, freedom)
        half = max(spread, half or 0.0)
    low, high = (None, None) if half is None else (math.exp(mean - half), math.exp(mean + half))
    return Lever(choices, bases, math.exp(mean), low, high, len(pairs), load)


def _dependents(space: Space, names: set[str]) -> set[str]:
    """Parameters whose existence depends on one of `names`, also through others."""
    found: set[str] = set()
    for param in space.params:
        if (names | found) & set(param.when):
            found.add(param.name)
    return found
