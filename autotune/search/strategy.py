"""The default strategy: launch-aware, learning from crashes, giving regions up by a computed decision.

    strategy = LaunchAware(space, Limits(launches=40, hours=8.0), seed=0)

One page of decisions, in this order: budgets, the baseline, what is owed (a retry, a confirmation), then the launch
that is worth most per second among those that no pivot has closed, then a few checks by a sceptic, then why to stop.
Everything is computed from what was told (`Memory`), so that telling a new strategy the same observations resumes the
search; only the count of checks starts anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autotune.records import Config
from autotune.search import pending as elsewhere
from autotune.search import stopping
from autotune.search import transfer as past_studies
from autotune.search.acquisition import Belief, Costs, Outlook, look
from autotune.search.crash_hypotheses import Culprit
from autotune.search.crash_model import CrashModel
from autotune.search.grid import Codes, Grid
from autotune.search.load_choice import next_load, repeats, unfamiliar
from autotune.search.observations import MANY, Key, Memory
from autotune.search.prior import Prior
from autotune.search.protocol import Best, Launch, Limits, Observation, Pivot, Stop, StopKind
from autotune.search.regions import Region, record, review
from autotune.search.retries import BASELINE_CHANCE, owed
from autotune.search.transfer import Past
from autotune.search.value_model import Floats, Strengths, ValueModel, normal_cdf
from autotune.space.space import Space

__all__ = ["LaunchAware", "Limits"]

NEW = 1  # choices never seen to come up that one launch may combine, so that its crash would tell which
CENTRES = 4  # best configurations around which candidates of a large space are drawn
CHECKS = 5  # launches that a sceptic may ask for, since the best last improved, before the search ends
CHECK_GAIN = 0.005  # the least gain that the sceptic must expect of one
CHECK_CHANCE = 0.6  # the least chance that one comes up
DOUBT = (0.1, 0.5, 0.3)  # the sceptic's least sd of effects, share of pairs, share under a load
RENEWED = 0.02  # growth of a large memory upon which strengths of effects are weighed anew
BETTER = 0.005  # gain (in logs) that counts as an improvement
LIKELY = 0.5  # chance from which the best so far is taken to stay it once pending launches have told


class LaunchAware:
    """Implements `protocol.Strategy`. `past`: observations of past studies, as belief."""

    def __init__(self, space: Space, limits: Limits | None = None, seed: int = 0,
                 past: Sequence[Observation] = ()) -> None:
        self.space = space
        self.limits = limits or Limits()
        self.seed = seed
        self.grid = Grid(space)
        self.memory = Memory(self.grid)
        self.past = Past(self.grid, past) if past else None
        self._prior = Prior(self.grid, self.past)
        self._value = ValueModel(self.grid, self._prior)
        self._busy: set[Key] = set()
        self._asked: dict[Key, int] = {}  # the load part that a pending server is measured under next, where known
        self._fresh: dict[Key, int | None] = {}  # launched and not measured yet: the load part it was launched for
        self._bar = 0.0
        self._closed: dict[str, Region] = {}
        self._pivots: list[Pivot] = []
        self._checked = (0, -math.inf)  # checks made since the best was at this value
        self._told = (-1, False)
        self._known = (-1, -1, -1)
        self._strengths: list[tuple[float, Strengths]] = []
        self._weighed = 0  # observations when the strengths were weighed
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

    def culprits(self) -> list[Culprit]:
        """What may have caused the crashes so far, likeliest first."""
        self._learn()
        return self._crashes.culprits()

    def past_report(self) -> str | None:
        """How wrong past studies were, in a line; None without any."""
        if self.past is None:
            return None
        self._learn(True)
        return past_studies.report(self.past, self._prior, self.memory.measurements(), self._trust_in_crashes())

    def propose(self) -> Launch | Stop:
        """Raises nothing; deterministic given seed, observations and pending launches."""
        memory = self.memory
        decision = self.limits.spent(memory.launches + len(self._busy), memory.used_s) or self._baseline()
        if decision is None:
            self._learn()
            decision = owed(memory, self._crashes, self._busy, self._candidates) or self._search()
        if isinstance(decision, Launch):
            self._fresh.setdefault(memory.key(decision.server), None)
        return decision

    def next_load(self, server: Config) -> Config | None:
        """The first call after `propose` always names a load part."""
        key = self.memory.key(server)
        load = self._next_load(key)
        if load is None:
            return None
        self._asked[key] = load
        return self.grid.load(load)

    def _next_load(self, key: Key) -> int | None:
        self._learn()
        row = _row(key)[None]
        fresh = key in self._fresh
        planned = self._fresh.get(key)
        if planned is None and not self.memory.count:
            return self._usual_load(row)
        if planned is None and fresh:
            planned = self._compared(key)
        if planned is not None:
            return planned
        outlook = self._look(row, self._expecting(), set())
        if not fresh and self._best is not None and self._leads(*self._best, key):
            return self._best[1]  # a new leader is measured again: luck makes leaders
        gains, again = outlook.gains[0], np.zeros(len(self.grid.load_rows))
        if self._beliefs:
            gains = gains if fresh else np.maximum(gains, self._sceptic(row).gains[0])
            again = repeats(self.memory, self._beliefs[0][1], key)
        index = next_load(gains, again, Costs.of(self.memory).measure_s, self._bar, fresh,
                          self._usual_load(row))
        if index is None and self._beliefs:
            index = unfamiliar(self.memory, self._crashes, self._beliefs[0][1], key)
        return index

    def _leads(self, best: Key, load: int, value: float, key: Key) -> bool:
        """Whether a server has the best so far, not surely yet, and is likelier to keep it than to lose it."""
        if best != key or not self.memory.vague(key, load):
            return False
        return not self._busy or elsewhere.stays(value, self._beliefs[0][1], *self._pending()) >= LIKELY

    def _compared(self, key: Key) -> int | None:
        """The baseline's own load part, for its server, while nothing is known of it: everything is compared there."""
        baseline, load = self.space.split(self.space.baseline)
        index, server = self.grid.load_index(load), self.memory.servers.get(key)
        known = server is not None and index in self.memory.settled(server)
        return None if known or key != self.memory.key(baseline) else index

    def _usual_load(self, row: Codes) -> int:
        """Where a server is measured that promises nothing: as the best so far, else as the baseline."""
        index = self._best[1] if self._best else self.grid.load_index(self.space.split(self.space.baseline)[1])
        allowed = np.flatnonzero(self.grid.allowed(row)[0])
        server = self.memory.servers.get(tuple(row[0].tolist()))
        open_ = [int(i) for i in allowed if server is None or i not in server.load_crashes] or allowed.tolist()
        return index if index in open_ else open_[0]

    def _baseline(self) -> Launch | None:
        server = self.space.split(self.space.baseline)[0]
        key = self.memory.key(server)
        if key in self.memory.servers or key in self._busy:
            return None
        return Launch(server, "the baseline, with which everything is compared", 0.0, BASELINE_CHANCE)

    def _search(self) -> Launch | Stop:
        self._learn(True)
        crashes = elsewhere.hoped(self._crashes, self.memory.key(self.space.split(self.space.baseline)[0]), self._busy)
        outlook = self._look(self._candidates(), self._expecting(True), self._busy, crashes)
        worth, regions = review(self.grid, outlook, crashes, self.limits.gain, len(self._busy))
        new = crashes.new(outlook.rows)
        if self._busy:
            worth = elsewhere.apart(crashes, outlook.rows, worth, sorted(self._busy), self.limits.gain)
        fewest = int(new[worth >= self.limits.gain].min(initial=self.grid.width))
        worth[new > max(NEW, fewest)] = 0.0
        self._decide(outlook, regions)
        standing = stopping.Standing(self._best[:2] if self._best else None, list(self._closed), bool(self._busy))
        stop = stopping.why(self.memory, outlook, worth, standing, self.limits.gain)
        doubts = self._doubts(outlook, regions) if stop is not None and stop.kind is StopKind.GAIN else None
        if doubts is not None:
            outlook, worth = doubts
        elif stop is not None:
            return stop
        pick = int(np.argmax(worth / outlook.cost_s))
        self._bar = float(worth[pick] / outlook.cost_s[pick])
        key = tuple(outlook.rows[pick].tolist())
        self._fresh[key] = int(np.argmax(self._planned(outlook, pick)))
        server = self.memory.servers.get(key)
        reason = (f"a check before the end: if effects are less regular than they look, it may gain "
                  f"{float(outlook.gain[pick]):.1%}" if doubts else self._reason(outlook, regions, pick))
        return Launch(self.grid.server(outlook.rows[pick]), reason, float(outlook.gain[pick]),
                      float(outlook.chance[pick]), "measure" if server else None)

    def _expecting(self, whole: bool = False) -> list[Belief]:
        """The beliefs of one who knows which launches are pending, and has no news of them yet.

        Before anything was measured they are the prior's, if anything is pending: none otherwise. whole: as if the
        pending launches were then measured under every load part, so that servers are told apart and not loads.
        """
        if not self._busy:
            return self._beliefs
        rows = np.array(sorted(self._busy), dtype=np.int16)
        loads = [self._usual_load(row[None]) if (load := self._asked.get(tuple(row.tolist()))) is None else load
                 for row in rows]
        strengths = self._strengths
        if self._beliefs:
            data = elsewhere.expected(self.memory.measurements(), self._beliefs[0][1], rows, loads)
        else:
            strengths, every = self._value.usual_strengths(), len(self.grid.load_rows)
            if whole:
                rows, loads = np.repeat(rows, every, axis=0), list(range(every)) * len(rows)
            data = elsewhere.foreseen(self._prior, rows, loads)
        return [(weight, self._value.fit(data, some)) for weight, some in strengths]

    def _pending(self) -> tuple[Codes, Floats]:
        """(n, P) server parts of pending launches, and (n, L) the chance that each comes up and survives a load."""
        rows = np.array(sorted(self._busy), dtype=np.int16)
        serving = self._crashes.chance_serving(rows) * self.grid.allowed(rows)
        return rows, self._crashes.chance(rows)[:, None] * serving

    def _planned(self, outlook: Outlook, pick: int) -> Floats:
        """(L,) gains by which the first load part of a launch is chosen: blind, others than those of pending ones."""
        if self._busy and not self._beliefs:
            outlook, pick = self._look(outlook.rows[[pick]], self._expecting(), self._busy), 0
        gains: Floats = outlook.gains[pick]
        return gains

    def _mark(self, beliefs: Sequence[Belief]) -> float | None:
        """Log objective above which anything is a gain; None while nothing feasible was measured, nor is pending."""
        if self._best is None or not self._busy:
            return self._best[2] if self._best else beliefs[0][1].level if beliefs and not self._beliefs else None
        return elsewhere.standing(self._best[2], self._beliefs[0][1], *self._pending())

    def _doubts(self, outlook: Outlook, regions: Sequence[Region]) -> tuple[Outlook, Floats] | None:
        """What a sceptic would still launch who takes effects and interactions to be large; None: nothing.

        The value model may be sure and wrong, where interactions that it took to be weak are strong. A few launches
        that it does not believe in hold it to account; each improvement earns it as many again.
        """
        best = self._best[2] if self._best else -math.inf
        count, at = self._checked
        if best > at + BETTER:
            count = 0
        if count >= CHECKS or not self._strengths:
            return None
        sceptic = self._sceptic(outlook.rows)
        worth = np.where(sceptic.chance < CHECK_CHANCE, 0.0, sceptic.expected)
        for region in regions:
            if region.why is not None:
                worth[region.inside] = 0.0
        if worth.max(initial=0.0) < max(CHECK_GAIN, self.limits.gain):
            return None
        self._checked = count + 1, max(best, at)
        return sceptic, worth

    def _sceptic(self, rows: Codes) -> Outlook:
        """The outlook of one who takes all effects and interactions to be large. Needs a measurement."""
        variance, _ = self._strengths[0][1]
        wild = self._value.fit(self.memory.measurements(), (np.maximum(variance, DOUBT[0] ** 2), DOUBT[1:]))
        return self._look(rows, [(1.0, wild)], self._busy)

    def _reason(self, outlook: Outlook, regions: Sequence[Region], pick: int) -> str:
        gain, chance = float(outlook.gain[pick]), float(outlook.chance[pick])
        where = [r.name for r in regions if not r.under_load and r.inside[pick]]
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
            opened = now.get(name)
            if opened is None:
                works = self.memory.measured if before.under_load else self.memory.came_up
                if works(before.when):
                    said = "it was measured" if before.under_load else "it came up"
                    self._pivots.append(record(self.grid, outlook, before, self.memory.launches, said))
                continue
            changed = len(opened.evidence) != len(before.evidence) or opened.chance > before.chance + 0.01
            why = f"its chance is now {opened.chance:.0%}" if changed else "launches elsewhere gain less by now"
            self._pivots.append(record(self.grid, outlook, opened, self.memory.launches, why))
        self._closed = closed

    def _candidates(self) -> Codes:
        rng = np.random.default_rng([self.seed, self.memory.count])
        return self.grid.servers(rng, [_row(k) for k in self._leaders()])

    def _leaders(self) -> list[Key]:
        """Server parts of the best configurations, for large spaces."""
        best: dict[Key, float] = {}
        for key, load in self.memory.leading():
            value = self.memory.servers[key].values[load][0].value or 0.0
            best[key] = max(best.get(key, 0.0), value)
        leaders = sorted(best, key=lambda k: -best[k])[:CENTRES]
        return leaders or [self.memory.key(self.space.split(self.space.baseline)[0])]

    def _look(self, rows: Codes, beliefs: Sequence[Belief], busy: set[Key],
              crashes: CrashModel | None = None) -> Outlook:
        past = None if self.past is None else (self.past, self._trust_in_crashes())
        return look(self.grid, self.memory, beliefs, crashes or self._crashes, rows, self._mark(beliefs), busy, past)

    def _trust_in_crashes(self) -> float:
        if self.past is None:
            return 0.0
        return self.past.trust_in_crashes(self.memory.passed(), self.memory.crashed())

    def _learn(self, full: bool = False) -> None:
        """Bring the models up to what was told."""
        memory = self.memory
        if self._told == (memory.count, full):
            return
        self._told = (memory.count, full)
        data = memory.measurements()
        if len(data.rows):
            many = len(data.rows) >= MANY  # then one candidate is kept, and weighed anew now and then
            if not self._strengths or (full and (not many or memory.count > (1 + RENEWED) * self._weighed)):
                self._strengths, self._weighed = self._value.strengths(data), memory.count
                if many:
                    self._strengths = [(1.0, self._strengths[0][1])]
            self._beliefs = [(w, self._value.fit(data, strengths)) for w, strengths in self._strengths]
        known = (memory.passes, len(memory.failures), memory.count if full else 0)
        if self._known != known:
            self._known = known
            self._crashes = CrashModel(self.grid, memory.passed(), memory.served(), memory.evidence(),
                                       self._crashes)
        self._best = self._find_best()

    def _find_best(self) -> tuple[Key, int, float] | None:
        """The feasible configuration with the best mean less its sd, times the probability that it keeps the limits.

        A mean alone would prefer lucky measurements to repeated ones.
        """
        feasible = self.memory.leading()
        if not feasible or not self._beliefs:
            return None
        keys = list(dict.fromkeys(key for key, _ in feasible))
        seen = self._beliefs[0][1].predict(np.array(keys, dtype=np.int16))
        found: tuple[float, float, Key, int] | None = None
        for key, load in feasible:
            ratios, noise = self.memory.ratios(key, load)
            kept = float(np.prod(normal_cdf(-ratios / noise)))
            at = keys.index(key), load
            value = float(seen.mean[at])
            score = value - float(seen.sd[at]) + math.log(max(kept, 1e-9))
            if found is None or score > found[0]:
                found = score, value, key, load
        return None if found is None else (found[2], found[3], found[1])


def _row(key: Key) -> Codes:
    return np.array(key, dtype=np.int16)
