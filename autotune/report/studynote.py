"""The note of the whole study in optuna-dashboard: the verdict, since the dashboard itself knows no limits."""

from __future__ import annotations

import shlex

from autotune.report import verdict
from autotune.report.markdown import code, escape
from autotune.report.story import Story
from autotune.report.wording import config_text


def study_note(story: Story) -> str:
    """The note as Markdown."""
    parts = [f"## {escape(verdict.headline(story))}", escape(verdict.support(story))]
    if story.winner is not None:
        parts.append(f"Configuration of trial {story.winner.trial}: `{code(config_text(story.winner.config))}`")
        rows = "\n".join("| " + " | ".join(escape(x) for x in row) + " |" for row in verdict.figure_rows(story))
        head = escape(verdict.label(story, story.winner))
        parts.append(f"| Figure | Baseline | {head} | Change | Limit |\n| --- | ---: | ---: | ---: | --- |\n{rows}")
        parts.append(f"Energy: {escape(verdict.energy_words(story.winner))}.")
    parts.append(f"{escape(verdict.spent_words(story))}. Stopped: {escape(verdict.stop_words(story))}.")
    parts.append("Best trials here are the best that keep every limit. Trials that crashed are *Pruned*; each trial's "
                 "note starts with its standing.")
    command = f"python -m autotune report +space={shlex.quote(story.space.name)}"
    parts.append(f"`{code(command)}` tells all of it on one page.")
    return "\n\n".join(p for p in parts if p) + "\n"
