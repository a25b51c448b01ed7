"""Opponents for tests/benchmarks/search.py, with what a fair comparison gives them.

`tpe_loads` measures every load part on each launch, as `launch_aware` may; `tpe_fail` tells Optuna a crash as FAIL,
which its TPE ignores, instead of PRUNED; `smac` is SMAC3 (extra `bench`), with crashes told as its costliest outcome.
"""

from __future__ import annotations

import math
import pathlib
import tempfile
from typing import TYPE_CHECKING, Any

from autotune.records import Config, Crash, config_key
from autotune.search.optuna_samplers import OptunaStrategy
from autotune.search.strategy import Best, Launch, Limits, Observation, Pivot, Stop, StopKind
from autotune.space.space import Space

if TYPE_CHECKING:
    import optuna

TRIES = 200  # proposals in a row without a new server part that end SMAC3


class EveryLoad(OptunaStrategy):
    """TPE; all load parts of a launch are measured, the sampler's own first."""

    def __init__(self, space: Space, limits: Limits, seed: int) -> None:
        super().__init__(space, "tpe", limits, seed)
        self._left: dict[str, list[Config]] = {}

    def next_load(self, server: Config) -> Config | None:
        key = config_key(server)
        first = super().next_load(server)
        if first is not None:
            self._left[key] = [load for load in _loads(self.space) if load != first
                               and self.space.forbidden({**server, **load}) is None]
            return first
        return self._left[key].pop(0) if self._left.get(key) else None


class CrashFails(OptunaStrategy):
    """TPE; crashes are FAIL, so that the sampler does not learn from them."""

    def __init__(self, space: Space, limits: Limits, seed: int) -> None:
        super().__init__(space, "tpe", limits, seed)

    def _prune(self, trial: optuna.Trial, violation: float | None) -> None:
        super()._prune(trial, None)


class Smac:
    """SMAC3's random forest; one configuration a launch. Raises ImportError without the extra `bench`."""

    def __init__(self, space: Space, limits: Limits, seed: int) -> None:
        from ConfigSpace import Categorical, ConfigurationSpace
        from smac import HyperparameterOptimizationFacade as Facade
        from smac import Scenario

        self.space, self.limits, self.launches, self.used_s = space, limits, 0, 0.0
        self._names = {p.name: p for p in space.params}
        choices = ConfigurationSpace(seed=seed)
        choices.add([Categorical(p.name, list(range(len(p.choices))), ordered=p.numeric,
                                 default=self._code(p.name, space.baseline)) for p in space.params])
        self._folder = tempfile.TemporaryDirectory(prefix="smac-")  # SMAC3 writes its run there
        scenario = Scenario(choices, deterministic=False, n_trials=5000, seed=seed,
                            output_directory=pathlib.Path(self._folder.name))
        self._facade: Any = Facade(scenario, lambda config, seed: 0.0, overwrite=True, logging_level=False,
                                   initial_design=Facade.get_initial_design(
                                       scenario, n_configs=8, additional_configs=[choices.get_default_configuration()]),
                                   intensifier=Facade.get_intensifier(scenario, max_config_calls=1))
        self._trial: Any = None
        self._load: Config | None = None
        self._best: Best | None = None

    def propose(self) -> Launch | Stop:
        for _ in range(TRIES):
            self._trial = self._facade.ask()
            config = self._config(dict(self._trial.config))
            if self.space.forbidden(config) is None:
                server, self._load = self.space.split(config)
                return Launch(server, "SMAC3", 0.0, 1.0)
            self._cost(math.inf)
        return Stop(StopKind.EXHAUSTED, f"{TRIES} proposals in a row were forbidden")

    def next_load(self, server: Config) -> Config | None:
        load, self._load = self._load, None
        return load

    def tell(self, observation: Observation) -> None:
        self.launches += observation.launch_s > 0
        self.used_s += observation.cost_s
        outcome = observation.outcome
        if isinstance(outcome, Crash) or outcome.value is None:
            self._cost(math.inf)
            return
        self._cost(-math.log(outcome.value) + sum(max(0.0, math.log(r)) for r in outcome.ratios.values()))
        if outcome.feasible and observation.load is not None and (
                self._best is None or outcome.value > self._best.value):
            self._best = Best(observation.server, observation.load, outcome.value)

    def pending(self, server: Config, load: Config | None = None) -> None:
        """One worker only."""

    def done(self, server: Config) -> None:
        """One worker only."""

    def best(self) -> Best | None:
        return self._best

    def pivots(self) -> list[Pivot]:
        return []

    def _cost(self, cost: float) -> None:
        from smac.runhistory import StatusType, TrialValue

        crashed = math.isinf(cost)
        self._facade.tell(self._trial, TrialValue(cost=100.0 if crashed else cost, status=StatusType.CRASHED if crashed
                                                  else StatusType.SUCCESS))

    def _code(self, name: str, config: Config) -> int:
        return list(self._names[name].choices).index(config[name]) if name in config else 0

    def _config(self, codes: dict[str, Any]) -> Config:
        config: dict[str, Any] = {}
        for name, param in self._names.items():
            if self.space.active(param, config):
                config[name] = param.choices[int(codes[name])]
        return config


def _loads(space: Space) -> list[Config]:
    """Every load part of a space."""
    from autotune.search.grid import Grid

    grid = Grid(space)
    return [grid.load(i) for i in range(len(grid.load_rows))]


OPPONENTS: dict[str, Any] = {"tpe_loads": EveryLoad, "tpe_fail": CrashFails, "smac": Smac}
