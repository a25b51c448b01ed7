"""The terminal summary: the verdict first, then figures, levers, crashes, pivots. Plain text when piped.

    print_summary(story)                  # tables with rich
    json.dumps(as_data(story))            # for scripts
"""

from __future__ import annotations

import sys
from typing import IO, Any, Literal

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.report import tables, verdict
from autotune.report.compare import Comparison
from autotune.report.measured import Tested, changed, choice_text, config_text, region_text, value_text
from autotune.report.story import Conclusion, Story
from autotune.utils.text import SPELLED, count, one_line, printable

PIPED_WIDTH = 120
SHOWN = 12  # rows of a table; the report has all of them
COLOURS = {Conclusion.IMPROVED: "bold green", Conclusion.NO_IMPROVEMENT: "bold", Conclusion.UNDECIDED: "bold yellow",
           Conclusion.NOT_CONFIRMED: "bold cyan", Conclusion.NOTHING_FEASIBLE: "bold red",
           Conclusion.NOTHING_MEASURED: "bold red"}


def print_summary(story: Story, file: IO[str] | None = None) -> None:
    """Write the summary to `file` (default: standard output)."""
    console, tty = _console(file)
    console.print(_text(f"Study {one_line(story.study)}", style="dim"))
    console.print(_text(verdict.headline(story), style=COLOURS[story.conclusion]))
    if verdict.support(story):
        console.print(_text(verdict.support(story)))
    console.print()
    if story.winner is not None:
        _winner(console, story, tty)
    for table in (_levers(story, tty), _crashes(story, tty), _pivots(story, tty), _untried(story, tty),
                  _load(story, tty)):
        if table is not None:
            console.print(table)
            console.print()
    console.print(_text(f"Spent: {verdict.spent_words(story)}."))
    console.print(_text(f"Trials: {verdict.counts_words(story)}."))
    console.print(_text(f"Stopped: {verdict.stop_words(story)}."))


def print_comparison(comparison: Comparison, file: IO[str] | None = None) -> None:
    """Write a comparison's headline, caveats and tables."""
    console, tty = _console(file)
    head = comparison.head()
    console.print(_text(head["headline"], style="bold"))
    console.print(_text(head["support"]))
    for name, title, data in comparison.tables():
        console.print()
        console.print(_of_table(data, data.caption or title, tty))
        for caveat in comparison.caveats if name == "studies" else ():
            console.print()
            console.print(_text(caveat))


def _console(file: IO[str] | None) -> tuple[Console, bool]:
    """(console, True for a terminal); a pipe gets a fixed width."""
    stream = file or sys.stdout
    tty = stream.isatty()
    return Console(file=stream, width=None if tty else PIPED_WIDTH, highlight=False, markup=False, emoji=False), tty


def _text(words: str, style: str = "") -> Text:
    """Words for the terminal, without what would move its cursor."""
    return Text(printable(words, instead=SPELLED), style=style)


def _of_table(data: tables.Table, title: str, tty: bool) -> Table:
    table = _table(title, tty, *(f">{c.title}" if c.numeric else c.title for c in data.columns))
    for row in data.rows:
        table.add_row(*(cell.text for cell in row))
    return table


def _winner(console: Console, story: Story, tty: bool) -> None:
    winner, base = story.winner, story.baseline
    assert winner is not None
    console.print(Text.assemble(("Configuration ", "dim"), config_text(winner.config)))
    if base is not None and base.config != winner.config:
        moved = [f"{name} {value_text(a)} -> {value_text(b)}"
                 for name, (a, b) in changed(base.config, winner.config).items()]
        console.print(Text.assemble(("Changed       ", "dim"), ", ".join(moved)))
    console.print(Text.assemble(("Energy        ", "dim"), one_line(verdict.energy_words(winner))))
    console.print()
    table = _table("", tty, "Figure", ">Baseline", f">{verdict.label(story, winner)}", ">Change", "Limit")
    for row in verdict.figure_rows(story):
        table.add_row(*row)
    console.print(table)
    console.print()


def _levers(story: Story, tty: bool) -> Table | None:
    if not story.levers:
        return None
    table = _table("What each choice is worth, one change at a time", tty, "Choice", "Instead of", ">Change", ">Pairs")
    for lever in story.levers[:SHOWN]:
        style = {1: "green", -1: "red", 0: ""}[lever.sign]
        table.add_row(lever.name, lever.instead,
                      Text(verdict.change_words(lever.factor, lever.low, lever.high), style=style), str(lever.pairs))
    return _more(table, len(story.levers))


