"""The verb report: prints the summary (or JSON for scripts)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.review.sources import read
from autotune.review.summary import as_json, print_summary

if TYPE_CHECKING:
    from autotune.config import Settings
    from autotune.study import Study


def report(settings: Settings, study: Study) -> int:
    """Tell the study; returns the exit code."""
    story = read(settings, study)
    if settings.report.format == "json":
        print(as_json(story))
    else:
        print_summary(story)
    return 0
