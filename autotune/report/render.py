"""The verb report: report.html and report.md from Jinja templates, the summary on the terminal, JSON for scripts.

    report(settings, study)             # writes both files, prints the summary: the verdict first, then tables
    markdown("note.jinja", **content)   # for optuna-dashboard
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

import jinja2
import rich.box
import rich.console
import rich.table
import rich.text
from markupsafe import Markup

from autotune.records import UsageError
from autotune.report import charts, compare, tables, verdict
from autotune.report.measured import Tested, changed, config_text, value_text
from autotune.report.story import Conclusion, Story, no_garbage_collection, read
from autotune.utils.files import output_path, write_output
from autotune.utils.text import KEPT, REPLACED, SPELLED, count, duration, one_line, printable, slug

if TYPE_CHECKING:
    from autotune.config.settings import Settings
    from autotune.storage.study import Study

# Style of the headline on the page and on the terminal.
TONES = {Conclusion.IMPROVED: ("good", "bold green"), Conclusion.LOAD_ONLY: ("good", "bold green"),
         Conclusion.NO_IMPROVEMENT: ("plain", "bold"),
         Conclusion.UNDECIDED: ("warn", "bold yellow"), Conclusion.NOT_CONFIRMED: ("warn", "bold cyan"),
         Conclusion.NOTHING_FEASIBLE: ("bad", "bold red"), Conclusion.NOTHING_MEASURED: ("bad", "bold red")}
COLOURS = {"good": "green", "bad": "red"}  # of table cells on the terminal
PIPED_WIDTH = 120
SHOWN = 12  # rows of a table on the terminal; the report has all of them


def report(settings: Settings, study: Study) -> int:
    """Write the report of a study, or the comparison of report.compare; returns the exit code.

    With report.format=json only JSON goes to standard output. Raises UsageError for an unsuitable out=.
    """
    with no_garbage_collection():
        if settings.report.compare is not None:
            found = compare.load(settings)
            names = "-".join(slug(story.study) for story in found.stories).replace("autotune-", "")
            page = output_path(settings.out, settings.outputs / f"compare-{names}.html")
            content: dict[str, Any] = {"template": "comparison.jinja", "comparison": found, "head": found.head()}
            data: dict[str, Any] = compare.as_data(found)
            show: Callable[[], None] = functools.partial(print_comparison, found)
        else:
            story = read(settings, study)
            page = output_path(settings.out, settings.folder / "report.html")
            content, data = {"template": "report.jinja", **content_of(story)}, as_data(story)
            show = functools.partial(print_summary, story)
        if page.suffix not in (".html", ".md"):
            raise UsageError(f"out={page}: a report is FILE.html with FILE.md beside it: name one of them, or a folder "
                             "(one that is not there yet ends in a slash)")
        page = page.with_suffix(".html")
        write_output(page, html(**content))
        write_output(page.with_suffix(".md"), markdown(**content))
        if settings.report.format == "json":
            print(_block(json.dumps(data, indent=1, ensure_ascii=False, default=str)))
            print(f"report: {page}", file=sys.stderr)
        else:
            show()
            print(f"Report: {page}")
    return 0


def content_of(story: Story) -> dict[str, Any]:
    """Variables of report.jinja."""
    made = story.provenance
    commands = [str(made["command"])] if made.get("command") else []
    if commands and story.winner is not None:
        commands += [commands[0].replace(" tune ", f" {verb} ", 1) for verb in ("export", "dashboard")]
    argv = story.winner.record.launch.argv if story.winner is not None else ()
    return {"story": story, "head": _head(story), "facts": _facts(story), "commands": "\n".join(commands),
            "server_command": shlex.join(argv), "tradeoff": charts.tradeoff(story),
            "load_curves": charts.load_curves(story), "progress": charts.progress(story)}


def _head(story: Story) -> dict[str, Any]:
    made = story.provenance
    gpus = made.get("gpu") or []
    device = f"{len(gpus)} GPUs" if len(gpus) > 1 else "1 GPU" if gpus else str(made.get("cpu") or "")
    name = str(story.space.needs.get("gpu_name") or "")
    chips = [story.engine, f"{name} · {device}" if name and device else device, str(made.get("created") or "")[:10],
             f"objective: {story.objective.replace('_', ' ')}"]
    return {"title": f"autotune: {one_line(story.study)}", "kicker": f"autotune report · study {one_line(story.study)}",
            "headline": verdict.headline(story), "tone": TONES[story.conclusion][0], "support": verdict.support(story),
            "chips": [one_line(x) for x in chips if x],
            "footer": f"{verdict.spent_words(story)}. Stopped: {verdict.stop_words(story)}."}


def _facts(story: Story) -> dict[str, str]:
    """Everything known of the study's conditions by label."""
    identity, made = story.identity, story.provenance
    facts: dict[str, Any] = {
        "Study": story.study, "Space": f"{story.space.name}, digest {identity.get('space_digest')}",
        "Strategy": story.strategy, "Engine": story.engine,
        "Model": ", ".join(f"{k}: {v}" for k, v in (identity.get("model") or {}).items()),
        "GPUs (hashed UUIDs)": ", ".join(map(str, made.get("gpu") or [])), "Driver": made.get("driver"),
        "CPU": made.get("cpu"), "Kernel": made.get("kernel"), "autotune": made.get("autotune"),
        "Python": made.get("python"), "Packages": _mapping_text(made.get("packages")),
        "Workload": _mapping_text(identity.get("workload")), "Limits": _mapping_text(identity.get("limits")),
        "Seeds": _mapping_text(made.get("seeds")), "Started": made.get("created"),
        "Roofline": verdict.roofline_words(story), "Time": verdict.spent_words(story),
        "Trials": verdict.counts_words(story)}
    return {label: one_line(fact) for label, fact in facts.items() if fact not in (None, "", "None")}


