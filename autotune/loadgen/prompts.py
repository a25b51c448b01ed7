"""Prompts of a wanted length, the same for every configuration: prompt number i depends on the seed and i only.

Text comes from the Python standard library (on every machine) or a JSONL file; token ids are random.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import random
from collections.abc import Sequence
from typing import Any

from autotune.loadgen.spec import PromptSpec
from autotune.records import UsageError

Messages = list[dict[str, Any]]
Prompt = str | list[int] | Messages

BUILTIN_FILES = ("argparse", "ast", "calendar", "cmd", "codecs", "configparser", "copy", "csv", "dataclasses",
                 "datetime", "difflib", "dis", "doctest", "enum", "fractions", "ftplib", "functools", "gettext",
                 "heapq", "imaplib", "inspect", "ipaddress", "locale", "mailbox", "mimetypes", "optparse", "pdb",
                 "pickle", "pickletools", "platform", "plistlib", "pprint", "pydoc", "random", "shutil", "smtplib",
                 "socket", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading",
                 "timeit", "tokenize", "traceback", "turtle", "types", "typing", "uuid", "warnings", "zipfile")
START_CHARS_PER_TOKEN = 3.0
DEEPEST = 32
"""Of chat messages."""
LARGEST_ID = 2**31


class PromptSet:
    """Prompts by number. `chars_per_token` starts as a guess; `calibrate` with what the server counted.

    `context_tokens` None keeps each prompt's own length (built-in text: about 256 tokens).
    """

    def __init__(self, spec: PromptSpec, context_tokens: int | None, chars_per_token: float | None = None) -> None:
        self.spec = spec
        self.context_tokens = context_tokens
        self.chars_per_token = chars_per_token or START_CHARS_PER_TOKEN
        self._items: list[Prompt] = []
        self._text = ""
        self._round: tuple[int, list[int]] = (-1, [])
        if spec.kind == "jsonl":
            assert spec.path is not None
            self._items = read_prompts(spec.path)
        if spec.kind == "builtin":
            self._text = builtin_text()
        elif spec.kind == "jsonl" and context_tokens is not None:
            self._text = "\n\n".join(_flat(item) for item in self._items)

    @property
    def needs_calibration(self) -> bool:
        """Whether the length in tokens depends on a tokenizer that only the server knows."""
        return self.spec.kind != "tokens" and self.context_tokens is not None

    def prompt(self, index: int) -> Prompt:
        """Prompt number `index`: text, token ids, or messages. Any index is valid."""
        if self.spec.kind == "tokens":
            assert self.context_tokens is not None
            shared = round(self.spec.shared_prefix * self.context_tokens)
            ids = range(self.spec.token_low, self.spec.token_high)
            common = random.Random(f"{self.spec.seed}/shared")
            own = random.Random(f"{self.spec.seed}/{index}")
            return common.choices(ids, k=shared) + own.choices(ids, k=self.context_tokens - shared)
        if self._items and self.context_tokens is None:
            return self._items[self._order(index)]
        chars = max(1, round((self.context_tokens or 256) * self.chars_per_token))
        shared = round(self.spec.shared_prefix * chars)
        unique = self._slice(f"{self.spec.seed}/{index}", chars - shared)
        return self._slice(f"{self.spec.seed}/shared", shared) + unique if shared else unique

    def sample(self, index: int, chars: int) -> str:
        """A text of exactly `chars` characters like those of the prompts, to calibrate with."""
        return self._slice(f"{self.spec.seed}/calibrate/{index}", chars)

    def _order(self, index: int) -> int:
        """All prompts once before any comes again, shuffled anew each round."""
        count = len(self._items)
        if self._round[0] != index // count:
            order = list(range(count))
            random.Random(f"{self.spec.seed}/round/{index // count}").shuffle(order)
            self._round = (index // count, order)
        return self._round[1][index % count]

    def _slice(self, label: str, chars: int) -> str:
        """`chars` characters from anywhere in the text, as `label` decides, going round at its end.

        Anywhere, not at the starts of lines, of which there are too few: a prompt that came before is one whose keys
        and values the server still has, and a load of such prompts is another load.
        """
        if chars <= 0:
            return ""
        start = int(share(label) * len(self._text))
        piece = self._text[start:start + chars]
        while len(piece) < chars:
            piece += self._text[:chars - len(piece)]
        return piece


def share(label: str) -> float:
    """A number in [0, 1) that looks random and depends on the label only; cheaper than seeding a generator."""
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=6).digest(), "big") / 2**48


def builtin_text() -> str:
    """Sources of pure-Python standard library modules. Raises UsageError where they are not on disk."""
    folder = pathlib.Path(os.__file__).parent
    texts = [(folder / f"{name}.py").read_text("utf-8") for name in BUILTIN_FILES
             if (folder / f"{name}.py").is_file()]
    if not texts:
        raise UsageError(f"no standard library sources in {folder}: give workload.prompts=FILE.jsonl")
    return "\n".join(texts)


def read_prompts(path: pathlib.Path) -> list[Prompt]:
    """The prompts of a JSONL file: lines with `prompt` (text or token ids), `text` or `messages`.

    Raises UsageError, for anything that could not be sent as well.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for, and a device may have no end
            raise UsageError(f"prompts: cannot read {path}: it is no plain file")
        lines = path.read_text("utf-8-sig").split("\n")  # other ends of lines may stand within a text
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"prompts: cannot read {path}: {error}") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}:{number}: not JSON: {error}") from error
        except RecursionError as error:
            raise UsageError(f"{path}:{number}: JSON that is nested too deeply") from error
        found: Any = None
        if isinstance(row, dict):
            found = next((row[k] for k in ("prompt", "text", "messages") if row.get(k)), None)
        if not _is_prompt(found):
            raise UsageError(f"{path}:{number}: needs prompt (text or token ids), text, or messages")
        if not _whole(found):
            raise UsageError(f"{path}:{number}: a text with half a character (a lone surrogate), or nested too deeply")
        prompts.append(found)
    if not prompts:
        raise UsageError(f"{path}: no prompts in it")
    return prompts


def is_messages(prompt: Prompt) -> bool:
    """Whether a prompt is a list of chat messages."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def as_text(messages: Sequence[Any]) -> str:
    """Chat messages as plain text, for servers and uses without a chat template."""
    return "\n".join(f"{m['role']}: {m['content']}" for m in messages)


def _whole(value: Any, depth: int = DEEPEST) -> bool:
    """Whether every text can be sent, and what it is in is no deeper than servers read."""
    if isinstance(value, str):
        return not any("\ud800" <= c <= "\udfff" for c in value) if not value.isascii() else True
    if isinstance(value, list | dict):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return depth > 0 and all(_whole(item, depth - 1) for item in items)
    return True


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    if not isinstance(value, list) or not value:
        return False
    if all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < LARGEST_ID for v in value):
        return True
    return all(isinstance(v, dict) and "role" in v and "content" in v for v in value)


def _flat(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    if is_messages(prompt):
        return as_text(prompt)
    raise UsageError("prompts given as token ids have a fixed length: leave the context length unset")
