"""What the study did not try, or could not get to work, and why: one line a choice."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autotune.records import Value
from autotune.report.wording import count, region_text
from autotune.space.space import Param, Space
from autotune.storage.trial import TrialRecord


@dataclasses.dataclass(frozen=True)
class Untried:
    """Choices of one parameter. `kind` is forbidden, closed, crashed (tried, never served), shadowed (tried only beside
    another choice that crashed without it, too) or unreached."""

    param: str
    values: tuple[Value, ...]
    kind: str
    why: str


def untried(space: Space, records: Sequence[TrialRecord], pivots: Iterable[Mapping[str, Any]],
            stop_reason: str | None) -> tuple[Untried, ...]:
    """Choices that never served, in the order of the space; those of a parameter that share a reason together."""
    closed = [p for p in pivots if p.get("action") == "close"]
    tried: dict[tuple[str, str], list[TrialRecord]] = {}
    loads = {p.name for p in space.load_params}
    for record in records:
        if record.state in ("COMPLETE", "PRUNED"):
            for name, value in record.config.items():
                if name not in loads or not record.crashed or record.crashed_under_load:
                    tried.setdefault((name, repr(value)), []).append(record)
    found: dict[tuple[str, str, str], list[Value]] = {}
    for param in space.params:
        for value in param.choices:
            trials = tried.get((param.name, repr(value)), [])
            if trials and all(t.crashed for t in trials):
                told: tuple[str, str] | None = _crashed(trials, tried)
            else:
                told = _untold(space, param, value, trials, closed, stop_reason)
            if told is not None:
                found.setdefault((param.name, *told), []).append(value)
    return tuple(Untried(name, tuple(values), kind, why) for (name, kind, why), values in found.items())


def _crashed(trials: Sequence[TrialRecord], tried: Mapping[tuple[str, str], Sequence[TrialRecord]]) -> tuple[str, str]:
    """(kind, why) of a choice that crashed in all its trials: its own doing, or perhaps that of its company."""
    numbers = {t.number for t in trials}
    company = [(name, others) for (name, _), others in tried.items()
               if all(t.crashed for t in others) and {t.number for t in others} > numbers]
    if company:
        name, others = max(company, key=lambda c: len(c[1]))
        beside = region_text({name: (others[0].config[name],)})
        why = f"tried only beside {beside}, which crashed in {count(len(others), 'trial')} and never served"
        return "shadowed", why
    blamed = collections.Counter(str(t.attrs.get("crash_blame")) for t in trials)
    told = ", ".join(f"{blame} {n}" for blame, n in blamed.most_common())
    return "crashed", f"tried in {count(len(trials), 'trial')}, always crashed (blame: {told})"


def _untold(space: Space, param: Param, value: Value, trials: Sequence[TrialRecord],
            closed: Sequence[Mapping[str, Any]], stop_reason: str | None) -> tuple[str, str] | None:
    """(kind, why) of a choice that was never tried; None for one that served."""
    if trials:
        return None
    for rule in space.rules:
        if set(rule.when) == {param.name} and rule.matches({param.name: value}):
            return "forbidden", rule.because
    for pivot in closed:
        region = pivot.get("region") or {}
        if any(repr(v) == repr(value) for v in region.get(param.name, ())):
            return "closed", str(pivot.get("reason") or "a pivot closed its region")
    partial = [rule for rule in space.rules if any(repr(v) == repr(value) for v in rule.when.get(param.name, ()))]
    why = f"not reached before the search ended{': ' + stop_reason if stop_reason else ''}"
    if partial:
        why += f" (partly forbidden: {partial[0].because})"
    return "unreached", why
