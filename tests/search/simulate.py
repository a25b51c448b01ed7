"""One simulated study: a strategy against a table, counting simulated seconds.

What a launch is: any change of the server part. A crash at another stage than `serving` costs the rule's
`after_s`; one while serving costs the launch (if it was not paid yet) and one measurement, and ends the server.
A rule of an earlier stage that names a load parameter is told with the load that was meant to be measured.

How a crash is told: category and signature are the rule's `log` name, blame is `blame` (default `config`,
which is what a classifier says of most of these logs; `unknown` is what it says of a log it never saw).
"""

from __future__ import annotations

import dataclasses
import math
import random

from autotune.records import Blame, Config, Crash, Stage, Value, config_key
from autotune.search.protocol import Launch, Measured, Observation, Stop, Strategy
from tests.search.tables import Rule, Table


@dataclasses.dataclass(frozen=True)
class Step:
    """After one observation: what was used so far and the true share of what would be reported now."""

    launches: int
    hours: float
    share: float


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished simulated study."""

    steps: tuple[Step, ...]
    launches: int
    crashed: int
    hours: float
    stop: Stop | None  # None: the simulated hours or launches were used
    forecasts: tuple[tuple[float, bool], ...]  # (stated chance, whether the launch came up) per launch

    @property
    def stopped(self) -> bool:
        """Whether the strategy ended the study."""
        return self.stop is not None

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
        """None when the server came up; the crash otherwise."""
        key = config_key(server)
        self.attempts[key] = self.attempts.get(key, 0) + 1
        rule = self.table.crash_rule({**server, **load}, self._roll(server, load))
        if rule is None or rule["stage"] == "serving":
            return None
        told = load if set(rule["when"]) & self.table.client_params else None
        return Observation(server, told, self._crash(rule), rule["after_s"], rule["after_s"])

    def measure(self, server: Config, load: Config, launch_s: float) -> Observation:
        """One measurement on the live server; `launch_s` is what its start cost, if not told yet."""
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
        measured = Measured(rate / watts, all(r <= 1 for r in ratios.values()), ratios, cv * math.sqrt(1.25))
        return Observation(server, load, measured, launch_s + measure_s, launch_s)

    def _roll(self, server: Config, load: Config) -> _Roll:
        return _Roll(f"{self.table.name}/{self.seed}", config_key(server), config_key(load), self)

    def _crash(self, rule: Rule) -> Crash:
        return Crash(rule["log"], Stage.parse(rule["stage"]), self.blame, rule["log"], excerpt=rule["log"])


class _Roll:
    """Decides a flaky rule: once per launch for the server's start, once per load for serving."""

    def __init__(self, study: str, server: str, load: str, cluster: Cluster) -> None:
        self.study, self.server, self.load, self.cluster = study, server, load, cluster

    def __call__(self, rule: int) -> float:
        serving = self.cluster.table.spec["crashes"][rule]["stage"] == "serving"
        attempt = self.cluster.attempts.get(self.server, 0)
        return random.Random(f"{self.study}/{rule}/{self.server}/{attempt}/{self.load if serving else ''}").random()


def simulate(table: Table, strategy: Strategy, seed: int, hours: float, launches: int = 1000,
             blame: Blame = Blame.CONFIG) -> Run:
    """Run one study until the strategy stops or `hours` simulated hours or `launches` launches are used."""
    cluster = Cluster(table, seed, blame)
    steps: list[Step] = []
    forecasts: list[tuple[float, bool]] = []
    shares: dict[str, float] = {}
    used_s, count, crashed = 0.0, 0, 0
    trial = 0
    stop: Stop | None = None

    def tell(observation: Observation) -> None:
        nonlocal used_s, trial
        strategy.tell(dataclasses.replace(observation, trial=trial))
        trial += 1
        used_s += observation.cost_s
        best = strategy.best()
        config: dict[str, Value] = {**best.server, **best.load} if best else {}
        key = config_key(config)
        if key not in shares:
            shares[key] = table.true_value(config) / table.optimum[1] if best else 0.0
        steps.append(Step(count, used_s / 3600, shares[key]))

    while used_s < hours * 3600 and count < launches:
        step = strategy.propose()
        if isinstance(step, Stop):
            stop = step
            break
        assert isinstance(step, Launch)
        load = strategy.next_load(step.server)
        assert load is not None, "a strategy must name a load part for a server that it has just proposed"
        count += 1
        failed = cluster.launch(step.server, load)
        forecasts.append((step.chance, failed is None))
        if failed is not None:
            crashed += 1
            tell(failed)
            continue
        launch_s = float(table.spec["launch_s"])
        while load is not None and used_s < hours * 3600:
            observation = cluster.measure(step.server, load, launch_s)
            launch_s = 0.0
            tell(observation)
            if isinstance(observation.outcome, Crash):
                crashed += 1
                break
            load = strategy.next_load(step.server)
    return Run(tuple(steps), count, crashed, used_s / 3600, stop, tuple(forecasts))
