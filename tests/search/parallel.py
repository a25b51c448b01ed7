"""One simulated study of several workers: a strategy against a table, on a simulated clock.

The workers hear of everything at once and share one strategy, as under `executor=ray` (workers of a shared study each
have their own, told the same). What a launch, a crash and a measurement cost is as in tests/search/simulate.py.
"""

from __future__ import annotations

import dataclasses
import heapq

from autotune.records import Config, Crash, Value, config_key
from autotune.search.protocol import Launch, Observation, Strategy
from tests.search.simulate import Cluster, Run, Step
from tests.search.tables import Table


@dataclasses.dataclass
class _Worker:
    """What a worker is at: `told` is what it will tell when its time comes."""

    server: Config | None = None
    told: Observation | None = None
    launch_s: float = 0.0  # of the launch, until it was told


class Fleet:
    """`workers` launches side by side on one table. Hours are those of the clock, not of all workers together."""

    def __init__(self, table: Table, strategy: Strategy, seed: int, workers: int) -> None:
        self.table, self.strategy, self.cluster = table, strategy, Cluster(table, seed)
        self.workers = [_Worker() for _ in range(workers)]
        self.steps: list[Step] = []
        self.launches = self.crashed = self.trial = 0
        self.forecasts: list[tuple[float, bool]] = []
        self.running: list[str] = []
        self.twice = 0  # launches of a server part that runs elsewhere at that time
        self.events: list[tuple[float, int, int]] = []
        self._count = 0
        self._shares: dict[str, float] = {}

    def run(self, hours: float, launches: int = 1000) -> Run:
        """Until the strategy stops and nobody is busy, or `hours` of the clock or `launches` launches are used."""
        now, stop = 0.0, None
        while now < hours * 3600 and self.launches < launches:
            for number, worker in enumerate(self.workers):
                if worker.server is None:
                    step = self.strategy.propose()
                    if not isinstance(step, Launch):
                        stop = step
                        break
                    stop = None
                    self._launch(now, number, step)
            if not self.events:
                break
            now, _, number = heapq.heappop(self.events)
            self._end(now, number)
        return Run(tuple(self.steps), self.launches, self.crashed, now / 3600, stop if not self.events else None,
                   tuple(self.forecasts))

    def _launch(self, now: float, number: int, step: Launch) -> None:
        worker, key = self.workers[number], config_key(step.server)
        load = self.strategy.next_load(step.server)
        assert load is not None, "a strategy must name a load part for a server that it has just proposed"
        self.launches += 1
        self.twice += key in self.running
        self.running.append(key)
        worker.server = step.server
        self._pend(step.server, True)
        failed = self.cluster.launch(step.server, load)
        self.forecasts.append((step.chance, failed is None))
        worker.launch_s = 0.0 if failed else float(self.table.spec["launch_s"])
        self._tell_later(now, number, failed or self.cluster.measure(step.server, load, worker.launch_s))

    def _tell_later(self, now: float, number: int, observation: Observation) -> None:
        self.workers[number].told = observation
        self._count += 1
        heapq.heappush(self.events, (now + observation.cost_s, self._count, number))

    def _end(self, now: float, number: int) -> None:
        worker = self.workers[number]
        server, told = worker.server, worker.told
        assert server is not None and told is not None
        self.strategy.tell(dataclasses.replace(told, trial=self.trial))
        self.trial += 1
        self.steps.append(Step(self.launches, now / 3600, self._share()))
        crashed = isinstance(told.outcome, Crash)
        self.crashed += crashed
        self._pend(server, False)
        load = None if crashed else self.strategy.next_load(server)
        if load is None:
            self.running.remove(config_key(server))
            worker.server = worker.told = None
            return
        self._pend(server, True)
        self._tell_later(now, number, self.cluster.measure(server, load, 0.0))

    def _pend(self, server: Config, pending: bool) -> None:
        """A lone worker has nobody to tell."""
        if len(self.workers) > 1:
            (self.strategy.pending if pending else self.strategy.done)(server)

    def _share(self) -> float:
        best = self.strategy.best()
        config: dict[str, Value] = {**best.server, **best.load} if best else {}
        key = config_key(config)
        if key not in self._shares:
            self._shares[key] = self.table.true_value(config) / self.table.optimum[1] if best else 0.0
        return self._shares[key]
