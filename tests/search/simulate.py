"""Simulated studies: a strategy against a table, on a simulated clock.

A crash before `serving` costs the rule's `after_s`. A crash at `serving` costs the launch (unless an earlier
observation of the launch included it) and one measurement, and ends the server. A crash by an earlier rule that names
a load parameter is observed with the load part that was to be measured.

Category and signature of a crash are the rule's `log` name. Its blame is `blame`: `config`, the classifier's usual
answer, or `unknown`, its answer to an unknown log.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Callable

from autotune.records import Blame, Config, Crash, Stage, Value, config_key
from autotune.search.strategy import Launch, Measured, Observation, Stop, Strategy
from tests.search.tables import Rule, Table


@dataclasses.dataclass(frozen=True)
class Step:
    """State after one observation. `share`: true value of the best configuration so far, of the optimum."""

    launches: int
    hours: float
    share: float


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished study. `hours` are those of the clock, not of all workers together."""

    steps: tuple[Step, ...]
    launches: int
    crashed: int
    hours: float
    stop: Stop | None  # None: the simulated hours or launches were used
    forecasts: tuple[tuple[float, bool], ...]  # (stated chance, whether the launch came up) per launch
    told: tuple[Observation, ...]

    @property
    def final_share(self) -> float:
        return self.steps[-1].share if self.steps else 0.0

    def reached(self, share: float) -> Step | None:
        """The first step from which the reported configuration stayed at or above `share` until the end."""
        good = None
        for step in reversed(self.steps):
            if step.share < share - 1e-9:
                break
            good = step
        return good


class Cluster:
    """Evaluates launches and measurements of one study; draws noise and flaky crashes from `seed`."""

    def __init__(self, table: Table, seed: int, blame: Blame = Blame.CONFIG) -> None:
        self.table = table
        self.seed = seed
        self.blame = blame
        self.attempts: dict[str, int] = {}
        self.measured = 0

    def launch(self, server: Config, load: Config) -> Observation | None:
        """Crash of the server's start; None if the server comes up."""
        key = config_key(server)
        self.attempts[key] = self.attempts.get(key, 0) + 1
        rule = self.table.crash_rule({**server, **load}, self._roll(server, load))
        if rule is None or rule["stage"] == "serving":
            return None
        observed = load if set(rule["when"]) & self.table.client_params else None
        return Observation(server, observed, self._crash(rule), rule["after_s"], rule["after_s"])

    def measure(self, server: Config, load: Config, launch_s: float) -> Observation:
        """One measurement on the live server; `launch_s`: seconds of its start, 0 after the first."""
        config = {**server, **load}
        measure_s = float(self.table.spec["measure_s"])
        rule = self.table.crash_rule(config, self._roll(server, load))
        if rule is not None and (rule["stage"] == "serving" or set(rule["when"]) & self.table.client_params):
            seconds = measure_s if rule["stage"] == "serving" else float(rule["after_s"])
            return Observation(server, load, self._crash(rule), launch_s + seconds, launch_s)
        self.measured += 1
        rng = random.Random(f"{self.table.name}/{self.seed}/{config_key(config)}/{self.measured}")
        cv = float(self.table.spec["noise_cv"])
        rate = self.table.rate(config) * math.exp(rng.gauss(0, cv))
        watts = self.table.watts(config) * math.exp(rng.gauss(0, cv / 2))
        limit = self.table.tpot_limit_ms
        ratios = {} if math.isinf(limit) else {"tpot_ms": self.table.tpot_ms(config, rate) / limit}
        measured = Measured(rate / watts, all(r <= 1 for r in ratios.values()), ratios, cv * math.sqrt(1.25),
                            short=self.table.short(config))
        return Observation(server, load, measured, launch_s + measure_s, launch_s)

    def _roll(self, server: Config, load: Config) -> Callable[[int], float]:
        """Draws a flaky rule: once per launch for the server's start, once per load for serving."""
        def roll(rule: int) -> float:
            key, part = config_key(server), config_key(load)
            serving = self.table.spec["crashes"][rule]["stage"] == "serving"
            study = f"{self.table.name}/{self.seed}/{rule}/{key}/{self.attempts.get(key, 0)}"
            return random.Random(f"{study}/{part if serving else ''}").random()

        return roll

    def _crash(self, rule: Rule) -> Crash:
        return Crash(rule["log"], Stage.parse(rule["stage"]), self.blame, rule["log"], excerpt=rule["log"])


