"""The verb report: report.html and report.md from Jinja templates, and the escaping that keeps text from being markup.

    report(settings, study)             # writes both files, prints the summary
    markdown("note.jinja", **content)   # for optuna-dashboard
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from autotune.records import UsageError
from autotune.report import charts, compare, tables, verdict
from autotune.report.measured import config_text
from autotune.report.story import Conclusion, Story, no_garbage_collection, read
from autotune.utils.files import output_path, write_output
from autotune.utils.text import KEPT, REPLACED, count, duration, one_line, printable, slug

if TYPE_CHECKING:
    from autotune.config.settings import Settings
    from autotune.storage.study import Study

TONES = {Conclusion.IMPROVED: "good", Conclusion.NO_IMPROVEMENT: "plain", Conclusion.UNDECIDED: "warn",
         Conclusion.NOT_CONFIRMED: "warn", Conclusion.NOTHING_FEASIBLE: "bad", Conclusion.NOTHING_MEASURED: "bad"}


def report(settings: Settings, study: Study) -> int:
    """Write the report of a study, or the comparison of report.compare; returns the exit code.

    With report.format=json only JSON goes to standard output. Raises UsageError for an unsuitable out=.
    """
    from autotune.report import terminal

    with no_garbage_collection():
        if settings.report.compare is not None:
            found = compare.load(settings)
            names = "-".join(slug(story.study) for story in found.stories).replace("autotune-", "")
            page = output_path(settings.out, settings.outputs / f"compare-{names}.html")
            content: dict[str, Any] = {"template": "comparison.jinja", "comparison": found, "head": found.head()}
            data: dict[str, Any] = compare.as_data(found)
            show: Callable[[], None] = functools.partial(terminal.print_comparison, found)
        else:
            story = read(settings, study)
            page = output_path(settings.out, settings.folder / "report.html")
            content, data = {"template": "report.jinja", **content_of(story)}, terminal.as_data(story)
            show = functools.partial(terminal.print_summary, story)
        page = _write(page, content)
        if settings.report.format == "json":
            print(_block(json.dumps(data, indent=1, ensure_ascii=False, default=str)))
            print(f"report: {page}", file=sys.stderr)
        else:
            show()
            print(f"Report: {page}")
    return 0


def _write(page: pathlib.Path, content: dict[str, Any]) -> pathlib.Path:
    """Write FILE.html and FILE.md, whichever was named; returns the first. Raises UsageError for another kind."""
    if page.suffix not in (".html", ".md"):
        raise UsageError(f"out={page}: a report is FILE.html with FILE.md beside it: name one of them, or a folder "
                         "(one that is not there yet ends in a slash)")
    write_output(page.with_suffix(".html"), html(**content))
    write_output(page.with_suffix(".md"), markdown(**content))
    return page.with_suffix(".html")


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
    """Title, headline and the conditions in a few words."""
    made = story.provenance
    gpus = made.get("gpu") or []
    device = f"{len(gpus)} GPUs" if len(gpus) > 1 else "1 GPU" if gpus else str(made.get("cpu") or "")
    name = str(story.space.needs.get("gpu_name") or "")
    chips = [story.engine, f"{name} · {device}" if name and device else device, str(made.get("created") or "")[:10],
             f"objective: {story.objective.replace('_', ' ')}"]
    return {"title": f"autotune: {one_line(story.study)}", "kicker": f"autotune report · study {one_line(story.study)}",
            "headline": verdict.headline(story), "tone": TONES[story.conclusion], "support": verdict.support(story),
            "chips": [one_line(x) for x in chips if x],
            "footer": f"{verdict.spent_words(story)}. Stopped: {verdict.stop_words(story)}."}


def _facts(story: Story) -> list[tuple[str, str]]:
    """(label, value) of everything known of the study's conditions."""
    identity, made = story.identity, story.provenance
    rows: list[tuple[str, Any]] = [
        ("Study", story.study), ("Space", f"{story.space.name}, digest {identity.get('space_digest')}"),
        ("Strategy", story.strategy), ("Engine", story.engine),
        ("Model", ", ".join(f"{k}: {v}" for k, v in (identity.get("model") or {}).items())),
        ("GPUs (hashed UUIDs)", ", ".join(map(str, made.get("gpu") or []))), ("Driver", made.get("driver")),
        ("CPU", made.get("cpu")), ("Kernel", made.get("kernel")),
        ("autotune", made.get("autotune")), ("Python", made.get("python")),
        ("Packages", ", ".join(f"{k} {v}" for k, v in (made.get("packages") or {}).items())),
        ("Workload", _mapping_text(identity.get("workload"))), ("Limits", _mapping_text(identity.get("limits"))),
        ("Seeds", _mapping_text(made.get("seeds"))), ("Started", made.get("created")),
        ("Time", verdict.spent_words(story)), ("Trials", verdict.counts_words(story)),
    ]
    return [(k, one_line(v)) for k, v in rows if v not in (None, "", "None")]


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
    """The class attribute of an element."""
    held = " ".join(name for name, holds in names.items() if holds)
    return Markup(' class="{}"').format(held) if held else Markup()


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