def _mapping_text(value: Any) -> str:
    if not isinstance(value, dict):
        return ""
    return ", ".join(f"{k} {', '.join(map(str, v)) if isinstance(v, list) else v}" for k, v in value.items()
                     if v is not None)


def _render(form: str, template: str, **content: Any) -> str:
    """A template as one HTML file or as GitHub-flavoured Markdown."""
    return _environment(form).get_template(template).render(sections=[], **content).strip() + "\n"


html, markdown = functools.partial(_render, "html"), functools.partial(_render, "markdown")


@functools.cache
def _environment(form: str) -> jinja2.Environment:
    """Every expression is escaped for its format: for Markdown by `escape`, for HTML by Jinja's own autoescape."""
    env = jinja2.Environment(loader=jinja2.PackageLoader("autotune.report"), autoescape=True,
                             undefined=jinja2.StrictUndefined, extensions=["jinja2.ext.do"],
                             finalize=escape if form == "markdown" else _block)
    env.globals |= {"blocks": f"{form}.jinja", "verdict": verdict, "tables": tables, "count": count,
                    "duration": duration, "config_text": config_text, "px": charts.px, "path": charts.path,
                    "marks": charts.MARKS, "classes": _classes}
    env.filters |= {"code": code, "fence": fence, "entities": _entities}
    return env


def _classes(**names: bool) -> Markup:
    held = " ".join(name for name, holds in names.items() if holds)
    return Markup(f' class="{held}"' if held else "")


def _block(value: object) -> str:
    """Text without control characters; Jinja escapes it."""
    return value if isinstance(value, Markup) else printable(str(value), keep=KEPT, instead=REPLACED)


def escape(text: object) -> Markup:
    """Text as Markdown that shows it literally, on one line."""
    if isinstance(text, Markup):
        return text
    shown = re.sub(r"([\\`*\[\]<>#|~&])", r"\\\1", one_line(text))
    return Markup(re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", shown))


def fence(text: str) -> Markup:
    """A code block of Markdown that the text cannot end, whatever back-ticks are in it."""
    ticks = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`+", text))])
    return Markup(f"{ticks}text\n{_block(text).rstrip()}\n{ticks}")


def code(text: str) -> Markup:
    """Text for an inline code span of Markdown."""
    return Markup(one_line(text).replace("`", "'"))


def _entities(text: str) -> Markup:
    """Text inside an HTML block of Markdown; every character that Markdown reads as an entity too."""
    return Markup(re.sub(r"[&<>\[\]`*_|]", lambda m: f"&#{ord(m[0])};", one_line(text)))


def print_summary(story: Story, file: IO[str] | None = None) -> None:
    """Write the summary to `file` (default: standard output)."""
    console = _console(file)
    console.print(_text(f"Study {story.study}", "dim"))
    console.print(_text(verdict.headline(story), TONES[story.conclusion][1]))
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
            console.print(rich.text.Text.assemble((label.ljust(14), "dim"), _text(fact)))
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


def print_comparison(comparison: compare.Comparison, file: IO[str] | None = None) -> None:
    console, head = _console(file), comparison.head()
    console.print(_text(head["headline"], "bold"))
    console.print(_text("\n".join((head["support"], *comparison.caveats)), keep="\n"))
    console.print()
    for _, title, data in comparison.tables():
        _print(console, data, data.caption or title)


def _console(file: IO[str] | None) -> rich.console.Console:
    stream = file or sys.stdout
    return rich.console.Console(file=stream, width=None if stream.isatty() else PIPED_WIDTH, highlight=False,
                                markup=False, emoji=False)


def _text(words: str, style: str = "", keep: str = "") -> rich.text.Text:
    """Words for the terminal, without characters that would move its cursor."""
    return rich.text.Text(printable(words, keep=keep, instead=SPELLED), style=style)


def _print(console: rich.console.Console, data: tables.Table, title: str, most: int | None = None) -> None:
    """Print the first rows of a table (`most`, or all) and an empty line; nothing for a table without rows."""
    if not data.rows:
        return
    tty = console.is_terminal
    more = len(data.rows) - len(data.rows[:most])
    shown = rich.table.Table(title=_text(title) if title else None, title_justify="left",
                  title_style="bold", header_style="dim", box=rich.box.SIMPLE if tty else None, pad_edge=False,
                  padding=(0, 1) if tty else (0, 2, 0, 0), caption_justify="left",
                  caption=f"{more:,} more in the report" if more else None)
    for column in data.columns:
        shown.add_column(_text(column.title), justify="right" if column.numeric else "left", overflow="fold")
    for row in data.rows[:most]:
        shown.add_row(*(_text(cell.text, COLOURS.get(cell.tone, "")) for cell in row))
    console.print(shown)
    console.print()


def as_data(story: Story) -> dict[str, Any]:
    """The summary for scripts. Keys are stable; unknown figures are absent."""
    return {
        "study": story.study, "conclusion": str(story.conclusion), "headline": verdict.headline(story),
        "objective": story.objective, "unit": story.unit,
        "winner": _tested(story.winner), "baseline": _tested(story.baseline),
        "gain": story.gain and story.gain._asdict(),
        "shares": {name: gain and gain._asdict() for name, gain in story.shares._asdict().items()},
        "limits": [limit._asdict() for limit in story.limits],
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
