"""The study: Optuna storage, trials asked and told, guards against mixing. The only module that writes to Optuna.

    study = Study.open(url, name, space, identity)
    with study.turn():                                # no other worker proposes or asks meanwhile
        trial = study.ask(config, launch=7)
    study.tell(trial, outcome, score, LaunchFacts(argv), cost_s=62.0, launch_s=41.0)

A crash is PRUNED with a graded constraint; FAIL means that we failed (samplers ignore FAIL). Several workers may share
a study: running trials carry their owner and a heartbeat, and those of dead workers are told FAIL by the living.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.engine.orphans import boot_id, start_time
from autotune.records import AutotuneError, Config, Crash, Measurement, Score, UsageError, to_json
from autotune.space.space import Space
from autotune.storage.heartbeat import Heartbeat
from autotune.storage.locks import StudyLock
from autotune.storage.retry import MEND, RetryPolicy, patient
from autotune.storage.schema import corrupt, study_attributes
from autotune.storage.trial import NO_LAUNCH, OUTCOME, LaunchFacts, Result, TrialRecord, distribution, record_of
from autotune.storage.urls import backend, hidden, open_storage, sqlite_file
from autotune.utils.text import SPELLED, printable

if TYPE_CHECKING:
    import optuna

LOST_AFTER_S = 120.0
SCHEMA = "autotune: the tables of a storage"


class StudyMismatch(UsageError):
    """A study was made under other conditions; `different` maps what differs to (then, now)."""

    def __init__(self, name: str, different: Mapping[str, tuple[Any, Any]]) -> None:
        self.name, self.different = name, different
        told = "; ".join(f"{key} was {_short(then)}, now {_short(now)}" for key, (then, now) in different.items())
        super().__init__(f"study {name} was made with other conditions ({told}): "
                         "results would not be comparable; choose another name with study.name=NAME")


class Study:
    def __init__(self, inner: optuna.Study, space: Space, limits: Sequence[str], turns: StudyLock,
                 patience: RetryPolicy) -> None:
        self.patience = patience
        self.inner, self.space, self.turns, self.owner = inner, space, turns, owner_id()
        self.constraints = ("crash", "invalid", *limits)
        self.own_space = True
        """Whether its trials are of `space`: a study that is only compared may have another one."""
        self._heartbeat = Heartbeat(inner._storage)
        self._ended: dict[int, TrialRecord] = {}

    @classmethod
    def open(cls, url: str, name: str, space: Space, identity: Mapping[str, Any], limits: Sequence[str] = (),
             create: bool = True, lost_after_s: float = LOST_AFTER_S, wait_s: float = 0.0) -> Study:
        """Open or create the study `name` in the storage `url`. A worker silent for `lost_after_s` counts as dead.

        Raises Mixed (a UsageError) when a study of another identity has this name, UsageError when it does not exist
        and `create` is False (to read, only the space must be the same); AutotuneError when the storage cannot
        be reached. Later on a storage that does not answer is asked again for `wait_s` seconds.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        turns, patience = StudyLock(url, f"autotune: study {name}"), RetryPolicy(wait_s)
        try:
            with _tables(url, create):
                storage = patient(open_storage(url, lost_after_s), patience)
            if name not in optuna.study.get_all_study_names(storage) and not create:
                raise UsageError(f"there is no study {name} yet: run python -m autotune +space={space.name} first")
            with turns.turn() if create else contextlib.nullcontext():
                inner = optuna.create_study(
                    study_name=name, storage=storage, direction="maximize", load_if_exists=True,
                    sampler=optuna.samplers.RandomSampler(), pruner=optuna.pruners.NopPruner())
                study = cls(inner, space, limits, turns, patience)
                study.own_space = "space_digest" in identity
                study._guard(identity if create else {k: v for k, v in identity.items() if k == "space_digest"}, create)
        except AutotuneError:
            raise
        except Exception as error:  # SQLAlchemy and its drivers share no base class of their own
            line = str(error).strip().splitlines()[0] if str(error).strip() else ""
            mend = f". If it is corrupt: {MEND}" if backend(url) == "sqlite" else ""
            raise AutotuneError(f"cannot open the study storage {hidden(url)}: "
                                f"{type(error).__name__}: {line[:200]}{mend}") from error
        return study

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """While it lasts, no other worker of the study proposes, asks, or clears up."""
        return self.turns.turn()

    def lead(self) -> None:
        """Be the one tuner of this study, beside workers. Raises AutotuneError naming the one that lives.

        One on another host counts as living while it has a running trial that gives signs of life.
        """
        with self.turn():
            self._no_gaps()
            other = str(self.attrs().get("tuner") or self.owner)
            if other != self.owner and other.count("|") == 3:
                silent = self._heartbeat.silent(self.inner._study_id)
                busy = any(_owner_of(t) == other and t._trial_id not in silent for t in self._running())
                if owner_alive(other) if is_here(other) else busy:
                    host, _, pid, _ = other.split("|")
                    raise AutotuneError(f"another autotune ({'' if is_here(other) else f'on {host}, '}pid {pid}) tunes "
                                        f"study {self.inner.study_name} in this storage; use the verb worker to join "
                                        "it, or study.name=NAME for one of your own")
            self.inner.set_user_attr("tuner", self.owner)

    def fail_stale_trials(self) -> list[int]:
        """Tell FAIL to running trials whose worker no longer lives; returns their numbers.

        A process of this host is looked up; of one elsewhere the trial's heartbeat tells.
        """
        dead = []
        with self.turn():
            running = self._running()
            others = [t for t in running if _owner_of(t) != self.owner]
            silent = self._heartbeat.silent(self.inner._study_id) if others else set()
            for trial in others:
                here = is_here(owner := _owner_of(trial))
                if owner_alive(owner) if here else trial._trial_id not in silent:
                    continue
                if self._tell_fail(trial, "the tuner died"):
                    dead.append(trial.number)
        return dead

    @contextlib.contextmanager
    def fail_running_on_exit(self) -> Iterator[None]:
        """Whatever ends the block, no trial of this process stays running: one may just have been made."""
        try:
            yield
        except BaseException as error:
            self.patience.leave(self.inner._storage)
            self.turns.wait_s = min(self.turns.wait_s, self.patience.wait_s)
            with contextlib.suppress(Exception), self.turn():  # else the next tuner does it
                for trial in self._running():
                    if _owner_of(trial) == self.owner:
                        self._tell_fail(trial, f"{type(error).__name__}: {error}".rstrip(": "))
            raise

    def _running(self) -> list[optuna.trial.FrozenTrial]:
        from optuna.trial import TrialState

        return self.inner.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def _tell_fail(self, trial: optuna.trial.FrozenTrial, why: str) -> bool:
        """Tell FAIL to a trial by what the storage has of it; False when it ended by itself meanwhile."""
        import optuna

        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError, ValueError):
            self.inner._storage.set_trial_user_attr(trial._trial_id, "fail_reason", why)
            self.inner.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            return True
        return False

    def ask(self, config: Config, launch: int, **attrs: Any) -> optuna.Trial:
        """A new trial for exactly `config`, owned by this process; others see it with all of this or not at all."""
        import optuna

        params = {param.name: config[param.name] for param in self.space.params if param.name in config}
        made = optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING, params=params,
            distributions={param.name: distribution(param) for param in self.space.params if param.name in config},
            user_attrs={"owner": self.owner, "launch_id": launch, **attrs})
        with self.turn():
            trial_id = self.inner._storage.create_new_trial(self.inner._study_id, template_trial=made)
            self._heartbeat.add(trial_id)
        return optuna.Trial(self.inner, trial_id)

    def tell(self, trial: optuna.Trial, outcome: Measurement | Crash, score: Score | None,
             launch: LaunchFacts = NO_LAUNCH, *, cost_s: float, launch_s: float) -> bool:
        """Record an outcome: one attribute, headlines, constraints (same keys on every trial), value or PRUNED.

        False: another worker took this one for dead and told the trial FAIL; the outcome is dropped.
        """
        value = score.value if score is not None else None
        return self._tell(trial, Result(outcome, score, round(cost_s, 3), round(launch_s, 3), launch), value)

    def copy(self, trial: optuna.Trial, source: TrialRecord, launch: LaunchFacts = NO_LAUNCH, *, cost_s: float,
             launch_s: float) -> bool:
        """Record the outcome of `source`, another configuration of an equivalent server, for `trial`.

        False: like `tell`.
        """
        if source.outcome is None:
            raise ValueError(f"trial {source.number} has no outcome to copy")
        result = Result(source.outcome, source.score, round(cost_s, 3), round(launch_s, 3), launch, source.number)
        return self._tell(trial, result, source.value)

    def fail(self, trial: optuna.Trial, why: str) -> bool:
        """Our own fault, or an interruption: nothing was learned about the configuration."""
        from optuna.trial import TrialState

        def write() -> None:
            trial.set_user_attr("fail_reason", why)
            self.inner.tell(trial, state=TrialState.FAIL)

        return self._end(trial, write)

    def _tell(self, trial: optuna.Trial, result: Result, value: float | None) -> bool:
        from optuna.trial import TrialState

        def write() -> None:
            trial.set_user_attr(OUTCOME, to_json(result))
            for name, shown in result.headlines().items():
                trial.set_user_attr(name, shown)
            for key, constraint in result.constraints().items():
                trial.set_constraint(key, constraint)
            self.inner.tell(trial, value, state=TrialState.PRUNED if value is None else None)

        return self._end(trial, write)

    def _end(self, trial: optuna.Trial, write: Callable[[], None]) -> bool:
        """End a trial of ours; False if another worker ended it before."""
        import optuna

        try:
            write()
        except optuna.exceptions.UpdateFinishedTrialError:
            return False
        finally:
            self._heartbeat.remove(trial._trial_id)
        return True

    def records(self) -> list[TrialRecord]:
        """Every trial, oldest first. Of ended ones the same objects every time."""
        return [self._record(t) for t in self.inner.get_trials(deepcopy=False)]

    def record(self, number: int) -> TrialRecord:
        """One trial by its number."""
        return self._record(self._trial(number))

    def _trial(self, number: int) -> optuna.trial.FrozenTrial:
        trials = self.inner.get_trials(deepcopy=False)
        if number < len(trials) and trials[number].number == number:
            return trials[number]
        raise corrupt(f"trial {number} is missing")

    def _no_gaps(self) -> None:
        """Raises CorruptStudy if a trial was removed: the storage would give its number to a new one."""
        numbers = [trial.number for trial in self.inner.get_trials(deepcopy=False)]
        gap = next((at for at, number in enumerate(numbers) if at != number), None)
        if gap is not None:
            raise corrupt(f"trial {gap} is missing")

    def _record(self, trial: optuna.trial.FrozenTrial) -> TrialRecord:
        kept = self._ended.get(trial.number)
        if kept is None:
            kept = record_of(trial)
            if kept.result is None and kept.state in ("COMPLETE", "PRUNED"):
                raise corrupt(f"trial {kept.number}: {OUTCOME} is missing")
            if self.own_space and (kept.state in ("COMPLETE", "PRUNED") or kept.state == "RUNNING" and kept.config):
                self._check_config(kept)
            if trial.state.is_finished():
                self._ended[trial.number] = kept
        return kept

    def _check_config(self, record: TrialRecord) -> None:
        """Raises CorruptStudy for choices unknown to the space: a stored configuration may go to a command line."""
        try:
            self.space.check(record.config)
        except UsageError as error:
            raise corrupt(f"trial {record.number}: {error}") from error

    def attrs(self) -> dict[str, Any]:
        """The study's attributes. Raises CorruptStudy for values of other types."""
        return study_attributes(self.inner.study_name, self.inner.user_attrs)

    def set_attr(self, name: str, value: Any) -> None:
        self.inner.set_user_attr(name, value)

    def _guard(self, identity: Mapping[str, Any], create: bool) -> None:
        stored = self.attrs().get("identity")
        plain = json.loads(json.dumps(dict(identity)))
        if stored is None and create and not self.inner.get_trials(deepcopy=False):
            self.inner.set_user_attr("identity", plain)
            return
        if stored is None:
            raise corrupt(f"study {self.inner.study_name}: identity is missing")
        different = {key: (stored[key], now) for key, now in plain.items()  # older releases stored less
                     if key in stored and not _same(stored[key], now)}
        if different:
            raise StudyMismatch(self.inner.study_name, different)


