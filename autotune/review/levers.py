"""What each choice is worth: configurations that differ in that choice only, compared pairwise.

The factor is the geometric mean of the ratios; its interval comes from their spread (Student's t on the
logarithms), or from the windows' own errors for a single pair. Parameters that exist only under a choice
(`when`) are left out of the comparison, since they cannot be held fixed across it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from autotune.measure.estimate import student_t
from autotune.records import Config, Value, config_key
from autotune.review.tested import Tested
from autotune.space import Param, Space


@dataclasses.dataclass(frozen=True)
class Lever:
    """`choice` instead of `base` multiplies the objective by `factor` (95 % interval low to high, where known)."""

    param: str
    base: Value
    choice: Value
    factor: float
    low: float | None
    high: float | None
    pairs: int
    load: bool

    @property
    def sign(self) -> int:
        """+1 a gain, -1 a loss, 0 not told apart from no effect."""
        if self.low is None or self.high is None:
            return 0
        return 1 if self.low > 1 else -1 if self.high < 1 else 0


def levers(space: Space, measured: Sequence[Tested]) -> tuple[Lever, ...]:
    """Every choice that can be compared with the baseline's: those of the server first, the largest effect first."""
    found = []
    for param in space.params:
        base = space.baseline.get(param.name, _usual(param.name, measured))
        if base is not None:
            found += _of_param(space, param, base, measured)
    return tuple(sorted(found, key=lambda lever: (lever.load, -abs(math.log(lever.factor)))))


def _usual(name: str, measured: Sequence[Tested]) -> Value | None:
    """The choice measured most often, to compare with where the baseline does not have the parameter."""
    counts: dict[str, list[Value]] = {}
    for entry in measured:
        if name in entry.config:
            counts.setdefault(repr(entry.config[name]), []).append(entry.config[name])
    return max(counts.values(), key=len)[0] if counts else None


def _of_param(space: Space, param: Param, base: Value, measured: Sequence[Tested]) -> list[Lever]:
    dependents = _dependents(space, param.name)
    groups: dict[str, dict[str, list[Tested]]] = {}
    values: dict[str, Value] = {}
    for entry in measured:
        if param.name in entry.config and entry.value > 0:
            rest = {k: v for k, v in entry.config.items() if k != param.name and k not in dependents}
            key = repr(entry.config[param.name])
            values[key] = entry.config[param.name]
            groups.setdefault(config_key(rest), {}).setdefault(key, []).append(entry)
    found = []
    for key, choice in values.items():
        if key == repr(base):
            continue
        pairs = [(a, b) for group in groups.values() for a in group.get(repr(base), []) for b in group.get(key, [])]
        if pairs:
            found.append(_lever(param, base, choice, pairs))
    return found


def _lever(param: Param, base: Value, choice: Value, pairs: Sequence[tuple[Tested, Tested]]) -> Lever:
    logs = [math.log(b.value / a.value) for a, b in pairs]
    mean = statistics.fmean(logs)
    half = _within(pairs)
    if len(logs) > 1:
        spread = statistics.stdev(logs) / math.sqrt(len(logs)) * student_t(0.975, min(len(logs) - 1, 200))
        half = max(spread, half or 0.0)
    low, high = (None, None) if half is None else (math.exp(mean - half), math.exp(mean + half))
    return Lever(param.name, base, choice, math.exp(mean), low, high, len(pairs), param.load)


def _within(pairs: Sequence[tuple[Tested, Tested]]) -> float | None:
    """Half-width of the mean log ratio from the windows' own errors; None when one is unknown."""
    squares = []
    for pair in pairs:
        for entry in pair:
            if entry.relative_error is None:
                return None
            squares.append(entry.relative_error ** 2)
    return math.sqrt(sum(squares)) / len(pairs)


def _dependents(space: Space, name: str) -> set[str]:
    """Parameters whose existence hangs on `name`, also through others."""
    found: set[str] = set()
    for param in space.params:
        if name in param.when or found & set(param.when):
            found.add(param.name)
    return found


def changed(baseline: Config, other: Config) -> dict[str, tuple[Value | None, Value | None]]:
    """Parameters whose choice differs: name -> (baseline's, other's); None where it does not exist."""
    names = [*other, *(n for n in baseline if n not in other)]
    return {n: (baseline.get(n), other.get(n)) for n in names if repr(baseline.get(n)) != repr(other.get(n))}
