"""A bash script that starts the server in the foreground. Host-specific parts can be set from outside."""

from __future__ import annotations

import shlex

from autotune.export.deployment import Deployment, Ref, Word, lines
from autotune.export.header import comment
from autotune.utils.text import one_line


def render(deployment: Deployment) -> str:
    """The script as text."""
    out = ["#!/usr/bin/env bash", comment(deployment),
           "# shellcheck disable=SC2016  # single quotes are meant: nothing in a value may expand",
           "set -euo pipefail", ""]
    for parameter in deployment.parameters:
        out.append(f"{parameter.name}=${{{parameter.name}:-{shlex.quote(parameter.default)}}}"
                   f"  # {one_line(parameter.what)}" if "\n" not in parameter.default else
                   f"{parameter.name}=${{{parameter.name}:-{shlex.quote(parameter.default)}}}")
    for name in deployment.secrets:
        out.append(f': "${{{name}:?set {name}: a secret of the measured command, never written here}}"')
    out.append("")
    for name, value in deployment.env.items():
        if value != (Ref(name),):
            out.append(f"export {name}={word(value)}")
        else:
            out.append(f"export {name}")
    if deployment.env:
        out.append("")
    if deployment.parameter("WORKDIR"):
        out.append('cd -- "$WORKDIR"')
    out.append("exec " + " \\\n  ".join(" ".join(word(w) for w in line) for line in lines(deployment.argv)))
    return "\n".join(out) + "\n"


def word(value: Word) -> str:
    """One shell word: literals quoted, references expanded and never split."""
    return "".join(f'"${{{part.name}}}"' if isinstance(part, Ref) else shlex.quote(part) for part in value)
