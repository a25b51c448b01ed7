"""Requests of a load: prompts of the wanted length, made ahead of time, the same for every configuration.

Prompt number i depends on the seed and i only. Text comes from the Python standard library (on every machine) or a
JSONL file; token ids are random. How many characters a token has, only the server knows: `chars_per_token` asks it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import random
import time
from collections import deque
from typing import Any, NamedTuple

import msgspec

from autotune.loadgen.http1 import request
from autotune.loadgen.wire_formats import WIRE_FORMATS, Generation, Prompt, WireFormat
from autotune.loadgen.workload import LoadOrder, LoadSpec, PromptSpec, Target
from autotune.records import UsageError
from autotune.utils.http import BadAnswer, NoAnswer, ask, completion_text, count, error_in, usage_of

BUILTIN_FILES = ("argparse", "ast", "calendar", "cmd", "codecs", "configparser", "copy", "csv", "dataclasses",
                 "datetime", "difflib", "dis", "doctest", "enum", "fractions", "ftplib", "functools", "gettext",
                 "heapq", "imaplib", "inspect", "ipaddress", "locale", "mailbox", "mimetypes", "optparse", "pdb",
                 "pickle", "pickletools", "platform", "plistlib", "pprint", "pydoc", "random", "shutil", "smtplib",
                 "socket", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading",
                 "timeit", "tokenize", "traceback", "turtle", "types", "typing", "uuid", "warnings", "zipfile")
START_CHARS_PER_TOKEN = 3.0
AHEAD = (64, 128)  # requests made ahead: at least, and as many as there is time for
BATCH_S = 0.00025  # several are made at once, so long, for much less than one by one with cold caches
CALIBRATIONS = 3
MAX_CHARS_PER_TOKEN = 64  # longer tokens are a wrong count: prompts would grow with the square of the context
MAX_TOKENS_PER_CHAR = 8
TEMPLATE_TOKENS = 4096  # that a chat template or a system prompt may add to every prompt


class Request(msgspec.Struct, frozen=True):
    """Request number `index`: bytes to send, and what is asked for."""

    index: int
    wanted_tokens: int
    data: bytes
    wire_format: WireFormat


class RequestSource:
    """Gives requests in order, made ahead where there was time for it."""

    def __init__(self, order: LoadOrder, host: str) -> None:
        self._target, self._load, self._host = order.target, order.load, host
        self._prompts = PromptSet(order.load.workload.prompt_source(), order.load.context_tokens, order.chars_per_token)
        self._format = WIRE_FORMATS[order.target.api]
        self._index, self._ready = 0, deque[Request]()

    @property
    def short(self) -> bool:
        """True if fewer than 64 requests are ready."""
        return len(self._ready) < AHEAD[0]

    def refill(self, seconds: float = BATCH_S, enough: int = AHEAD[1]) -> None:
        """Make requests ahead for so long, or until there are `enough`."""
        end = time.monotonic() + seconds
        while len(self._ready) < enough and time.monotonic() < end:
            self._ready.append(self._build())

    def next(self) -> Request:
        return self._ready.popleft() if self._ready else self._build()

    def _build(self) -> Request:
        index, target, workload = self._index, self._target, self._load.workload
        self._index += 1
        wanted = workload.output_tokens * (1 + workload.spread * (2 * share(f"{workload.seed}/length/{index}") - 1))
        if workload.rate_per_s is None and index < self._load.concurrency:  # the rest of a request: ends are spread
            wanted *= share(f"{workload.seed}/begun/{index}")
        tokens = max(1, round(wanted))
        body = self._format.body(Generation(target.model, self._prompts.prompt(index), tokens, workload.temperature,
                                            workload.ignore_eos, True, target.continuous_usage))
        return Request(index, tokens, request(self._host, self._format.path, msgspec.json.encode(body)), self._format)


class Completion(NamedTuple):
    """A whole answer; counts are None where the server gives none."""

    text: str
    completion_tokens: int | None
    prompt_tokens: int | None


def complete(target: Target, prompt: Prompt, output_tokens: int, timeout_s: float) -> Completion:
    """One greedy generation, not streamed. Raises NoAnswer and BadAnswer, with the path and the server's words."""
    wire_format = WIRE_FORMATS[target.api]
    path, body = wire_format.path, wire_format.body(Generation(target.model, prompt, output_tokens))
    try:
        answer = ask(target.base_url.rstrip("/") + path, body, within_s=timeout_s)
        value = answer.json() if answer.status == 200 else {}
        message, usage = error_in(value), usage_of(value)
        found = Completion(completion_text(value), count(usage, "completion_tokens"), count(usage, "prompt_tokens"))
    except NoAnswer as error:
        raise NoAnswer(f"POST {path}: no answer: {error}", error.late) from error
    except BadAnswer as error:
        raise BadAnswer(f"POST {path}: bad answer: {error}") from error
    if message or answer.status != 200:
        raise BadAnswer(f"POST {path}: HTTP {answer.status}: {(message or answer.text)[:500]}")
    return found


