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
from autotune.records import AutotuneError, Config, Count, UsageError, config_key
from autotune.report.crashes import CrashGroup, Untried, group, launch_key, untried
from autotune.report.levers import Lever, levers
from autotune.report.measured import Tested, copied, ended, find, tested, valid
from autotune.space.space import Space, server_key
from autotune.storage.schema import Choice, read_pivots
from autotune.storage.trial import TrialRecord
from autotune.tuning.roofline import Roofline
from autotune.utils.files import read_plain
from autotune.utils.validation import from_json

if TYPE_CHECKING:
    from autotune.config.settings import Settings
    from autotune.storage.study import Study


class Conclusion(enum.StrEnum):
    """The claim that the study supports about its best configuration."""

    IMPROVED = "improved"  # confirmed by interleaved re-measurement
    LOAD_ONLY = "load_only"  # confirmed: another load gains, another server does not
    NO_IMPROVEMENT = "no_improvement"  # confirmed: nothing beats the baseline by enough
    UNDECIDED = "undecided"  # re-measured, and the interval does not decide
    NOT_CONFIRMED = "not_confirmed"  # best of single measurements
    NOTHING_FEASIBLE = "nothing_feasible"
    NOTHING_MEASURED = "nothing_measured"


DECIDED = (Conclusion.IMPROVED, Conclusion.LOAD_ONLY, Conclusion.NO_IMPROVEMENT,
           Conclusion.UNDECIDED)  # by the confirmation
GAINFUL = (Conclusion.IMPROVED, Conclusion.LOAD_ONLY)


class Gain(NamedTuple):
    """A gain of the winner over the baseline as a share, with its interval where known.

    `of`: what was changed for it: `server` (under equal load), `load` (on the baseline's server) or `both`. `level` is
    the interval's: of a confirmation for all its intervals and looks together, else of the windows alone.
    """

    share: float
    low: float | None
    high: float | None
    confirmed: bool
    of: str = "server"
    level: float = 0.95


class Shares(NamedTuple):
    """The gain in its parts; None: not measured, or both have the same server or the same load.

    `server`: the winner's server over the baseline's under the winner's load; `server_before`: under the baseline's
    load; `load`: the winner's load over the baseline's, on the baseline's server; `both`: all that was changed.
    """

    server: Gain | None = None
    server_before: Gain | None = None
    load: Gain | None = None
    both: Gain | None = None


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
    """One limit and the winner's measured / limit: a `ratio` above 1 breaks the limit; 1 - ratio is the headroom.

    `error`: the ratio's standard error, where known.
    """

    name: str
    limit: float
    ratio: float | None
    error: float | None = None


