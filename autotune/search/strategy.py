"""The protocol between the tuning loop and a search strategy, as frozen values.

    step = strategy.propose()                       # Launch or Stop
    while load := strategy.next_load(step.server):  # load parts on the live server, until None
        strategy.tell(Observation(step.server, load, outcome, cost_s=...))

A strategy is a pure function of its seed and observations, in order: a new one with a study's observations resumes it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from autotune.records import Config, Crash, Value


class StopKind(enum.StrEnum):
    """The rule that ended the search."""

    LAUNCHES = "launches"  # no launches left in the budget
    TRIALS = "trials"  # no trials left in the budget (counted by the loop)
    HOURS = "hours"  # no hours left in the budget
    GAIN = "gain"  # no remaining launch is expected to gain enough
    EXHAUSTED = "exhausted"  # every configuration is measured or closed
    CRASHES = "crashes"  # no server came up, and no remaining one is likely to
    HOST = "host"  # this host cannot run the last good configuration any more


@dataclasses.dataclass(frozen=True)
class Limits:
    """Budgets of a study; None is unlimited.

    `gain`: smallest expected gain that justifies a launch, as a share of the best value, with the crash risk included.
    """

    launches: int | None = None
    hours: float | None = None
    gain: float = 0.003

    def spent(self, launches: int, seconds: float) -> Stop | None:
        """Stop if a budget is used up, else None."""
        if self.launches is not None and launches >= self.launches:
            return Stop(StopKind.LAUNCHES, f"all {self.launches} launches are used")
        if self.hours is not None and seconds >= self.hours * 3600:
            return Stop(StopKind.HOURS, f"all {self.hours:g} hours are used")
        return None


@dataclasses.dataclass(frozen=True)
class Launch:
    """The next server part to start.

    `expected_gain`: expected improvement as a share of the best value, if the launch works. `chance`: probability that
    it works. `intent`: `retry`, `confirm` or `measure` if the server was launched before.
    """

    server: Config
    reason: str
    expected_gain: float
    chance: float
    intent: str | None = None


class Stop(NamedTuple):
    """End of the search: the rule and a sentence for people."""

    kind: StopKind
    reason: str


@dataclasses.dataclass(frozen=True)
class Measured:
    """One measurement on a live server.

    `value`: the objective, positive, higher is better; None for an invalid measurement. `ratios`: measured / limit by
    limit, above 1 if violated. `relative_noise`: standard deviation of `value` as a share of it, None if unknown.
    `ratio_errors`: standard errors of ratios, where known. `short`: how short the server was of a resource, 0..1.
    """

    value: float | None
    feasible: bool = True
    ratios: Mapping[str, float] = dataclasses.field(default_factory=dict)
    relative_noise: float | None = None
    ratio_errors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    short: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def violations(self) -> dict[str, float]:
        """Excess over each violated limit, as a share of the limit."""
        return {name: ratio - 1 for name, ratio in self.ratios.items() if ratio > 1}


@dataclasses.dataclass(frozen=True)
class Observation:
    """One outcome. `load` is None if the server failed before any load part.

    `cost_s`: seconds in total. `launch_s`: seconds of the server's start, above 0 for the first observation of a launch
    only. `trial`: number of the trial in the study.
    """

    server: Config
    load: Config | None
    outcome: Measured | Crash
    cost_s: float
    launch_s: float = 0.0
    trial: int | None = None


class Best(NamedTuple):
    """Best configuration so far, with its estimated objective (noise averaged out)."""

    server: Config
    load: Config
    value: float


@dataclasses.dataclass(frozen=True)
class Pivot:
    """Decision to close or reopen a region, with its evidence.

    `belief`: probability that the region always crashes. `chance`, `upper_gain` (a share of the best) and `cost_s`:
    probability, plausible gain and expected cost of the region's most promising launch. `alternative`: the best launch
    outside the region. `launches_saved`: launches in the region that would otherwise rank above the alternative.
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
        """Identity of the decision across a resume."""
        region = ",".join(f"{k}={'|'.join(map(str, v))}" for k, v in sorted(self.region.items()))
        return f"{self.action}:{region}:{','.join(map(str, self.trials))}"

    def to_json(self) -> dict[str, Any]:
        """Plain data for one line of pivots.jsonl."""
        return {"key": self.key, **dataclasses.asdict(self), "region": {k: list(v) for k, v in self.region.items()}}


class Strategy(Protocol):
    """A search strategy, deterministic given its seed and observations."""


    def propose(self) -> Launch | Stop:
        """The next server part to launch, or the reason to stop."""

    def next_load(self, server: Config) -> Config | None:
        """The next load part to measure on a live server; None stops the server."""

    def tell(self, observation: Observation) -> None:
        """Add one observation."""

    def pending(self, server: Config, load: Config | None = None) -> None:
        """Mark a launch as running on another worker; it is not proposed again. `load`: its load part, if known."""

    def done(self, server: Config) -> None:
        """Mark a pending launch as ended, after its observations were added."""

    def best(self) -> Best | None:
        """The configuration to report now; None if nothing feasible was measured."""

    def pivots(self) -> list[Pivot]:
        """Pivots since the last call, oldest first."""
