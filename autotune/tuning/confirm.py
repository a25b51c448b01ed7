"""Trials beside the search: confirmation of the finalists, and interference between launches side by side.

Finalists and baseline are launched in interleaved blocks (statistics: measure/finalists.py), each measured under the
baseline's load and under the finalists'. Stored blocks are replayed, so an interruption loses one block at most. For
interference, the baseline runs alone and with neighbours of its kind. No search learns from these trials: they carry
the attribute `confirm`.
"""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

from autotune.executors.parallel import ParallelExecutor
from autotune.measure.finalists import BASELINE, Block, Confirmation, ConfirmSettings, Decision, Finalist, Gain
from autotune.records import Config, UsageError, config_key
from autotune.space.space import Space, server_key
from autotune.storage.schema import CorruptStudy
from autotune.storage.trial import ALONE, BESIDE, TrialRecord
from autotune.tuning.loop import Tuner
from autotune.utils.text import count

METHOD = "re-launched in interleaved blocks (A B B A), paired differences of log values"
DECIDED = {"confirmed": "improved", "no_improvement": "no_improvement"}
LOAD_OF = "load-"  # + trial: key of the baseline's server under that trial's load


class Budget(NamedTuple):
    """The limits of a whole study; None: unlimited."""

    launches: int | None
    hours: float | None

    def left(self, records: Sequence[TrialRecord]) -> int | None:
        """Launches that are left; interrupted ones, isolation and the measurement of neighbours do not count."""
        used = {r.launch_id for r in records if r.state in ("COMPLETE", "PRUNED") and _counts(r)}
        return None if self.launches is None else max(0, self.launches - len(used))

    def spent(self, records: Sequence[TrialRecord]) -> str:
        """The reason why nothing more may be launched; "" if something may."""
        if self.left(records) == 0:
            return f"all {self.launches} launches are used"
        used_s = sum(r.cost_s or 0.0 for r in records if _counts(r))
        return "" if self.hours is None or used_s < self.hours * 3600 else f"all {self.hours:g} hours are used"


def _counts(record: TrialRecord) -> bool:
    return record.confirm not in (ALONE, BESIDE) and record.start.isolates is None


class Plan(NamedTuple):
    """The finalists of a confirmation: configurations by key, and the rounds at most."""

    configurations: Mapping[str, Config]
    rounds: int

    @classmethod
    def stored(cls, space: Space, plan: Mapping[str, Any]) -> Plan:
        """The plan of a study's attributes. Raises CorruptStudy for a configuration that the space does not have."""
        configurations = {}
        for key, config in plan["configurations"].items():  # go to a command line
            try:
                configurations[key] = space.check(config)
            except UsageError as error:
                raise CorruptStudy(f"confirmation_plan.{key}: {error}") from error
        return cls(configurations, plan.get("rounds") or 0)

    def start(self, space: Space, settings: ConfirmSettings) -> Confirmation:
        base_server, base_load = map(config_key, space.split(self.configurations[BASELINE]))
        parts = {key: tuple(map(config_key, space.split(config))) for key, config in self.configurations.items()}
        found = [Finalist(key, load, server != base_server) for key, (server, load) in parts.items() if key != BASELINE]
        return Confirmation(found, base_load, settings, self.rounds)

    def launch(self, space: Space, key: str, live: Sequence[str]) -> tuple[Config, list[Config]]:
        """(server part, load parts) of a block: its own load first, then the others that it is compared under."""
        base = self.configurations[BASELINE]
        others = [self.configurations[one] for one in live] if key == BASELINE else [base]
        server, own = space.split(self.configurations[key])
        loads = {config_key(load): load for load in (own, *(space.split(config)[1] for config in others))}
        return server, list(loads.values())


