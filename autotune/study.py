"""The study: Optuna storage, trials asked and told, guards against mixing. The only module that writes to Optuna.

    study = Study.open(url, name, space, identity)
    trial = study.ask(config, launch=7)
    study.tell(trial, outcome, verdict, cost_s=62.0, launch_s=41.0)

A crash is PRUNED with a graded constraint; FAIL means that we failed (samplers ignore FAIL).
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from autotune.engine.leftovers import boot_id, start_time
from autotune.history import TrialRecord, Verdict, crash_attrs, measurement_attrs, severity
from autotune.patience import patient
from autotune.records import AutotuneError, Config, Crash, Measurement, UsageError, Value
from autotune.space import Param, Space

if TYPE_CHECKING:
    import optuna


class Study:
    def __init__(self, inner: optuna.Study, plan: dict[str, Value], space: Space, limits: Sequence[str]) -> None:
        self.inner, self.plan, self.space, self.owner = inner, plan, space, owner_id()
        self.constraints = ("crash", "invalid", *limits)

    @classmethod
    def open(cls, url: str, name: str, space: Space, identity: Mapping[str, Any], limits: Sequence[str] = (),
             create: bool = True, wait_s: float = 0.0) -> Study:
        """Open or create the study `name` in the storage `url`.

        Raises UsageError when a study of another identity has this name, or when it does not exist and
        `create` is False (to read, only the space must be the same); AutotuneError when the storage cannot
        be reached. Later on a storage that does not answer is asked again for `wait_s` seconds.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            storage = patient(optuna.storages.RDBStorage(url, engine_kwargs=_engine_options(url)), wait_s)
            names = optuna.study.get_all_study_names(storage)
            if name not in names and not create:
                raise UsageError(f"there is no study {name} yet: run python -m autotune +space={space.name} first")
            plan: dict[str, Value] = {}
            inner = optuna.create_study(study_name=name, storage=storage, direction="maximize", load_if_exists=True,
                                        sampler=_planned_sampler(plan), pruner=optuna.pruners.NopPruner())
            study = cls(inner, plan, space, limits)
            study._guard(identity if create else {k: v for k, v in identity.items() if k == "space_digest"})
        except (UsageError, AutotuneError):
            raise
        except Exception as error:  # SQLAlchemy and its drivers share no base class of their own
            line = str(error).strip().splitlines()[0] if str(error).strip() else ""
            raise AutotuneError(f"cannot open the study storage {_without_password(url)}: "
                                f"{type(error).__name__}: {line[:200]}") from error
        return study

    def clear_dead(self) -> list[int]:
        """Tell FAIL to trials left RUNNING by a tuner of this host that no longer lives; returns their numbers."""
        from optuna.trial import TrialState

        dead = []
        for trial in self.inner.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            owner = trial.user_attrs.get("owner", "")
            if owner == self.owner or owner_alive(owner):
                continue
            self.inner._storage.set_trial_user_attr(trial._trial_id, "fail_reason", "the tuner died")
            self.inner.tell(trial.number, state=TrialState.FAIL)
            dead.append(trial.number)
        return dead

    def ask(self, config: Config, launch: int, **attrs: Any) -> optuna.Trial:
        """A new trial for exactly `config`, every parameter suggested, owned by this process."""
        self.plan.clear()
        self.plan.update(config)
        trial = self.inner.ask()
        trial.set_user_attr("owner", self.owner)
        trial.set_user_attr("launch_id", launch)
        for name, value in attrs.items():
            trial.set_user_attr(name, value)
        for param in self.space.params:
            if param.name in config:
                suggest(trial, param)
        return trial

    def tell(self, trial: optuna.Trial, outcome: Measurement | Crash, verdict: Verdict | None, *, cost_s: float,
             launch_s: float, **attrs: Any) -> None:
        """Record an outcome: attributes, constraints (same keys on every trial), value or PRUNED."""
        from optuna.trial import TrialState

        flat = crash_attrs(outcome) if isinstance(outcome, Crash) else measurement_attrs(outcome)
        if verdict is not None:
            flat |= {"feasible": verdict.feasible, "violated": list(verdict.violated), "objective": verdict.value,
                     "limit_ratios": dict(verdict.ratios), "invalid_reasons": list(verdict.reasons)}
        else:
            flat |= {"feasible": False}
        for name, value in {**flat, **attrs, "cost_s": round(cost_s, 3), "launch_s": round(launch_s, 3)}.items():
            if value is not None:
                trial.set_user_attr(name, value)
        crash = severity(outcome) if isinstance(outcome, Crash) else 0.0
        invalid = 1.0 if verdict is not None and (verdict.reasons or verdict.value is None) else 0.0
        for key in self.constraints:
            ratio = verdict.ratios.get(key, 1.0) - 1 if verdict is not None else 0.0
            trial.set_constraint(key, {"crash": crash, "invalid": invalid}.get(key, ratio))
        if verdict is None or verdict.value is None:
            self.inner.tell(trial, state=TrialState.PRUNED)
        else:
            self.inner.tell(trial, verdict.value)

    def copy(self, trial: optuna.Trial, source: TrialRecord, *, cost_s: float, launch_s: float, **attrs: Any) -> None:
        """Record for `trial` what `source`, another configuration of the very same server, was measured at."""
        own = {"owner", "launch_id", "reason", "cost_s", "launch_s", *attrs}
        taken = {name: value for name, value in source.attrs.items() if name not in own}
        for name, value in {**taken, **attrs, "same_as": source.number, "cost_s": round(cost_s, 3),
                            "launch_s": round(launch_s, 3)}.items():
            if value is not None:
                trial.set_user_attr(name, value)
        for key, value in self.inner.trials[source.number].constraints.items():
            trial.set_constraint(key, value)
        self.inner.tell(trial, source.value)

    def fail(self, trial: optuna.Trial, why: str) -> None:
        """Our own fault, or an interruption: nothing was learned about the configuration."""
        from optuna.trial import TrialState

        trial.set_user_attr("fail_reason", why)
        self.inner.tell(trial, state=TrialState.FAIL)

    def records(self) -> list[TrialRecord]:
        """Every trial, oldest first."""
        return [record_of(t) for t in self.inner.get_trials(deepcopy=False)]

    def record(self, number: int) -> TrialRecord:
        """One trial by its number."""
        return record_of(self.inner.get_trials(deepcopy=False)[number])

    def attrs(self) -> dict[str, Any]:
        """The study's own attributes."""
        return dict(self.inner.user_attrs)

    def set_attr(self, name: str, value: Any) -> None:
        self.inner.set_user_attr(name, value)

    def _guard(self, identity: Mapping[str, Any]) -> None:
        stored = self.inner.user_attrs.get("identity")
        plain = json.loads(json.dumps(dict(identity)))
        if stored is None:
            self.inner.set_user_attr("identity", plain)
            return
        different = [key for key in plain if stored.get(key) != plain[key]]
        if different:
            told = "; ".join(f"{key} was {_short(stored.get(key))}, now {_short(plain[key])}" for key in different)
            raise UsageError(f"study {self.inner.study_name} was made with other conditions ({told}): "
                             "results would not be comparable; choose another name with study.name=NAME")


