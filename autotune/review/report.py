"""The verb report: report.html and report.md in the study's folder, the summary on the terminal (or JSON)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from autotune.review.document import build
from autotune.review.export import write
from autotune.review.markdown import markdown
from autotune.review.page import html
from autotune.review.sources import read
from autotune.review.summary import as_json, print_summary

if TYPE_CHECKING:
    from autotune.config import Settings
    from autotune.study import Study


def report(settings: Settings, study: Study) -> int:
    """Tell the study; returns the exit code. With report.format=json only JSON goes to standard output."""
    story = read(settings, study)
    document = build(story)
    page = settings.folder / "report.html"
    write(page, html(document))
    write(settings.folder / "report.md", markdown(document))
    if settings.report.format == "json":
        print(as_json(story))
        print(f"report: {page}", file=sys.stderr)
    else:
        print_summary(story)
        print(f"Report: {page}")
    return 0