def _crashes(story: Story, tty: bool) -> Table | None:
    if not story.crashes:
        return None
    table = _table("Crashes by signature", tty, "Signature", ">Launches", "Stage", "Blame", "Category", "What happened")
    for group in story.crashes[:SHOWN]:
        crash = group.crash
        words = one_line(crash.explanation or crash.excerpt.strip()[-160:])
        if group.suspects:
            words += " With " + ", ".join(f"{choice_text(s.param, s.value)} ({s.crashed} of {s.launches} launches)"
                                          for s in group.suspects[:3]) + "."
        table.add_row(one_line(crash.signature), str(group.launches), str(crash.stage), str(crash.blame),
                      one_line(crash.category), words)
    return _more(table, len(story.crashes))


def _pivots(story: Story, tty: bool) -> Table | None:
    if not story.pivots:
        return None
    table = _table("Pivots: regions given up, and why", tty, "After", "Decision", "Region", "Reason")
    for pivot in story.pivots[:SHOWN]:
        table.add_row(count(int(pivot.get("after_launches") or 0), "launch", "launches"),
                      one_line(pivot.get("action", "")), region_text(pivot.get("region") or {}),
                      one_line(pivot.get("reason", "")))
    return _more(table, len(story.pivots))


def _untried(story: Story, tty: bool) -> Table | None:
    if not story.untried:
        return None
    table = _table("Never served, and why", tty, "Choice", "Why")
    for entry in story.untried[:SHOWN]:
        table.add_row(region_text({entry.param: entry.values}), one_line(entry.why))
    return _more(table, len(story.untried))


def _load(story: Story, tty: bool) -> Table | None:
    data = tables.load(story)
    return _of_table(data, "Baseline and winner under load", tty) if data else None


class _Rows(Table):
    """A table that shows text as it is: no character of a cell moves the terminal's cursor."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*[one_line(cell) if isinstance(cell, str) else cell for cell in cells], **options)


def _table(title: str, tty: bool, *columns: str) -> Table:
    table = _Rows(title=title or None, title_justify="left", title_style="bold", header_style="dim",
                  box=box.SIMPLE if tty else None, pad_edge=False, padding=(0, 2, 0, 0) if not tty else (0, 1))
    for column in columns:
        side: Literal["right", "left"] = "right" if column.startswith(">") else "left"
        table.add_column(one_line(column.lstrip(">")), justify=side, overflow="fold")
    return table


def _more(table: Table, total: int) -> Table:
    if total > SHOWN:
        table.caption = f"{total - SHOWN:,} more in the report"
        table.caption_justify = "left"
    return table


def as_data(story: Story) -> dict[str, Any]:
    """The summary for scripts. Keys are stable; unknown figures are absent."""
    gain = story.gain
    return {
        "study": story.study, "conclusion": str(story.conclusion), "headline": verdict.headline(story),
        "objective": story.objective, "unit": story.unit,
        "winner": _tested(story.winner), "baseline": _tested(story.baseline),
        "gain": None if gain is None else {"share": gain.share, "low": gain.low, "high": gain.high,
                                           "confirmed": gain.confirmed},
        "limits": [{"name": x.name, "limit": x.limit, "ratio": x.ratio} for x in story.limits],
        "finalists": [_tested(t) for t in story.finalists],
        "counts": vars(story.counts), "spent_s": vars(story.spent),
        "levers": [vars(lever) for lever in story.levers],
        "crashes": [{"signature": g.signature, "category": g.crash.category, "stage": g.crash.stage,
                     "blame": g.crash.blame, "trials": list(g.trials), "launches": g.launches, "cost_s": g.cost_s,
                     "explanation": g.crash.explanation, "next_step": g.crash.next_step,
                     "suspects": [vars(s) for s in g.suspects]} for g in story.crashes],
        "pivots": [dict(p) for p in story.pivots],
        "never_served": [vars(u) for u in story.untried],
        "matrix": [dict(row) for row in story.matrix],
        "stop": dict(story.stop), "confirmation": dict(story.confirmation), "neighbours": dict(story.neighbours),
        "identity": dict(story.identity), "provenance": dict(story.provenance),
    }


def _tested(entry: Tested | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {"trial": entry.trial, "trials": list(entry.trials), "config": dict(entry.config), "value": entry.value,
            "relative_error": entry.relative_error, "feasible": entry.feasible, "figures": dict(entry.figures),
            "limit_ratios": dict(entry.ratios), "energy_source": entry.energy_source,
            "energy_assumed": entry.energy_assumed}