def finalists(space: Space, records: Sequence[TrialRecord]) -> list[tuple[int, Config]]:
    """(first trial, configuration) of every server's best feasible load, if it beats the baseline; best first.

    The baseline's own server is among them where another load of it is better. Values of repeated measurements are
    averaged (geometric mean).
    """
    seen: dict[str, list[TrialRecord]] = {}
    for record in records:
        fair = record.state == "COMPLETE" and record.value is not None and not record.invalid_reasons
        if fair and not record.confirm and (record.value or 0) > 0:
            seen.setdefault(config_key(record.config), []).append(record)
    first = {key: group[0] for key, group in seen.items()}
    mean = {key: fmean(math.log(r.value or 1.0) for r in group) for key, group in seen.items() if keeps_limits(group)}
    baseline = config_key(space.baseline)
    better = sorted((key for key in mean if key != baseline and mean[key] > mean.get(baseline, -math.inf)),
                    key=lambda key: -mean[key])
    best: dict[str, TrialRecord] = {}
    for key in better:
        best.setdefault(server_key(space, first[key].config), first[key])
    return [(record.number, record.config) for record in best.values()]


def keeps_limits(group: Sequence[TrialRecord]) -> bool:
    """True if the mean ratio of each limit over the measurements of a configuration is at most 1, or above it by no
    more than its standard error: the confirmation measures again what a limit leaves open."""
    if not any(r.score is not None and r.score.ratio_errors for r in group):
        return all(r.feasible for r in group)
    for name in {name for r in group for name in r.ratios}:
        known = [(r.ratios[name], (r.score.ratio_errors if r.score else {}).get(name, 0.0))
                 for r in group if name in r.ratios]
        if fmean(ratio for ratio, _ in known) > 1 + math.hypot(*(error for _, error in known)) / len(known):
            return False
    return True


def confirm(tuner: Tuner, settings: ConfirmSettings, budget: Budget) -> Decision | None:
    """Decide between the baseline and the finalists; None without finalists, or where the budget is too small."""
    study, space = tuner.study, tuner.study.space
    records = study.records()
    searched = sum(r.state in ("COMPLETE", "PRUNED") and r.confirm is None for r in records)
    plan = _plan(tuner, records, searched, settings, budget)
    if plan is None:
        return None
    state = plan.start(space, settings)
    kept = blocks(records, searched)
    for slot in iter(state.next, None):
        number, key = slot
        server, loads = plan.launch(space, key, state.live)
        if (found := _stored(kept.get(slot, []), space, loads)) is not None:
            state.add(_block(space, plan, key, found))
        elif reason := budget.spent(study.records()):
            state.stop(reason)
        else:
            tuner.listener.note(f"confirmation round {number} of {plan.rounds}: " + (
                "the baseline's server" if key == BASELINE else f"the server of trial {key}"))
            found = tuner.measure_loads(server, loads, "confirmation", confirm=key, confirm_after=searched,
                                        confirm_round=number)
            state.add(_block(space, plan, key, found))
    decision = state.decision()
    made = [r for r in study.records() if r.start.confirm_after == searched]
    study.set_attr("confirmation", as_attr(decision, plan, made))
    return decision


def blocks(records: Sequence[TrialRecord], searched: int) -> dict[tuple[int, str], list[list[TrialRecord]]]:
    """The stored launches of each block, in order."""
    launches: dict[int, list[TrialRecord]] = {}
    for record in records:
        if record.start.confirm_after == searched and record.start.confirm_round and record.launch_id is not None:
            launches.setdefault(record.launch_id, []).append(record)
    found: dict[tuple[int, str], list[list[TrialRecord]]] = {}
    for group in launches.values():
        found.setdefault((group[0].start.confirm_round or 0, str(group[0].confirm)), []).append(group)
    return found


def _stored(launches: list[list[TrialRecord]], space: Space, loads: Sequence[Config]) -> list[TrialRecord] | None:
    """Take the next stored launch that was not interrupted before these loads or a crash; None: there is none."""
    wanted = set(map(config_key, loads))
    while launches:
        ended = [r for r in launches.pop(0) if r.state in ("COMPLETE", "PRUNED")]
        if any(r.crashed for r in ended) or wanted <= {config_key(space.split(r.config)[1]) for r in ended}:
            return ended
    return None


