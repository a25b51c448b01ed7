"""Trials beside the search: confirmation of the finalists, and interference between launches side by side.

Finalists and baseline are launched in interleaved blocks (statistics: measure/finalists.py). Stored blocks are
replayed, so an interruption loses one block at most. For interference, the baseline runs alone and with neighbours of
its kind. No search learns from these trials: they carry the attribute `confirm`.
"""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

from autotune.executors.parallel import ParallelExecutor
from autotune.measure.finalists import Confirmation, ConfirmSettings, Decision
from autotune.records import Config, UsageError, config_key
from autotune.space.space import Space
from autotune.storage.schema import CorruptStudy
from autotune.storage.trial import ALONE, BESIDE, TrialRecord
from autotune.tuning.loop import Tuner
from autotune.utils.text import count

REPEATS = 2  # further launches for a block whose window must not be compared
METHOD = "re-launched in interleaved blocks (A B B A), two-way layout on log values"
DECIDED = {"confirmed": "improved", "no_improvement": "no_improvement"}


def finalists(space: Space, records: Sequence[TrialRecord], most: int) -> list[tuple[int, Config]]:
    """(first trial, configuration) of the best feasible configurations that beat the baseline, best first.

    Values of repeated measurements are averaged (geometric mean).
    """
    values: dict[str, list[float]] = {}
    first: dict[str, TrialRecord] = {}
    for record in records:
        key = config_key(record.config)
        if record.feasible and record.value is not None and record.value > 0 and not record.confirm:
            values.setdefault(key, []).append(math.log(record.value))
            first.setdefault(key, record)
    mean = {key: sum(logs) / len(logs) for key, logs in values.items()}
    baseline = config_key(space.baseline)
    better = sorted((key for key in mean if key != baseline and mean[key] > mean.get(baseline, -math.inf)),
                    key=lambda key: -mean[key])
    return [(first[key].number, first[key].config) for key in better[:most]]


def confirm(tuner: Tuner, settings: ConfirmSettings) -> Decision | None:
    """Decide between the baseline and the finalists; None without finalists."""
    study = tuner.study
    records = study.records()
    searched = sum(r.state in ("COMPLETE", "PRUNED") and r.confirm is None for r in records)
    plan = _plan(tuner, records, searched, settings.finalists)
    if plan is None:
        return None
    state = Confirmation("baseline", [key for key in plan if key != "baseline"], settings)
    for r in records:
        if r.start.confirm_after == searched and r.state in ("COMPLETE", "PRUNED") and not _disturbed(r):
            state.add(str(r.confirm), r.value if r.feasible else None)
    while (key := state.next()) is not None:
        note = f"confirmation round {state.rounds + 1}: " + (
            "the baseline" if key == "baseline" else f"the configuration of trial {key}")
        for _ in range(1 + REPEATS):
            tuner.listener.note(note)
            record = tuner.measure(plan[key], reason="confirmation", confirm=key, confirm_after=searched)
            if not _disturbed(record):
                break
            note = f"again: the window was {', '.join(record.invalid_reasons)}"
        state.add(key, record.value if record.feasible else None)
    decision = state.decision()
    blocks = [r for r in study.records() if r.start.confirm_after == searched]
    study.set_attr("confirmation", as_attr(decision, plan, blocks))
    return decision


def _plan(tuner: Tuner, records: Sequence[TrialRecord], searched: int, most: int) -> dict[str, Config] | None:
    """The configurations to confirm: of the stored plan unless the search went on since, else of new finalists."""
    space, study = tuner.study.space, tuner.study
    stored = study.attrs().get("confirmation_plan") or {}
    if stored.get("after_trials") == searched:
        return {key: planned(space, key, config) for key, config in stored["configurations"].items()}
    own = [r for r in records if config_key(r.config) == config_key(space.baseline) and r.state != "FAIL"]
    chosen = finalists(space, records, most)
    if not chosen or (own and all(r.crashed for r in own)):
        return None
    plan = {"baseline": dict(space.baseline), **{str(number): dict(config) for number, config in chosen}}
    study.set_attr("confirmation_plan", {"after_trials": searched, "configurations": plan})
    return dict(plan)


