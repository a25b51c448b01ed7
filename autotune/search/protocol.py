"""What the loop and a strategy say to each other. Frozen values; knows neither Optuna nor processes.

    step = strategy.propose()                       # Launch or Stop
    while load := strategy.next_load(step.server):  # load parts on the live server, until None
        strategy.tell(Observation(step.server, load, outcome, cost_s=...))

A strategy's state is a pure function of its seed and of what it was told, in order: telling a new
strategy the past observations of a study resumes it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Protocol

from autotune.records import Config, Crash, Value


class StopKind(enum.StrEnum):
    """Which rule ended the search."""

    LAUNCHES = "launches"  # the budget of launches is used
    TRIALS = "trials"  # the budget of trials is used: the loop counts them
    HOURS = "hours"  # the budget of hours is used
    GAIN = "gain"  # no launch left is expected to add enough
    EXHAUSTED = "exhausted"  # every configuration was measured or is closed
    CRASHES = "crashes"  # nothing served, and nothing left has a fair chance to
    HOST = "host"  # this host cannot run even the last good configuration


@dataclasses.dataclass(frozen=True)
class Limits:
    """When to stop. None: no such limit.

    `gain` is the least expected gain of a launch (crashes counted) that is worth making it, as a share of the best.
    """

    launches: int | None = None
    hours: float | None = None
    gain: float = 0.003

    def spent(self, launches: int, seconds: float) -> Stop | None:
        """The stop when a budget is used up, None while all have something left."""
        if self.launches is not None and launches >= self.launches:
            return Stop(StopKind.LAUNCHES, f"all {self.launches} launches are used")
        if self.hours is not None and seconds >= self.hours * 3600:
            return Stop(StopKind.HOURS, f"all {self.hours:g} hours are used")
        return None


@dataclasses.dataclass(frozen=True)
class Launch:
    """The next server part to start.

    `expected_gain` is the expected improvement over the best so far, as a share of it, given that the
    launch works; `chance` is the probability that it does. `intent` is set when the server was launched
    before and is launched again on purpose (`retry`, `confirm`, `measure`).
    """

    server: Config
    reason: str
    expected_gain: float
    chance: float
    intent: str | None = None


@dataclasses.dataclass(frozen=True)
class Stop:
    """No further launch; `kind` says which rule ended the search, `reason` says it in a sentence."""

    kind: StopKind
    reason: str


@dataclasses.dataclass(frozen=True)
class Measured:
    """One measurement on a live server.

    `value` is the objective, higher is better, positive; None when the measurement is not valid.
    `ratios` maps each limit's name to measured / limit: above 1 it is violated. Give the ratios of kept
    limits too where known: they tell how much room is left. `relative_noise` is the standard
    deviation of `value` as a share of it, None when unknown.
    """

    value: float | None
    feasible: bool = True
    ratios: Mapping[str, float] = dataclasses.field(default_factory=dict)
    relative_noise: float | None = None

    @property
    def violations(self) -> dict[str, float]:
        """By how much each violated limit is exceeded, as a share of the limit."""
        return {name: ratio - 1 for name, ratio in self.ratios.items() if ratio > 1}


@dataclasses.dataclass(frozen=True)
class Observation:
    """One outcome. `load` is None when the server never got as far as a load part.

    `cost_s` are the seconds that it took, `launch_s` the part of them spent on starting the server: above 0
    exactly for the first observation of a launch. `trial` is the number under which the study knows it.
    """

    server: Config
    load: Config | None
    outcome: Measured | Crash
    cost_s: float
    launch_s: float = 0.0
    trial: int | None = None


@dataclasses.dataclass(frozen=True)
class Best:
    """The configuration that a strategy would report now, and its estimated objective (noise averaged out)."""

    server: Config
    load: Config
    value: float


@dataclasses.dataclass(frozen=True)
class Pivot:
    """The decision to close a region, or to open it again, with everything that it rests on.

    `region` maps parameters to the choices under suspicion. `belief` is the probability that the region always
    crashes; `chance` that its most promising launch works; `upper_gain` what that launch may plausibly add, as a
    share of the best so far; `cost_s` what it is expected to cost; `alternative` describes the best launch
    elsewhere. `launches_saved` counts the launches in the region that would otherwise rank above it.
    """

    action: str  # "close" or "reopen"
    region: Mapping[str, tuple[Value, ...]]
    trials: tuple[int, ...]
    signatures: tuple[str, ...]
    belief: float
    chance: float
    upper_gain: float
    cost_s: float
    alternative: str
    launches_saved: int
    reason: str
    reopens_when: str
    after_launches: int

    @property
    def key(self) -> str:
        """Identity across a resume: what was decided, on which evidence."""
        region = ",".join(f"{k}={'|'.join(map(str, v))}" for k, v in sorted(self.region.items()))
        return f"{self.action}:{region}:{','.join(map(str, self.trials))}"

    def to_json(self) -> dict[str, Any]:
        """Plain data for one line of pivots.jsonl."""
        plain = dataclasses.asdict(self)
        plain["region"] = {k: list(v) for k, v in self.region.items()}
        return {"key": self.key, **plain}


class Strategy(Protocol):
    """A search strategy, deterministic by its seed and by what it was told."""

    def propose(self) -> Launch | Stop:
        """The next server part to launch, or why none is worth it."""

    def next_load(self, server: Config) -> Config | None:
        """The next load part to measure on this live server; None: stop the server."""

    def tell(self, observation: Observation) -> None:
        """Take in one outcome."""

    def pending(self, server: Config, load: Config | None = None) -> None:
        """A launch of `server` runs elsewhere: neither a success nor a failure, and not proposed again.

        `load`: the load part that it is or will be measured under, where known.
        """

    def done(self, server: Config) -> None:
        """That launch has ended (its observations, if any, were told before)."""

    def best(self) -> Best | None:
        """What would be reported now; None when nothing feasible was measured."""

    def pivots(self) -> list[Pivot]:
        """Decisions since the last call, oldest first."""