class Fleet:
    """Workers with side-by-side launches on one table and one shared strategy."""

    def __init__(self, table: Table, strategy: Strategy, seed: int, workers: int, blame: Blame = Blame.CONFIG) -> None:
        self.table, self.strategy, self.workers, self.cluster = table, strategy, workers, Cluster(table, seed, blame)
        self.steps: list[Step] = []
        self.launches = self.crashed = 0
        self.forecasts: list[tuple[float, bool]] = []
        self.told: list[Observation] = []
        self.twice = 0  # launches of a server part that another worker runs at that time
        self.events: list[tuple[float, int, Observation]] = []  # (end in seconds, number, outcome) of each busy worker
        self._number = itertools.count()
        self._shares: dict[str, float] = {}

    def run(self, hours: float, launches: int = 1000) -> Run:
        """Run until the strategy stops and no worker is busy, or `hours` or `launches` are used."""
        now, stop = 0.0, None
        while now < hours * 3600:
            while len(self.events) < self.workers and self.launches < launches:
                step = self.strategy.propose()
                if isinstance(step, Stop):
                    stop = step
                    break
                stop = None
                self._launch(now, step)
            if not self.events:
                break
            now, _, observation = heapq.heappop(self.events)
            self._end(now, observation)
        return Run(tuple(self.steps), self.launches, self.crashed, now / 3600, stop if not self.events else None,
                   tuple(self.forecasts), tuple(self.told))

    def _launch(self, now: float, step: Launch) -> None:
        load = self.strategy.next_load(step.server)
        assert load is not None, "a strategy must name a load part for a server that it has just proposed"
        self.launches += 1
        self.twice += any(running.server == step.server for _, _, running in self.events)
        failed = self.cluster.launch(step.server, load)
        self.forecasts.append((step.chance, failed is None))
        launch_s = float(self.table.spec["launch_s"])
        self._schedule(now, failed or self.cluster.measure(step.server, load, launch_s))

    def _schedule(self, now: float, observation: Observation) -> None:
        """Tell the outcome when its simulated time has passed. Only launches of several workers count as pending."""
        if self.workers > 1:
            self.strategy.pending(observation.server)
        heapq.heappush(self.events, (now + observation.cost_s, next(self._number), observation))

    def _end(self, now: float, observation: Observation) -> None:
        server = observation.server
        self.told.append(dataclasses.replace(observation, trial=len(self.told)))
        self.strategy.tell(self.told[-1])
        self.steps.append(Step(self.launches, now / 3600, self._share()))
        crashed = isinstance(observation.outcome, Crash)
        self.crashed += crashed
        if self.workers > 1:
            self.strategy.done(server)
        load = None if crashed else self.strategy.next_load(server)
        if load is not None:
            self._schedule(now, self.cluster.measure(server, load, 0.0))

    def _share(self) -> float:
        best = self.strategy.best()
        config: dict[str, Value] = {**best.server, **best.load} if best else {}
        key = config_key(config)
        if key not in self._shares:
            self._shares[key] = self.table.true_value(config) / self.table.optimum[1] if best else 0.0
        return self._shares[key]


def simulate(table: Table, strategy: Strategy, seed: int, hours: float, launches: int = 1000,
             blame: Blame = Blame.CONFIG) -> Run:
    """Run one study with one worker."""
    return Fleet(table, strategy, seed, 1, blame).run(hours, launches)
