"""A comparison of studies as a document, for page.py, markdown.py and the terminal."""

from __future__ import annotations

from autotune.engine.spec import text
from autotune.report import verdict
from autotune.report.blocks import Block, Cell, Document, Para, Section, Table
from autotune.report.compare import Comparison
from autotune.report.story import Story
from autotune.report.wording import count, one_line, percent, with_unit

TONES = {"changed sign": "bad", "differs": "strong", "open": "muted", "alike": ""}


def build(comparison: Comparison) -> Document:
    """The document: how each study ended, what the best ones choose, levers side by side, crashes."""
    stories = comparison.stories
    names = [one_line(s.study) for s in stories]
    turned = [p for p in comparison.levers if p.verdict == "changed sign"]
    headline = f"{count(len(turned), 'lever')} changed sign" if turned else "No lever changed sign"
    shared = count(len(comparison.levers), "lever")
    listed = ", ".join(p.name for p in turned)
    support = f"Of {shared} that at least two studies can tell" + (f": {listed}." if listed else ".")
    sections = [Section("studies", "The studies", (_studies(stories), *(Para(c, "warn") for c in comparison.caveats))),
                _best(stories), _levers(comparison, names), _crashes(comparison, names)]
    return Document(f"autotune: {' and '.join(names)}", f"autotune comparison · {' · '.join(names)}", headline + ".",
                    "warn" if turned else "plain", support, (), tuple(s for s in sections if s is not None),
                    "Factors are the objective with a choice over the objective with the baseline's choice.")


def _studies(stories: tuple[Story, ...]) -> Table:
    rows = []
    for s in stories:
        gain = s.gain
        devices = [one_line(d) for d in s.identity.get("devices") or []]
        engine = f"{s.identity.get('engine')} {s.identity.get('engine_version') or ''}"
        rows.append((Cell(one_line(s.study), "strong"), f"{len(devices)} devices" if len(devices) > 1 else
                     ", ".join(devices), one_line(engine.strip()),
                     with_unit(s.baseline.value if s.baseline else None, s.unit),
                     with_unit(s.winner.value if s.winner else None, s.unit),
                     percent(gain.share, signed=True) if gain else "", str(s.conclusion).replace("_", " ")))
    return Table(("Study", "Devices", "Engine", ">Baseline", ">Best", ">Gain", "Verdict"), tuple(rows))


def _best(stories: tuple[Story, ...]) -> Section | None:
    """The winners' choices; those on which they differ stand out."""
    winners = [s.winner for s in stories]
    if any(w is None for w in winners):
        return None
    params = list(dict.fromkeys(name for w in winners if w is not None for name in w.config))
    rows: list[tuple[str | Cell, ...]] = []
    for name in params:
        values = [text(w.config[name]) if w is not None and name in w.config else "absent" for w in winners]
        tone = "strong" if len(set(values)) > 1 else "muted"
        rows.append((name, *(Cell(one_line(v), tone) for v in values)))
    return Section("best", "The best of each", (
        Table(("Choice", *(one_line(s.study) for s in stories)), tuple(rows)),))


def _levers(comparison: Comparison, names: list[str]) -> Section | None:
    if not comparison.levers:
        return None
    rows: list[tuple[str | Cell, ...]] = []
    for pair in comparison.levers:
        told = [Cell("-", "muted") if lever is None else
                Cell(verdict.change_words(lever.factor, lever.low, lever.high),
                     {1: "good", -1: "bad", 0: ""}[lever.sign]) for lever in pair.levers]
        rows.append((pair.name, pair.instead, *told,
                     Cell(pair.verdict, TONES[pair.verdict])))
    return Section("levers", "Levers side by side", (
        Table(("Choice", "Instead of", *(f">{n}" for n in names), "Verdict"), tuple(rows)),))


def _crashes(comparison: Comparison, names: list[str]) -> Section | None:
    if not comparison.signatures:
        return None
    rows = tuple((one_line(s), one_line(c), *(str(n) if n else Cell("-", "muted") for n in counts))
                 for s, c, counts in comparison.signatures)
    blocks: tuple[Block, ...] = (Table(("Signature", "Category", *(f">{n}" for n in names)), rows,
                                       "Launches that ended so"),)
    return Section("crashes", "Crashes", blocks)
