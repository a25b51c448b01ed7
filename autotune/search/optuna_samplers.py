"""Optuna's samplers behind the same protocol, for comparison: `tpe`, `random` and `grid`.

One trial is one configuration and one launch. A crash is PRUNED with a constraint graded by its stage, a violated limit
is a constraint, and a forbidden configuration is PRUNED without a launch. The Optuna study lives in memory.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune.records import Config, Crash, UsageError, Value, config_key
from autotune.search.strategy import Best, Launch, Limits, Measured, Observation, Pivot, Stop, StopKind
from autotune.space.space import ENUMERABLE, Param, Space, server_key
from autotune.storage.trial import severity, suggest

if TYPE_CHECKING:
    import optuna
    from optuna.trial import TrialState

SAMPLERS = ("tpe", "random", "grid")
FORBIDDEN = 5.0  # constraint of a forbidden configuration: worse than any crash
TRIES = 2000  # unusable proposals in a row that end the search


class _Asked(NamedTuple):
    """A trial without an outcome yet."""

    trial: optuna.Trial
    config: Config


class OptunaStrategy:
    """Implements `strategy.Strategy`. Raises UsageError for a grid too large to list."""

    def __init__(self, space: Space, sampler: str, limits: Limits | None = None, seed: int = 0) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.space, self.name, self.limits = space, sampler, limits or Limits()
        self.sampler: Any = _sampler(space, sampler, seed)
        self.study = optuna.create_study(direction="maximize", sampler=self.sampler)
        self.launches, self.used_s = 0, 0.0
        self._asked: dict[str, _Asked] = {}  # own trials by server part
        self._unmeasured, self._busy, self._servers, self._tried = set[str](), set[str](), set[str](), set[str]()
        self._values: dict[str, tuple[Config, list[Measured]]] = {}
        self._aside: list[Config] = []  # postponed: lost with a host, or pending on another worker

    def propose(self) -> Launch | Stop:
        """The sampler's next configuration; the baseline first."""
        if (spent := self.limits.spent(self.launches, self.used_s)) is not None:
            return spent
        first = server_key(self.space, self.space.baseline) not in self._servers | self._busy
        again = self._again(first)
        if first or again is not None:
            self.study.enqueue_trial(dict(again or self.space.baseline))
        with contextlib.ExitStack() as rejected:  # until its end they count as running, so that TPE avoids them
            return self._choose(again, first, rejected)

    def _choose(self, again: Config | None, first: bool, rejected: contextlib.ExitStack) -> Launch | Stop:
        """A proposal that no other worker runs; proposals that one runs are pruned when `rejected` is closed."""
        for _ in range(TRIES):
            if again is None and self.name == "grid" and self.sampler.is_exhausted(self.study):
                return Stop(StopKind.EXHAUSTED, f"the rest of the grid ({len(self._aside)}) waits for other workers"
                            if self._aside else "every configuration of the grid was tried")
            asked, again = self._ask(), None
            server = server_key(self.space, asked.config)
            if self.space.forbidden(asked.config) is not None:
                self._prune(asked.trial, FORBIDDEN)
            elif self.name == "grid" and config_key(asked.config) in self._tried:
                self._prune(asked.trial, None)
            elif server in self._busy and self.name == "grid":  # it never names a cell twice
                self._prune(asked.trial, None)
                self._aside.append(asked.config)
            elif server in self._busy:
                rejected.callback(self._prune, asked.trial, None)
            else:
                self._asked[server] = asked
                self._unmeasured.add(server)
                reason = "the baseline, the reference of all comparisons" if first else f"Optuna's {self.name} sampler"
                return Launch(self.space.split(asked.config)[0], reason, 0.0, 1.0)
        return Stop(StopKind.EXHAUSTED, f"{TRIES} proposals in a row were forbidden, known or running on other workers")

    def next_load(self, server: Config) -> Config | None:
        """The load part of the trial; one per launch."""
        key = config_key(server)
        if key not in self._unmeasured:
            return None
        self._unmeasured.discard(key)
        return self.space.split(self._asked[key].config)[1]

    def tell(self, observation: Observation) -> None:
        """Take in one outcome."""
        self.used_s += observation.cost_s
        self.launches += observation.launch_s > 0
        key = config_key(observation.server)
        asked = self._asked.get(key)
        self._servers.add(key)
        if asked is not None and observation.load in (None, self.space.split(asked.config)[1]):
            del self._asked[key]
            self._unmeasured.discard(key)
        else:
            load = observation.load or self.space.split(self.space.baseline)[1]
            self.study.enqueue_trial({**observation.server, **load})
            asked = self._ask()
        config = config_key(asked.config)
        self._tried.add(config)
        if isinstance(observation.outcome, Crash):
            self._prune(asked.trial, severity(observation.outcome))
            return
        self._values.setdefault(config, (asked.config, []))[1].append(observation.outcome)
        if observation.outcome.value is None:
            self._prune(asked.trial, None)
            return
        for name, ratio in {**observation.outcome.ratios, "crash": 1.0}.items():
            asked.trial.set_constraint(name, ratio - 1)
        self._finish(asked.trial, observation.outcome.value)

    def pending(self, server: Config, load: Config | None = None) -> None:
        self._busy.add(config_key(server))

    def done(self, server: Config) -> None:
        self._busy.discard(config_key(server))

    def best(self) -> Best | None:
        """The feasible configuration with the best mean of its measurements."""
        means = [(sum(values) / len(values), config) for config, seen in self._values.values() if (
            values := [math.log(m.value) for m in seen if m.value is not None and m.value > 0 and m.feasible])]
        mean, config = max(means, key=lambda pair: pair[0], default=(0.0, None))
        return None if config is None else Best(*self.space.split(config), math.exp(mean))

    def pivots(self) -> list[Pivot]:
        """Always empty: samplers give no reasons."""
        return []

    def _again(self, first: bool) -> Config | None:
        """A postponed configuration that may run now, if not `first`. Trials lost with their host are postponed."""
        for key in [key for key in self._asked if key not in self._busy]:
            lost = self._asked.pop(key)
            self._unmeasured.discard(key)
            self._prune(lost.trial, None)
            self._aside.append(lost.config)
        self._aside = [config for config in self._aside if config_key(config) not in self._tried]
        free = (i for i, config in enumerate(self._aside) if server_key(self.space, config) not in self._busy)
        at = None if first else next(free, None)
        return None if at is None else self._aside.pop(at)

    def _ask(self) -> _Asked:
        trial = self.study.ask()
        config: dict[str, Value] = {}
        for param in self.space.params:
            if self.space.active(param, config):
                config[param.name] = _choice(param, suggest(trial, param))
        return _Asked(trial, config)

    def _prune(self, trial: optuna.Trial, violation: float | None) -> None:
        """End a trial without a value: PRUNED with a violation, FAIL without one."""
        from optuna.trial import TrialState

        if violation is not None:
            trial.set_constraint("crash", violation)
        self._finish(trial, state=TrialState.PRUNED if violation is not None else TrialState.FAIL)

    def _finish(self, trial: optuna.Trial, value: float | None = None, state: TrialState | None = None) -> None:
        with contextlib.suppress(RuntimeError):  # at its last cell a grid stops Optuna's own loop: none runs
            self.study.tell(trial, value, state)


def _sampler(space: Space, name: str, seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed)
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if name != "grid":
        raise UsageError(f"study.strategy={name} is not one of autotune, {', '.join(SAMPLERS)}")
    size = math.prod(len(p.choices) for p in space.params)
    if size > ENUMERABLE:
        raise UsageError(f"study.strategy=grid: {space.name} has {size} configurations, more than {ENUMERABLE}; "
                         "use another strategy")
    return optuna.samplers.GridSampler({p.name: list(p.choices) for p in space.params}, seed=seed)


def _choice(param: Param, chosen: Value) -> Value:
    """The choice nearest to a sampled value, which float steps may miss slightly."""
    if param.step is None or isinstance(chosen, str):
        return chosen
    return min((c for c in param.choices if not isinstance(c, str)), key=lambda c: abs(c - chosen))
