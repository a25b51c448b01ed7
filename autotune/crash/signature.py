"""Signature of a fault: a short hash that is stable over hosts, ranks, pids, ports, addresses, times, paths and sizes.

The hash covers stage, exception type, the skeleton of the message's first sentence (of the first two if the first has
only a few words), and the deepest frames of the engine (file and function without line numbers). Error numbers and
values of parameters stay. A change of these rules needs a new VERSION.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from autotune.records import Stage, digest

VERSION = "v2"
LENGTH, FRAMES = 10, 2  # characters of the hash; frames in it
MAX_SKELETON, SHORTEST_SENTENCE, FEW_WORDS = 160, 12, 4  # characters; words of a sentence that needs the next one
GENERIC_TYPES = {"Exception", "RuntimeError"}  # types without information beyond their message

ENGINES = re.compile(
    r"(?:^|[/\\])(?:sglang|sgl_kernel|vllm\w*|tensorrt_llm|flashinfer|deep_ep|deep_gemm|lmdeploy|autotune)[/\\]")
PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
FOLDERS = re.compile(r".*[/\\]")
STEPS: tuple[tuple[re.Pattern[str], str], ...] = tuple((re.compile(pattern, re.X), into) for pattern, into in (
    (r"[a-z][a-z0-9+.-]*://[^\s'\"<>)\]]+", "<url>"),
    (r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "<id>"),
    (r"\b0x[0-9a-f]*(?:\.\.\.)?", "<addr>"),
    (r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{6,}\b", "<id>"),
    (r"(?<![\w.])[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-9a-f])?(?![\w:])", "<pci>"),
    (r"(?<![\w:])(?=[0-9a-f:]*\d)(?:[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){5,7}|(?:[0-9a-f]{1,4}:){1,6}(?::[0-9a-f]{1,4}){1,6}"
     r"|::[0-9a-f]{1,4})(?:%\w+)?(?![\w:])|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])", "<host>"),
    # hosts: after a word that announces one, before a port, with a domain
    (r"\b(host(?:name)?s?|node|peer|machine|server)(\ ?[=:]\ ?|\ (?:name\ )?)(['\"]?)"
     r"(?=[\w.-]*[\d.-])[a-z0-9][\w.-]*[a-z0-9]\3(?![\w(])", r"\1\2<host>"),
    (r"(?<![\w./<-])(?!(?:port|pid|tokens?|error|code|line|id|size)\b|[\w.+-]*\.(?:py|cuh?|cc?|cpp|h|hpp|rs|go|so)\b)"
     r"[a-z][a-z0-9-]*+(?:\.[a-z][a-z0-9-]*+)*+(?=(?::|<)\d{4,5}\b)", "<host>"),
    (r"(?<![\w./-])[a-z0-9][a-z0-9-]*(?:\.[a-z0-9-]+)*\.(?:local|internal|lan|svc|cluster|com|net|org|edu|io)\b(?![.(/])",
     "<host>"),
    (r"(?<![\w./-])[a-z][a-z0-9-]*-\d++(?:\.[a-z][a-z0-9-]*+)++(?<!\.(?:txt|log|bin|whl|pth|csv))(?<!\.(?:json|yaml|gguf))"
     r"(?<!\.(?:py|so|cu))(?<!\.safetensors)(?![\w(/-])", "<host>"),
    # the path of a source file or library: its name stays
    (r"(?<![\w.@%+~:/\\-])[\w.@%+~:-]*+(?:[/\\]++[^\s'\"<>|,;()\[\]{}:/\\]*+(?=[/\\]))*+[/\\]++"
     r"([\w.+-]+\.(?:py|pyx|cuh?|c|cc|cpp|cxx|h|hpp|hh|rs|go|so)\b(?:\.\d+)*)", r"\1"),
    (r"(?<![\w.:/\\])(?:[a-z]:\\|~|\.{1,3})?(?:[/\\]+[a-z_.<][^\s'\"<>|,:;()\[\]{}/\\]*)+[/\\]*", "<path>"),
    # the name of a model or adapter
    (r"\b(repo(?:sitory)?(?:\ model)?(?:\ for)?|model|checkpoint|tokenizer|adapter)\s+"
     r"(['\"`]?)(?:<path>|[\w.@-]*[/\d-][\w./@-]*)\2(?=[\s.,:;]|$)", r"\1 <name>"),
    # what an error number means, in words that depend on the version
    (r"\b((?:cuda|hip|nccl|driver)\ (?:runtime\ )?(?:error|failure)[\ :]*-?\d{1,4})\b"
     r"\s*[:,]?\s*(?:'[^']*'|\"[^\"]*\")?", r"\1"),
    # numbers of layers and experts: model.layers.3.mlp, layer 3, experts_47
    (r"(?<=[a-z_\]])(?<!\.so)\.\d+(?=\.[a-z_])", ".#"),
    (r"\b(layers?|experts?|blocks?)([._\ ]?)\d+\b", r"\1\2#"),
    (r"\bof\ size\s+\d[\d.]*\s*(?:[kmgt]i?b|bytes)?", ""),
    (r"(?<![a-z])(tp|dp|ep|pp|cp|rank|worker|gpu|cuda:|device|node|core|enginecore_dp)[_-]?\d+", r"\1#"),
))
ERROR_NUMBER = re.compile(
    r"((?:\b|_)(?:errno|error|status|signal|xid|exit ?code|code|failure|http|returned)\b[^\w\n-]{0,4})(-?\d{1,3})"
    r"(?!\w|\.\d)")
# the value of a parameter: page_size 64, --head-dim=80, topk (2); not what a run counts (free_blocks 12, req_id 3)
VALUE = re.compile(
    r"((?<![\w-])(?:--)?"
    r"(?!\w*(?:avail|free|used|total|num_|rank|pid|_id|index|port|time|count|bytes|mem|cur_|(?<!draft_)tokens))"
    r"(?:[a-z]+(?:[_-][a-z0-9]+)+|topk)\b\s{0,2}(?:==?|:|of|is)?\s{0,2}\(?)(\d{1,3})"
    r"(?![\w.,/]|\ ?(?:[kmgtp]i?b|bytes)\b)")
KEPT = re.compile(f"{ERROR_NUMBER.pattern}|{VALUE.pattern}")
NUMBER = re.compile(
    r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)*(?:e[-+]?\d+)?(?:\s?(?:[kmgtp]i?b?|bytes|ms|us|ns|s|%))?(?![a-z_])")
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
    """First sentences of a message in lower case, without the parts that vary between runs."""
    text = message.lower()
    for pattern, into in STEPS:
        text = pattern.sub(into, text)
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(match[2] or match[4])
        return f"{match[1] or match[3]}\0"

    text = LIST.sub("#", NUMBER.sub("#", KEPT.sub(keep, text.replace("\0", ""))))
    text = re.sub("\0", lambda _: kept.pop(0), text)
    end = SENTENCE.search(text, SHORTEST_SENTENCE)
    if end and len(text[:end.start()].split()) < FEW_WORDS:
        end = SENTENCE.search(text, end.end() + SHORTEST_SENTENCE)
    return " ".join((text[:end.start()] if end else text).split())[:MAX_SKELETON].strip()
