"""Signature of a fault: a short hash that is stable over ranks, pids, ports, addresses, times, paths and sizes.

The hash covers stage, exception type, the skeleton of the message's first sentence, and the deepest frames of the
engine (file and function without line numbers). A change of these rules needs a new VERSION.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from autotune.records import Stage, digest

VERSION = "v1"
LENGTH, FRAMES = 10, 2  # characters of the hash; frames in it
MAX_SKELETON, SHORTEST_SENTENCE = 160, 12  # characters
GENERIC_TYPES = {"Exception", "RuntimeError"}  # types without information beyond their message

ENGINES = re.compile(
    r"(?:^|[/\\])(?:sglang|sgl_kernel|vllm\w*|tensorrt_llm|flashinfer|deep_ep|deep_gemm|lmdeploy|autotune)[/\\]")
PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
FOLDERS = re.compile(r".*[/\\]")
STEPS: tuple[tuple[re.Pattern[str], str], ...] = tuple((re.compile(pattern, re.X), into) for pattern, into in (
    (r"[a-z][a-z0-9+.-]*://[^\s'\"<>)\]]+", "<url>"),
    (r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "<id>"),
    (r"\b0x[0-9a-f]*(?:\.\.\.)?", "<addr>"),
    (r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{12,}\b", "<id>"),
    # the path of a source file or library: its name stays
    (r"[\w.@%+~:-]*[/\\][^\s'\"<>|,;()\[\]{}:]*?"
     r"([\w.+-]+\.(?:py|pyx|cuh?|c|cc|cpp|cxx|h|hpp|hh|rs|go|so)\b(?:\.\d+)*)", r"\1"),
    (r"(?<![\w.:/\\])(?:[a-z]:\\|~|\.{1,3})?(?:[/\\]+[a-z_.<][^\s'\"<>|,:;()\[\]{}/\\]*)+[/\\]*", "<path>"),
    # the name of a model or adapter
    (r"\b(repo(?:sitory)?(?:\ model)?(?:\ for)?|model|checkpoint|tokenizer|adapter)\s+"
     r"(['\"`]?)(?:<path>|[\w.@-]*[/\d-][\w./@-]*)\2(?=[\s.,:;]|$)", r"\1 <name>"),
    # what an error number means, in words that depend on the version
    (r"\b((?:cuda|hip|nccl|driver)\ (?:runtime\ )?(?:error|failure)[\ :]*-?\d{1,4})\b"
     r"\s*[:,]?\s*(?:'[^']*'|\"[^\"]*\")?", r"\1"),
    (r"\bof\ size\s+\d[\d.]*\s*(?:[kmgt]i?b|bytes)?", ""),
    (r"(?<![a-z])(tp|dp|ep|pp|cp|rank|worker|gpu|cuda:|device|node|core|enginecore_dp)[_-]?\d+", r"\1#"),
))
ERROR_NUMBER = re.compile(
    r"((?:\b|_)(?:errno|error|status|signal|xid|exit ?code|code|failure|http|returned)\b[^\w\n-]{0,4})(-?\d{1,3})"
    r"(?!\w|\.\d)")
NUMBER = re.compile(
    r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)*(?:e[-+]?\d+)?(?:\s?(?:[kmgtp]i?b|bytes|ms|us|ns|s|%))?(?![a-z_])")
LIST = re.compile(r"#(?:\s*[,x/:]\s*#)+")
SENTENCE = re.compile(r"(?<=[a-z0-9)\]'\"`>#])[.!?](?=\s|$)", re.I)


def signature(stage: Stage | None, kind: str, message: str, frames: Sequence[tuple[str, str]] = ()) -> str:
    """Signature of a fault, such as v1-3f9c21d07a. `kind`: exception type; `frames`: (file, function) from outside."""
    ours = [frame for frame in frames if ENGINES.search(PACKAGES.sub("", frame[0]))]  # of an engine or its kernels
    deepest = [f"{FOLDERS.sub('', file)}:{function}" for file, function in ours[-FRAMES:]]
    kind = kind.rsplit(".", 1)[-1]
    parts = [str(stage or ""), "" if message and kind in GENERIC_TYPES else kind, re.sub(r"\s+", "", skeleton(message)),
             *deepest]
    return f"{VERSION}-{digest('|'.join(parts), LENGTH)}"


def around(message: str, needle: str) -> str:
    """Part of a message with `needle`: from the start of its sentence or line to the end of its line."""
    at = message.find(needle)
    if at < 0:
        return message.partition("\n")[0]
    ends = [end.end() for end in SENTENCE.finditer(message, 0, at)]
    first = max(message.rfind("\n", 0, at) + 1, ends[-1] if ends else 0)
    last = message.find("\n", at + len(needle))
    return message[first:last if last >= 0 else len(message)]


def skeleton(message: str) -> str:
    """First sentence of a message in lower case, without the parts that vary between runs. Error numbers stay."""
    text = message.lower()
    for pattern, into in STEPS:
        text = pattern.sub(into, text)
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(match[2])
        return f"{match[1]}\0"

    text = LIST.sub("#", NUMBER.sub("#", ERROR_NUMBER.sub(keep, text.replace("\0", ""))))
    text = re.sub("\0", lambda _: kept.pop(0), text)
    end = SENTENCE.search(text, SHORTEST_SENTENCE)
    return " ".join((text[:end.start()] if end else text).split())[:MAX_SKELETON].strip()
