"""The verb report with report.compare=[A, B, ...]: the best of each study, and levers that changed sign.

Studies are folders of outputs/ (or paths of such folders); with study.storage=URL, names of studies there.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune.records import UsageError, Value
from autotune.report.levers import Lever
from autotune.report.measured import Tested, value_text
from autotune.report.story import Story, read_folder
from autotune.report.tables import Cell, Table, table, tone_of
from autotune.report.verdict import range_words
from autotune.space.space import Param, Space
from autotune.storage.trial import TrialRecord
from autotune.utils.text import count, one_line, percent, with_unit

if TYPE_CHECKING:
    from autotune.config.settings import Settings

LOADS = ("concurrency", "context")
# Verdicts in the order of the table, with their tones; open: an interval includes no effect, or is unknown.
PARTS = {"server": "", "load": " (load alone)", "both": " (server and load)"}
TONES = {"changed sign": "bad", "differs": "strong", "open": "muted", "alike": ""}


class Pair(NamedTuple):
    """One lever in several studies, None in a study without it. `verdict` is a key of TONES."""

    name: str
    instead: str
    levers: tuple[Lever | None, ...]
    verdict: str


class Comparison(NamedTuple):
    """`signatures` are (signature, category, launches in each study)."""

    stories: tuple[Story, ...]
    levers: tuple[Pair, ...]
    caveats: tuple[str, ...]
    signatures: tuple[tuple[str, str, tuple[int, ...]], ...]

    @property
    def names(self) -> list[str]:
        return [one_line(s.study) for s in self.stories]

    def head(self) -> dict[str, Any]:
        """Title and headline, as html.jinja and markdown.jinja take them."""
        changed = [p.name for p in self.levers if p.verdict == "changed sign"]
        comparable = f"Of {count(len(self.levers), 'lever')} measured in at least two studies"
        return {"title": f"autotune: {' and '.join(self.names)}",
                "kicker": f"autotune comparison · {' · '.join(self.names)}",
                "headline": f"{count(len(changed), 'lever') if changed else 'No lever'} changed sign.",
                "tone": "warn" if changed else "plain", "chips": (),
                "support": comparable + (f": {', '.join(changed)}." if changed else "."),
                "footer": "Factors are the objective with a choice over the objective with the baseline's choice."}

    def tables(self) -> list[tuple[str, str, Table]]:
        """(name, title, table) of each section."""
        found = [("studies", "The studies", self._studies()), ("best", "The best of each", self._best()),
                 ("levers", "Levers side by side", self._levers()), ("crashes", "Crashes", self._crashes())]
        return [(name, title, shown) for name, title, shown in found if shown.rows]

    def _studies(self) -> Table:
        rows = []
        for s in self.stories:
            devices = [one_line(d) for d in s.identity.get("devices") or []]
            rows.append((
                Cell(one_line(s.study), "strong"),
                f"{len(devices)} devices" if len(devices) > 1 else ", ".join(devices), one_line(s.engine),
                with_unit(s.baseline.value if s.baseline else None, s.unit),
                with_unit(s.winner.value if s.winner else None, s.unit),
                f"{percent(s.gain.share, signed=True)}{PARTS[s.gain.of]}" if s.gain else "",
                str(s.conclusion).replace("_", " ")))
        return table(("Study", "Devices", "Engine", ">Baseline", ">Best", ">Gain", "Verdict"), rows)

    def _best(self) -> Table:
        """Choices of the winners; different ones stand out. Empty when a study has no winner."""
        winners = [s.winner.config for s in self.stories if s.winner is not None]
        rows: list[tuple[str | Cell, ...]] = []
        for name in dict.fromkeys(name for w in winners for name in w if len(winners) == len(self.stories)):
            values = [value_text(w.get(name)) for w in winners]
            tone = "strong" if len(set(values)) > 1 else "muted"
            rows.append((name, *(Cell(v, tone) for v in values)))
        return table(("Choice", *self.names), rows)

    def _levers(self) -> Table:
        return table(("Choice", "Instead of", *(f">{n}" for n in self.names), "Verdict"), (
            (pair.name, pair.instead, *(
                Cell("-", "muted") if x is None else Cell(_change(x), tone_of(x)) for x in pair.levers),
             Cell(pair.verdict, TONES[pair.verdict])) for pair in self.levers))

    def _crashes(self) -> Table:
        return table(("Signature", "Category", *(f">{n}" for n in self.names)), (
            (one_line(s), one_line(c), *(str(n) if n else Cell("-", "muted") for n in counts))
            for s, c, counts in self.signatures), "Launches by crash signature")


def _change(lever: Lever) -> str:
    interval = range_words(lever.low, lever.high)
    return percent(lever.factor - 1, signed=True) + (f" ({interval})" if interval else "")


def load(settings: Settings) -> Comparison:
    """Read the studies of report.compare; studies of the same name (of two hosts, say) are named by their given paths.

    Raises UsageError for fewer than two, and for unknown ones.
    """
    names = settings.report.compare or []
    if len(names) < 2:
        raise UsageError("report.compare takes two or more studies: report.compare=[study_a,study_b]")
    stories = [_story(settings, name) for name in names]
    called = [story.study for story in stories]
    return compare([dataclasses.replace(story, study=name) if called.count(story.study) > 1 else story
                    for story, name in zip(stories, names, strict=True)])


def compare(stories: Sequence[Story]) -> Comparison:
    """Put stories side by side. Raises UsageError when their objectives differ."""
    if len(objectives := {story.objective for story in stories}) > 1:
        raise UsageError(f"these studies maximise different things ({', '.join(sorted(objectives))}): "
                         "they cannot be compared")
    return Comparison(tuple(stories), _pairs(stories), _caveats(stories), _signatures(stories))


def _story(settings: Settings, name: str) -> Story:
    from autotune.storage.database import sqlite_url
    from autotune.storage.study import Study

    folder = next((p for p in (settings.outputs / name, pathlib.Path(name)) if (p / "study.db").is_file()), None)
    url, shown = settings.study.storage, name
    if url is None:
        if folder is None:
            raise UsageError(f"report.compare: there is no study.db in {settings.outputs / name}, nor in {name}")
        url, shown = sqlite_url(folder), folder.name
    study = Study.open(url, shown, settings.space, {}, create=False)
    identity = study.attrs().get("identity") or {}
    records = study.records()
    same = identity.get("space_digest") == settings.space.digest
    space = settings.space if same else space_of(records, str(identity.get("space") or shown), settings.space)
    return read_folder(settings, study, shown, space, {}, folder)


def space_of(records: Sequence[TrialRecord], name: str, like: Space) -> Space:
    """A space rebuilt from trials: the parameters and choices seen, trial 0 as the baseline."""
    seen: dict[str, dict[str, Value]] = {}
    for record in records:
        for param, value in record.config.items():
            seen.setdefault(param, {})[repr(value)] = value
    loads = {p.name for p in like.load_params} | set(LOADS)
    params = tuple(Param(param, tuple(sorted(choices.values(), key=lambda c: (isinstance(c, str), c))),
                         load=param in loads) for param, choices in seen.items())
    return Space(name, like.engine, params, dict(records[0].config) if records else {})


def _pairs(stories: Sequence[Story]) -> tuple[Pair, ...]:
    found: dict[str, list[Lever | None]] = {}
    for i, story in enumerate(stories):
        for lever in story.levers:
            found.setdefault(lever.key, [None] * len(stories))[i] = lever
    pairs = [Pair(known[0].name, known[0].instead, tuple(levers), _verdict(known)) for levers in found.values()
             if len(known := [x for x in levers if x is not None]) > 1]
    return tuple(sorted(pairs, key=lambda pair: list(TONES).index(pair.verdict)))


def _verdict(levers: Sequence[Lever]) -> str:
    signs = {lever.sign for lever in levers}
    if {1, -1} <= signs:
        return "changed sign"
    for a, b in itertools.combinations(levers, 2):
        if None not in (a.low, a.high, b.low, b.high) and (a.low or 0) > (b.high or 0) or (b.low or 0) > (a.high or 0):
            return "differs"
    return "open" if 0 in signs else "alike"


def _caveats(stories: Sequence[Story]) -> tuple[str, ...]:
    """Conditions that differ, except the ones under comparison (devices, engine version)."""
    found = []
    for key, words in (("model", "models"), ("workload", "workloads"), ("limits", "limits")):
        if len({repr(story.identity.get(key)) for story in stories}) > 1:
            found.append(f"The {words} differ, so absolute figures do not compare.")
    if len(sources := {s.winner.energy.source for s in stories if s.winner is not None}) > 1:
        found.append(f"Energy comes from different sources ({', '.join(sorted(sources))}).")
    if unconfirmed := [s.study for s in stories if not s.confirmed]:
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
    return {
        "studies": [{"study": s.study, "conclusion": str(s.conclusion), "devices": s.identity.get("devices"),
                     "engine_version": s.identity.get("engine_version"), "winner": _entry(s, s.winner),
                     "baseline": _entry(s, s.baseline)} for s in comparison.stories],
        "levers": [{"choice": p.name, "instead_of": p.instead, "verdict": p.verdict,
                    "factors": [x and {"factor": x.factor, "low": x.low, "high": x.high} for x in p.levers]}
                   for p in comparison.levers],
        "crashes": [{"signature": s, "category": c, "launches": n} for s, c, n in comparison.signatures],
        "caveats": comparison.caveats}


def _entry(story: Story, entry: Tested | None) -> dict[str, Any] | None:
    return entry and {"trial": entry.trial, "config": entry.config, "value": entry.value, "unit": story.unit,
                      "is_baseline": story.is_baseline(entry)}
