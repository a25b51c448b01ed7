"""Secrets out of everything that is written: environment values, flags, URLs with credentials.

    clean = Redactor.from_command(argv, env)
    clean.text("HF_TOKEN=hf_abc...")  ->  "HF_TOKEN=[redacted]"

A name that looks secret hides its value wherever that value shows up later; values that look secret by
themselves (access tokens, keys, `user:password@host`) are hidden without a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

HIDDEN = "[redacted]"
NAME = re.compile(
    r"(?:^|[-_.])(?:api[-_]?key|access[-_]?key|secret|token|password|passwd|passphrase|credentials?|auth|private[-_]?key"
    r"|bearer|cookie|session[-_]?key|dsn)(?:$|[-_.])|(?:^|[-_])(?:key|pat)$|[-_]pwd$", re.I)
HARMLESS = re.compile(
    r"(?:max|min|num|new|output|input|total|draft|prefill|running|kv|cache|best|first|mask|pad|eos|bos|skip|per)[-_]?"
    r"(?:[a-z]+[-_])*tokens?|tokens?[-_](?:per|map|budget|capacity|limit|usage|worker)|tokenizer|token[-_]map|"
    r"(?:^|[-_])tokens(?:$|[-_])", re.I)
SHAPES = re.compile(
    r"(?P<url>(?<=://)[^\s/@:\"']*:[^\s/@\"']+(?=@))"
    r"|\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|AKIA[0-9A-Z]{16}|nvapi-[A-Za-z0-9_-]{16,}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+)"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{8,}=*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)")
ASSIGNED = re.compile(r"(?<!#)(?P<name>[A-Za-z0-9_.-]{2,60})(?P<sep>[\"']?\s*[=:]\s*[\"']?)(?P<value>[^\s\"',;&]{4,})")
SHORTEST = 4
"""Values shorter than this are not replaced everywhere (they would hit ordinary text)."""


def secret_name(name: str) -> bool:
    """Whether a variable, flag or key of this name holds a secret (HF_TOKEN does, --max-total-tokens does not)."""
    return bool(NAME.search(name.lstrip("-"))) and not HARMLESS.search(name)


class Redactor:
    """Replaces known secret values, and whatever looks like one."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        known = {value for value in values if len(value) >= SHORTEST and value.lower() not in {"true", "false", "none"}}
        self.values = tuple(sorted(known, key=lambda v: (-len(v), v)))

    @classmethod
    def from_command(cls, argv: Sequence[str], *environments: Mapping[str, str]) -> Redactor:
        """Collect the values of secret-looking flags and variables."""
        values = [value for env in environments for name, value in env.items() if secret_name(name)]
        for flag, value in zip(argv, [*argv[1:], ""], strict=False):  # of no arguments at all: none
            name, equals, attached = flag.partition("=")
            if flag.startswith("-") and secret_name(name):
                values.append(attached if equals else value)
        return cls(v for v in values if not v.startswith("--"))

    def text(self, text: str) -> str:
        """`text` without secrets."""
        for value in self.values:
            text = text.replace(value, HIDDEN)
        text = SHAPES.sub(HIDDEN, text)
        return ASSIGNED.sub(self._assignment, text) if "=" in text or ":" in text else text

    def data(self, value: object) -> object:
        """The same for nested lists and mappings; a value under a secret-looking key is hidden whole."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {k: HIDDEN if isinstance(k, str) and secret_name(k) and isinstance(v, str) and v else self.data(v)
                    for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.data(v) for v in value]
        return value

    def argv(self, argv: Sequence[str]) -> list[str]:
        """An argument vector with secret values hidden."""
        shown: list[str] = []
        hide = False
        for arg in argv:
            name, equals, _ = arg.partition("=")
            secret = arg.startswith("-") and secret_name(name)
            if hide and not arg.startswith("--"):
                shown.append(HIDDEN)
            elif secret and equals:
                shown.append(f"{name}={HIDDEN}")
            else:
                shown.append(self.text(arg))
            hide = secret and not equals
        return shown

    @staticmethod
    def _assignment(match: re.Match[str]) -> str:
        start, value = f"{match['name']}{match['sep']}", match["value"]
        if value.startswith("["):
            return match[0]
        return start + (HIDDEN if secret_name(match["name"]) else ASSIGNED.sub(Redactor._assignment, value))
