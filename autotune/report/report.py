"""The verb report: report.html and report.md in the study's folder or at out=; the summary on the terminal, or JSON."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import TYPE_CHECKING

from autotune.records import UsageError
from autotune.report import compare
from autotune.report.blocks import Document
from autotune.report.comparison import build as compared
from autotune.report.document import build
from autotune.report.load import read, uncollected
from autotune.report.markdown import markdown
from autotune.report.page import html
from autotune.report.terminal import as_json, print_document, print_summary
from autotune.utils.files import output_path, write_output
from autotune.utils.text import KEPT, REPLACED, printable, slug

if TYPE_CHECKING:
    from autotune.config.settings import Settings
    from autotune.storage.study import Study


def report(settings: Settings, study: Study) -> int:
    """Tell the study; returns the exit code. With report.format=json only JSON goes to standard output."""
    with uncollected():
        return comparison(settings) if settings.report.compare is not None else _report(settings, study)


def _report(settings: Settings, study: Study) -> int:
    story = read(settings, study)
    document = build(story)
    page = _written(document, output_path(settings.out, settings.folder / "report.html"))
    if settings.report.format == "json":
        print(printable(as_json(story), keep=KEPT, instead=REPLACED))
        print(f"report: {page}", file=sys.stderr)
    else:
        print_summary(story)
        print(f"Report: {page}")
    return 0


def _written(document: Document, page: pathlib.Path) -> pathlib.Path:
    """Write FILE.html and FILE.md, whichever was named; returns the first. Raises UsageError for another kind."""
    if page.suffix not in (".html", ".md"):
        raise UsageError(f"out={page}: a report is FILE.html with FILE.md beside it: name one of them, or a folder "
                         "(one that is not there yet ends in a slash)")
    write_output(page.with_suffix(".html"), html(document))
    write_output(page.with_suffix(".md"), markdown(document))
    return page.with_suffix(".html")


def comparison(settings: Settings) -> int:
    """Compare the studies of report.compare; writes outputs/compare-A-B.html and .md, or those of out=."""
    found = compare.load(settings)
    document = compared(found)
    names = "-".join(slug(story.study) for story in found.stories).replace("autotune-", "")
    page = _written(document, output_path(settings.out, settings.outputs / f"compare-{names}.html"))
    if settings.report.format == "json":
        told = json.dumps(compare.as_data(found), indent=1, ensure_ascii=False, default=str)
        print(printable(told, keep=KEPT, instead=REPLACED))
        print(f"report: {page}", file=sys.stderr)
    else:
        print_document(document)
        print(f"Report: {page}")
    return 0
