"""Trials as typed records, and their one stored form. Optuna's types are only read here.

A trial stores its start attributes (`StartFacts`), one attribute `outcome` (`Result`), and headline attributes for
people in optuna-dashboard, which are never read back. Studies of earlier releases stored every figure as an attribute
of its own; `_result_of_flat` reads those.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from autotune.records import (
    STATISTICS,
    Blame,
    Config,
    Count,
    Crash,
    Measurement,
    Number,
    Outcome,
    Percentiles,
    Score,
    Stage,
    Value,
)
from autotune.space.space import Param
from autotune.storage.schema import Choice, convert

if TYPE_CHECKING:
    import optuna

# Constraint of a crash by stage: the earlier, the further from working. Unknown blame: the mildest.
SEVERITY = {Stage.ARG_PARSE: 4.0, Stage.IMPORT: 4.0, Stage.DEVICE_INIT: 3.5, Stage.NCCL_INIT: 3.0, Stage.LOAD: 3.0,
            Stage.KV_ALLOC: 2.5, Stage.GRAPH_CAPTURE: 2.0, Stage.WARMUP: 1.5, Stage.SERVING: 1.0}
MILDEST = 0.5
INVALID = 1.0
# Values of `confirm` for baseline trials that measure the effect of neighbours: the search does not learn from them.
ALONE, BESIDE = "alone", "beside"
OUTCOME = "outcome"
FIGURES = ("tokens_per_s", "tokens_per_j", "accept_length", "window_s", "output_tokens", "requests", "errors",
           "error_rate", "prompt_tokens", "relative_error", "output_agreement", "client_cpu_share")
LATENCIES = ("ttft", "tpot", "itl", "e2e")


class LaunchFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts of the launch that a trial was measured on.

    `resolved` are the settings that the server reports, `resolved_key` their identity. `neighbours` is the number of
    launches beside it (None: it is made to run alone). `under_load` is True for a crash while a load was measured.
    `machine` is the name of the host that it ran on.
    """

    argv: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None
    resolved: Mapping[str, Any] | None = None
    resolved_key: str | None = None
    neighbours: Count | None = None
    under_load: bool | None = None
    machine: str | None = None


NO_LAUNCH = LaunchFacts()


class StartFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Attributes that a trial is created with; `fail_reason` is added by our own failure."""

    owner: str | None = None
    launch_id: Count | None = None
    reason: str | None = None
    confirm: str | None = None
    confirm_after: Count | None = None
    confirm_round: Count | None = None
    isolates: str | None = None
    fail_reason: str | None = None


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """The attribute `outcome` of a trial. `same_as` is the trial whose outcome was copied for an equivalent server."""

    outcome: Outcome
    score: Score | None
    cost_s: Number
    launch_s: Number
    launch: LaunchFacts = NO_LAUNCH
    same_as: Count | None = None

    def constraints(self) -> dict[str, float]:
        """Graded constraints by name (above 0: violated), of the same keys for every trial.

        `limits` is the sum of excesses, or the largest (negative) one when every limit holds; an invalid measurement
        counts as at least twice a limit.
        """
        crash = severity(self.outcome) if isinstance(self.outcome, Crash) else 0.0
        over = [ratio - 1 for ratio in self.score.ratios.values()] if self.score is not None else []
        limits = sum(max(0.0, one) for one in over) or max(over, default=0.0)
        if self.score is not None and (self.score.value is None or self.score.reasons):
            limits = max(limits, INVALID)
        return {"crash": crash, "limits": limits}

    def headlines(self) -> dict[str, Any]:
        """Attributes for people who look at the study in optuna-dashboard."""
        score, outcome = self.score, self.outcome
        shown: dict[str, Any] = {"feasible": score is not None and score.feasible}
        if isinstance(outcome, Crash):
            shown |= {"crash_category": outcome.category, "crash_stage": str(outcome.stage),
                      "crash_blame": str(outcome.blame), "crash_signature": outcome.signature}
        else:
            shown |= {"tokens_per_j": outcome.tokens_per_j, "tokens_per_s": outcome.tokens_per_s,
                      "watts": outcome.energy.watts, "violated": list(score.violated) if score is not None else None}
        return {name: value for name, value in shown.items() if value is not None and value != []}


class TrialRecord(msgspec.Struct, frozen=True):
    """One trial. `state` is Optuna's: COMPLETE, PRUNED, FAIL, RUNNING, WAITING.

    The fields of `Result` are None without an outcome. `cost_s`: seconds that the trial took, its part of the launch
    included. `launch_s`: seconds that the server took to start; 0 on a server that another trial started.
    """

    number: int
    state: str
    config: Config
    value: float | None
    start: StartFacts = StartFacts()
    started: datetime.datetime | None = None
    ended: datetime.datetime | None = None
    outcome: Outcome | None = None
    score: Score | None = None
    cost_s: float | None = None
    launch_s: float | None = None
    launch: LaunchFacts = NO_LAUNCH
    same_as: int | None = None

    @property
    def measurement(self) -> Measurement | None:
        return self.outcome if isinstance(self.outcome, Measurement) else None

    @property
    def crash(self) -> Crash | None:
        return self.outcome if isinstance(self.outcome, Crash) else None

    @property
    def launch_id(self) -> int | None:
        return self.start.launch_id

    @property
    def confirm(self) -> str | None:
        return self.start.confirm

    @property
    def crashed(self) -> bool:
        return self.crash is not None

    @property
    def feasible(self) -> bool:
        return self.state == "COMPLETE" and self.score is not None and self.score.feasible

    @property
    def invalid_reasons(self) -> tuple[str, ...]:
        """Validity codes because of which a measurement must not be compared with others."""
        return self.score.reasons if self.score is not None else ()

    @property
    def ratios(self) -> Mapping[str, float]:
        """Measured / limit of each limit; above 1 the limit is broken."""
        return self.score.ratios if self.score is not None else {}

    @property
    def crashed_under_load(self) -> bool:
        """True if a load was being measured at the crash. Studies that did not store it go by the stage."""
        if self.crash is None:
            return False
        known = self.launch.under_load
        return self.crash.stage is Stage.SERVING if known is None else known

    @property
    def figures(self) -> dict[str, float]:
        """Measured figures by name, such as tokens_per_j or ttft_p99_ms; unknown ones are absent."""
        return figures_of(self.measurement) if self.measurement is not None else {}


def figures_of(m: Measurement) -> dict[str, float]:
    """Numeric figures of a measurement by name; unknown ones are absent."""
    known: dict[str, float | None] = {name: getattr(m, name) for name in FIGURES}
    known |= {"watts": m.energy.watts, "joules": m.energy.joules, "energy_cross_check_j": m.energy.cross_check_j}
    for name in LATENCIES:
        latency: Percentiles | None = getattr(m, f"{name}_ms")
        known |= {f"{name}_{of}_ms": getattr(latency, of, None) for of in STATISTICS}
    return {name: value for name, value in known.items() if value is not None}


def severity(crash: Crash) -> float:
    """Distance of a crash from working, for samplers that grade constraints."""
    return MILDEST if crash.blame in (Blame.UNKNOWN, Blame.TRANSIENT) else SEVERITY[crash.stage]


def record_of(trial: optuna.trial.FrozenTrial) -> TrialRecord:
    """An Optuna trial as a record. Raises CorruptStudy naming the first value of another type."""
    where, attrs = f"trial {trial.number}", trial.user_attrs
    start: StartFacts = convert(attrs, StartFacts, where)
    config: Config = convert(trial.params, dict[str, Choice], f"{where}: params")
    value = convert(trial.values[0], Number, f"{where}: value") if trial.values else None
    stored, at = attrs.get(OUTCOME), f"{where}: {OUTCOME}"
    if stored is None and (stored := _result_of_flat(attrs, config)) is not None:
        at = where
    result = msgspec.structs.asdict(convert(stored, Result, at)) if stored is not None else {}
    return TrialRecord(trial.number, trial.state.name, config, value, start, trial.datetime_start,
                       trial.datetime_complete, **result)


def _result_of_flat(attrs: Mapping[str, Any], config: Config) -> dict[str, Any] | None:
    """The stored form of a trial of an earlier release, which had an attribute for each figure; None without any."""
    known = {name: value for name, value in attrs.items() if value is not None}

    def part(**named: str) -> dict[str, Any]:
        """The attributes, some under today's names: new=old."""
        return {**known, **{new: known[old] for new, old in named.items() if old in known}}

    if "cost_s" not in attrs:
        return None
    score: dict[str, Any] | None = None
    if "crash_signature" in attrs:
        crash = part(**{name: f"crash_{name}" for name in Crash.__struct_fields__})
        outcome: dict[str, Any] = {"type": "crash", "excerpt": "", **crash}
    else:
        energy = part(**{name: f"energy_{name}" for name in ("source", "assumed", "reasons", "scope", "cross_check_j")})
        outcome = {"type": "measurement", **part(reasons="window_reasons"), "concurrency": config.get("concurrency"),
                   "energy": {"joules": None, **energy}}
        for name in LATENCIES:
            if latency := {of: known[old] for of in STATISTICS if (old := f"{name}_{of}_ms") in known}:
                outcome[f"{name}_ms"] = latency
        score = {"value": None, **part(value="objective", ratios="limit_ratios", reasons="invalid_reasons")}
    launch = part(argv="server_argv", env="server_env", under_load="crash_under_load")
    if isinstance(launch.get("argv"), list):  # the embedded engine's module had another name
        launch["argv"] = ["autotune.ddtree" if word == "autotune.engines.ddtree" else word for word in launch["argv"]]
    return {**known, "outcome": outcome, "score": score, "launch": launch}


def distribution(param: Param) -> optuna.distributions.BaseDistribution:
    """A parameter's choices as Optuna knows them."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if param.step is None or len(param.choices) < 2:
        return CategoricalDistribution(list(param.choices))
    if all(isinstance(c, int) for c in param.choices):
        return IntDistribution(int(param.choices[0]), int(param.choices[-1]), step=int(param.step))
    return FloatDistribution(float(param.choices[0]), float(param.choices[-1]), step=param.step)


def suggest(trial: optuna.Trial, param: Param) -> Value:
    """Have a trial's sampler choose one of a parameter's choices."""
    from optuna.distributions import FloatDistribution, IntDistribution

    kind = distribution(param)
    if isinstance(kind, IntDistribution):
        return trial.suggest_int(param.name, kind.low, kind.high, step=kind.step)
    if isinstance(kind, FloatDistribution):
        return trial.suggest_float(param.name, kind.low, kind.high, step=kind.step)
    return cast(Value, trial.suggest_categorical(param.name, list(param.choices)))