def chars_per_token(target: Target, load: LoadSpec) -> float | None:
    """Characters per token of the prompts of `load`; None for random token ids, or where no usage came back.

    The first request has as many characters as the context has tokens, so it is never too long; three of the wanted
    length follow. Raises NoAnswer and BadAnswer.
    """
    source = load.workload.prompt_source()
    if source.tokens is not None:
        return None
    prompts, timeout_s = PromptSet(source, load.context_tokens), load.workload.first_token_timeout_s

    def tokens_of(*texts: str) -> int:
        return sum(complete(target, text, 1, timeout_s).prompt_tokens or 0 for text in texts)

    tokens = tokens_of(prompts.sample(0, load.context_tokens))
    if not tokens:
        return None
    chars = max(1, round(_ratio(load.context_tokens, tokens) * load.context_tokens))
    tokens = tokens_of(*(prompts.sample(index, chars) for index in range(1, CALIBRATIONS + 1)))
    return _ratio(CALIBRATIONS * chars, tokens) if tokens else None


def _ratio(chars: int, tokens: int) -> float:
    """Characters per token. Raises BadAnswer for a count that no text of this length has."""
    if chars > MAX_CHARS_PER_TOKEN * tokens or tokens > MAX_TOKENS_PER_CHAR * chars + CALIBRATIONS * TEMPLATE_TOKENS:
        raise BadAnswer(f"bad answer: the server counts {tokens} prompt tokens in {chars} characters")
    return chars / tokens


class PromptSet:
    """Prompts by number, of about `context_tokens` tokens of `chars_per_token` characters (None: a guess)."""

    def __init__(self, spec: PromptSpec, context_tokens: int, chars_per_token: float | None = None) -> None:
        self.spec, self.context_tokens = spec, context_tokens
        self.chars_per_token = chars_per_token or START_CHARS_PER_TOKEN
        self._text = "\n\n".join(read_prompts(spec.path)) if spec.path is not None else \
            builtin_text() if spec.tokens is None else ""

    def prompt(self, index: int) -> Prompt:
        """Prompt number `index`. Any index is valid."""
        seed = self.spec.seed
        if self.spec.tokens is not None:
            shared = round(self.spec.shared_prefix * self.context_tokens)
            ids = range(*self.spec.tokens)
            common, own = (random.Random(f"{seed}/{label}") for label in ("shared", index))
            return common.choices(ids, k=shared) + own.choices(ids, k=self.context_tokens - shared)
        chars = max(1, round(self.context_tokens * self.chars_per_token))
        shared = round(self.spec.shared_prefix * chars)
        unique = self._slice(f"{seed}/{index}", chars - shared)
        return self._slice(f"{seed}/shared", shared) + unique if shared else unique

    def sample(self, index: int, chars: int) -> str:
        """A text of exactly `chars` characters like those of the prompts, to calibrate with."""
        return self._slice(f"{self.spec.seed}/calibrate/{index}", chars)

    def _slice(self, label: str, chars: int) -> str:
        """`chars` characters from a place in the text that `label` decides, going round at its end.

        Any place, not only starts of lines, of which there are too few: the server would answer a repeated prompt
        from its prefix cache.
        """
        start = int(share(label) * len(self._text))
        rounds = 1 + (start + chars) // len(self._text)  # one, where the text is long enough: no copy of it
        return (self._text * rounds)[start:start + chars]


def share(label: str) -> float:
    """A number in [0, 1) that looks random and depends on the label only; cheaper than seeding a generator."""
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=6).digest(), "big") / 2**48


def builtin_text() -> str:
    """Sources of pure-Python standard library modules. Raises UsageError where they are not on disk."""
    folder = pathlib.Path(os.__file__).parent
    files = [folder / f"{name}.py" for name in BUILTIN_FILES]
    texts = [file.read_text("utf-8") for file in files if file.is_file()]
    if not texts:
        raise UsageError(f"no standard library sources in {folder}: give workload.prompts=FILE.jsonl")
    return "\n".join(texts)


def read_prompts(path: pathlib.Path) -> list[str]:
    """The texts of a JSONL file: lines with `prompt`, `text` or chat `messages`. Raises UsageError."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe or a device may never end
            raise UsageError(f"prompts: cannot read {path}: not a regular file")
        lines = path.read_text("utf-8-sig").split("\n")  # U+2028 and the like may occur within a text
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"prompts: cannot read {path}: {error}") from error
    prompts: list[str] = []
    for number, line in ((number, line) for number, line in enumerate(lines, 1) if line.strip()):
        try:
            found = _text_of(json.loads(line))
            found.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{path}:{number}: a lone surrogate, which cannot be sent") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}:{number}: not JSON: {error}") from error
        if not found:
            raise UsageError(f"{path}:{number}: needs a text under prompt or text, or messages with role and content")
        prompts.append(found)
    if not prompts:
        raise UsageError(f"{path}: no prompts in it")
    return prompts


def _text_of(row: Any) -> str:
    """The text of a row, chat messages without a chat template; "" without any."""
    keys = ("prompt", "text", "messages") if isinstance(row, dict) else ()
    found = next((row[key] for key in keys if row.get(key)), "")
    if isinstance(found, list) and all(isinstance(item, dict) and {"role", "content"} <= item.keys() for item in found):
        return "\n".join(f"{item['role']}: {item['content']}" for item in found)
    return found if isinstance(found, str) else ""
