"""Past studies (`study.warm_start`) as prior knowledge, weighed by how well they predict the present study.

Parameters and choices that the present space lacks are ignored; a parameter that a past study lacked counts as the
baseline's choice.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from autotune.records import UsageError, config_key
from autotune.search.crash_model import CrashModel
from autotune.search.grid import Codes, Floats, Grid
from autotune.search.observations import Observations
from autotune.search.strategy import Measured, Observation
from autotune.search.value_model import Data, Posterior, Prior, ValueModel
from autotune.space.space import Space
from autotune.storage.database import sqlite_url
from autotune.storage.schema import CorruptStudy, study_attributes
from autotune.storage.trial import TrialRecord, record_of

WRONG = 3.0  # correct predictions that outweigh a wrong one


class Past:
    """Models fitted to past observations, on the grid of the present space."""

    def __init__(self, grid: Grid, observations: Sequence[Observation]) -> None:
        memory = Observations(grid)
        fitting = [fits for observation in observations if (fits := _fitting(grid, observation)) is not None]
        self.given, self.used = len(observations), len(fitting)
        for observation in fitting:
            memory.add(observation)
        data = memory.measurements()
        self._posterior: Posterior | None = None
        if len(data.rows):
            model = ValueModel(grid, Prior(grid))
            self._posterior = model.fit(data, model.strengths(data)[0][1])
        self._crashes = CrashModel(grid, memory.passed(), memory.served(), memory.evidence())
        self._known = bool(memory.servers)
        self._loads = len(grid.load_rows)

    def effects(self, rows: Codes) -> Floats:
        """(n, L) log objective, up to a constant."""
        return self._posterior.predict(rows).mean if self._posterior else np.zeros((len(rows), self._loads))

    def chance(self, rows: Codes) -> Floats:
        """(n,) probability that each server part comes up, by past studies."""
        return self._crashes.chance(rows) if self._known else np.ones(len(rows))

    def trust_in_crashes(self, memory: Observations) -> float:
        """Trust in 0..1 in the past crash model, by its predictions of the present launches."""
        if not self._known:
            return 0.0
        passed, crashed = memory.passed(), memory.crashed()
        right = float((self.chance(passed) > 0.5).sum() + (self.chance(crashed) <= 0.5).sum())
        wrong = len(passed) + len(crashed) - right
        return (1 + right) / (2 + right + WRONG * wrong)

    def error(self, data: Data) -> float | None:
        """Root mean square error of the predicted effects, in logs; None below two measurements."""
        if self._posterior is None or len(data.rows) < 2:
            return None
        off = data.y[:, 0] - self.effects(data.rows)[np.arange(len(data.rows)), data.loads]
        return float(np.sqrt(np.mean((off - off.mean()) ** 2)))

    def report(self, trust: float, memory: Observations) -> str:
        """One line on the accuracy of past studies; trust: their share in the value model."""
        data = memory.measurements()
        error = self.error(data)
        coverage = f"warm start: {self.used} of {self.given} past observations fit this space"
        if error is None:
            return f"{coverage}; nothing was measured here to compare with"
        return (f"{coverage}; their effects were off by {math.expm1(error):.0%} (root mean square of {len(data.rows)} "
                f"configurations measured here), so they count {trust:.0%} in the value model and "
                f"{self.trust_in_crashes(memory):.0%} in the crash model")


def _fitting(grid: Grid, observation: Observation) -> Observation | None:
    """The observation in the present space; None if it does not fit."""
    space = grid.space
    known = {p.name for p in space.params}
    config = {k: v for k, v in {**observation.server, **(observation.load or {})}.items() if k in known}
    for param in space.params:
        if param.name not in config and param.name in space.baseline and space.active(param, config):
            config[param.name] = space.baseline[param.name]
    try:
        server, load = space.split(space.check(config))
        if observation.load is not None:
            grid.load_index(load)
    except (UsageError, KeyError):
        return None
    return dataclasses.replace(observation, server=server, load=load if observation.load is not None else None)


def past_observations(sources: Iterable[str], space: Space, objective: str) -> list[Observation]:
    """Observations of the studies in all sources, oldest first; values are relative within each study.

    Sources are folders of outputs/, SQLite files or storage URLs. A study of another objective contributes its crashes
    only. Raises UsageError for a missing source or one without a study.
    """
    return [observation for source in sources for records, its_objective in _studies(source)
            for observation in _observations(records, space, its_objective == objective)]


def _studies(source: str) -> list[tuple[list[TrialRecord], str | None]]:
    """(trials, objective) of each study of a storage."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    url = _url(source)
    try:
        names = optuna.study.get_all_study_names(url)
        studies = [optuna.load_study(study_name=name, storage=url) for name in names]
        stored = [(study.study_name, study.user_attrs, study.get_trials(deepcopy=False)) for study in studies]
    except Exception as error:  # SQLAlchemy and its drivers share no base class of their own
        line = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(f"study.warm_start: {source} cannot be read: {type(error).__name__}: {line[:200]}") from error
    if not stored:
        raise UsageError(f"study.warm_start: {source} holds no study")
    found = []
    for name, attrs, trials in stored:
        try:
            identity = study_attributes(name, attrs).get("identity") or {}
            records = [record_of(trial) for trial in trials]
        except CorruptStudy as error:
            raise UsageError(f"study.warm_start: {source}: {error.problem}") from error
        found.append((records, identity.get("objective")))
    return found


def _url(source: str) -> str:
    if "://" in source:
        return source
    found = pathlib.Path(source).expanduser()
    found = found / "study.db" if found.is_dir() else found
    if not found.is_file():
        raise UsageError(f"study.warm_start: no study in {source}: give a folder of outputs/ with a study.db, "
                         "or a storage URL")
    return sqlite_url(found.parent) if found.name == "study.db" else f"sqlite:///{found}"


def _observations(records: Sequence[TrialRecord], space: Space, comparable: bool) -> list[Observation]:
    values = [r.value for r in records if r.value is not None and r.value > 0 and comparable]
    level = math.exp(sum(math.log(v) for v in values) / len(values)) if values else 1.0
    loads = {p.name for p in space.load_params} | {"concurrency", "context"}
    out, launched = [], set()
    for record in records:
        if record.state not in ("COMPLETE", "PRUNED") or record.confirm:
            continue
        server = {k: v for k, v in record.config.items() if k not in loads}
        load = {k: v for k, v in record.config.items() if k in loads}
        launch = f"{record.launch_id}/{config_key(server)}"
        known = comparable and not record.invalid_reasons and record.value is not None
        outcome = record.crash or Measured(record.value / level if known and record.value is not None else None,
                                           record.score is not None and record.score.feasible)
        before_load = record.crashed and not record.crashed_under_load
        out.append(Observation(server, None if before_load else load, outcome, record.cost_s or 0.0,
                               0.0 if launch in launched else record.launch_s or 1.0))
        launched.add(launch)
    return out
