"""The whole study as one frozen value. Every output reads a story and nothing else, so that no two disagree.

    story = read(settings, study)                                    # from the storage and the study's folder
    story = summarize(name, space, objective, limits, records, attrs, pivots, matrix)     # pure
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import gc
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from autotune.measure.objective import UNITS
from autotune.records import AutotuneError, Count, UsageError
from autotune.report.crashes import CrashGroup, Untried, group, launch_key, untried
from autotune.report.levers import Lever, levers
from autotune.report.measured import Tested, copied, ended, find, tested, valid
from autotune.space.space import Space
from autotune.storage.schema import Choice, read_pivots
from autotune.storage.trial import TrialRecord
from autotune.utils.files import read_plain
from autotune.utils.validation import from_json

if TYPE_CHECKING:
    from autotune.config.settings import Settings
    from autotune.storage.study import Study


class Conclusion(enum.StrEnum):
    """The claim that the study supports about its best configuration."""

    IMPROVED = "improved"  # confirmed by interleaved re-measurement
    NO_IMPROVEMENT = "no_improvement"  # confirmed: nothing beats the baseline by enough
    UNDECIDED = "undecided"  # re-measured, and the interval does not decide
    NOT_CONFIRMED = "not_confirmed"  # best of single measurements
    NOTHING_FEASIBLE = "nothing_feasible"
    NOTHING_MEASURED = "nothing_measured"


DECIDED = (Conclusion.IMPROVED, Conclusion.NO_IMPROVEMENT, Conclusion.UNDECIDED)  # by the confirmation


class Gain(NamedTuple):
    """Gain of the winner over the baseline as a share, with its 95 % interval where known."""

    share: float
    low: float | None
    high: float | None
    confirmed: bool


class Counts(NamedTuple):
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


class Spent(NamedTuple):
    """Time in seconds. `wall_s` is first start to last end, None when unknown."""

    wall_s: float | None
    total_s: float
    launch_s: float
    crashed_s: float


class Limit(NamedTuple):
    """One limit and the winner's measured / limit: a `ratio` above 1 breaks the limit; 1 - ratio is the headroom."""

    name: str
    limit: float
    ratio: float | None


@dataclasses.dataclass(frozen=True)
class Story:
    """`neighbours` is the effect of servers side by side on the baseline; {} when it was not measured."""

    study: str
    space: Space
    objective: str
    conclusion: Conclusion
    baseline: Tested | None
    best: Tested | None
    winner: Tested | None
    finalists: tuple[Tested, ...]
    limits: tuple[Limit, ...]
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
    strategy: str
    neighbours: Mapping[str, Any]

    @property
    def unit(self) -> str:
        return UNITS.get(self.objective, self.objective)

    @property
    def confirmed(self) -> bool:
        return self.conclusion in (Conclusion.IMPROVED, Conclusion.NO_IMPROVEMENT)

    @property
    def engine(self) -> str:
        """Engine and version; "" when unknown."""
        return " ".join(str(x) for x in (self.identity.get("engine"), self.identity.get("engine_version")) if x)

    def is_baseline(self, entry: Tested) -> bool:
        return self.baseline is not None and entry.config == self.baseline.config

    def confirmed_gain(self, entry: Tested | None) -> Mapping[str, Any]:
        """The confirmation's result for one configuration; {} for none."""
        finalists = self.confirmation.get("finalists") or {}
        numbers = entry.trials if entry is not None else ()
        return next((finalists[str(n)] for n in numbers if str(n) in finalists), {})

    @functools.cached_property
    def gain(self) -> Gain | None:
        """Gain of the winner over the baseline; None when either is unknown or they are the same."""
        baseline, winner, conclusion = self.baseline, self.winner, self.conclusion
        result = self.confirmation if self.confirmation.get("gain") is not None else self.confirmed_gain(winner)
        if result.get("gain") is not None and conclusion is not Conclusion.NO_IMPROVEMENT:
            low, high = (list(result.get("interval") or []) + [None, None])[:2]
            return Gain(float(result["gain"]), low, high, conclusion is Conclusion.IMPROVED)
        if baseline is None or winner is None or baseline.value <= 0 or winner.config == baseline.config:
            return None
        factor = winner.value / baseline.value
        if winner.relative_error is None or baseline.relative_error is None:
            return Gain(factor - 1, None, None, False)
        half = math.hypot(winner.relative_error, baseline.relative_error)
        return Gain(factor - 1, factor * math.exp(-half) - 1, factor * math.exp(half) - 1, False)

    @functools.cached_property
    def same_load(self) -> float | None:
        """Gain over the baseline's server under the winner's load, where that is another load and was measured."""
        if self.winner is None:
            return None
        (server, base_load), load = self.space.split(self.space.baseline), self.space.split(self.winner.config)[1]
        same = find({**server, **load}, self.measured)
        if same is None or same is self.winner or same.value <= 0 or load == base_load:
            return None
        return self.winner.value / same.value - 1

    @functools.cached_property
    def counts(self) -> Counts:
        records = self.records
        complete = [r for r in records if not r.crashed and ended(r)]
        fair = [r for r in complete if valid(r)]
        own = [r for r in records if not copied(r) and ended(r)]
        launches = {launch_key(r) for r in own}
        served = {launch_key(r) for r in own if not r.crashed}
        return Counts(
            trials=len(records), feasible=sum(r.feasible for r in fair), infeasible=sum(not r.feasible for r in fair),
            invalid=len(complete) - len(fair), crashed=sum(r.crashed for r in records),
            failed=sum(r.state == "FAIL" for r in records), running=sum(r.state == "RUNNING" for r in records),
            copied=sum(map(copied, records)), launches=len(launches), crashed_launches=len(launches - served))

    @functools.cached_property
    def spent(self) -> Spent:
        starts, ends = [r.started for r in self.records if r.started], [r.ended for r in self.records if r.ended]
        wall = (max(ends) - min(starts)).total_seconds() if starts and ends else None
        return Spent(wall, sum(r.cost_s or 0.0 for r in self.records), sum(r.launch_s or 0.0 for r in self.records),
                     sum(r.cost_s or 0.0 for r in self.records if r.crashed))


