"""The report's sections of evidence: levers, crashes, pivots, what was not tried, every trial."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.report import notes, verdict
from autotune.report.blocks import Block, Cell, Chart, Code, Fold, Para, Section, Table
from autotune.report.charts import fate_bar, interval_bar, progress_chart, swatch
from autotune.report.crashes import CrashGroup
from autotune.report.levers import Lever, changed
from autotune.report.markup import join
from autotune.report.series import fates, progress
from autotune.report.story import Story
from autotune.report.wording import (
    choice_text,
    config_text,
    count,
    duration,
    number,
    one_line,
    percent,
    region_text,
)

MOST_GROUPS = 40
EXCERPT = 3000
REACH = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
"""Half-widths of the scale that levers are drawn on, as shares."""


def levers(story: Story) -> Section | None:
    """What each choice is worth."""
    if not story.levers:
        return None
    parts = [("Choices of the server", [x for x in story.levers if not x.load]),
             ("Choices of the load", [x for x in story.levers if x.load])]
    return Section("levers", "What each lever is worth", (
        *(_lever_table(title, found) for title, found in parts if found),
        Para("Pairs of configurations that differ in this choice only; where the baseline has no choice, against the "
             "most measured one. Bars that cross the middle are not told apart from no effect.", "muted")))


def _lever_table(title: str, found: Sequence[Lever]) -> Table:
    widest = max(abs(lever.factor - 1) for lever in found)
    reach = next((r for r in REACH if r >= widest), widest)
    rows = []
    for lever in found:
        tone = {1: "good", -1: "bad", 0: ""}[lever.sign]
        rows.append((lever.name, lever.instead,
                     Cell(percent(lever.factor - 1, signed=True), tone),
                     Cell("", picture=interval_bar(lever.factor, lever.low, lever.high, reach)),
                     verdict.range_words(lever.low, lever.high), str(lever.pairs)))
    scale = f"-{percent(reach)} to +{percent(reach)}".replace(" %", "%")
    return Table(("Choice", "?Instead of", ">Change", scale, "?95 % interval", "?>Pairs"), tuple(rows), title)


def crashes(story: Story) -> Section | None:
    """Crashes by signature, and which choices went with them."""
    if not story.crashes:
        return None
    counts = story.counts
    blocks: list[Block] = [Para(
        f"{count(counts.crashed, 'trial')} of {counts.trials:,} crashed in "
        f"{count(sum(g.launches for g in story.crashes), 'launch', 'launches')}, with "
        f"{count(len(story.crashes), 'signature')}; {duration(story.spent.crashed_s)} went into them.")]
    names, ended = fates(story)
    rows = tuple((_signature(g, names), str(g.launches), str(g.crash.stage), Cell(str(g.crash.blame), "strong"),
                  one_line(g.crash.category), one_line(g.crash.explanation), suspects(g))
                 for g in story.crashes[:MOST_GROUPS])
    blocks.append(Table(("Signature", ">Launches", "Stage", "Blame", "Category", "What happened", "Always with"), rows))
    if len(story.crashes) > MOST_GROUPS:
        rest = story.crashes[MOST_GROUPS:]
        blocks.append(Para(f"{count(len(rest), 'rarer signature')} with "
                           f"{count(sum(g.launches for g in rest), 'launch', 'launches')} not shown.", "muted"))
    told = []
    for fate in (x for x in ended if x.launches):
        crashed = sorted(fate.crashed.items(), key=lambda item: names.index(item[0]))
        told.append((choice_text(fate.param, fate.value), str(fate.launches), str(fate.served),
                     Cell("", picture=fate_bar(fate.served, crashed, names)),
                     ", ".join(f"{s}: {n}" for s, n in crashed)))
    blocks.append(Table(("Choice", "?>Launches", ">Served", "Share", "?Crashes by signature"), tuple(told),
                        "How launches with each choice ended (green: served)"))
    blocks += [_excerpt(group) for group in story.crashes[:MOST_GROUPS]]
    return Section("crashes", "Crashes", tuple(blocks))


def _signature(group: CrashGroup, names: Sequence[str]) -> Cell:
    """A signature with the colour that it has in the bars."""
    shown = one_line(group.signature)
    position = names.index(group.signature if group.signature in names else "other")
    return Cell(shown, picture=join([swatch(position), shown]))


def suspects(group: CrashGroup) -> str:
    """Choices that every crash of a group shares and that never served, in words."""
    return ", ".join(f"{choice_text(s.param, s.value)} ({s.crashed} of {s.launches})" for s in group.suspects)


def _excerpt(group: CrashGroup) -> Fold:
    crash = group.crash
    blocks: list[Block] = []
    if crash.explanation:
        blocks.append(Para(crash.explanation))
    if crash.next_step:
        blocks.append(Para(f"What to do: {crash.next_step}"))
    shown = ", ".join(map(str, group.trials[:12])) + (", ..." if len(group.trials) > 12 else "")
    blocks.append(Para(f"Trials {shown}; all with {config_text(group.common) or 'nothing in common'}.", "muted"))
    if crash.excerpt.strip():
        blocks.append(Code(crash.excerpt.strip()[-EXCERPT:], "From the log of the newest"))
    return Fold(f"{one_line(group.signature)}: {one_line(crash.category)} at {crash.stage}", tuple(blocks))


def search(story: Story) -> Section | None:
    """How the search went: progress, and regions given up with the evidence."""
    steps = progress(story)
    if not steps:
        return None
    picture = Chart(progress_chart(story, steps), "Every trial by launch, the best so far as a line, crashes along the "
                    "bottom, pivots as dashed lines.")
    if not story.pivots:
        return Section("search", "The search", (picture, Para(f"No region was given up. Stopped: "
                                                              f"{verdict.stop_words(story)}.", "muted")))
    rows = []
    for pivot in story.pivots:
        closing = pivot.get("action") == "close"
        rows.append((count(int(pivot.get("after_launches") or 0), "launch", "launches"),
                     Cell("given up" if closing else "opened again", "bad" if closing else "good"),
                     Cell(region_text(pivot.get("region") or {}), "strong"), one_line(pivot.get("reason") or ""),
                     verdict.pivot_words(pivot), one_line(pivot.get("reopens_when") or "")))
    saved = sum(int(p.get("launches_saved") or 0) for p in story.pivots if p.get("action") == "close")
    words = f"{count(len(story.pivots), 'decision')}" + (f", about {count(saved, 'launch', 'launches')} saved" if saved
                                                         else "") + "."
    return Section("search", "The search and its pivots", (picture, Para(words), Table(
        ("After", "Decision", "Region", "Reason", "Evidence", "Opens again when"), tuple(rows),
        "Pivots: regions given up, and why")))


def untried(story: Story) -> Section | None:
    """Choices that never served."""
    if not story.untried:
        return None
    words = {"forbidden": "forbidden", "closed": "given up", "crashed": "only crashed",
             "shadowed": "not told apart", "unreached": "not reached"}
    rows = tuple((region_text({u.param: u.values}), Cell(words[u.kind], "muted"), one_line(u.why))
                 for u in story.untried)
    return Section("untried", "What never served, and why", (Table(("Choices", "Standing", "Why"), rows),))


def trials(story: Story) -> Section | None:
    """Every trial, folded."""
    if not story.records:
        return None
    rows = []
    for record in story.records:
        moved = changed(story.space.baseline, record.config)
        differs = ", ".join(f"{n}={'-' if b is None else str(b).lower() if isinstance(b, bool) else one_line(b)}"
                            for n, (_, b) in moved.items()) or "baseline"
        attrs = record.attrs
        standing = notes.standing(record)
        tone = "bad" if record.crashed else "good" if record.feasible else "muted"
        rows.append((str(record.number), "" if record.launch_id is None else str(record.launch_id), differs,
                     number(record.value) if record.value is not None else "", number(attrs.get("tokens_per_s"))
                     if attrs.get("tokens_per_s") else "", number(attrs.get("watts")) if attrs.get("watts") else "",
                     Cell(standing, tone)))
    return Section("trials", "Every trial", (Fold(f"All {len(rows):,} trials", (Table(
        (">Trial", "?>Launch", "Differs from the baseline in", f">{story.unit}", "?>tok/s", "?>W", "Standing"),
        tuple(rows)),)),))
