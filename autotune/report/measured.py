"""Configurations as the study measured them: repeats merged, with means and intervals; names and units of figures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from autotune.records import STATISTICS, Config, Energy, Value, config_key
from autotune.space.constraints import text
from autotune.storage.trial import ALONE, BESIDE, LATENCIES, TrialRecord
from autotune.utils.text import one_line

# Attribute: (name for people, unit), in the order of tables.
FIGURES = {
    "tokens_per_j": ("Output tokens per joule", "tok/J"), "tokens_per_s": ("Throughput", "tok/s"),
    "watts": ("Power", "W"), "ttft_p50_ms": ("TTFT p50", "ms"), "ttft_p99_ms": ("TTFT p99", "ms"),
    "tpot_p50_ms": ("TPOT p50", "ms"), "tpot_p99_ms": ("TPOT p99", "ms"), "e2e_p99_ms": ("Whole request p99", "ms"),
    "accept_length": ("Acceptance length", "tok/step"), "output_agreement": ("Output agreement", ""),
    "error_rate": ("Error rate", ""),
}
LATENCY = re.compile(rf"({'|'.join(LATENCIES)})_({'|'.join(STATISTICS)})_ms")


class Tested(NamedTuple):
    """One configuration with every valid measurement of it.

    `value` is the mean objective, `relative_error` the half-width of its 95 % interval as a share, from the spread
    within the windows (None: unknown). `ratios` are mean measured / limit; above 1 the limit is broken; `ratio_errors`
    their standard errors where known. The figures of a confirmed configuration come from its confirmation blocks alone:
    those were not selected for a high value.
    """

    config: Config
    trials: tuple[int, ...]
    value: float
    relative_error: float | None
    feasible: bool
    figures: Mapping[str, float]
    ratios: Mapping[str, float]
    record: TrialRecord
    ratio_errors: Mapping[str, float] = {}

    @property
    def trial(self) -> int:
        return self.trials[0]

    @property
    def violated(self) -> tuple[str, ...]:
        return tuple(name for name, ratio in self.ratios.items() if ratio > 1)

    @property
    def energy(self) -> Energy:
        assert self.record.measurement is not None
        return self.record.measurement.energy


def valid(record: TrialRecord) -> bool:
    """True for a trial whose measurement may be compared with others."""
    return record.state == "COMPLETE" and None not in (record.value, record.measurement) and not record.invalid_reasons


def copied(record: TrialRecord) -> bool:
    """True for a trial that repeats another's outcome: both configurations resolve to the same server."""
    return record.same_as is not None


def ended(record: TrialRecord) -> bool:
    return record.state in ("COMPLETE", "PRUNED")


def standing(record: TrialRecord) -> str:
    """A trial's outcome in a few words."""
    if record.crash is not None:
        return one_line(f"CRASHED at {record.crash.stage}: {record.crash.category}")
    if record.state == "FAIL":
        return "FAILED (not the configuration's fault)"
    if record.state in ("RUNNING", "WAITING"):
        return record.state.capitalize()
    if record.invalid_reasons or record.value is None:
        return one_line(f"INVALID: {', '.join(record.invalid_reasons or ['no value'])}")
    if record.score is not None and record.score.violated:
        return one_line(f"INFEASIBLE: breaks {', '.join(record.score.violated)}")
    return "Feasible" if record.feasible else "INFEASIBLE"


def tested(records: Iterable[TrialRecord]) -> list[Tested]:
    """Every configuration with a valid measurement of its own, best feasible first."""
    groups: dict[str, list[TrialRecord]] = {}
    for record in records:
        if valid(record) and not copied(record) and record.confirm not in (ALONE, BESIDE):
            groups.setdefault(config_key(record.config), []).append(record)
    return sorted((_merge(group) for group in groups.values()), key=lambda t: (not t.feasible, -t.value))


def find(config: Config, candidates: Sequence[Tested]) -> Tested | None:
    key = config_key(config)
    return next((t for t in candidates if config_key(t.config) == key), None)


def changed(baseline: Config, other: Config) -> dict[str, tuple[Value | None, Value | None]]:
    """Parameters whose choice differs: name -> (baseline's, other's); None where the parameter is absent."""
    names = [*other, *(n for n in baseline if n not in other)]
    return {n: (baseline.get(n), other.get(n)) for n in names if repr(baseline.get(n)) != repr(other.get(n))}


def _merge(group: Sequence[TrialRecord]) -> Tested:
    numbers = tuple(r.number for r in group)
    group = [r for r in group if r.confirm is not None] or group
    values = [r.value for r in group if r.value is not None]
    errors = [r.measurement.relative_error for r in group if r.measurement is not None]
    known = [e for e in errors if e is not None and math.isfinite(e)]
    error = math.sqrt(sum(e * e for e in known)) / len(known) if known and len(known) == len(group) else None
    ratios = _means([r.ratios for r in group])
    figures = {name: value for name, value in _means([r.figures for r in group]).items()
               if name in FIGURES or LATENCY.fullmatch(name)}
    feasible = any(r.feasible for r in group) and all(ratio <= 1 for ratio in ratios.values())
    stated = [r.score.ratio_errors if r.score is not None else {} for r in group]
    errors_of = {name: math.hypot(*(row[name] for row in stated)) / len(stated)
                 for name in ratios if all(name in row for row in stated)}
    return Tested(group[-1].config, numbers, sum(values) / len(values), error, feasible, figures, ratios, group[-1],
                  errors_of)


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of every key over the rows that have it."""
    found = {name: [row[name] for row in rows if name in row] for row in rows for name in row}
    return {name: sum(values) / len(values) for name, values in found.items()}


def figure_title(name: str) -> tuple[str, str]:
    """(name for people, unit) of a trial attribute or of a limit."""
    plain = limited(name)
    if plain in FIGURES:
        return FIGURES[plain]
    latency = LATENCY.fullmatch(plain)
    if latency:
        return f"{latency[1].upper() if latency[1] != 'e2e' else 'Whole request'} {latency[2]}", "ms"
    return ("Speed of a request", "tok/s") if plain == "request_tokens_per_s" else (plain.replace("_", " "), "")


def limited(limit: str) -> str:
    """The figure that a limit bounds: max_watts bounds watts."""
    return limit.removeprefix("max_").removeprefix("min_")


def value_text(value: Value | None) -> str:
    """A choice, or "absent" for a parameter without one."""
    return "absent" if value is None else one_line(text(value))


def choice_text(name: str, value: Value) -> str:
    return f"{name}={one_line(text(value))}"


def config_text(config: Config) -> str:
    return " ".join(choice_text(name, value) for name, value in config.items())


def changes_text(baseline: Config, config: Config, absent: str = "absent") -> str:
    """name=value for every choice that differs from the baseline's; "" for none."""
    return ", ".join(f"{name}={absent if now is None else value_text(now)}"
                     for name, (_, now) in changed(baseline, config).items())


def region_text(region: Mapping[str, object]) -> str:
    """A set of configurations as `a=1 or 2 and b=true`."""
    several = {name: values if isinstance(values, list | tuple) else (values,) for name, values in region.items()}
    return " and ".join(f"{name}={' or '.join(one_line(text(v)) for v in values)}"
                        for name, values in several.items()) or "the whole space"
