"""The whole study as one frozen value. Every output reads this and nothing else, so that none disagrees.

    story = tell(name, space, objective, limits, study.records(), study.attrs(), pivots, matrix)

Pure: no storage, no files, no clock.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.measure.objective import UNITS
from autotune.records import config_key
from autotune.report.crashes import CrashGroup, group, launch_keys
from autotune.report.levers import Lever, grown, levers
from autotune.report.tested import Tested, copied, find, tested, valid
from autotune.report.untried import Untried, untried
from autotune.space.space import Space
from autotune.storage.trial import TrialRecord


class Conclusion(enum.StrEnum):
    """What may be claimed about the best configuration."""

    IMPROVED = "improved"  # confirmed by interleaved re-measurement
    NO_IMPROVEMENT = "no_improvement"  # confirmed: nothing beats the baseline by enough
    UNDECIDED = "undecided"  # re-measured, and the interval does not decide
    NOT_CONFIRMED = "not_confirmed"  # best of single measurements
    NOTHING_FEASIBLE = "nothing_feasible"
    NOTHING_MEASURED = "nothing_measured"


@dataclasses.dataclass(frozen=True)
class Gain:
    """Gain of the winner over the baseline as a share, with its 95 % interval where known."""

    share: float
    low: float | None
    high: float | None
    confirmed: bool


@dataclasses.dataclass(frozen=True)
class Counts:
    """Trials by outcome. `copied` repeat another trial's outcome and are also counted under it."""

    trials: int
    feasible: int
    infeasible: int
    invalid: int
    crashed: int
    failed: int
    running: int
    copied: int
    launches: int
    crashed_launches: int


@dataclasses.dataclass(frozen=True)
class Spent:
    """Where the time went, in seconds. `wall_s` is first start to last end, None when unknown."""

    wall_s: float | None
    total_s: float
    launch_s: float
    crashed_s: float


@dataclasses.dataclass(frozen=True)
class Limit:
    """One limit and how the winner stands to it: above 1, `ratio` breaks it; 1 - ratio is the headroom."""

    name: str
    limit: float
    ratio: float | None


@dataclasses.dataclass(frozen=True)
class Story:
    study: str
    space: Space
    objective: str
    conclusion: Conclusion
    baseline: Tested | None
    baseline_crash: CrashGroup | None
    best: Tested | None
    winner: Tested | None
    finalists: tuple[Tested, ...]
    gain: Gain | None
    same_load: float | None
    """Gain over the baseline's server under the winner's load, where that was measured and the loads differ."""
    limits: tuple[Limit, ...]
    counts: Counts
    spent: Spent
    crashes: tuple[CrashGroup, ...]
    levers: tuple[Lever, ...]
    pivots: tuple[Mapping[str, Any], ...]
    untried: tuple[Untried, ...]
    matrix: tuple[Mapping[str, Any], ...]
    measured: tuple[Tested, ...]
    records: tuple[TrialRecord, ...]
    identity: Mapping[str, Any]
    provenance: Mapping[str, Any]
    stop: Mapping[str, Any]
    confirmation: Mapping[str, Any]
    strategy: str = ""
    neighbours: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What launches side by side did to the baseline (`neighbours.result`); {} when it was not measured."""

    @property
    def unit(self) -> str:
        """Unit of the objective."""
        return UNITS.get(self.objective, self.objective)

    @property
    def confirmed(self) -> bool:
        return self.conclusion in (Conclusion.IMPROVED, Conclusion.NO_IMPROVEMENT)


def tell(study: str, space: Space, objective: str, limits: Mapping[str, float], records: Sequence[TrialRecord],
         attrs: Mapping[str, Any], pivots: Sequence[Mapping[str, Any]] = (),
         matrix: Sequence[Mapping[str, Any]] = ()) -> Story:
    """One pass over the records. `attrs` are the study's own attributes, `matrix` the rows of matrix.json."""
    measured = tested(records)
    baseline = find(space.baseline, measured)
    best = measured[0] if measured and measured[0].feasible else None
    confirmation = dict(attrs.get("confirmation") or {})
    conclusion = _conclusion(measured, best, confirmation)
    winner = _winner(conclusion, confirmation, measured, baseline, best)
    crashes = group(records, [p.name for p in space.server_params])
    baseline_key = config_key(space.baseline)
    numbers = {r.number for r in records if r.crashed and config_key(r.config) == baseline_key}
    stop = dict(attrs.get("stop") or {})
    return Story(
        study=study, space=space, objective=objective, conclusion=conclusion, baseline=baseline,
        baseline_crash=next((g for g in crashes if numbers & set(g.trials)), None) if baseline is None else None,
        best=best, winner=winner, finalists=tuple(t for t in measured if t.feasible)[:5],
        gain=_gain(conclusion, confirmation, baseline, winner), same_load=_same_load(space, measured, winner),
        limits=tuple(Limit(name, value, winner.ratios.get(name) if winner else None) for name, value in limits.items()),
        counts=_counts(records), spent=_spent(records), crashes=crashes, levers=levers(space, measured),
        pivots=tuple(pivots), untried=untried(space, records, pivots, stop.get("reason")), matrix=tuple(matrix),
        measured=tuple(measured), records=tuple(records), identity=dict(attrs.get("identity") or {}),
        provenance=dict(attrs.get("provenance") or {}), stop=stop, confirmation=confirmation,
        strategy=str(attrs.get("strategy") or ""), neighbours=dict(attrs.get("neighbours") or {}))


