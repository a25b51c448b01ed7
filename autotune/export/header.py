"""The comment on top of every launch file: where it came from and what was measured."""

from __future__ import annotations

from autotune.export.deployment import Deployment
from autotune.utils.text import one_line


def comment(deployment: Deployment) -> str:
    """Comment lines starting with `#`; every fact is one line whatever is in it."""
    width = max(len(label) for label, _ in deployment.facts)
    out = ["# Written by autotune: starts one measured configuration of a study.", "#"]
    if deployment.warning:
        out += ["#  " + "!" * 100, f"#  !!  {one_line(deployment.warning)}", "#  " + "!" * 100, "#"]
    out += [f"#   {label.ljust(width)}  {fact}" for label, fact in deployment.facts]
    return "\n".join([*out, "#"])
