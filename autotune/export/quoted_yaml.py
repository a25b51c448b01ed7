"""YAML in which every text is quoted, so that no version of YAML reads a word as something else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*\Z")


class _Key(str):
    """A mapping's key that is safe without quotes."""


class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        return super().increase_indent(flow, False)  # lists are indented under their key


_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))
_Dumper.add_representer(_Key, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text)))


def dump(*documents: Mapping[str, Any]) -> str:
    """Documents as YAML 1.1 and 1.2 both read them."""
    return "---\n".join(yaml.dump(_marked(document), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
                        for document in documents)


def _marked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_Key(k) if PLAIN_KEY.match(str(k)) else str(k): _marked(v) for k, v in value.items()}
    return [_marked(v) for v in value] if isinstance(value, list | tuple) else value