def _block(space: Space, plan: Plan, key: str, records: Sequence[TrialRecord]) -> Block:
    """A launch as the test sees it."""
    values = {config_key(space.split(r.config)[1]): r.value for r in records
              if r.state == "COMPLETE" and not r.invalid_reasons and r.value is not None and r.value > 0}
    crash = next((r.crash for r in records if r.crash is not None), None)
    over = {config_key(space.split(r.config)[1]) for r in records if any(ratio > 1 for ratio in r.ratios.values())}
    own = config_key(plan.configurations[key])
    disturbed = any(r.state == "COMPLETE" and r.invalid_reasons for r in records if config_key(r.config) == own)
    return Block(values, over, crash.signature if crash else "", disturbed, records[0].launch.machine or "")


def _plan(tuner: Tuner, records: Sequence[TrialRecord], searched: int, settings: ConfirmSettings,
          budget: Budget) -> Plan | None:
    """The stored plan unless the search went on since, else one of new finalists."""
    space, study = tuner.study.space, tuner.study
    stored = study.attrs().get("confirmation_plan") or {}
    if stored.get("after_trials") == searched and stored.get("rounds"):
        return Plan.stored(space, stored)
    own = [r for r in records if config_key(r.config) == config_key(space.baseline) and r.state != "FAIL"]
    found = finalists(space, records)
    if not found or (own and all(r.crashed for r in own)):
        return None
    base = server_key(space, space.baseline)
    servers = [item for item in found if server_key(space, item[1]) != base]
    most, rounds = settings.plan(len(servers), budget.left(records))
    if not rounds:
        tuner.listener.note(f"not confirmed: of {budget.launches} launches too few are left "
                            "(study.confirm.launches keeps some for it)")
        return None
    chosen = [item for item in found if item in servers[:most] or server_key(space, item[1]) == base]
    plan = {BASELINE: dict(space.baseline), **{str(number): dict(config) for number, config in chosen}}
    for number, config in chosen:  # the baseline's server under each other load: the load may be all of the gain
        other = {**space.baseline, **space.split(config)[1]}
        if other not in plan.values():
            plan[f"{LOAD_OF}{number}"] = other
    study.set_attr("confirmation_plan", {"after_trials": searched, "configurations": plan, "rounds": rounds})
    return Plan(plan, rounds)


def as_attr(decision: Decision, plan: Plan, records: Sequence[TrialRecord]) -> dict[str, Any]:
    """The decision as plain data for the report."""
    def plain(gain: Gain) -> dict[str, Any]:
        return {"gain": gain.gain, "interval": [gain.low, gain.high]}

    gains = {key: {**plain(g.both), "verdict": g.verdict, "blocks": g.blocks, "bad": g.bad, "server": plain(g.server),
                   "server_before": plain(g.server_before), "load": plain(g.load), "tied": g.tied}
             for key, g in decision.gains.items()}
    best = gains[decision.winner] if decision.winner else {"gain": None, "interval": None}
    ended = [r for r in records if r.state in ("COMPLETE", "PRUNED")]
    values = [{"finalist": r.confirm, "round": r.start.confirm_round, "trial": r.number, "value": r.value}
              for r in ended]
    won = config_key(plan.configurations[decision.winner]) if decision.winner else None
    decided = DECIDED.get(decision.state, "undecided")
    if decision.winner and decision.gains[decision.winner].server == Gain():
        decided = "load_only"
    return {
        "method": METHOD, "decided": decided, "reason": decision.reason,
        "winner": next((r.number for r in records if config_key(r.config) == won), None), "gain": best["gain"],
        "interval": best["interval"], "level": decision.level, "rounds": decision.rounds,
        "blocks": len({r.launch_id for r in ended}), "finalists": gains,
        "configurations": {key: dict(config) for key, config in plan.configurations.items()}, "values": values}


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
