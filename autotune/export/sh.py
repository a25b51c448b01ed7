"""A bash script that starts the server in the foreground. Host-specific parts can be set from outside."""

from __future__ import annotations

import shlex

from autotune.export.deployment import Deployment, Ref, Word, lines
from autotune.utils.text import one_line


def render(deployment: Deployment) -> str:
    out = ["#!/usr/bin/env bash", deployment.comment(),
           "# shellcheck disable=SC2016  # single quotes are meant: nothing in a value may expand",
           "set -euo pipefail", ""]
    for p in deployment.parameters.values():
        remark = "" if "\n" in p.default else f"  # {one_line(p.what)}"
        out.append(f"{p.name}=${{{p.name}:-{shlex.quote(p.default)}}}{remark}")
    out += [f': "${{{name}:?set {name}: a secret of the measured command, never written here}}"'
            for name in deployment.secrets]
    out.append("")
    out += [f"export {name}" if value == (Ref(name),) else f"export {name}={word(value)}"
            for name, value in deployment.env.items()]
    out += ["", 'cd -- "$WORKDIR"'] if deployment.env else ['cd -- "$WORKDIR"']
    out.append("exec " + " \\\n  ".join(" ".join(word(w) for w in line) for line in lines(deployment.argv)))
    return "\n".join(out) + "\n"


def word(value: Word) -> str:
    """One shell word: literals quoted, references expanded and never split."""
    return "".join(f'"${{{part.name}}}"' if isinstance(part, Ref) else shlex.quote(part) for part in value)