@dataclasses.dataclass(frozen=True)
class Story:
    """`neighbours` is the effect of servers side by side on the baseline; {} when it was not measured.

    `roofline_tokens_per_s`: what bandwidth and arithmetic of the winner's GPUs allow at most under its load.
    """

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
    roofline_tokens_per_s: float | None = None

    @property
    def unit(self) -> str:
        return UNITS.get(self.objective, self.objective)

    @property
    def confirmed(self) -> bool:
        return self.conclusion in (*GAINFUL, Conclusion.NO_IMPROVEMENT)

    @property
    def engine(self) -> str:
        """Engine and version; "" when unknown."""
        return " ".join(str(x) for x in (self.identity.get("engine"), self.identity.get("engine_version")) if x)

    def is_baseline(self, entry: Tested) -> bool:
        return self.baseline is not None and entry.config == self.baseline.config

    def confirmed_gain(self, entry: Tested | None) -> Mapping[str, Any]:
        """The confirmation's result for one configuration; {} for none."""
        finalists, configurations = (self.confirmation.get(x) or {} for x in ("finalists", "configurations"))
        keys = () if entry is None else (*map(str, entry.trials), *(
            key for key, config in configurations.items() if config == entry.config))
        return next((finalists[key] for key in keys if key in finalists), {})

    @functools.cached_property
    def gain(self) -> Gain | None:
        """The gain that the verdict states: the server's under equal load where it was measured, or the load's where
        the server is the baseline's. None where there is nothing to compare."""
        return self.stated(self.winner, self.shares)

    def stated(self, entry: Tested | None, shares: Shares | None) -> Gain | None:
        """The part of a configuration's gain that is worth stating first."""
        if entry is None or shares is None:
            return None
        return shares.server or (shares.load if self._same_server(entry) else None) or shares.both

    @functools.cached_property
    def reference(self) -> Tested | None:
        """The configuration that `gain` compares the winner with."""
        same = self.same_load
        return same if same is not None and self.gain is not None and self.gain.of == "server" else self.baseline

    @functools.cached_property
    def shares(self) -> Shares:
        """The winner's gain in its parts, from the confirmation where it was confirmed, else from the windows."""
        if self.winner is None or self.conclusion is Conclusion.NO_IMPROVEMENT:
            return Shares()
        return self.confirmed_shares(self.winner) or self._measured_shares(self.winner)

    def confirmed_shares(self, entry: Tested) -> Shares | None:
        """The parts of a finalist's gain from the confirmation; None for another configuration."""
        result = self.confirmed_gain(entry)
        if result.get("gain") is None:
            return None
        level, confirmed = self.confirmation.get("level") or 0.95, self.conclusion in GAINFUL and entry is self.winner

        def gain(of: str, found: Mapping[str, Any] | None) -> Gain | None:
            low, high = (list((found or {}).get("interval") or []) + [None, None])[:2]
            return Gain(float((found or {})["gain"]), low, high, confirmed, of, level) \
                if found and found.get("gain") is not None else None

        if self._same_server(entry):
            return Shares(load=gain("load", result), both=gain("both", result))
        equal = self._load(entry) == self._load()
        return Shares(gain("server", result if equal else result.get("server")),
                      gain("server", result.get("server_before")), gain("load", result.get("load")),
                      gain("both", result))

    def _measured_shares(self, winner: Tested) -> Shares:
        base, same = self.baseline, self.same_load

        def gain(of: str, other: Tested | None, one: Tested | None) -> Gain | None:
            if one is None or other is None or other.value <= 0 or one.config == other.config:
                return None
            factor, errors = one.value / other.value, (one.relative_error, other.relative_error)
            half = None if None in errors else math.hypot(*filter(None, errors))
            low, high = (None, None) if half is None else (factor * math.exp(-half) - 1, factor * math.exp(half) - 1)
            return Gain(factor - 1, low, high, False, of)

        before = find({**self.space.split(winner.config)[0], **self._load()}, self.measured)
        apart = same is not base
        return Shares(gain("server", same, winner), gain("server", base, before) if apart else None,
                      gain("load", base, same) if apart else None, gain("both", base, winner))

    def _load(self, entry: Tested | None = None) -> Config:
        return self.space.split(entry.config if entry else self.space.baseline)[1]

    def _same_server(self, entry: Tested) -> bool:
        return server_key(self.space, entry.config) == server_key(self.space, self.space.baseline)

    @functools.cached_property
    def same_load(self) -> Tested | None:
        """The baseline's server under the winner's load, if it was measured."""
        return None if self.winner is None else find(
            {**self.space.split(self.space.baseline)[0], **self._load(self.winner)}, self.measured)

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
    story = read_folder(settings, study, settings.study_name, settings.space, settings.limits, settings.folder)
    roofline = Roofline.read(settings, story.identity.get("engine_version"),
                             str((story.identity.get("devices") or [""])[0]))
    limit = roofline.limit(story.winner.config) if roofline is not None and story.winner is not None else None
    return dataclasses.replace(story, roofline_tokens_per_s=limit)


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


def _finalists(measured: Sequence[Tested], winner: Tested | None,
               confirmation: Mapping[str, Any]) -> tuple[Tested, ...]:
    """The winner, what was re-measured, and then the best others that keep their limits: five in all."""
    again = [config_key(config) for config in (confirmation.get("configurations") or {}).values()]
    feasible = [t for t in measured if t.feasible]
    return tuple(sorted(feasible, key=lambda t: (t is not winner, config_key(t.config) not in again)))[:5]


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
        best=best, winner=winner, finalists=_finalists(measured, winner, confirmation),
        limits=tuple(Limit(name, value, winner.ratios.get(name) if winner else None,
                           winner.ratio_errors.get(name) if winner else None) for name, value in limits.items()),
        crashes=group(records, [p.name for p in space.server_params]), levers=levers(space, measured),
        pivots=tuple(pivots), untried=untried(space, records, pivots, stop.get("reason")), matrix=tuple(matrix),
        measured=tuple(measured), records=tuple(records), identity=dict(attrs.get("identity") or {}),
        provenance=dict(attrs.get("provenance") or {}), stop=stop, confirmation=confirmation,
        strategy=str(attrs.get("strategy") or ""), neighbours=dict(attrs.get("neighbours") or {}))
