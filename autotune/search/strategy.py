"""The default strategy: launch-aware, learning from crashes, giving regions up by a computed decision.

    strategy = LaunchAware(space, Limits(launches=40, hours=8.0), seed=0)

One page of decisions, in this order: budgets, the baseline, what is owed (a retry, a confirmation), then the launch
that is worth most (with the launch after it) among those that no pivot has closed, then why to stop. Everything is
computed from what was told (`Memory`), so that telling a new strategy the same observations resumes the search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autotune.records import Blame, Config
from autotune.search.crashes import CrashModel, Culprit
from autotune.search.grid import Codes, Grid
from autotune.search.loads import MOST_REPEATS, next_load, worth_of_repeat
from autotune.search.memory import NOISE, Key, Memory
from autotune.search.outlook import Costs, Outlook, look
from autotune.search.pivot import Region, record, review
from autotune.search.protocol import Best, Launch, Limits, Observation, Pivot, Stop, StopKind
from autotune.search.value import Floats, Posterior, Strengths, ValueModel
from autotune.space import Space

__all__ = ["LaunchAware", "Limits"]

BASELINE_CHANCE = 0.95
CENTRES = 4  # best configurations around which candidates of a large space are drawn
CHECKS, CHECK_GAIN, WILD, CHECK_CHANCE = 5, 0.005, 0.1, 0.6
LEAST_W, MOST_MIX = 0.03, 4
HOPELESS = 0.1  # chance below which, when nothing ever served, no further launch is made
DEAD_LAUNCHES = 20  # crashed launches without a single success after which the search ends in any case


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
        self._closed: dict[str, Region] = {}
        self._pivots: list[Pivot] = []
        self._told = (-1, False)
        self._known = (-1, -1, -1)
        self._strengths: Strengths | None = None
        self._posterior: Posterior | None = None
        self._beliefs = None
        self._last_best, self._checks = -1e9, 0
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
        written, self._pivots = self._pivots, []
        return written

    def culprits(self) -> list[Culprit]:
        """What may have caused the crashes so far, likeliest first."""
        self._learn()
        return self._crashes.culprits()

    def propose(self) -> Launch | Stop:
        """Raises nothing; deterministic given seed, observations and pending launches."""
        memory = self.memory
        spent = self.limits.spent(memory.launches, memory.used_s, memory.count)
        decision = spent or self._baseline() or self._owed() or self._search()
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
        index = next_load(outlook.gains[0], self._repeats(key), Costs.of(self.memory).measure_s, self._bar, fresh,
                          self._usual_load(row))
        return None if index is None else self.grid.load(index)

    def _repeats(self, key: Key) -> Floats:
        """(L,) what measuring each load part of a live server again is worth for the choice of the winner."""
        out = np.zeros(len(self.grid.load_rows))
        feasible = self.memory.feasible()
        if self._posterior is None or len(feasible) < 2 or not any(k == key for k, _ in feasible):
            return out
        rows = np.array([k for k, _ in feasible], dtype=np.int16)
        loads = np.array([load for _, load in feasible], dtype=np.intp)
        seen = self._posterior.predict(rows)
        mean, sd = seen.mean[np.arange(len(rows)), loads], seen.sd[np.arange(len(rows)), loads]
        for i, (k, load) in enumerate(feasible):
            again = self.memory.servers[k].values[load]
            if k == key and len(again) < MOST_REPEATS:
                noise = again[-1].relative_noise or NOISE
                out[load] = worth_of_repeat(mean[i], sd[i], noise, np.delete(mean, i).max())
        return out

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
        self._learn(True)
        outlook = self._look(self._candidates(), self._busy)
        worth, regions = review(self.grid, outlook, self._crashes, self.limits.gain)
        self._decide(outlook, regions)
        stop = self._why_stop(outlook, worth)
        check = False
        if stop is not None:
            best = self._best[2] if self._best else 0.0
            if best > self._last_best + 0.005:
                self._last_best, self._checks = best, 0
            if stop.kind is not StopKind.GAIN or self._checks >= CHECKS:
                return stop
            worth = self._sceptical(outlook, worth, regions)
            if worth.max() < CHECK_GAIN:
                return stop
            self._checks += 1
            check = True
        pick = int(np.argmax(worth / outlook.cost_s))
        self._bar = float(worth[pick] / outlook.cost_s[pick])
        server = self.memory.servers.get(tuple(outlook.rows[pick].tolist()))
        return Launch(self.grid.server(outlook.rows[pick]), self._reason(outlook, regions, pick),
                      float(outlook.gain[pick]), float(outlook.chance[pick]), "measure" if server else None)

    def _sceptical(self, outlook, worth, regions):
        v, share = self._strengths
        wild = self._value.fit(self.memory.measurements(), (np.maximum(v, WILD ** 2), (0.5, 0.3)))
        sceptic = look(self.grid, self.memory, [(1.0, wild)], self._crashes, outlook.rows, self._best[2], self._busy)
        out = sceptic.expected
        out[sceptic.chance < CHECK_CHANCE] = 0.0
        for region in regions:
            if region.why is not None:
                out[region.inside] = 0.0
        return out

    def _reason(self, outlook: Outlook, regions: Sequence[Region], pick: int) -> str:
        gain, chance = float(outlook.gain[pick]), float(outlook.chance[pick])
        where = [r.name for r in regions if r.inside[pick]]
        if where:
            return (f"isolates {' and '.join(where)}: starts with {chance:.0%}, may gain up to "
                    f"{float(outlook.upper[pick]):.1%}")
        return f"{gain:.1%} expected gain if it starts, which it does with {chance:.0%}"

    def _decide(self, outlook: Outlook, regions: Sequence[Region]) -> None:
        """Note which regions were closed or opened since the last launch."""
        closed = {r.name: r for r in regions if r.why is not None}
        now = {r.name: r for r in regions}
        for name, region in closed.items():
            if name not in self._closed:
                self._pivots.append(record(self.grid, outlook, region, self.memory.launches))
        for name, before in self._closed.items():
            if name in closed:
                continue
            region = now.get(name)
            if region is None:
                if self._came_up(before):
                    self._pivots.append(record(self.grid, outlook, before, self.memory.launches, "it came up"))
                continue
            changed = len(region.evidence) != len(before.evidence) or region.chance > before.chance + 0.01
            why = f"its chance is now {region.chance:.0%}" if changed else "launches elsewhere gain less by now"
            self._pivots.append(record(self.grid, outlook, region, self.memory.launches, why))
        self._closed = closed

    def _came_up(self, region: Region) -> bool:
        return any(server.came_up and all(self.grid.server(server.row).get(name) in values
                                          for name, values in region.when.items())
                   for server in self.memory.servers.values())

    def _why_stop(self, outlook: Outlook, worth: Floats) -> Stop | None:
        memory = self.memory
        came_up = any(s.came_up for s in memory.servers.values())
        if not outlook.gain.size or outlook.gain.max() <= 0:
            if self._busy:
                return Stop(StopKind.EXHAUSTED, "every configuration left is being measured elsewhere")
            return Stop(StopKind.EXHAUSTED, f"no configuration is left to try: {self._summary()}")
        if not came_up and (memory.launches >= DEAD_LAUNCHES or outlook.chance.max() < HOPELESS):
            return Stop(StopKind.CRASHES, f"all {memory.launches} launches crashed; the best one left has a chance of "
                        f"{outlook.chance.max():.0%}")
        if came_up and self._best is not None and worth.max() < self.limits.gain:
            gave_up = f"; given up: {', '.join(sorted(self._closed))}" if self._closed else ""
            return Stop(StopKind.GAIN, f"{self._summary()}: no launch left is expected to add {self.limits.gain:.2%} "
                        f"(the best one {worth.max():.2%}){gave_up}")
        if worth.max() <= 0:
            return Stop(StopKind.CRASHES, "every region left is closed: see the pivots")
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
        return look(self.grid, self.memory, self._beliefs, self._crashes, rows, best, busy)

    def _learn(self, full: bool = False) -> None:
        """Bring the models up to what was told."""
        memory = self.memory
        if self._told == (memory.count, full):
            return
        self._told = (memory.count, full)
        data = memory.measurements()
        if len(data.rows) and (full or self._strengths is None):
            self._strengths = self._value.strengths(data)
        self._posterior = self._value.fit(data, self._strengths) if self._strengths is not None else None
        self._beliefs = None
        if self._strengths is not None:
            top = [(w, o) for w, o in self._value.mix if w > LEAST_W][:MOST_MIX]
            total = sum(w for w, _ in top)
            self._beliefs = [(w / total, self._value.fit(data, (self._strengths[0], o))) for w, o in top]
        known = (memory.passes, len(memory.failures), memory.count if full else 0)
        if self._known != known:
            self._known = known
            self._crashes = CrashModel(self.grid, memory.passed(), memory.served(), memory.evidence(),
                                       self._crashes)
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