class MatrixRow(msgspec.Struct):
    """Required values of a row of matrix.json."""

    config: str
    ctx: Count
    concurrency: Count


def read(settings: Settings, study: Study) -> Story:
    """The story of an open study, with pivots.jsonl and matrix.json of its folder where they exist.

    Raises AutotuneError when matrix.json is not what the verb matrix writes.
    """
    return read_folder(settings, study, settings.study_name, settings.space, settings.limits, settings.folder)


def read_folder(settings: Settings, study: Study, name: str, space: Space, limits: Mapping[str, float],
                folder: pathlib.Path | None) -> Story:
    """The story of a study of another space; `limits` and the settings' objective are for studies that stored none."""
    identity: Mapping[str, Any] = study.attrs().get("identity") or {}
    with no_garbage_collection():
        return summarize(name, space, str(identity.get("objective") or settings.objective.name),
                         limits if identity.get("limits") is None else identity["limits"], study.records(),
                         study.attrs(), read_pivots(folder) if folder else (),
                         _matrix(folder / "matrix.json") if folder else ())


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection, which would take half of the time of reading a large study: all its objects live."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _matrix(path: pathlib.Path) -> Any:
    if not path.exists():
        return []
    try:
        rows = json.loads(read_plain(path))
    except (OSError, ValueError, RecursionError) as error:
        raise AutotuneError(f"{path} cannot be read ({error}): delete it, or run the verb matrix again") from error
    try:
        from_json(rows, list[MatrixRow])
        return from_json(rows, list[dict[str, Choice | None]])
    except UsageError as error:
        raise AutotuneError(f"{path} is not a list of rows as the verb matrix writes them (row {error}): delete it, or "
                            "run the verb matrix again") from error


def summarize(study: str, space: Space, objective: str, limits: Mapping[str, float], records: Sequence[TrialRecord],
              attrs: Mapping[str, Any], pivots: Sequence[Mapping[str, Any]] = (),
              matrix: Sequence[Mapping[str, Any]] = ()) -> Story:
    """Build the story. `attrs` are the study's own attributes, `matrix` the rows of matrix.json."""
    measured = tested(records)
    baseline = find(space.baseline, measured)
    best = measured[0] if measured and measured[0].feasible else None
    confirmation = dict(attrs.get("confirmation") or {})
    decided = confirmation.get("decided")
    conclusion = Conclusion.NOTHING_MEASURED if not measured else Conclusion.NOTHING_FEASIBLE if best is None else \
        Conclusion(decided) if decided in DECIDED else Conclusion.NOT_CONFIRMED
    # The configuration to run: the baseline when nothing beats it, the confirmed one, else the best measured.
    confirmed = next((t for t in measured if confirmation.get("winner") in t.trials), None)
    winner = (baseline if conclusion is Conclusion.NO_IMPROVEMENT else None) or confirmed or best
    stop = dict(attrs.get("stop") or {})
    return Story(
        study=study, space=space, objective=objective, conclusion=conclusion, baseline=baseline,
        best=best, winner=winner, finalists=tuple(t for t in measured if t.feasible)[:5],
        limits=tuple(Limit(name, value, winner.ratios.get(name) if winner else None) for name, value in limits.items()),
        crashes=group(records, [p.name for p in space.server_params]), levers=levers(space, measured),
        pivots=tuple(pivots), untried=untried(space, records, pivots, stop.get("reason")), matrix=tuple(matrix),
        measured=tuple(measured), records=tuple(records), identity=dict(attrs.get("identity") or {}),
        provenance=dict(attrs.get("provenance") or {}), stop=stop, confirmation=confirmation,
        strategy=str(attrs.get("strategy") or ""), neighbours=dict(attrs.get("neighbours") or {}))
