"""Crashes grouped by signature, with the choices that go with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from autotune.records import Blame, Crash, Value
from autotune.report.tested import copied
from autotune.storage.trial import TrialRecord


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A choice that every crash of a group has: `crashed` of `launches` launches with it ended in this group."""

    param: str
    value: Value
    crashed: int
    launches: int


@dataclasses.dataclass(frozen=True)
class CrashGroup:
    """All crashes with one signature. `crash` is the newest, told in full; `launches` counts real launches."""

    crash: Crash
    trials: tuple[int, ...]
    launches: int
    cost_s: float
    common: Mapping[str, Value]
    suspects: tuple[Suspect, ...]

    @property
    def signature(self) -> str:
        return self.crash.signature


def group(records: Sequence[TrialRecord], server_names: Iterable[str]) -> tuple[CrashGroup, ...]:
    """Crash groups, most frequent first. `server_names` are the parameters that need a launch.

    A suspect is a choice that all launches of a group share and that never served; of several, those whose launches
    ended in this group most often. It describes what was seen and proves nothing (search/ tells how likely it is).
    """
    names = tuple(server_names)
    served = {(name, repr(value)) for r in records if r.state == "COMPLETE" and not r.crashed
              for name, value in r.config.items()}
    groups: dict[str, list[TrialRecord]] = {}
    for record in records:
        if record.crash is not None:
            groups.setdefault(record.crash.signature, []).append(record)
    launched = _by_choice(r for r in records if not copied(r) and r.state in ("COMPLETE", "PRUNED"))
    found = [_group(members, names, served, launched) for members in groups.values()]
    return tuple(sorted(found, key=lambda g: (-g.launches, -len(g.trials), g.trials[0])))


def launch_keys(records: Iterable[TrialRecord]) -> set[int]:
    """Distinct launches behind trials; a trial without a launch id counts as a launch of its own."""
    return {record.launch_id if record.launch_id is not None else -1 - record.number for record in records}


def _group(members: list[TrialRecord], names: tuple[str, ...], served: set[tuple[str, str]],
           launched: Mapping[tuple[str, str], set[int]]) -> CrashGroup:
    own = [r for r in members if not copied(r)]
    common = {name: value for name, value in members[0].config.items()
              if name in names and all(name in m.config and m.config[name] == value for m in members)}
    here = launch_keys(own)
    suspects = []
    last = members[-1].crash
    assert last is not None
    if last.blame not in (Blame.TRANSIENT, Blame.ENVIRONMENT):
        for name, value in common.items():
            with_choice = launched.get((name, repr(value)), set())
            if with_choice and (name, repr(value)) not in served:
                suspects.append(Suspect(name, value, len(here & with_choice), len(with_choice)))
    top = max((s.crashed / s.launches for s in suspects), default=0.0)
    suspects = [s for s in suspects if s.crashed / s.launches == top]
    return CrashGroup(last, tuple(m.number for m in members), len(here),
                      sum(m.cost_s or 0.0 for m in members), common, tuple(suspects))


def _by_choice(records: Iterable[TrialRecord]) -> dict[tuple[str, str], set[int]]:
    """Launches by (parameter, choice)."""
    found: dict[tuple[str, str], set[int]] = {}
    for record in records:
        key = next(iter(launch_keys([record])))
        for name, value in record.config.items():
            found.setdefault((name, repr(value)), set()).add(key)
    return found