def sqlite_url(folder: pathlib.Path) -> str:
    """The default storage of a study folder."""
    return f"sqlite:///{folder / 'study.db'}"


def owner_id() -> str:
    """host|boot|pid|start time: recognises this process, also after its pid is used again."""
    return f"{socket.gethostname()}|{boot_id()}|{os.getpid()}|{start_time(os.getpid())}"


def owner_alive(owner: str) -> bool:
    """Whether an owner lives; owners on other hosts are taken to live."""
    here = owner_id().split("|")
    parts = owner.split("|")
    if len(parts) != 4 or parts[0] != here[0]:
        return len(parts) == 4
    return parts[1] == here[1] and start_time(int(parts[2])) == parts[3]


def _planned_sampler(plan: Mapping[str, Value]) -> optuna.samplers.BaseSampler:
    """A sampler that returns the planned value of each parameter: strategies decide, Optuna records."""
    import optuna

    class Planned(optuna.samplers.BaseSampler):
        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return {}

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
            return {}

        def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
            return plan[param_name]

    return Planned()


def suggest(trial: optuna.Trial, param: Param) -> Value:
    """Have a trial's sampler choose one of a parameter's choices."""
    if param.step is None or len(param.choices) < 2:
        chosen: Any = trial.suggest_categorical(param.name, list(param.choices))
        return cast(Value, chosen)
    if all(isinstance(c, int) for c in param.choices):
        return trial.suggest_int(param.name, int(param.choices[0]), int(param.choices[-1]), step=int(param.step))
    return trial.suggest_float(param.name, float(param.choices[0]), float(param.choices[-1]), step=param.step)


def record_of(trial: optuna.trial.FrozenTrial) -> TrialRecord:
    """An Optuna trial as plain data."""
    value = trial.values[0] if trial.values else None
    return TrialRecord(trial.number, trial.state.name, dict(trial.params), value, dict(trial.user_attrs),
                       trial.datetime_start, trial.datetime_complete)


def _engine_options(url: str) -> dict[str, Any]:
    return {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {"pool_pre_ping": True}


def _without_password(url: str) -> str:
    from autotune.redact import Redactor

    return Redactor().text(url)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