def _conclusion(measured: Sequence[Tested], best: Tested | None, confirmation: Mapping[str, Any]) -> Conclusion:
    if not measured:
        return Conclusion.NOTHING_MEASURED
    if best is None:
        return Conclusion.NOTHING_FEASIBLE
    decided = confirmation.get("decided")
    known = (Conclusion.IMPROVED, Conclusion.NO_IMPROVEMENT, Conclusion.UNDECIDED)
    return Conclusion(decided) if decided in known else Conclusion.NOT_CONFIRMED


def _winner(conclusion: Conclusion, confirmation: Mapping[str, Any], measured: Sequence[Tested],
            baseline: Tested | None, best: Tested | None) -> Tested | None:
    """The configuration to run: the confirmed one; the baseline when nothing beats it; else the best measured."""
    number = confirmation.get("winner")
    named = next((t for t in measured if number in t.trials), None) if number is not None else None
    if conclusion is Conclusion.NO_IMPROVEMENT:
        return baseline or named or best
    return named or best


def _gain(conclusion: Conclusion, confirmation: Mapping[str, Any], baseline: Tested | None,
          winner: Tested | None) -> Gain | None:
    told = confirmation if confirmation.get("gain") is not None else _finalist(confirmation, winner)
    if told is not None and conclusion is not Conclusion.NO_IMPROVEMENT:
        low, high = (list(told.get("interval") or []) + [None, None])[:2]
        return Gain(float(told["gain"]), low, high, conclusion is Conclusion.IMPROVED)
    if baseline is None or winner is None or baseline.value <= 0 or winner.config == baseline.config:
        return None
    factor = winner.value / baseline.value
    if winner.relative_error is None or baseline.relative_error is None:
        return Gain(factor - 1, None, None, False)
    half = math.hypot(winner.relative_error, baseline.relative_error)
    return Gain(factor - 1, factor * grown(-half) - 1, factor * grown(half) - 1, False)


def _finalist(confirmation: Mapping[str, Any], entry: Tested | None) -> Mapping[str, Any] | None:
    """What the confirmation says about one configuration."""
    finalists = confirmation.get("finalists") or {}
    found = [finalists[str(n)] for n in entry.trials if str(n) in finalists] if entry is not None else []
    return next((f for f in found if f.get("gain") is not None), None)


def _same_load(space: Space, measured: Sequence[Tested], winner: Tested | None) -> float | None:
    if winner is None:
        return None
    server, load = space.split(space.baseline)[0], space.split(winner.config)[1]
    twin = find({**server, **load}, measured)
    if twin is None or twin is winner or twin.value <= 0 or load == space.split(space.baseline)[1]:
        return None
    return winner.value / twin.value - 1


def _counts(records: Sequence[TrialRecord]) -> Counts:
    complete = [r for r in records if not r.crashed and r.state in ("COMPLETE", "PRUNED")]
    fair = [r for r in complete if valid(r)]
    own = [r for r in records if not copied(r) and r.state in ("COMPLETE", "PRUNED")]
    crashed = [r for r in own if r.crashed]
    served = launch_keys(r for r in own if not r.crashed)
    return Counts(
        trials=len(records), feasible=sum(r.feasible for r in fair), infeasible=sum(not r.feasible for r in fair),
        invalid=len(complete) - len(fair), crashed=sum(r.crashed for r in records),
        failed=sum(r.state == "FAIL" for r in records), running=sum(r.state == "RUNNING" for r in records),
        copied=sum(copied(r) for r in records), launches=len(launch_keys(own)),
        crashed_launches=len(launch_keys(crashed) - served))


def _spent(records: Sequence[TrialRecord]) -> Spent:
    def total(name: str, some: Sequence[TrialRecord]) -> float:
        return sum(float(r.attrs.get(name) or 0) for r in some)

    starts = [r.started for r in records if isinstance(r.started, datetime.datetime)]
    ends = [r.ended for r in records if isinstance(r.ended, datetime.datetime)]
    wall = (max(ends) - min(starts)).total_seconds() if starts and ends else None
    return Spent(wall, total("cost_s", records), total("launch_s", records),
                 total("cost_s", [r for r in records if r.crashed]))
