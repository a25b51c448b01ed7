"""Reading past studies for `study.warm_start`: folders of outputs/, SQLite files or storage URLs."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterable, Sequence

from autotune.records import Crash, UsageError, config_key
from autotune.search.protocol import Measured, Observation
from autotune.space.space import Space
from autotune.storage.schema import CorruptStudy, study_attributes
from autotune.storage.trial import TrialRecord, record_of
from autotune.storage.urls import sqlite_url


def past_observations(sources: Iterable[str], space: Space, objective: str) -> list[Observation]:
    """What the studies in every source saw, oldest first. Values are relative within each study.

    A study of another objective still tells which configurations crash. Raises UsageError for a source that is not
    there or holds no study.
    """
    out: list[Observation] = []
    for source in sources:
        for records, its_objective in _studies(source):
            out += _observations(records, space, its_objective == objective)
    return out


def _studies(source: str) -> list[tuple[list[TrialRecord], str | None]]:
    """(trials, objective) of each study of a storage."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    url = _url(source)
    try:
        names = optuna.study.get_all_study_names(url)
        studies = [optuna.load_study(study_name=name, storage=url) for name in names]
    except Exception as error:  # SQLAlchemy and its drivers share no base class of their own
        line = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(f"study.warm_start: {source} cannot be read: {type(error).__name__}: {line[:200]}") from error
    if not studies:
        raise UsageError(f"study.warm_start: {source} holds no study")
    found = []
    for study in studies:
        try:
            identity = study_attributes(study.study_name, study.user_attrs).get("identity") or {}
            records = [record_of(trial) for trial in study.get_trials(deepcopy=False)]
        except CorruptStudy as error:
            raise UsageError(f"study.warm_start: {source}: {error.problem}") from error
        found.append((records, identity.get("objective")))
    return found


def _url(source: str) -> str:
    if "://" in source:
        return source
    path = pathlib.Path(source).expanduser()
    found = path / "study.db" if path.is_dir() else path
    if not found.is_file():
        raise UsageError(f"study.warm_start: there is no study in {source}: give a folder of outputs/ with a study.db, "
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
        outcome: Measured | Crash
        if record.crash is not None:
            outcome = record.crash
        else:
            known = comparable and record.value is not None and not record.invalid_reasons
            outcome = Measured(record.value / level if known and record.value is not None else None,
                               record.score is not None and record.score.feasible)
        before_load = record.crashed and not record.crashed_under_load
        out.append(Observation(server, None if before_load else load, outcome, record.cost_s or 0.0,
                               0.0 if launch in launched else record.launch_s or 1.0))
        launched.add(launch)
    return out
