"""Pivots, retries and stops: regions closed or reopened by a sum that is computed anew before every launch.

A region is a choice that crashed and never came up, a choice that crashed under load and was never measured, or a
combination of choices that most probably crashes. An open region of the first kind gets isolating launches only. A
region is closed while its best launch does not pay: its chance is too low, its plausible gain times its chance is not
worth a launch, or the best other launch gains more per second.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np

from autotune.records import Blame, Value
from autotune.search.acquisition import DEAR, Forecast
from autotune.search.crash_model import CrashModel, Failure, named
from autotune.search.grid import Codes, Floats, Mask
from autotune.search.observations import Key, Observations
from autotune.search.strategy import Launch, Pivot, Stop, StopKind
from autotune.space.space import Param
from autotune.utils.text import count

When = Mapping[int, tuple[int, ...]]  # codes by column

SUSPICION = 0.1  # least probability of a part in a crash that makes a choice a suspect
CULPRIT = 0.5  # least probability that makes a combination of choices a region
ISOLATING = 0.97  # least chance against known causes of an isolating launch, as a share of the region's best
FAIR = 0.2  # a region with a lower chance is closed
PLAUSIBLE = 0.3  # weight of a plausible gain relative to an expected one
CERTAIN = 0.7  # least probability for believing a crash that names the choice in its text only
LACKING = "this host lacks it"


class Region(NamedTuple):
    """State of one region; `why` is the reason for closing, None while it is open."""

    when: Mapping[str, tuple[Value, ...]]
    inside: Mask  # (n,) rows of the forecast
    belief: float  # probability that the region is at fault
    evidence: tuple[Failure, ...]
    chance: float  # that its most promising launch comes up (and is measured, for crashes under load)
    upper: float
    cost_s: float
    left: int  # its launches that would rank above the best other launch if they came up for sure
    alternative: int | None  # row of the best launch outside
    why: str | None
    opens: str  # condition for reopening, besides a working launch
    under_load: bool  # its servers come up and crash under load

    @property
    def name(self) -> str:
        return " with ".join(f"{k}={'|'.join(map(str, v))}" for k, v in sorted(self.when.items()))


class _Found(NamedTuple):
    """Candidate for a region."""

    when: When
    belief: float
    inside: Mask
    under_load: bool = False


def evaluate_regions(forecast: Forecast, crashes: CrashModel, least: float,
                     pending_launches: int = 0) -> tuple[Floats, list[Region]]:
    """(n,) worth of each launch, 0 in closed regions, and the regions.

    least: smallest expected gain that justifies a launch.
    """
    worth = forecast.expected / forecast.price
    if not len(crashes.passed):  # while nothing works, no gain weighs against a chance
        return forecast.gain * forecast.chance, []
    found = [_Found({column: (code,)}, part, forecast.inside({column: (code,)}), under_load)
             for under_load in (False, True) for column, code, part in crashes.suspects(under_load)
             if part >= SUSPICION]
    found += [_Found(when, part, forecast.inside(when)) for when, part in crashes.combinations() if part >= CULPRIT]
    weight, known = _spared(pending_launches), forecast.chance / crashes.unseen(forecast.rows)
    cheap = forecast.price <= DEAR
    for some in found:
        if len(some.when) == 1:  # isolating launches only
            safe = known * forecast.serving if some.under_load else known
            top = (safe * (some.inside & (forecast.upper > 0))).max(initial=0.0)
            worth[some.inside & cheap & (safe < ISOLATING * top)] = 0.0
        if len(some.when) == 1 and not some.under_load:
            hopeful = some.inside & cheap & (worth > 0)
            worth[hopeful] = np.maximum(worth, weight * forecast.chance * forecast.upper)[hopeful]
    free = np.logical_and.reduce([~some.inside for some in found], initial=True) & (worth > 0)
    nothing_else = not (worth[free] >= least).any()
    for some in found:
        if some.under_load and nothing_else:
            chance = forecast.chance * forecast.serving
            hopeful = some.inside & cheap & (worth > 0) & (chance >= FAIR)
            worth[hopeful] = np.maximum(worth, weight * chance * forecast.upper)[hopeful]
    regions = [region for some in found
               if (region := _evaluated(forecast, crashes, worth, some, least, nothing_else)) is not None]
    for region in regions:
        if region.why is not None:
            worth[region.inside] = 0.0
    return worth, regions


def _spared(pending_launches: int) -> float:
    """Weight of a plausible gain: the chance of at least one hit in all parallel launches, each with `PLAUSIBLE`.

    One of many parallel launches is easily spared, and a region that opens late costs launches in sequence.
    """
    return PLAUSIBLE if not pending_launches else 1 - (1 - PLAUSIBLE) ** (pending_launches + 1)


def _evaluated(forecast: Forecast, crashes: CrashModel, worth: Floats, found: _Found, least: float,
               nothing_else: bool) -> Region | None:
    """One region; None without a remaining launch."""
    when, part, inside, params = found.when, found.belief, found.inside, crashes.grid.params
    chances, uppers = ((forecast.chance * forecast.serving, forecast.upper_served) if found.under_load
                       else (forecast.chance, forecast.upper))
    hopeful = np.flatnonzero(inside & (uppers > 0))
    if not hopeful.size:
        return None
    ranked = np.where(inside, worth, 0.0)
    if ranked.max() <= 0:
        ranked[hopeful] = (chances * uppers)[hopeful]
    probe = int(np.argmax(ranked))
    chance, upper, cost_s = float(chances[probe]), float(uppers[probe]), float(forecast.cost_s[probe])
    price = float(forecast.price[probe])
    rates = np.where(inside, 0.0, forecast.expected / forecast.cost_s)
    other = int(np.argmax(rates)) if rates.max() > 0 else None
    alternative = float(rates[other]) if other is not None else 0.0
    top = float(chances[hopeful].max())
    why, opens = None, ""
    evidence = tuple(f for f in crashes.failures if all(int(f.row[c]) in codes for c, codes in when.items()))
    lacking = any(f.crash.blame is Blame.ENVIRONMENT for f in evidence)  # the host lacks the feature
    names = {params[c].name: tuple((*params[c].choices, "absent")[code] for code in codes) for c, codes in when.items()}
    said = _lacks(params[next(iter(when))], next(iter(names.values())), evidence, part) if len(when) == 1 else None
    if said is not None:
        why, opens = f"{LACKING} ({said})", "the host is repaired"
    elif top < FAIR and not (nothing_else and not lacking and PLAUSIBLE * top * upper / price >= least):
        why, opens = f"its best chance is {top:.0%}, below {FAIR:.0%}", f"its chance rises above {FAIR:.0%}"
    elif chance * upper / price < least:
        why = f"a plausible gain of {upper:.1%} at a chance of {chance:.0%} is below the least gain of {least:.1%}"
        opens = f"its gain times its chance rises above {least:.1%}"
    elif chance * upper / cost_s < alternative:
        why = "the best other launch gains more per second"
        opens = f"other launches gain less than {chance * upper / cost_s * 3600:.1%} an hour"
    elif float((worth * inside).max()) < least:
        why = f"its expected gain of {float((worth * inside).max()):.2%} is below the least gain of {least:.1%}"
        opens = f"its gain times its chance rises above {least:.1%}"
    left = int((inside & (forecast.gain / forecast.cost_s > alternative)).sum())
    return Region(names, inside, part, evidence, chance, upper, cost_s, left, other, why, opens, found.under_load)


def _lacks(param: Param, choices: tuple[Value, ...], evidence: tuple[Failure, ...], part: float) -> str | None:
    """Category of an environment crash that names a choice, in its text only if the choice is the main suspect."""
    for crash in (failure.crash for failure in evidence if failure.crash.blame is Blame.ENVIRONMENT):
        if named(param, choices, crash.category) or (part >= CERTAIN and named(param, choices, crash.excerpt)):
            return crash.category
    return None


def changes(memory: Observations, forecast: Forecast, before: Mapping[str, Region],
            regions: Sequence[Region]) -> list[Pivot]:
    """Pivots that lead from the regions closed `before`, by name, to the present state of the regions."""
    now = {region.name: region for region in regions}
    pivots = [record(memory, forecast, region) for region in regions
              if region.why is not None and region.name not in before]
    for name, old in before.items():
        opened = now.get(name)
        if opened is None:
            if memory.works(old.when, old.under_load):
                why = "it was measured" if old.under_load else "it came up"
                pivots.append(record(memory, forecast, old, why))
        elif opened.why is None:
            changed = len(opened.evidence) != len(old.evidence) or opened.chance > old.chance + 0.01
            why = f"its chance is now {opened.chance:.0%}" if changed else "other launches gain less now"
            pivots.append(record(memory, forecast, opened, why))
    return pivots


def record(memory: Observations, forecast: Forecast, region: Region, reopened: str | None = None) -> Pivot:
    """The decision on a region for pivots.jsonl; `reopened` is the reason for reopening."""
    signatures = tuple(sorted({f.crash.signature for f in region.evidence}))
    trials = tuple(sorted({f.trial for f in region.evidence if f.trial is not None}))
    other, promise = "nothing left", "no other launch"
    if region.alternative is not None:
        row, gain, cost_s = (of[region.alternative] for of in (forecast.rows, forecast.expected, forecast.cost_s))
        other = ", ".join(f"{k}={v}" for k, v in memory.grid.server(row).items())
        promise = f"{gain:.1%} for {cost_s:.0f} s in the best other launch"
    totals = f"{count(len(region.evidence), 'crash', 'crashes')} of {count(len(signatures), 'signature')}"
    total = f"{region.upper:.1%} at best x {region.chance:.0%} for {region.cost_s:.0f} s against {promise}"
    if reopened is None:
        reason = f"{region.name} closed after {totals}: {region.why} ({total})"
        works = f"a launch with {region.name} {'is measured' if region.under_load else 'comes up'}"
        lacking = region.why is not None and region.why.startswith(LACKING)
        opens = f"{region.opens} and {works}" if lacking else f"{works}, or {region.opens}"
    else:
        reason, opens = f"{region.name} reopened: {reopened} ({total})", "it is open"
    return Pivot("close" if reopened is None else "reopen", region.when, trials, signatures, region.belief,
                 region.chance, region.upper, region.cost_s, other, region.left, reason, opens, memory.launches)


HOPELESS = 0.1  # chance of the best launch below which a study without any running server ends
DEAD_LAUNCHES = 20  # crashed launches without a success that end the search


def stop_reason(memory: Observations, forecast: Forecast, worth: Floats, least: float, best: tuple[Key, int] | None,
                closed: Collection[str], busy: bool) -> Stop | None:
    """The reason to stop; None while a launch is expected to gain at least `least`.

    closed: names of the closed regions. busy: other workers have pending launches.
    """
    came_up = memory.anything_works
    server, load = memory.grid.space.split(memory.grid.space.baseline)
    baseline = memory.key(server), memory.grid.load_index(load)
    totals = ("nothing feasible was measured" if best is None else
              "the baseline is already the best" if best == baseline else
              "the baseline's server is already the best, under another load" if best[0] == baseline[0] else
              "the best so far stands")
    if not forecast.gain.size or forecast.gain.max() <= 0:
        if busy:
            return Stop(StopKind.EXHAUSTED, "other workers are measuring every remaining configuration")
        if not came_up:
            return Stop(StopKind.CRASHES, f"all {memory.launches} launches crashed, and no configuration is left")
        return Stop(StopKind.EXHAUSTED, f"no configuration is left to try: {totals}")
    if not came_up and (memory.launches >= DEAD_LAUNCHES or forecast.chance.max() < HOPELESS):
        return Stop(StopKind.CRASHES, f"all {memory.launches} launches crashed; the best remaining one has a chance of "
                    f"{forecast.chance.max():.0%}")
    if came_up and best is not None and worth.max() < least:
        gave_up = f"; closed: {', '.join(sorted(closed))}" if closed else ""
        return Stop(StopKind.GAIN, f"{totals}: no remaining launch is expected to gain {least:.2%} "
                    f"(the best one {worth.max():.2%}){gave_up}")
    if worth.max() <= 0:
        return Stop(StopKind.CRASHES, "every remaining region is closed: see the pivots")
    return None


ALIKE = 3  # configurations with one signature, and as few choices in common as possible, that put the host in doubt


def repeated(memory: Observations) -> Launch | Stop | None:
    """A retry or the end after `ALIKE` configurations of one signature while nothing works; else None."""
    crashed = [server for server in memory.servers.values() if server.launch_crashes]
    signatures = {crash.signature for server in crashed for crash in server.launch_crashes}
    if len(crashed) < ALIKE or len(signatures) > 1:
        return None
    crash = crashed[0].launch_crashes[0]
    if memory.retries.left(crash.signature):
        return Launch(memory.grid.server(crashed[0].row), f"{len(crashed)} configurations that share as few choices as "
                      f"possible crashed alike ({crash.category}): one retry", 0.0, RETRY_CHANCE, intent="retry")
    return Stop(StopKind.CRASHES, f"{len(crashed)} configurations that share as few choices as possible crashed alike "
                f"({crash.category}), and so did a retry: suspect the host, the model or the fixed arguments of the "
                "engine, not the choices")


BASELINE_CHANCE = 0.95
RETRY_CHANCE = 0.5


def after_crashes(memory: Observations, crashes: CrashModel, busy: AbstractSet[Key],
                  candidates: Callable[[], Codes]) -> Launch | Stop | None:
    """A retry after a transient crash, one launch that checks the host after an environment crash, or None.

    The last good configuration shows whether the host still works. A crashed configuration with a choice that never
    came up needs no check: the host lacks that feature.
    """
    if memory.doubtful is not None and memory.doubtful not in busy and not crashes.expected(memory.doubtful):
        server = memory.servers[memory.doubtful]
        crash = server.launch_crashes[-1]
        why = "looked transient" if crash.blame is Blame.TRANSIENT else "came although each of its choices had worked"
        return Launch(memory.grid.server(server.row), f"its crash ({crash.category}) {why}: one retry for this "
                      "signature, then it counts against the configuration", 0.0, RETRY_CHANCE, intent="retry")
    confirmed = {crash.signature for passes, _, crash in memory.environment if memory.passes > passes}
    doubted = [e for e in memory.environment if e[0] == memory.passes and e[2].signature not in confirmed]
    if memory.last_good is not None:
        doubted = [e for e in doubted if all(seen[code] for seen, code in zip(crashes.seen, e[1], strict=True))]
    if not doubted:
        return None
    crash = doubted[0][2]
    if memory.last_good is not None:
        good = memory.servers[memory.last_good]
        if good.launch_crashes:
            return Stop(StopKind.HOST, f"{crash.category} was blamed on the environment, and the last good "
                        "configuration does not start any more: repair this host")
        if memory.last_good in busy:
            return None
        return Launch(memory.grid.server(good.row), f"{crash.category} was blamed on the environment: the last good "
                      "configuration shows whether this host still works", 0.0, BASELINE_CHANCE, intent="confirm")
    if len(doubted) > 1:
        return Stop(StopKind.HOST, f"{crash.category} was blamed on the environment, and so was a configuration "
                    "that shares as little as possible with it: nothing can run here")
    rows = candidates()
    shared = (rows == np.array(doubted[0][1], dtype=np.int16)).sum(axis=1)
    far = rows[shared == shared.min()]
    pick = far[int(np.argmax(crashes.chance(far)))]
    return Launch(memory.grid.server(pick), f"{crash.category} was blamed on the environment: a configuration that "
                  "shares as little as possible with it shows whether anything can run here", 0.0, RETRY_CHANCE)
