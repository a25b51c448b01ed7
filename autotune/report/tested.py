"""Configurations as the study measured them: repeats of one configuration together, with means and intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from autotune.records import Config, config_key
from autotune.report.wording import FIGURES, LATENCY
from autotune.storage.trial import ALONE, BESIDE, TrialRecord


@dataclasses.dataclass(frozen=True)
class Tested:
    """One configuration with every valid measurement of it. Where it was measured again to confirm it, the figures
    come from those blocks alone: they were not chosen for being high.

    `value` is the mean objective, `relative_error` the half-width of its 95 % interval as a share, from the spread
    within the windows (None: unknown). `ratios` are mean measured / limit; above 1 the limit is broken.
    """

    config: Config
    trials: tuple[int, ...]
    value: float
    relative_error: float | None
    feasible: bool
    figures: Mapping[str, float]
    ratios: Mapping[str, float]
    record: TrialRecord

    @property
    def trial(self) -> int:
        """The trial that measured it first."""
        return self.trials[0]

    @property
    def violated(self) -> tuple[str, ...]:
        return tuple(name for name, ratio in self.ratios.items() if ratio > 1)

    @property
    def energy_source(self) -> str | None:
        return self.record.attrs.get("energy_source")

    @property
    def energy_assumed(self) -> bool:
        return bool(self.record.attrs.get("energy_assumed"))


def valid(record: TrialRecord) -> bool:
    """Whether a trial holds a measurement that may be compared with others."""
    return (record.state == "COMPLETE" and record.value is not None and not record.crashed
            and not record.attrs.get("invalid_reasons"))


def copied(record: TrialRecord) -> bool:
    """Whether a trial repeats another's outcome because the server would have been the same one."""
    return record.attrs.get("same_as") is not None


def tested(records: Iterable[TrialRecord]) -> list[Tested]:
    """Every configuration with a valid measurement of its own, best feasible first."""
    groups: dict[str, list[TrialRecord]] = {}
    for record in records:
        if valid(record) and not copied(record) and record.attrs.get("confirm") not in (ALONE, BESIDE):
            groups.setdefault(config_key(record.config), []).append(record)
    return sorted((_merge(group) for group in groups.values()), key=lambda t: (not t.feasible, -t.value))


def find(config: Config, candidates: Sequence[Tested]) -> Tested | None:
    """The entry for exactly this configuration."""
    key = config_key(config)
    return next((t for t in candidates if config_key(t.config) == key), None)


def _merge(group: Sequence[TrialRecord]) -> Tested:
    numbers = tuple(r.number for r in group)
    group = [r for r in group if r.attrs.get("confirm") is not None] or group
    values = [r.value for r in group if r.value is not None]
    errors = [r.attrs.get("relative_error") for r in group]
    known = [float(e) for e in errors if e is not None and math.isfinite(e)]
    error = math.sqrt(sum(e * e for e in known)) / len(known) if known and len(known) == len(group) else None
    ratios = _means([r.attrs.get("limit_ratios") or {} for r in group])
    feasible = any(r.feasible for r in group) and all(ratio <= 1 for ratio in ratios.values())
    return Tested(group[-1].config, numbers, sum(values) / len(values), error, feasible,
                  _means([_figures(r) for r in group]), ratios, group[-1])


def _figures(record: TrialRecord) -> dict[str, float]:
    figures = {name: float(value) for name, value in record.attrs.items()
               if (name in FIGURES or LATENCY.fullmatch(name)) and isinstance(value, int | float)}
    requests, errors = record.attrs.get("requests"), record.attrs.get("errors")
    if isinstance(requests, int) and isinstance(errors, int) and requests + errors > 0:
        figures.setdefault("error_rate", errors / (requests + errors))
    return figures


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of every key over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _mean([row[name] for row in rows if name in row]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
