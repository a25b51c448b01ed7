"""A study: its trials and attributes in an Optuna storage, shared by several workers.

    trial = study.ask(config, launch=7, reason="...")
    study.tell(trial, outcome, score, LaunchFacts(argv), cost_s=62.0, launch_s=41.0)

A crash is PRUNED with a graded constraint; FAIL means that we failed (samplers ignore FAIL). Running trials carry
their owner and a heartbeat; living workers mark those of dead workers FAIL.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from autotune.records import AutotuneError, Config, Outcome, Score, UsageError
from autotune.space.space import Space
from autotune.storage.database import Retries, RunningTrials, cannot_open, open_storage, sqlite_file, trials_of
from autotune.storage.locks import StudyLock, is_here, owner_alive, owner_id
from autotune.storage.schema import CorruptStudy, study_attributes
from autotune.storage.trial import NO_LAUNCH, OUTCOME, LaunchFacts, Result, TrialRecord, distribution, record_of
from autotune.utils.text import SPELLED, printable

if TYPE_CHECKING:
    import optuna

LOST_AFTER_S = 120.0
TABLES = "autotune: the tables of a storage"  # topic of the lock under which tables are made


class StudyMismatch(UsageError):
    """A study was made under other conditions; `different` maps their names to (then, now)."""

    def __init__(self, name: str, different: Mapping[str, tuple[Any, Any]]) -> None:
        self.name, self.different = name, different
        changes = "; ".join(f"{key} was {_short(then)}, now {_short(now)}" for key, (then, now) in different.items())
        super().__init__(f"study {name} was made with other conditions ({changes}): "
                         "results would not be comparable; choose another name with study.name=NAME")


class Study:
    """An open study; `owner` identifies this process.

    `own_space` is False for a study that is only compared: its trials may be of another space.
    """

    def __init__(self, inner: optuna.Study, space: Space, lock: StudyLock, retries: Retries,
                 storage: optuna.storages.RDBStorage) -> None:
        self.inner, self.space, self.owner, self.own_space = inner, space, owner_id(), True
        self.storage, self._lock, self._retries = storage, lock, retries
        self._running = RunningTrials(inner)
        self._ended: dict[int, TrialRecord] = {}

    @classmethod
    def open(cls, url: str, name: str, space: Space, identity: Mapping[str, Any], *, create: bool = True,
             lost_after_s: float = LOST_AFTER_S, wait_s: float = 0.0) -> Study:
        """Open or create the study `name`. A worker silent for `lost_after_s` is dead; calls are retried for `wait_s`.

        Raises StudyMismatch for a study of another identity (without `create`: of another space), UsageError for a
        study that does not exist when `create` is False, AutotuneError for a storage that cannot be reached.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        lock, retries = StudyLock(url, f"autotune: study {name}"), Retries(wait_s)
        try:
            with _tables_lock(url, create):
                storage = open_storage(url, lost_after_s, retries)
            if name not in optuna.study.get_all_study_names(storage) and not create:
                raise UsageError(f"there is no study {name} yet: run python -m autotune +space={space.name} first")
            with lock.held() if create else contextlib.nullcontext():
                inner = optuna.create_study(
                    study_name=name, storage=storage, direction="maximize", load_if_exists=True,
                    sampler=optuna.samplers.RandomSampler(), pruner=optuna.pruners.NopPruner())
                study = cls(inner, space, lock, retries, storage)
                study.own_space = "space_digest" in identity
                study._check_identity(identity if create else {
                    key: value for key, value in identity.items() if key == "space_digest"}, create)
        except AutotuneError:
            raise
        except Exception as error:  # SQLAlchemy and its drivers share no base class of their own
            raise cannot_open(url, error, f"{type(error).__name__}: ") from error
        return study

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Hold the study lock: no other worker of the study proposes, asks, or fails stale trials meanwhile."""
        return self._lock.held()

    def lead(self) -> None:
        """Become the one tuner of this study, beside workers. Raises AutotuneError naming another one that lives.

        A tuner on another host counts as alive while a running trial of it sends heartbeats.
        """
        with self.locked():
            for number, trial in enumerate(trials_of(self.inner)):
                if trial.number != number:  # the storage would give the number of a removed trial to a new one
                    raise CorruptStudy(f"trial {number} is missing")
            other = str(self.attrs().get("tuner") or self.owner)
            if other != self.owner and other.count("|") == 3:
                silent = self._running.silent()
                busy = any(_owner_of(t) == other and t.number not in silent for t in self._running.all())
                if owner_alive(other) if is_here(other) else busy:
                    host, _, pid, _ = other.split("|")
                    raise AutotuneError(f"another autotune ({'' if is_here(other) else f'on {host}, '}pid {pid}) tunes "
                                        f"study {self.inner.study_name} in this storage; use the verb worker to join "
                                        "it, or study.name=NAME for one of your own")
            self.inner.set_user_attr("tuner", self.owner)

    def fail_stale_trials(self) -> list[int]:
        """Mark running trials of dead workers FAIL; returns their numbers.

        Workers of this host are looked up among its processes; others count as dead without heartbeats.
        """
        with self.locked():
            others = [t for t in self._running.all() if _owner_of(t) != self.owner]
            silent = self._running.silent() if others else set()
            return [t.number for t in others
                    if not (owner_alive(_owner_of(t)) if is_here(_owner_of(t)) else t.number not in silent)
                    and self._running.fail(t, "the tuner died")]

    @contextlib.contextmanager
    def fail_running_on_exit(self) -> Iterator[None]:
        """Mark the running trials of this process FAIL if an exception ends the block."""
        try:
            yield
        except BaseException as error:
            self._retries.shorten(self.storage)
            self._lock.wait_s = min(self._lock.wait_s, self._retries.wait_s)
            with contextlib.suppress(Exception), self.locked():  # else the next tuner does it
                for trial in self._running.all():
                    if _owner_of(trial) == self.owner:
                        self._running.fail(trial, f"{type(error).__name__}: {error}".rstrip(": "))
            raise

    def ask(self, config: Config, launch: int, **start: Any) -> optuna.Trial:
        """A new trial for exactly `config`, owned by this process. `start`: fields of StartFacts."""
        import optuna

        params = [param for param in self.space.params if param.name in config]
        template = optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING, params={param.name: config[param.name] for param in params},
            distributions={param.name: distribution(param) for param in params},
            user_attrs={"owner": self.owner, "launch_id": launch, **start})
        with self.locked():
            return self._running.create(template)

    def tell(self, trial: optuna.Trial, outcome: Outcome, score: Score | None, launch: LaunchFacts = NO_LAUNCH, *,
             cost_s: float, launch_s: float, same_as: int | None = None) -> bool:
        """Store the outcome of a trial: COMPLETE with a value, else PRUNED. `same_as`: see Result.

        False: another worker took this one for dead and marked the trial FAIL; the outcome is dropped.
        """
        from optuna.trial import TrialState

        result = Result(outcome, score, round(cost_s, 3), round(launch_s, 3), launch, same_as)
        value = score.value if score is not None else None
        return self._end(trial, {OUTCOME: msgspec.to_builtins(result), **result.headlines()}, value,
                         TrialState.PRUNED if value is None else None, result.constraints())

    def fail(self, trial: optuna.Trial, why: str) -> bool:
        """Mark a trial FAIL: our own fault or an interruption taught nothing about its configuration."""
        from optuna.trial import TrialState

        return self._end(trial, {"fail_reason": why}, None, TrialState.FAIL, {})

    def _end(self, trial: optuna.Trial, attrs: Mapping[str, Any], value: float | None,
             state: optuna.trial.TrialState | None, constraints: Mapping[str, float]) -> bool:
        """End a trial of this process; False if another worker ended it before."""
        import optuna

        try:
            for name, stored in attrs.items():
                trial.set_user_attr(name, stored)
            for name, constraint in constraints.items():
                trial.set_constraint(name, constraint)
            self.inner.tell(trial, value, state=state)
        except optuna.exceptions.UpdateFinishedTrialError:
            return False
        finally:
            self._running.ended(trial)
        return True

    def records(self) -> list[TrialRecord]:
        """Every trial, oldest first. Ended ones are the same objects every time."""
        return [self._record(t) for t in trials_of(self.inner)]

    def record(self, number: int) -> TrialRecord:
        return self._record(self._frozen(number))

    def trial(self, number: int) -> optuna.Trial:
        """Optuna's trial by its number, to attach notes to."""
        return self._running.handle(self._frozen(number))

    def _frozen(self, number: int) -> optuna.trial.FrozenTrial:
        trials = trials_of(self.inner)
        if number < len(trials) and trials[number].number == number:
            return trials[number]
        raise CorruptStudy(f"trial {number} is missing")

    def _record(self, trial: optuna.trial.FrozenTrial) -> TrialRecord:
        kept = self._ended.get(trial.number)
        if kept is not None:
            return kept
        record = record_of(trial)
        measured = record.state in ("COMPLETE", "PRUNED")
        if record.outcome is None and measured:
            raise CorruptStudy(f"trial {record.number}: {OUTCOME} is missing")
        if self.own_space and (measured or record.state == "RUNNING" and record.config):
            try:  # a stored configuration may go to a command line
                self.space.check(record.config)
            except UsageError as error:
                raise CorruptStudy(f"trial {record.number}: {error}") from error
        if trial.state.is_finished():
            self._ended[trial.number] = record
        return record

    def attrs(self) -> dict[str, Any]:
        """The study's attributes. Raises CorruptStudy for values of other types."""
        return study_attributes(self.inner.study_name, self.inner.user_attrs)

    def set_attr(self, name: str, value: Any) -> None:
        self.inner.set_user_attr(name, value)

    def _check_identity(self, identity: Mapping[str, Any], create: bool) -> None:
        stored = self.attrs().get("identity")
        plain = json.loads(json.dumps(dict(identity)))
        if stored is None and create and not trials_of(self.inner):
            self.inner.set_user_attr("identity", plain)
            return
        if stored is None:
            raise CorruptStudy(f"study {self.inner.study_name}: identity is missing")
        different = {key: (stored[key], now) for key, now in plain.items()  # earlier releases stored less
                     if key in stored and stored[key] != now}
        if different:
            raise StudyMismatch(self.inner.study_name, different)


def _tables_lock(url: str, create: bool) -> contextlib.AbstractContextManager[None]:
    """Excludes others while Optuna may make tables, which it does for readers too; nothing for a read-only folder."""
    file = sqlite_file(url)
    if not create and file is not None and not os.access(file.parent, os.W_OK):
        return contextlib.nullcontext()
    return StudyLock(url, TABLES).held()


def _owner_of(trial: optuna.trial.FrozenTrial) -> str:
    """The owner of a trial; "" for a trial of another tool."""
    return str(trial.user_attrs.get("owner") or "")


def _short(value: Any) -> str:
    text = printable(value if isinstance(value, str) else json.dumps(value), instead=SPELLED)
    return text if len(text) <= 60 else text[:57] + "..."
