"""The default strategy: launch-aware, learning from crashes, giving regions up by a computed decision.

    strategy = LaunchAware(space, Limits(launches=40, hours=8.0), seed=0)

One page of decisions, in this order: budgets, the baseline, what is owed (a retry, a confirmation), then the launch
with the most expected gain per second among those that no pivot has closed, then why to stop. Everything is computed
from what was told (`Memory`), so that telling a new strategy the same observations resumes the search.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from autotune.records import Blame, Config
from autotune.search.crashes import CrashModel
from autotune.search.grid import Codes, Grid
from autotune.search.loads import next_load
from autotune.search.memory import Key, Memory
from autotune.search.outlook import Costs, Outlook, look
from autotune.search.protocol import Best, Launch, Observation, Pivot, Stop, StopKind
from autotune.search.value import Posterior, ValueModel
from autotune.space import Space

BASELINE_CHANCE = 0.95
CENTRES = 4  # best configurations around which candidates of a large space are drawn
HOPELESS = 0.1  # chance below which, when nothing ever served, no further launch is made
DEAD_LAUNCHES = 20  # crashed launches without a single success after which the search ends in any case


@dataclasses.dataclass(frozen=True)
class Limits:
    """When to stop. None: no such limit.

    `gain` is the least expected gain of a launch (crashes counted) that is worth making it, as a share of the best.
    """

    launches: int | None = None
    hours: float | None = None
    gain: float = 0.001


class LaunchAware:
    """Implements `protocol.Strategy`."""

    def __init__(self, space: Space, limits: Limits | None = None, seed: int = 0) -> None:
        self.space = space
        self.limits = limits or Limits()
        self.seed = seed
        self.grid = Grid(space)
        self.memory = Memory(self.grid)
        self._value = ValueModel(self.grid)
        self._busy: set[Key] = set()
        self._fresh: set[Key] = set()
        self._bar = 0.0
        self._told = -1
        self._posterior: Posterior | None = None
        self._crashes = CrashModel(self.grid, self.memory.passed(), self.memory.served(), [])
        self._best: tuple[Key, int, float] | None = None

    def tell(self, observation: Observation) -> None:
        """Raises KeyError when the configuration is not in the space."""
        self.memory.add(observation)
        self._fresh.discard(self.memory.key(observation.server))

    def pending(self, server: Config) -> None:
        self._busy.add(self.memory.key(server))

    def done(self, server: Config) -> None:
        self._busy.discard(self.memory.key(server))

    def best(self) -> Best | None:
        self._learn()
        if self._best is None:
            return None
        key, load, value = self._best
        return Best(self.grid.server(_row(key)), self.grid.load(load), math.exp(value))

    def pivots(self) -> list[Pivot]:
        return []

    def propose(self) -> Launch | Stop:
        """Raises nothing; deterministic given seed, observations and pending launches."""
        memory, limits = self.memory, self.limits
        if limits.launches is not None and memory.launches >= limits.launches:
            return Stop(StopKind.LAUNCHES, f"all {limits.launches} launches are used")
        if limits.hours is not None and memory.used_s >= limits.hours * 3600:
            return Stop(StopKind.HOURS, f"all {limits.hours:g} hours are used")
        decision = self._baseline() or self._owed() or self._search()
        if isinstance(decision, Launch):
            self._fresh.add(memory.key(decision.server))
        return decision

    def next_load(self, server: Config) -> Config | None:
        """The first call after `propose` always names a load part."""
        self._learn()
        key = self.memory.key(server)
        row = _row(key)[None]
        fresh = key in self._fresh
        if not self.memory.count:
            return self.space.split(self.space.baseline)[1]
        outlook = self._look(row, set())
        index = next_load(outlook.gains[0], Costs.of(self.memory).measure_s, self._bar, fresh, self._usual_load(row))
        return None if index is None else self.grid.load(index)

    def _usual_load(self, row: Codes) -> int:
        """Where a server is measured that promises nothing: as the best so far, else as the baseline."""
        index = self._best[1] if self._best else self.grid.load_index(self.space.split(self.space.baseline)[1])
        allowed = np.flatnonzero(self.grid.allowed(row)[0])
        return index if index in allowed else int(allowed[0])

    def _baseline(self) -> Launch | None:
        server = self.space.split(self.space.baseline)[0]
        key = self.memory.key(server)
        if key in self.memory.servers or key in self._busy:
            return None
        return Launch(server, "the baseline, with which everything is compared", 0.0, BASELINE_CHANCE)

    def _owed(self) -> Launch | Stop | None:
        """A retry after a transient crash, or a confirmation after one blamed on the environment."""
        memory = self.memory
        for key, server in memory.servers.items():
            crashes = server.launch_crashes
            if (not server.came_up and len(crashes) == 1 and crashes[0].blame is Blame.TRANSIENT
                    and key not in self._busy):
                return Launch(self.grid.server(server.row), f"its crash ({crashes[0].category}) looked transient: one "
                              "retry, then it counts against the configuration", 0.0, 0.5, intent="retry")
        return self._confirmation()

    def _confirmation(self) -> Launch | Stop | None:
        memory = self.memory
        confirmed = {crash.signature for passes, _, crash in memory.environment if memory.passes > passes}
        doubted = [e for e in memory.environment if e[0] == memory.passes and e[2].signature not in confirmed]
        if not doubted:
            return None
        crash = doubted[0][2]
        if memory.last_good is not None:
            good = memory.servers[memory.last_good]
            if good.launch_crashes:
                return Stop(StopKind.HOST, f"{crash.category} was blamed on the environment, and the last good "
                            "configuration does not start any more either: this host needs repair")
            if memory.last_good in self._busy:
                return None
            return Launch(self.grid.server(good.row), f"{crash.category} was blamed on the environment: the last good "
                          "configuration tells whether this host still works", 0.0, BASELINE_CHANCE, intent="confirm")
        if len(doubted) > 1:
            return Stop(StopKind.HOST, f"{crash.category} was blamed on the environment, and so was a configuration "
                        "that shares as little as possible with it: nothing can run here")
        row = _row(doubted[0][1])
        rows = self._candidates()
        shared = (rows == row).sum(axis=1)
        far = rows[shared == shared.min()]
        pick = far[int(np.argmax(self._crashes.chance(far)))]
        return Launch(self.grid.server(pick), f"{crash.category} was blamed on the environment: a configuration that "
                      "shares as little as possible with it tells whether anything can run here", 0.0, 0.5)

    def _search(self) -> Launch | Stop:
        self._learn()
        outlook = self._look(self._candidates(), self._busy)
        stop = self._why_stop(outlook)
        if stop is not None:
            return stop
        pick = int(np.argmax(outlook.score))
        self._bar = float(outlook.score[pick])
        return Launch(self.grid.server(outlook.rows[pick]), self._reason(outlook, pick),
                      float(outlook.gain[pick]), float(outlook.chance[pick]))

    def _reason(self, outlook: Outlook, pick: int) -> str:
        return (f"most expected gain per second: {outlook.gain[pick]:.1%} if it works, "
                f"which it does with {outlook.chance[pick]:.0%}")

    def _why_stop(self, outlook: Outlook) -> Stop | None:
        memory = self.memory
        came_up = any(s.came_up for s in memory.servers.values())
        if not outlook.score.size or outlook.score.max() <= 0:
            if self._busy:
                return Stop(StopKind.EXHAUSTED, "every configuration left is being measured elsewhere")
            return Stop(StopKind.EXHAUSTED, f"no configuration is left to try: {self._summary()}")
        if not came_up and (memory.launches >= DEAD_LAUNCHES or outlook.chance.max() < HOPELESS):
            return Stop(StopKind.CRASHES, f"all {memory.launches} launches crashed; the best one left has a chance of "
                        f"{outlook.chance.max():.0%}")
        most = float(outlook.expected.max())
        if came_up and self._best is not None and most < self.limits.gain:
            return Stop(StopKind.GAIN, f"no launch left is expected to add {self.limits.gain:.2%} (the best one "
                        f"{most:.2%}): {self._summary()}")
        return None

    def _summary(self) -> str:
        if self._best is None:
            return "nothing feasible was measured"
        baseline = self.memory.key(self.space.split(self.space.baseline)[0])
        load = self.grid.load_index(self.space.split(self.space.baseline)[1])
        if self._best[:2] == (baseline, load):
            return "the baseline is already the best"
        if self._best[0] == baseline:
            return "the baseline's server is already the best, under another load"
        return "the best so far stands"

    def _candidates(self) -> Codes:
        rng = np.random.default_rng([self.seed, self.memory.count])
        return self.grid.servers(rng, [_row(k) for k in self._leaders()])

    def _leaders(self) -> list[Key]:
        """Server parts of the best configurations, for large spaces."""
        best: dict[Key, float] = {}
        for key, load in self.memory.feasible():
            value = self.memory.servers[key].values[load][0].value or 0.0
            best[key] = max(best.get(key, 0.0), value)
        leaders = sorted(best, key=lambda k: -best[k])[:CENTRES]
        return leaders or [self.memory.key(self.space.split(self.space.baseline)[0])]

    def _look(self, rows: Codes, busy: set[Key]) -> Outlook:
        best = self._best[2] if self._best else None
        return look(self.grid, self.memory, self._posterior, self._crashes, rows, best, busy)

    def _learn(self) -> None:
        """Bring the models up to what was told."""
        memory = self.memory
        if self._told == memory.count:
            return
        self._told = memory.count
        rows, loads, y, noise = memory.measurements(memory.limits())
        self._posterior = self._value.fit(rows, loads, y, noise) if len(rows) else None
        self._crashes = CrashModel(self.grid, memory.passed(), memory.served(), memory.evidence())
        self._best = self._find_best()

    def _find_best(self) -> tuple[Key, int, float] | None:
        feasible = self.memory.feasible()
        if not feasible or self._posterior is None:
            return None
        keys = list(dict.fromkeys(key for key, _ in feasible))
        mean = self._posterior.predict(np.array(keys, dtype=np.int16)).mean
        value, key, load = max((float(mean[keys.index(key), load]), key, load) for key, load in feasible)
        return key, load, value


def _row(key: Key) -> Codes:
    return np.array(key, dtype=np.int16)
