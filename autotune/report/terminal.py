"""The terminal summary: the verdict first, then figures, levers, crashes, pivots. Plain text when piped.

    print_summary(story)                  # tables with rich
    json.dumps(as_data(story))            # for scripts
"""

from __future__ import annotations

import sys
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.report import tables, verdict
from autotune.report.compare import Comparison
from autotune.report.measured import Tested, changed, config_text, value_text
from autotune.report.story import Conclusion, Story
from autotune.utils.text import SPELLED, printable

PIPED_WIDTH = 120
SHOWN = 12  # rows of a table; the report has all of them
COLOURS = {Conclusion.IMPROVED: "bold green", Conclusion.NO_IMPROVEMENT: "bold", Conclusion.UNDECIDED: "bold yellow",
           Conclusion.NOT_CONFIRMED: "bold cyan", Conclusion.NOTHING_FEASIBLE: "bold red",
           Conclusion.NOTHING_MEASURED: "bold red"}
TONES = {"good": "green", "bad": "red"}


def print_summary(story: Story, file: IO[str] | None = None) -> None:
    """Write the summary to `file` (default: standard output)."""
    console = _console(file)
    console.print(_text(f"Study {story.study}", "dim"))
    console.print(_text(verdict.headline(story), COLOURS[story.conclusion]))
    if verdict.support(story):
        console.print(_text(verdict.support(story)))
    console.print()
    base, winner = story.baseline, story.winner
    if winner is not None:
        facts = {"Configuration": config_text(winner.config)}
        if base is not None and base.config != winner.config:
            facts["Changed"] = ", ".join(f"{name} {value_text(a)} -> {value_text(b)}" for name, (a, b)
                                         in changed(base.config, winner.config).items())
        for label, fact in (facts | {"Energy": verdict.energy_words(winner)}).items():
            console.print(Text.assemble((label.ljust(14), "dim"), _text(fact)))
        console.print()
        _print(console, tables.figures(story), "")
    if story.levers:
        columns = ("Choice", "Instead of", "Change", "95 % interval", "Pairs")
        _print(console, tables.levers(story.levers, "").only(*columns),
               "What each choice is worth, one change at a time", SHOWN)
    _print(console, tables.crashes(story)[0], "Crashes by signature", SHOWN)
    _print(console, tables.pivots(story).only("After", "Decision", "Region", "Reason"),
           "Pivots: regions given up, and why", SHOWN)
    _print(console, tables.untried(story).only("Choices", "Why"), "Never served, and why", SHOWN)
    if load := tables.load(story):
        _print(console, load, "Baseline and winner under load")
    console.print(_text(f"Spent: {verdict.spent_words(story)}."))
    console.print(_text(f"Trials: {verdict.counts_words(story)}."))
    console.print(_text(f"Stopped: {verdict.stop_words(story)}."))


def print_comparison(comparison: Comparison, file: IO[str] | None = None) -> None:
    """Write a comparison's headline, caveats and tables."""
    console, head = _console(file), comparison.head()
    console.print(_text(head["headline"], "bold"))
    console.print(_text("\n".join((head["support"], *comparison.caveats)), keep="\n"))
    console.print()
    for _, title, data in comparison.tables():
        _print(console, data, data.caption or title)


def _console(file: IO[str] | None) -> Console:
    """A console; a pipe gets a fixed width."""
    stream = file or sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PIPED_WIDTH, highlight=False, markup=False,
                   emoji=False)


def _text(words: str, style: str = "", keep: str = "") -> Text:
    """Words for the terminal, without characters that would move its cursor."""
    return Text(printable(words, keep=keep, instead=SPELLED), style=style)


def _print(console: Console, data: tables.Table, title: str, most: int | None = None) -> None:
    """Print the first rows of a table (`most`, or all) and an empty line; nothing for a table without rows."""
    if not data.rows:
        return
    tty = console.is_terminal
    more = len(data.rows) - len(data.rows[:most])
    shown = Table(title=_text(title) if title else None, title_justify="left",
                  title_style="bold", header_style="dim", box=box.SIMPLE if tty else None, pad_edge=False,
                  padding=(0, 1) if tty else (0, 2, 0, 0), caption_justify="left",
                  caption=f"{more:,} more in the report" if more else None)
    for column in data.columns:
        shown.add_column(_text(column.title), justify="right" if column.numeric else "left", overflow="fold")
    for row in data.rows[:most]:
        shown.add_row(*(_text(cell.text, TONES.get(cell.tone, "")) for cell in row))
    console.print(shown)
    console.print()


def as_data(story: Story) -> dict[str, Any]:
    """The summary for scripts. Keys are stable; unknown figures are absent."""
    return {
        "study": story.study, "conclusion": str(story.conclusion), "headline": verdict.headline(story),
        "objective": story.objective, "unit": story.unit,
        "winner": _tested(story.winner), "baseline": _tested(story.baseline),
        "gain": story.gain and story.gain._asdict(), "limits": [limit._asdict() for limit in story.limits],
        "finalists": [_tested(t) for t in story.finalists],
        "counts": story.counts._asdict(), "spent_s": story.spent._asdict(),
        "levers": [lever._asdict() for lever in story.levers],
        "crashes": [{"signature": g.signature, "category": g.crash.category, "stage": g.crash.stage,
                     "blame": g.crash.blame, "trials": g.trials, "launches": g.launches, "cost_s": g.cost_s,
                     "explanation": g.crash.explanation, "next_step": g.crash.next_step,
                     "suspects": [s._asdict() for s in g.suspects]} for g in story.crashes],
        "pivots": story.pivots, "never_served": [u._asdict() for u in story.untried], "matrix": story.matrix,
        "stop": story.stop, "confirmation": story.confirmation, "neighbours": story.neighbours,
        "identity": story.identity, "provenance": story.provenance}


def _tested(entry: Tested | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {"trial": entry.trial, "trials": entry.trials, "config": entry.config, "value": entry.value,
            "relative_error": entry.relative_error, "feasible": entry.feasible, "figures": entry.figures,
            "limit_ratios": entry.ratios, "energy_source": entry.energy.source, "energy_assumed": entry.energy.assumed}
