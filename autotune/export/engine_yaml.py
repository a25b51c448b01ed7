"""The engine's own configuration file (`--config FILE` of SGLang and vLLM): flags as YAML keys. `dump` quotes YAML.

The command line wins over the file, so host, port and secrets are passed there. Environment variables cannot stand
in such a file; the header lists them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from autotune.export.deployment import Deployment, Ref, Word, lines, plain
from autotune.records import UsageError

LONG_FLAG = re.compile(r"--[A-Za-z][A-Za-z0-9-]*\Z")


def render(deployment: Deployment) -> str:
    """The file as text. Raises UsageError when the engine reads no such file, or a flag cannot stand in one."""
    flag = deployment.engine.config_file
    if flag is None:
        raise UsageError(f"engine {deployment.engine.name} reads no configuration file: "
                         "use format=sh, systemd, compose or k8s")
    head, *rest = lines(deployment.argv)
    if any(isinstance(word[0], str) and word[0].startswith("--") for word in head):
        head, rest = [], [head, *rest]
    settings: dict[str, Any] = {}
    passed: list[list[Word]] = []
    for line in rest:
        if any(isinstance(part, Ref) and part.name in deployment.secrets for word in line for part in word):
            passed.append(line)
            continue
        name, values = _setting(deployment, line)
        if name in settings:
            raise UsageError(f"--{name} is given more than once, which a configuration file cannot say: use format=sh")
        settings[name] = values
    out = [deployment.comment(), f"# Start: {_shell(deployment, head)} {flag} THIS_FILE"
           + "".join(f" {_shell(deployment, line)}" for line in passed),
           "# Flags on the command line win over this file: --host 0.0.0.0 --port 9000"]
    out += [f"# Needs the environment variable {name}={_quoted(_value(deployment, value))}"
            for name, value in deployment.env.items() if value != (Ref(name),)]
    out += [f"# Needs the secret {name} in the environment" for name in deployment.secrets]
    return "\n".join([*out, ""]) + dump(settings)


def _setting(deployment: Deployment, line: list[Word]) -> tuple[str, Any]:
    """(key, value) of a flag: true for a switch, a list for several values."""
    first = line[0]
    flag, equals, start = (first[0] if isinstance(first[0], str) else "").partition("=")
    if not LONG_FLAG.match(flag):
        raise UsageError(f"{plain(first)} is not a long flag, which a configuration file needs: use format=sh")
    values = [_value(deployment, (start, *first[1:]))] if equals else []
    values += [_value(deployment, word) for word in line[1:]]
    name = flag.removeprefix("--")
    return name, True if not values else values[0] if len(values) == 1 else values


def _value(deployment: Deployment, word: Word) -> str:
    defaults = {name: p.default for name, p in deployment.parameters.items()}
    return "".join(part if isinstance(part, str) else defaults.get(part.name, f"${part.name}") for part in word)


def _shell(deployment: Deployment, words: list[Word]) -> str:
    return " ".join(f'"${{{w[0].name}}}"' if len(w) == 1 and isinstance(w[0], Ref) and w[0].name in deployment.secrets
                    else _quoted(_value(deployment, w)) for w in words)


def _quoted(text: str) -> str:
    """A shell word on one line, also with line breaks in it (bash's $'...')."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join({"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t"}.get(c) or
                          (c if c.isprintable() else f"\\u{ord(c):04x}") for c in text) + "'"


class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        return super().increase_indent(flow, False)  # lists are indented under their key

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def choose_scalar_style(self) -> Any:
        """Quotes for every text that is not a key."""
        is_text = isinstance(self.event, yaml.ScalarEvent) and self.event.implicit[1] and not self.simple_key_context
        return '"' if is_text else super().choose_scalar_style()


def dump(*documents: Mapping[str, Any]) -> str:
    """Documents with every text quoted, so that no version of YAML reads a word as something else."""
    return "---\n".join(yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
                        for document in documents)
