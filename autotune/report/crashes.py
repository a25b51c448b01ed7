"""Crashes grouped by signature with the choices that go with them, and the choices that never served, with a reason."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from autotune.records import Blame, Config, Crash, Value
from autotune.report.measured import choice_text, copied, ended
from autotune.space.space import Param, Space
from autotune.storage.trial import TrialRecord
from autotune.utils.text import count

MOST_SIGNATURES = 8  # signatures that are counted apart
Choice = tuple[str, str]  # (parameter, repr of its value)


class Suspect(NamedTuple):
    """A choice that every crash of a group has: `crashed` of `launches` launches with it ended in this group."""

    param: str
    value: Value
    crashed: int
    launches: int


class CrashGroup(NamedTuple):
    """All crashes with one signature. `crash` is the newest one; `launches` counts real launches."""

    crash: Crash
    trials: tuple[int, ...]
    launches: int
    cost_s: float
    common: Mapping[str, Value]
    suspects: tuple[Suspect, ...]

    @property
    def signature(self) -> str:
        return self.crash.signature


class Fate(NamedTuple):
    """Launches with one choice by outcome: "served" first, then crash signatures."""

    param: str
    value: Value
    outcomes: Mapping[str, int]


class Untried(NamedTuple):
    """Choices of one parameter that never served.

    `kind`: forbidden, closed, crashed, shadowed (tried only beside another choice that crashed alone) or unreached.
    """

    param: str
    values: tuple[Value, ...]
    kind: str
    why: str


def group(records: Sequence[TrialRecord], server_names: Iterable[str]) -> tuple[CrashGroup, ...]:
    """Crash groups, most frequent first. `server_names` are the parameters that need a launch.

    A suspect is a choice that all launches of a group share and that never served; of several, those whose launches
    ended in this group most often.
    """
    names = set(server_names)
    served = {choice for r in records if r.state == "COMPLETE" and not r.crashed for choice in _choices(r)}
    groups: dict[str, list[TrialRecord]] = {}
    launched: dict[Choice, set[int]] = collections.defaultdict(set)
    for record in records:
        if record.crash is not None:
            groups.setdefault(record.crash.signature, []).append(record)
        if not copied(record) and ended(record):
            for choice in _choices(record):
                launched[choice].add(launch_key(record))
    found = (_group(members, names, served, launched) for members in groups.values())
    return tuple(sorted(found, key=lambda g: (-g.launches, -len(g.trials), g.trials[0])))


def _choices(record: TrialRecord) -> list[Choice]:
    return [(name, repr(value)) for name, value in record.config.items()]


def launch_key(record: TrialRecord) -> int:
    """The launch behind a trial; a trial without a launch id counts as a launch of its own."""
    return record.launch_id if record.launch_id is not None else -1 - record.number


def _group(members: list[TrialRecord], names: set[str], served: set[Choice],
           launched: Mapping[Choice, set[int]]) -> CrashGroup:
    newest = members[-1].crash
    assert newest is not None
    common = {name: value for name, value in members[0].config.items()
              if name in names and all(name in m.config and m.config[name] == value for m in members)}
    here = {launch_key(r) for r in members if not copied(r)}
    suspects = [Suspect(name, value, len(here & launches), len(launches)) for name, value in common.items()
                if newest.blame not in (Blame.TRANSIENT, Blame.ENVIRONMENT) and (name, repr(value)) not in served
                and (launches := launched[name, repr(value)])]
    top = max((s.crashed / s.launches for s in suspects), default=0.0)
    return CrashGroup(newest, tuple(m.number for m in members), len(here), sum(m.cost_s or 0.0 for m in members),
                      common, tuple(s for s in suspects if s.crashed / s.launches == top))


def fates(space: Space, records: Iterable[TrialRecord],
          crashes: Sequence[CrashGroup]) -> tuple[tuple[str, ...], list[Fate]]:
    """(signatures, outcomes of each launched server choice); rare signatures are counted under "other"."""
    named = tuple(g.signature for g in crashes[:MOST_SIGNATURES])
    launches: dict[int, tuple[Config, str]] = {}
    for record in records:
        if not copied(record) and ended(record):
            key, outcome = launch_key(record), record.crash.signature if record.crash is not None else "served"
            if key not in launches or launches[key][1] == "served":
                launches[key] = record.config, outcome
    counted: dict[Choice, dict[str, int]] = collections.defaultdict(collections.Counter)
    for config, outcome in launches.values():
        for name, value in config.items():
            counted[name, repr(value)][outcome if outcome in ("served", *named) else "other"] += 1
    named += ("other",) * (len(crashes) > MOST_SIGNATURES)
    return named, [Fate(param.name, value, {s: outcomes[s] for s in ("served", *named) if s in outcomes})
                   for param in space.server_params for value in param.choices
                   if (outcomes := counted.get((param.name, repr(value))))]


def untried(space: Space, records: Sequence[TrialRecord], pivots: Iterable[Mapping[str, Any]],
            stop_reason: str | None) -> tuple[Untried, ...]:
    """Choices that never served, in the order of the space; those of a parameter that share a reason together."""
    closed = [p for p in pivots if p.get("action") == "close"]
    tried: dict[Choice, list[TrialRecord]] = collections.defaultdict(list)
    loads = {p.name for p in space.load_params}
    for record in filter(ended, records):
        for choice in _choices(record):
            if choice[0] not in loads or not record.crashed or record.crashed_under_load:
                tried[choice].append(record)
    found: dict[tuple[str, str, str], list[Value]] = collections.defaultdict(list)
    for param in space.params:
        for value in param.choices:
            trials = tried.get((param.name, repr(value)), [])
            if all(t.crashed for t in trials):
                reason = _crashed(trials, tried) if trials else _untried(space, param, value, closed, stop_reason)
                found[param.name, *reason].append(value)
    return tuple(Untried(name, tuple(values), kind, why) for (name, kind, why), values in found.items())


def _crashed(trials: Sequence[TrialRecord], tried: Mapping[Choice, Sequence[TrialRecord]]) -> tuple[str, str]:
    """(kind, why) of a choice that crashed in all its trials: by itself, or always beside another such choice."""
    numbers = {t.number for t in trials}
    company = [(name, others) for (name, _), others in tried.items()
               if all(t.crashed for t in others) and {t.number for t in others} > numbers]
    if company:
        name, others = max(company, key=lambda c: len(c[1]))
        return "shadowed", (f"tried only beside {choice_text(name, others[0].config[name])}, which crashed in "
                            f"{count(len(others), 'trial')} and never served")
    blamed = collections.Counter(str(t.crash.blame) for t in trials if t.crash is not None)
    blames = ", ".join(f"{blame} {n}" for blame, n in blamed.most_common())
    return "crashed", f"tried in {count(len(trials), 'trial')}, always crashed (blame: {blames})"


def _untried(space: Space, param: Param, value: Value, closed: Sequence[Mapping[str, Any]],
             stop_reason: str | None) -> tuple[str, str]:
    """(kind, why) of a choice without a trial."""
    for rule in space.rules:
        if set(rule.when) == {param.name} and rule.matches({param.name: value}):
            return "forbidden", rule.because
    for pivot in closed:
        if repr(value) in map(repr, (pivot.get("region") or {}).get(param.name, ())):
            return "closed", str(pivot.get("reason") or "a pivot closed its region")
    partly = next((f" (partly forbidden: {rule.because})" for rule in space.rules
                   if repr(value) in map(repr, rule.when.get(param.name, ()))), "")
    return "unreached", f"not reached before the search ended{': ' + stop_reason if stop_reason else ''}{partly}"
