"""The verb report with report.compare=[A, B, ...]: the best of each study, and levers that changed sign.

Studies are folders of outputs/ (or paths of such folders); with study.storage=URL, names of studies there.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autotune.records import UsageError, Value
from autotune.report.levers import Lever
from autotune.report.story import Story
from autotune.report.tested import Tested
from autotune.report.verdict import is_baseline
from autotune.space.space import Param, Space
from autotune.storage.trial import TrialRecord

if TYPE_CHECKING:
    from autotune.config.settings import Settings

LOADS = ("concurrency", "context")


@dataclasses.dataclass(frozen=True)
class Pair:
    """One lever in several studies; None where a study cannot tell. `verdict` is changed sign, differs, alike or
    open (an interval includes no effect, or is unknown)."""

    name: str
    instead: str
    levers: tuple[Lever | None, ...]
    verdict: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    stories: tuple[Story, ...]
    levers: tuple[Pair, ...]
    caveats: tuple[str, ...]
    signatures: tuple[tuple[str, str, tuple[int, ...]], ...]
    """(signature, category, launches in each study)"""


def load(settings: Settings) -> Comparison:
    """Read the studies that report.compare names; folders of the same name (of two hosts, say) are told apart by the
    paths given. Raises UsageError for fewer than two, and for unknown ones."""
    names = settings.report.compare or []
    if len(names) < 2:
        raise UsageError("report.compare takes two or more studies: report.compare=[study_a,study_b]")
    stories = [_story(settings, name) for name in names]
    called = [story.study for story in stories]
    return compare([dataclasses.replace(story, study=name) if called.count(story.study) > 1 else story
                    for story, name in zip(stories, names, strict=True)])


def compare(stories: Sequence[Story]) -> Comparison:
    """Put stories side by side. Raises UsageError when their objectives differ."""
    objectives = {story.objective for story in stories}
    if len(objectives) > 1:
        raise UsageError(f"these studies maximise different things ({', '.join(sorted(objectives))}): "
                         "they cannot be compared")
    return Comparison(tuple(stories), _pairs(stories), _caveats(stories), _signatures(stories))


def _story(settings: Settings, name: str) -> Story:
    from autotune.report.load import of_folder
    from autotune.storage.study import Study
    from autotune.storage.urls import sqlite_url

    folder = next((p for p in (settings.outputs / name, pathlib.Path(name)) if (p / "study.db").is_file()), None)
    if settings.study.storage is None and folder is None:
        raise UsageError(f"report.compare: there is no study.db in {settings.outputs / name}, nor in {name}")
    url = settings.study.storage or sqlite_url(folder or pathlib.Path())
    shown = folder.name if folder is not None and settings.study.storage is None else name
    study = Study.open(url, shown, settings.space, {}, create=False)
    identity = study.attrs().get("identity") or {}
    records = study.records()
    same = identity.get("space_digest") == settings.space.digest
    space = settings.space if same else space_of(records, str(identity.get("space") or shown), settings.space)
    return of_folder(study, shown, space, str(identity.get("objective") or settings.objective.name),
                     identity.get("limits") or {}, folder)


def space_of(records: Sequence[TrialRecord], name: str, like: Space) -> Space:
    """What can be known of a space from its trials: parameters and choices that were seen, trial 0 as baseline."""
    seen: dict[str, list[Value]] = {}
    for record in records:
        for param, value in record.config.items():
            choices = seen.setdefault(param, [])
            if not any(repr(value) == repr(c) for c in choices):
                choices.append(value)
    loads = {p.name for p in like.load_params} | set(LOADS)
    params = tuple(Param(param, tuple(sorted(choices, key=lambda c: (isinstance(c, str), c))), load=param in loads)
                   for param, choices in seen.items())
    return Space(name, like.engine, params, dict(records[0].config) if records else {})


def _pairs(stories: Sequence[Story]) -> tuple[Pair, ...]:
    found: dict[str, list[Lever | None]] = {}
    for i, story in enumerate(stories):
        for lever in story.levers:
            found.setdefault(lever.key, [None] * len(stories))[i] = lever
    pairs = []
    for levers in found.values():
        known = [x for x in levers if x is not None]
        if len(known) > 1:
            pairs.append(Pair(known[0].name, known[0].instead, tuple(levers), _verdict(known)))
    order = {"changed sign": 0, "differs": 1, "open": 2, "alike": 3}
    return tuple(sorted(pairs, key=lambda p: order[p.verdict]))


def _verdict(levers: Sequence[Lever]) -> str:
    signs = {lever.sign for lever in levers}
    if {1, -1} <= signs:
        return "changed sign"
    for a, b in itertools.combinations(levers, 2):
        if None not in (a.low, a.high, b.low, b.high) and (a.low or 0) > (b.high or 0) or (b.low or 0) > (a.high or 0):
            return "differs"
    return "open" if 0 in signs else "alike"


def _caveats(stories: Sequence[Story]) -> tuple[str, ...]:
    """Conditions that differ, beside the ones that one compares for (devices, engine version)."""
    found = []
    for key, words in (("model", "models"), ("workload", "workloads"), ("limits", "limits")):
        if len({repr(story.identity.get(key)) for story in stories}) > 1:
            found.append(f"The {words} differ, so absolute figures do not compare.")
    sources = {t.energy_source for t in (s.winner for s in stories) if t is not None}
    if len(sources) > 1:
        found.append(f"Energy comes from different sources ({', '.join(sorted(map(str, sources)))}).")
    unconfirmed = [s.study for s in stories if not s.confirmed]
    if unconfirmed:
        found.append(f"Not confirmed: {', '.join(unconfirmed)}.")
    return tuple(found)


def _signatures(stories: Sequence[Story]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    categories: dict[str, str] = {}
    counts: dict[str, list[int]] = {}
    for i, story in enumerate(stories):
        for group in story.crashes:
            categories[group.signature] = group.crash.category
            counts.setdefault(group.signature, [0] * len(stories))[i] = group.launches
    return tuple((s, categories[s], tuple(n)) for s, n in sorted(counts.items(), key=lambda item: -sum(item[1])))


def as_data(comparison: Comparison) -> dict[str, Any]:
    """The comparison for scripts."""
    return {
        "studies": [{"study": s.study, "conclusion": str(s.conclusion), "devices": s.identity.get("devices"),
                     "engine_version": s.identity.get("engine_version"), "winner": _entry(s, s.winner),
                     "baseline": _entry(s, s.baseline)} for s in comparison.stories],
        "levers": [{"choice": p.name, "instead_of": p.instead, "verdict": p.verdict,
                    "factors": [None if x is None else {"factor": x.factor, "low": x.low, "high": x.high}
                                for x in p.levers]} for p in comparison.levers],
        "crashes": [{"signature": s, "category": c, "launches": list(n)} for s, c, n in comparison.signatures],
        "caveats": list(comparison.caveats),
    }


def _entry(story: Story, entry: Tested | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {"trial": entry.trial, "config": dict(entry.config), "value": entry.value, "unit": story.unit,
            "is_baseline": is_baseline(story, entry)}
