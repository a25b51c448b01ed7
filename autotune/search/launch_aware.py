"""The default strategy: launch-aware, learns from crashes, closes regions by a computed decision.

Order of decisions: budgets, the baseline, retries after crashes, the launch with the highest worth per second outside
closed regions, launches that cover pairs of choices never seen together, the reason to stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.records import Config
from autotune.search import acquisition, regions
from autotune.search.acquisition import Belief, Costs, Forecast
from autotune.search.crash_model import CrashModel
from autotune.search.grid import Codes, Floats, Grid, Mask
from autotune.search.observations import MANY, Key, Observations
from autotune.search.regions import BASELINE_CHANCE, Region
from autotune.search.strategy import Best, Launch, Limits, Observation, Pivot, Stop, StopKind
from autotune.search.transfer import Past
from autotune.search.value_model import Analytic, Data, Prior, Strengths, ValueModel
from autotune.space.space import Space

PAIR_GAIN = 0.001  # expected gain of trying two choices together for the first time
NEW = 1  # choices per launch that never came up, so that a crash identifies its cause
CENTRES = 4  # best configurations around which a large space is sampled
CHECK_CHANCE = 0.6  # least chance of a launch that covers pairs before the end, as a share of the best one
DOUBT = (0.1, 0.5, 0.3, 0.02)  # a check assumes at least: sd of effects, shares of pairs and under a load, residual
RENEWED = 0.02  # growth of a large study that triggers new strengths of effects
LIKELY = 0.5  # least probability that a leader survives the pending launches, for measuring it again


class LaunchAware:
    """Implements `strategy.Strategy`. `past`: observations of past studies, as prior knowledge.

    `expected`: the objective of a server part and a load part by a formula, up to a factor; None where it is unknown.
    """

    def __init__(self, space: Space, limits: Limits | None = None, seed: int = 0, past: Sequence[Observation] = (),
                 expected: Callable[[Config, Config], float | None] | None = None) -> None:
        self.space, self.limits, self.seed = space, limits or Limits(), seed
        self.grid = Grid(space)
        self.memory = Observations(self.grid)
        self.past = Past(self.grid, past) if past else None
        self._value = ValueModel(self.grid, Prior(self.grid, self.past.effects if self.past else None,
                                                  Analytic(self.grid, expected) if expected else None))
        self._baseline, load = space.split(space.baseline)
        self._baseline_key, self._baseline_load = self.memory.key(self._baseline), self.grid.load_index(load)
        self._busy: set[Key] = set()
        self._asked: dict[Key, int] = {}  # next load part of a pending server, if known
        self._fresh: dict[Key, int | None] = {}  # launched, not measured: planned load part
        self._bar = 0.0
        self._closed: dict[str, Region] = {}
        self._pivots: list[Pivot] = []
        self._learned = (-1, False)
        self._known = (-1, -1, -1)
        self._strengths: list[tuple[float, Strengths]] = []
        self._weighed = 0  # observations at the last weighing of strengths
        self._beliefs: list[Belief] = []
        self._crashes = CrashModel(self.grid, self.memory.passed(), self.memory.served(), [])
        self._best: tuple[Key, int, float] | None = None

    def tell(self, observation: Observation) -> None:
        """Raises KeyError when the configuration is not in the space."""
        self.memory.add(observation)
        self._fresh.pop(self.memory.key(observation.server), None)

    def pending(self, server: Config, load: Config | None = None) -> None:
        key = self.memory.key(server)
        self._busy.add(key)
        if load is not None:
            self._asked[key] = self.grid.load_index(load)

    def done(self, server: Config) -> None:
        key = self.memory.key(server)
        self._busy.discard(key)
        self._asked.pop(key, None)

    def best(self) -> Best | None:
        self._learn()
        if self._best is None:
            return None
        key, load, value = self._best
        return Best(self.grid.server(_row(key)), self.grid.load(load), math.exp(value))

    def pivots(self) -> list[Pivot]:
        written, self._pivots = self._pivots, []
        return written

    def past_report(self) -> str | None:
        """One line on the accuracy of past studies; None without any."""
        if self.past is None:
            return None
        self._learn(True)
        return self.past.report(self._value.prior.trust, self.memory)

    def propose(self) -> Launch | Stop:
        """The next launch, deterministic given seed, observations and pending launches."""
        memory = self.memory
        decision: Launch | Stop | None = self.limits.spent(memory.launches + len(self._busy), memory.used_s)
        if decision is None and self._baseline_key not in memory.servers.keys() | self._busy:
            decision = Launch(self._baseline, "the baseline, the reference of all comparisons", 0.0, BASELINE_CHANCE)
        if decision is None:
            self._learn()
            decision = regions.after_crashes(memory, self._crashes, self._busy, self._candidates) or self._search()
        if isinstance(decision, Launch):
            self._fresh.setdefault(memory.key(decision.server), None)
        return decision

    def next_load(self, server: Config) -> Config | None:
        """The next load part; never None on the first call after `propose`."""
        key = self.memory.key(server)
        load = self._next_load(key)
        if load is None:
            return None
        self._asked[key] = load
        return self.grid.load(load)

    def _next_load(self, key: Key) -> int | None:
        self._learn()
        row, server, fresh = _row(key)[None], self.memory.servers.get(key), key in self._fresh
        planned = self._fresh.get(key)
        if planned is not None:
            return planned
        if not self.memory.count:
            return self._usual_load(row)
        if fresh and key == self._baseline_key and (server is None or
                                                    self._baseline_load not in self.memory.settled(server)):
            return self._baseline_load  # the reference of all comparisons
        gains = self._forecast(row, self._expecting(), set()).gains[0]
        if fresh:
            return int(np.argmax(gains)) if gains.max() > acquisition.LEAST else self._usual_load(row)
        if self._best is not None and self._best[0] == key:
            _, load, value = self._best
            if self.memory.uncertain(key, load) and (not self._busy or acquisition.chance_to_stay_best(
                    value, self._beliefs[0][1], *self._pending()) >= LIKELY):
                return load  # a new leader is measured again: luck makes leaders
        if server is not None and (undecided := self.memory.promising(
                key, self._best[2] if self._best is not None else -math.inf)) is not None:
            return undecided  # noise may have put it over a limit
        if self._beliefs:
            gains = np.maximum(gains, self._sceptic(row).gains[0])
        index, costs, bar = int(np.argmax(gains)), Costs.of(self.memory), self._bar
        if self._best is not None and self._best[0] == key:  # later it would take another launch
            bar = min(bar, self.limits.gain / costs.usual_s)
        if gains[index] >= acquisition.LEAST and gains[index] / costs.measure_s >= bar:
            return index
        return acquisition.unfamiliar(self.memory, self._crashes, self._beliefs[0][1], key) if self._beliefs else None

    def _usual_load(self, row: Codes) -> int:
        """Load part of a server without an expected gain: that of the best, else of the baseline."""
        index = self._best[1] if self._best else self._baseline_load
        allowed = np.flatnonzero(self.grid.allowed(row)[0])
        server = self.memory.servers.get(tuple(row[0].tolist()))
        open_ = [int(i) for i in allowed if server is None or i not in server.load_crashes] or allowed.tolist()
        return index if index in open_ else open_[0]

    def _search(self) -> Launch | Stop:
        self._learn(True)
        least = self.limits.gain
        crashes = self._crashes
        if self._baseline_key in self._busy:  # it is assumed to come up
            passed = np.concatenate([crashes.passed, _row(self._baseline_key)[None]])
            crashes = CrashModel(self.grid, passed, crashes.served, crashes.failures)
        forecast = self._forecast(self._candidates(), self._expecting(True), self._busy, crashes)
        if not self.memory.anything_works and not self._busy and (alike := regions.repeated(self.memory)) is not None:
            return alike
        worth, found = regions.evaluate_regions(forecast, crashes, least, len(self._busy))
        fresh_pairs = crashes.new_pairs(forecast.rows)
        suspect = np.logical_or.reduce([region.inside for region in found], initial=False)
        together = PAIR_GAIN * forecast.survives * fresh_pairs * (forecast.price <= acquisition.DEAR)
        together = together * (forecast.gain >= PAIR_GAIN)
        worth = np.where((worth > 0) & ~suspect, worth + together, worth)
        new = crashes.new(forecast.rows)
        if self._busy:
            worth = acquisition.without_choices_under_test(crashes, forecast.rows, worth, sorted(self._busy), least)
        fewest = int(new[worth >= least].min(initial=self.grid.width))
        worth[new > max(NEW, fewest)] = 0.0
        self._pivots += regions.changes(self.memory, forecast, self._closed, found)
        self._closed = {region.name: region for region in found if region.why is not None}
        stop = regions.stop_reason(self.memory, forecast, worth, least, self._best[:2] if self._best else None,
                                   self._closed, bool(self._busy))
        ends = stop is not None and stop.kind is StopKind.GAIN
        doubts = self._sceptical_check(forecast, fresh_pairs) if ends else None
        if doubts is not None:
            forecast, worth = doubts
        elif stop is not None:
            return stop
        pick = int(np.argmax(worth / forecast.cost_s))
        others = float((np.delete(worth, pick) / np.delete(forecast.cost_s, pick)).max(initial=0.0))
        self._bar = others if doubts is None else least / Costs.of(self.memory).usual_s
        key = tuple(forecast.rows[pick].tolist())
        gain, chance = float(forecast.gain[pick]), float(forecast.chance[pick])
        suspects = " and ".join(r.name for r in found if not r.under_load and r.inside[pick])
        if doubts is not None:
            reason = ("a check before the end: choices that were never launched together; if interactions are strong, "
                      f"it may gain {gain:.1%}")
        elif suspects:
            reason = f"isolates {suspects}: {chance:.0%} chance to start, may gain up to {forecast.upper[pick]:.1%}"
        else:
            reason = f"{gain:.1%} expected gain if it starts; {chance:.0%} chance to start"
        gains = forecast.gains[pick]
        if self._busy and not self._beliefs:  # another load part than those of pending launches
            gains = self._forecast(forecast.rows[[pick]], self._expecting(), self._busy).gains[0]
        self._fresh[key] = int(np.argmax(gains))
        return Launch(self.grid.server(forecast.rows[pick]), reason, gain, chance,
                      "measure" if key in self.memory.servers else None)

    def _expecting(self, whole: bool = False) -> list[Belief]:
        """Value models that take pending launches into account.

        Before the first measurement: those of the prior if launches are pending, else none. whole: assume that pending
        launches are measured under every load part, which compares servers and not loads.
        """
        if not self._busy:
            return self._beliefs
        rows = np.array(sorted(self._busy), dtype=np.int16)
        loads = [self._asked[key] if key in self._asked else self._usual_load(_row(key)[None])
                 for key in sorted(self._busy)]
        if whole and not self._beliefs:
            every = len(self.grid.load_rows)
            rows, loads = np.repeat(rows, every, axis=0), list(range(every)) * len(rows)
        data = acquisition.with_pending(self.memory.measurements(),
                                        self._beliefs[0][1] if self._beliefs else self._value.prior, rows, loads)
        strengths = self._strengths if self._beliefs else self._value.usual_strengths()
        return [(weight, self._value.fit(data, some)) for weight, some in strengths]

    def _pending(self) -> tuple[Codes, Floats]:
        """(n, P) pending server parts, and (n, L) the probability that each comes up and survives a load part."""
        rows = np.array(sorted(self._busy), dtype=np.int16)
        serving = self._crashes.chance_serving(rows) * self.grid.allowed(rows)
        return rows, self._crashes.chance(rows)[:, None] * serving

    def _mark(self, beliefs: Sequence[Belief]) -> float | None:
        """Log objective to beat; None while nothing feasible is measured or pending."""
        if self._best is None or not self._busy:
            return self._best[2] if self._best else beliefs[0][1].level if beliefs and not self._beliefs else None
        return acquisition.expected_best(self._best[2], self._beliefs[0][1], *self._pending())

    def _sceptical_check(self, forecast: Forecast, fresh_pairs: NDArray[np.intp]) -> tuple[Forecast, Floats] | None:
        """A launch that tries choices together for the first time, or None once all pairs are covered.

        The value model cannot know an interaction that it never saw: large effects and interactions rank the launches.
        """
        sceptic = self._sceptic(forecast.rows)
        fresh_pairs = fresh_pairs + self._fresh_beside_strong(forecast.rows)
        dear = sceptic.price > acquisition.DEAR
        worth = np.where((sceptic.survives < CHECK_CHANCE * sceptic.survives.max()) | dear | (sceptic.gain <= 0), 0.0,
                         (sceptic.expected + acquisition.LEAST) / sceptic.price * fresh_pairs)
        for region in self._closed.values():
            worth[region.inside] = 0.0
        if worth.max(initial=0.0) <= 0:
            return None
        return sceptic, worth

    def _fresh_beside_strong(self, rows: Codes) -> Mask:
        """(n,) True for a choice that never came up beside a pair of the best server's choices that interacts strongly.

        Such a pair counts as a choice of its own, whose pairs with other choices are to be covered too.
        """
        fresh = np.zeros(len(rows), dtype=bool)
        if self._best is None:
            return fresh
        best, passed = _row(self._best[0]), self._crashes.passed
        for i, j, _ in self._strengths[0][1].strong:
            pair = [i, j] if j >= 0 else [i]
            beside = passed[(passed[:, pair] == best[pair]).all(axis=1)]
            held = (rows[:, pair] == best[pair]).all(axis=1)
            fresh |= held & np.any([~np.isin(rows[:, k], beside[:, k]) for k in range(self.grid.width)], axis=0)
        return fresh

    def _sceptic(self, rows: Codes) -> Forecast:
        """Forecast under large effects and interactions; needs a measurement."""
        likely = self._strengths[0][1]
        doubt = likely._replace(variance=np.maximum(likely.variance, DOUBT[0] ** 2), share=DOUBT[1:])
        wild = self._value.fit(self.memory.measurements(), doubt)
        return self._forecast(rows, [(1.0, wild)], self._busy)

    def _candidates(self) -> Codes:
        """(n, P) server parts to choose from, in a large space around those of the best configurations."""
        best: dict[Key, float] = {}
        for key, load in self.memory.leading():
            best[key] = max(best.get(key, 0.0), self.memory.servers[key].values[load][0].value or 0.0)
        leaders = sorted(best, key=lambda k: -best[k])[:CENTRES] or [self._baseline_key]
        return self.grid.servers(np.random.default_rng([self.seed, self.memory.count]), [_row(k) for k in leaders])

    def _forecast(self, rows: Codes, beliefs: Sequence[Belief], busy: set[Key],
                  crashes: CrashModel | None = None) -> Forecast:
        return acquisition.forecast_launches(self.memory, beliefs, crashes or self._crashes, rows, self._mark(beliefs),
                                             busy, self.past)

    def _learn(self, full: bool = False) -> None:
        """Update the models with the newest observations."""
        memory = self.memory
        if self._learned == (memory.count, full):
            return
        self._learned = (memory.count, full)
        data = memory.measurements()
        if len(data.rows):
            many = len(data.rows) >= MANY  # then one candidate is kept, and weighed again rarely
            if not self._strengths or (full and (not many or memory.count > (1 + RENEWED) * self._weighed)):
                some = Data(data.rows[::2], data.loads[::2], data.y[::2], data.noise[::2]) if many else data
                self._strengths, self._weighed = self._value.strengths(some), memory.count
                if many:
                    self._strengths = [(1.0, self._strengths[0][1])]
            self._beliefs = [(w, self._value.fit(data, strengths)) for w, strengths in self._strengths]
        known = (memory.passes, len(memory.failures), memory.count if full else 0)
        if self._known != known:
            self._known = known
            self._crashes = CrashModel(self.grid, memory.passed(), memory.served(), memory.evidence(), self._crashes)
        self._best = acquisition.best_configuration(memory, self._beliefs) if self._beliefs else None


def _row(key: Key) -> Codes:
    return np.array(key, dtype=np.int16)
