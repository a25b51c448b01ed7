"""Confirmation on real launches: finalists and baseline in interleaved blocks, each block a launch of its own.

Blocks are trials with the attribute `confirm`; the decision goes to the study's attribute `confirmation`.
Interrupting it loses at most one block: what was measured is replayed. The statistics are in `measure/confirm.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autotune.config.settings import ConfirmationSettings
from autotune.measure.sequential import Confirmation, ConfirmSettings, Decision
from autotune.records import Config, UsageError, config_key
from autotune.space.space import Space
from autotune.storage.schema import corrupt
from autotune.storage.trial import TrialRecord
from autotune.tuning.loop import Tuner

AGAIN = 2  # further launches for a block whose window may not be compared
METHOD = "re-launched in interleaved blocks (A B B A), two-way layout on log values"


def finalists(space: Space, records: Sequence[TrialRecord], count: int) -> list[tuple[int, Config]]:
    """(first trial, configuration) of the best feasible configurations that beat the baseline, best first.

    Values of repeated measurements are averaged (geometric mean).
    """
    values: dict[str, list[float]] = {}
    first: dict[str, TrialRecord] = {}
    for record in records:
        key = config_key(record.config)
        if record.feasible and record.value is not None and record.value > 0 and not record.attrs.get("confirm"):
            values.setdefault(key, []).append(record.value)
            first.setdefault(key, record)
    mean = {key: math.exp(sum(map(math.log, found)) / len(found)) for key, found in values.items()}
    bar = mean.get(config_key(space.baseline), 0.0)
    better = sorted((key for key in mean if key != config_key(space.baseline) and mean[key] > bar),
                    key=lambda key: -mean[key])
    return [(first[key].number, first[key].config) for key in better[:count]]


def confirm(tuner: Tuner, settings: ConfirmationSettings) -> Decision | None:
    """Decide between the baseline and the finalists; None when there is nothing to decide."""
    space, study = tuner.study.space, tuner.study
    records = study.records()
    searched = sum(r.state in ("COMPLETE", "PRUNED") and "confirm" not in r.attrs for r in records)
    stored = study.attrs().get("confirmation_plan") or {}
    if stored.get("after_trials") == searched:
        plan: dict[str, Config] = {key: planned(space, key, config)
                                   for key, config in stored["configurations"].items()}
    else:  # none yet, or the search went on since
        own = [r for r in records if config_key(r.config) == config_key(space.baseline) and r.state != "FAIL"]
        chosen = finalists(space, records, settings.finalists)
        if not chosen or (own and all(r.crashed for r in own)):
            return None
        plan = {"baseline": dict(space.baseline), **{str(number): dict(config) for number, config in chosen}}
        study.set_attr("confirmation_plan", {"after_trials": searched, "configurations": plan})
    rules = ConfirmSettings(settings.alpha, settings.min_rounds, settings.max_rounds, settings.worth)
    state = Confirmation("baseline", [key for key in plan if key != "baseline"], rules)
    blocks: list[tuple[str, float | None]] = [
        (str(r.attrs["confirm"]), r.value if r.feasible else None) for r in records
        if r.attrs.get("confirm_after") == searched and r.state in ("COMPLETE", "PRUNED") and not _disturbed(r)]
    state.replay(blocks)
    while (key := state.next()) is not None:
        tuner.watcher.note(f"confirmation round {state.rounds + 1}: "
                           + ("the baseline" if key == "baseline" else f"the configuration of trial {key}"))
        record = tuner.block(plan[key], reason="confirmation", confirm=key, confirm_after=searched)
        for _ in range(AGAIN):  # a window that may not be compared says nothing against the configuration
            if _disturbed(record):
                tuner.watcher.note(f"again: the window was {', '.join(record.attrs['invalid_reasons'])}")
                record = tuner.block(plan[key], reason="confirmation", confirm=key, confirm_after=searched)
        state.add(key, record.value if record.feasible else None)
    decision = state.decision()
    mine = [r for r in study.records() if r.attrs.get("confirm_after") == searched]
    study.set_attr("confirmation", as_attr(decision, plan, mine))
    return decision


def planned(space: Space, key: str, config: Config) -> Config:
    """A configuration of a stored plan, which goes to a command line. Raises Damaged for one that is none."""
    try:
        return space.check(config)
    except UsageError as error:
        raise corrupt(f"confirmation_plan.{key}: {error}") from error


def _disturbed(record: TrialRecord) -> bool:
    """Whether a block was measured, within the limits or not, in a window that may not be compared."""
    return record.state == "COMPLETE" and bool(record.attrs.get("invalid_reasons"))


def as_attr(decision: Decision, plan: dict[str, Config], records: Sequence[TrialRecord]) -> dict[str, Any]:
    """The decision as plain data for the report."""
    states = {"confirmed": "improved", "no_improvement": "no_improvement"}
    best = decision.gains.get(decision.winner) if decision.winner else None
    blocks = [{"finalist": r.attrs["confirm"], "trial": r.number, "value": r.value} for r in records
              if r.state in ("COMPLETE", "PRUNED")]
    return {
        "method": METHOD, "decided": states.get(decision.state, "undecided"), "reason": decision.reason,
        "winner": int(decision.winner) if decision.winner else None, "gain": best.gain if best else None,
        "interval": [best.low, best.high] if best else None, "rounds": decision.rounds, "blocks": len(blocks),
        "finalists": {key: {"gain": g.gain, "interval": [g.low, g.high], "verdict": g.verdict}
                      for key, g in decision.gains.items()},
        "configurations": plan, "values": blocks,
    }