def planned(space: Space, key: str, config: Config) -> Config:
    """A configuration of a stored plan, which goes to a command line. Raises CorruptStudy for an impossible one."""
    try:
        return space.check(config)
    except UsageError as error:
        raise CorruptStudy(f"confirmation_plan.{key}: {error}") from error


def _disturbed(record: TrialRecord) -> bool:
    """True when the block's window must not be compared, which says nothing against its configuration."""
    return record.state == "COMPLETE" and bool(record.invalid_reasons)


def as_attr(decision: Decision, plan: dict[str, Config], records: Sequence[TrialRecord]) -> dict[str, Any]:
    """The decision as plain data for the report."""
    best = decision.gains.get(decision.winner) if decision.winner else None
    blocks = [{"finalist": r.confirm, "trial": r.number, "value": r.value} for r in records
              if r.state in ("COMPLETE", "PRUNED")]
    return {
        "method": METHOD, "decided": DECIDED.get(decision.state, "undecided"), "reason": decision.reason,
        "winner": int(decision.winner) if decision.winner else None, "gain": best.gain if best else None,
        "interval": [best.low, best.high] if best else None, "rounds": decision.rounds, "blocks": len(blocks),
        "finalists": {key: {"gain": g.gain, "interval": [g.low, g.high], "verdict": g.verdict}
                      for key, g in decision.gains.items()},
        "configurations": plan, "values": blocks,
    }


def check_interference(tuner: Tuner, executor: ParallelExecutor) -> dict[str, Any] | None:
    """Measure interference once a study: the baseline alone, as many as fit side by side, alone again.

    None: nothing fits beside the baseline, or it only crashed.
    """
    space, study = tuner.study.space, tuner.study
    many = min(executor.capacity, len(executor.layout.units) // executor.units(space.split(space.baseline)[0]))
    known = study.attrs().get("neighbours")
    if known is not None and known["count"] == many - 1:
        return dict(known)
    own = [r for r in study.records() if config_key(r.config) == config_key(space.baseline) and r.state != "FAIL"]
    if own and all(r.crashed for r in own):
        return None
    if many < 2:
        tuner.listener.note("the baseline takes all of this host: nothing was measured beside it")
        return None

    def measure(kind: str) -> TrialRecord:
        return tuner.measure(dict(space.baseline), "what neighbours do to the baseline", confirm=kind)

    tuner.listener.note(f"the baseline alone, with {many - 1} of its kind beside it, and alone again")
    alone = [measure(ALONE)]
    with executor.together(many), concurrent.futures.ThreadPoolExecutor(many, "beside") as pool:
        beside = list(pool.map(measure, [BESIDE] * many))
    alone.append(measure(ALONE))
    found = interference(alone, beside, many - 1)
    study.set_attr("neighbours", found)
    tuner.listener.note(interference_text(found))
    return found


def interference(alone: Sequence[TrialRecord], beside: Sequence[TrialRecord], neighbours: int) -> dict[str, Any]:
    """Plain data: values of both kinds, the trials, the relative `change` by the neighbours (None when either kind
    has no value), and the relative difference of the values alone."""
    values = {kind: [r.value for r in records if r.state == "COMPLETE" and r.value is not None and r.value > 0]
              for kind, records in ((ALONE, alone), (BESIDE, beside))}
    means = [geometric_mean(values[kind]) for kind in (ALONE, BESIDE) if values[kind]]
    change = means[1] / means[0] - 1 if len(means) == 2 else None
    apart = max(values[ALONE]) / min(values[ALONE]) - 1 if len(values[ALONE]) > 1 else None
    return {"count": neighbours, **values, "change": change, "alone_apart": apart,
            "trials": [r.number for r in (*alone, *beside)]}


def interference_text(found: dict[str, Any]) -> str:
    """The measured interference for people."""
    neighbours = count(found["count"], "neighbour")
    if found["change"] is None:
        return f"the effect of {neighbours} on the baseline is not known: it could not be measured"
    less = "less" if found["change"] < 0 else "more"
    apart = "" if found["alone_apart"] is None else f" (two measurements alone are {found['alone_apart']:.1%} apart)"
    return f"with {neighbours} of its kind the baseline is worth {abs(found['change']):.1%} {less} than alone{apart}"
