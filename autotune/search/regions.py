"""Giving a region up, and taking it up again: a sum, worked out anew before every launch.

A region is a choice that has never come up since it took part in a crash, one that comes up and has never been measured
since it took part in a crash under load, or a combination of choices that most probably crashes. In an open region of
the first kind only isolating launches are made: those with nearly the best chance that the region has, which do not
combine it with another suspect and change what may be its accomplice.

A region is closed while its best launch no longer pays: because too little chance is left, because not even a
plausible gain times the chance is worth a launch, or because it costs more seconds per plausible gain than the best
launch elsewhere does per expected gain. The sum depends on nothing but what was told, so it opens a region again as
soon as evidence or the alternatives change; regions with much to gain get one more probe when nothing else is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autotune.records import Blame, Value
from autotune.search import crash_features
from autotune.search.acquisition import Outlook
from autotune.search.crash_hypotheses import Failure
from autotune.search.crash_model import CrashModel
from autotune.search.grid import Grid, Mask
from autotune.search.protocol import Pivot

Floats = NDArray[np.float64]
When = Mapping[int, tuple[int, ...]]
"""Codes by column."""

SUSPICION = 0.1  # probability of a part in a crash from which a choice that never came up is a suspect
CULPRIT = 0.5  # probability from which a combination of choices is a region
ISOLATING = 0.97  # share of the region's best chance that an isolating launch has at least
FAIR = 0.2  # chance below which a region is closed
PLAUSIBLE = 0.3  # what a plausible gain counts for, beside an expected one
CERTAIN = 0.7  # probability from which a choice that a crash names in its text, not its category, is taken at its word
LACKING = "this host lacks it"
LAST_PROBE = 0.06  # plausible gain times chance that is worth one more launch when nothing else is left


@dataclasses.dataclass(frozen=True)
class Region:
    """One region as it stands: `why` says why it is closed, None while it is open."""

    when: Mapping[str, tuple[Value, ...]]
    inside: Mask  # (n,) of the outlook's rows
    belief: float  # probability that the region is at fault
    evidence: tuple[Failure, ...]
    probe: int  # row of its most promising launch
    chance: float  # that its probe comes up, and where crashes under load are the reason that it is then measured
    upper: float
    cost_s: float
    left: int  # launches in it that would rank above the best one elsewhere if they were sure to come up
    alternative: int | None  # row of the best launch elsewhere
    why: str | None
    opens: str  # what has to change for it to be opened again, besides a launch of it
    under_load: bool  # its servers come up, and break when they are asked for something

    @property
    def name(self) -> str:
        return " with ".join(f"{k}={'|'.join(map(str, v))}" for k, v in sorted(self.when.items()))


@dataclasses.dataclass(frozen=True)
class _Found:
    """What may be a region: see `Region`."""

    when: When
    belief: float
    inside: Mask
    isolating: bool = False
    under_load: bool = False


def review(grid: Grid, outlook: Outlook, crashes: CrashModel, least: float,
           elsewhere: int = 0) -> tuple[Floats, list[Region]]:
    """(n,) what each launch is worth by itself, 0 where it is not to be made, and the regions.

    least: the expected gain that makes a launch worth it; elsewhere: launches that are pending.
    """
    worth = outlook.expected.copy()
    suspects: list[tuple[When, float]] = [
        ({column: (code,)}, part) for column, code, part in crashes.suspects() if part >= SUSPICION]
    loaded: list[tuple[When, float]] = [
        ({column: (code,)}, part) for column, code, part in crashes.suspects_under_load() if part >= SUSPICION]
    combinations: list[tuple[When, float]] = [
        (when, part) for when, part in crashes.combinations() if part >= CULPRIT]
    found = [*(_Found(when, part, _inside(outlook, when), isolating=True) for when, part in suspects),
             *(_Found(when, part, _inside(outlook, when), under_load=True) for when, part in loaded),
             *(_Found(when, part, _inside(outlook, when)) for when, part in combinations)]
    for some in found:
        if some.isolating:
            top = _top(outlook, some.inside)
            worth[some.inside & (outlook.chance < ISOLATING * top)] = 0.0
            hopeful = some.inside & (worth > 0)
            worth[hopeful] = np.maximum(worth, _spared(elsewhere) * outlook.chance * outlook.upper)[hopeful]
    free = np.logical_and.reduce([~some.inside for some in found], initial=True) & (worth > 0)
    nothing_else = not (worth[free] >= least).any()
    regions = []
    for some in found:
        region = _judge(grid, outlook, crashes, worth, some, least, nothing_else)
        if region is not None:
            regions.append(region)
    for region in regions:
        if region.why is not None:
            worth[region.inside] = 0.0
    return worth, regions


def _spared(elsewhere: int) -> float:
    """What a plausible gain counts for beside an expected one.

    The more launches run side by side, the better one of them can be spared for what is less likely, and the more
    time is lost when a region opens last: what comes after takes turns that no number of workers shortens. As the
    chance of at least one hit in so many, each of `PLAUSIBLE`.
    """
    return PLAUSIBLE if not elsewhere else 1 - (1 - PLAUSIBLE) ** (elsewhere + 1)


def _judge(grid: Grid, outlook: Outlook, crashes: CrashModel, worth: Floats, found: _Found, least: float,
           nothing_else: bool) -> Region | None:
    """One region; None when it has no launch left."""
    when, part, inside = found.when, found.belief, found.inside
    chances, uppers = ((outlook.chance * outlook.serving, outlook.upper_served) if found.under_load
                       else (outlook.chance, outlook.upper))
    hopeful = np.flatnonzero(inside & (uppers > 0))
    if not hopeful.size:
        return None
    ranked = np.where(inside, worth, 0.0)
    if ranked.max() <= 0:
        ranked[hopeful] = (chances * uppers)[hopeful]
    probe = int(np.argmax(ranked))
    chance, upper, cost_s = float(chances[probe]), float(uppers[probe]), float(outlook.cost_s[probe])
    rates = np.where(inside, 0.0, outlook.expected / outlook.cost_s)
    other = int(np.argmax(rates)) if rates.max() > 0 else None
    alternative = float(rates[other]) if other is not None else 0.0
    top = float(chances[hopeful].max())
    why, opens = None, ""
    evidence = tuple(f for f in crashes.failures if all(int(f.row[c]) in codes for c, codes in when.items()))
    lacking = any(f.crash.blame is Blame.ENVIRONMENT for f in evidence)  # this host has no such feature
    names = {grid.params[c].name: tuple(_choice(grid, c, code) for code in codes) for c, codes in when.items()}
    if (said := _lacks(grid, names, evidence, part)) is not None:
        why, opens = f"{LACKING} ({said})", "the host is mended"
    elif top < FAIR and not (nothing_else and not lacking and top * upper >= LAST_PROBE):
        why, opens = f"at most {top:.0%} chance is left, less than {FAIR:.0%}", f"its chance rises above {FAIR:.0%}"
    elif chance * upper < least:
        why = f"even a plausible gain of {upper:.1%} at {chance:.0%} is not worth a launch, which takes {least:.1%}"
        opens = f"its gain times its chance rises above {least:.1%}"
    elif chance * upper / cost_s < alternative:
        why = "the best launch elsewhere pays more per second"
        opens = f"launches elsewhere gain less than {chance * upper / cost_s * 3600:.1%} an hour"
    left = int((inside & (outlook.gain / outlook.cost_s > alternative)).sum())
    return Region(names, inside, part, evidence, probe, chance, upper, cost_s, left, other, why, opens,
                  found.under_load)


def _lacks(grid: Grid, names: Mapping[str, tuple[Value, ...]], evidence: tuple[Failure, ...],
           part: float) -> str | None:
    """The category of a crash that says itself that this host lacks the feature of a single choice: it was blamed on
    the environment and names the choice in its category, or, where little else is suspected, in its text."""
    if len(names) != 1:
        return None
    (name, choices), = names.items()
    param = next(p for p in grid.params if p.name == name)
    for failure in evidence:
        crash = failure.crash
        if crash.blame is Blame.ENVIRONMENT and (crash_features.named(param, choices, crash.category) or (
                part >= CERTAIN and crash_features.named(param, choices, crash.excerpt))):
            return crash.category
    return None


def record(grid: Grid, outlook: Outlook, region: Region, after_launches: int, reopened: str | None = None) -> Pivot:
    """The decision on a region for pivots.jsonl. `reopened` says why it was opened again."""
    signatures = tuple(sorted({f.crash.signature for f in region.evidence}))
    trials = tuple(sorted({f.trial for f in region.evidence if f.trial is not None}))
    elsewhere, promise = "nothing left", "no launch elsewhere"
    if region.alternative is not None:
        server = grid.server(outlook.rows[region.alternative])
        gain, cost_s = float(outlook.expected[region.alternative]), float(outlook.cost_s[region.alternative])
        elsewhere = ", ".join(f"{k}={v}" for k, v in server.items())
        promise = f"{gain:.1%} for {cost_s:.0f} s elsewhere"
    told = (f"{len(region.evidence)} crash{'es' if len(region.evidence) != 1 else ''} of "
            f"{len(signatures)} signature{'s' if len(signatures) != 1 else ''}")
    total = f"{region.upper:.1%} at best x {region.chance:.0%} for {region.cost_s:.0f} s against {promise}"
    if reopened is None:
        reason = f"{region.name} closed after {told}: {region.why} ({total})"
        works = f"a launch with {region.name} {'is measured' if region.under_load else 'comes up'}"
        lacking = region.why is not None and region.why.startswith(LACKING)
        opens = f"{region.opens} and {works}" if lacking else f"{works}, or {region.opens}"
    else:
        reason, opens = f"{region.name} opened again: {reopened} ({total})", "it is open"
    return Pivot("close" if reopened is None else "reopen", region.when, trials, signatures, region.belief,
                 region.chance, region.upper, region.cost_s, elsewhere, region.left, reason, opens, after_launches)


def _inside(outlook: Outlook, when: Mapping[int, tuple[int, ...]]) -> Mask:
    inside = np.ones(len(outlook.rows), dtype=bool)
    for column, codes in when.items():
        inside &= np.isin(outlook.rows[:, column], codes)
    return inside


def _top(outlook: Outlook, inside: Mask) -> float:
    """The best chance in a region among launches that could gain anything."""
    return float((outlook.chance * (inside & (outlook.upper > 0))).max(initial=0.0))


def _choice(grid: Grid, column: int, code: int) -> Value:
    choices = grid.params[column].choices
    return choices[code] if code < len(choices) else "absent"