def _tables(url: str, create: bool) -> contextlib.AbstractContextManager[None]:
    """One at a time while tables may be made: Optuna makes them for those who only read as well.

    Where a reader can write nothing, nothing is made.
    """
    file = sqlite_file(url) if backend(url) == "sqlite" else None
    if not create and file is not None and not os.access(file.parent, os.W_OK):
        return contextlib.nullcontext()
    return StudyLock(url, SCHEMA).turn()


def owner_id() -> str:
    """host|boot|pid|start time: recognises this process, also after its pid is used again."""
    return f"{_host()}|{boot_id()}|{os.getpid()}|{start_time(os.getpid())}"


def owner_alive(owner: str) -> bool:
    """Whether an owner lives; owners on other hosts are taken to live."""
    parts = owner.split("|")
    if not is_here(owner) or not parts[2].isdecimal():
        return len(parts) == 4 and not is_here(owner)
    return parts[1] == boot_id() and start_time(int(parts[2])) == parts[3]


def is_here(owner: str) -> bool:
    """Whether an owner's process would be found on this host."""
    return owner.count("|") == 3 and owner.split("|")[0] == _host()


def _host() -> str:
    """This host, and which of its containers: process ids of another one mean nothing here."""
    try:
        space = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        space = ""
    return f"{socket.gethostname()}/{space}"


def _owner_of(trial: optuna.trial.FrozenTrial) -> str:
    """Whose a trial is; "" for nobody's."""
    owner = trial.user_attrs.get("owner")
    return owner if isinstance(owner, str) else ""


def _same(then: Any, now: Any) -> bool:
    """Whether a condition is the one that a study was made under (early studies kept the GPUs one by one)."""
    if isinstance(then, list) and isinstance(now, list) and now and " x " in str(now[0]):
        plain = [re.sub(r" [0-9a-f]{8}$", "", str(one)) for one in then]
        then = [f"{plain.count(name)} x {name}" for name in sorted(set(plain))] if plain != then else then
    return bool(then == now)


def _short(value: Any) -> str:
    text = printable(value if isinstance(value, str) else json.dumps(value), instead=SPELLED)
    return text if len(text) <= 60 else text[:57] + "..."
