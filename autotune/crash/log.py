"""A server log as clean lines (without wrappers, ANSI codes and log prefixes), and the tracebacks in it.

    log = clean(data)
    blocks = tracebacks(log.lines)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from autotune.crash import source
from autotune.crash.source import GAP, HEAD, TAIL, WINDOWS
from autotune.crash.wrappers import HEADER, unwrap

MAX_LINES, MAX_TEXT, MAX_CHARS = 6000, 500_000, 1200  # of a log: lines and characters; of a line: characters
CENTRE = 25  # lines on each side of a trace of a failure that are kept of a long log
KEPT_COPIES, LAST_LINES = 3, 400  # copies of a line that are kept in a long log, except in its last lines

STRONG, WEAK = ([word.decode() for word in words] for words in (source.STRONG, source.WEAK))
ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]|\[\d{1,3}(?:;\d{1,3})*m")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u2028\u2029\ufeff]+")
PROGRESS = re.compile(
    r"^(.{0,80}?)\d{1,3}%\|[^|\n]{0,400}\|[ \t]*[\d.]+[kMG]?/[\d.]+[kMG]?[ \t]*\[[^\]\n]{0,60}\]", re.M)
FRAME_BORDER = re.compile(r"^\s*[│┃|❱]\s?|\s*[│┃]\s*$")
VARYING = re.compile(r"\d[0-9a-fA-FxX.:,]*")
WRITER = re.compile(r"(?:(?:Worker|EngineCore|APIServer|DP|TP|PP|EP|CP|[Rr]ank|RANK)[ _]?(?:[A-Z]{2})?\d+)")

_TIME = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
PREFIXES = tuple(re.compile(p) for p in (
    rf"\[?\d{{4}}-\d\d-\d\d[T ]{_TIME}(?:Z|[+-]\d\d:?\d\d)?(?P<w>[^\]\n]{{0,40}}?)\]\s*",  # [2026-01-01 00:00:00 TP0]
    rf"\d{{4}}-\d\d-\d\d[T ]{_TIME}(?:Z|[+-]\d\d:?\d\d)?[:,]?\s+",
    rf"\[(?:\d\d-\d\d|\d\d/\d\d/\d{{4}})[- T]{_TIME}(?P<w>[^\]\n]{{0,40}})\]\s*",
    rf"\[?{_TIME}\]?\s+(?=\S)",
    r"[A-Z][a-z]{2} \d{1,2}, \d{4} @ [\d:.]+\s+",
    r"\d+\.\d\d\.\d{3}\.\d{3} (?P<l>[EWID]) ",  # llama.cpp
    r"\((?P<w>[A-Za-z][\w.-]*)(?: rank=\d+)?(?: pid=\d+)?(?:, ip=[^)]{0,60})?\)\s*",  # (Worker_TP1 pid=4242)
    rf"(?P<l>INFO|WARNING|WARN|ERROR|DEBUG|CRITICAL|FATAL)\b[ :-]*(?:\d+\s+(?=\[))?(?:\d\d-\d\d {_TIME}\s*)?"
    r"(?:\[\s*(?P<w>(?:[A-Z]{2}\d+ ?)*)[\w./-]*\.(?:py|cc|cpp):\d+\]|[\w./-]+\.(?:py|cc|cpp):\d+\])?:?\s*",
    r"\[(?P<w>[Rr]ank ?\d+|RANK \d+|PG [^\]]{0,60})\]:?\s*",
    rf"\[(?P<l>[A-Z])\d{{2,4}} {_TIME} [\w.]+:\d+\]\s*",  # [E321 02:07:08.408 ProcessGroupNCCL.cpp:607]
    rf"(?P<l>[EWIF])\d{{4}} {_TIME}\s+\d+ [\w.]+:\d+\]\s*",
    r"\[(?:TRT-LLM|TensorRT-LLM)\]\s*(?:\[(?P<w>RANK \d+)\]\s*)?(?:\[(?P<l>[A-Z]+)\]\s*)?",
    r"[\w.-]+:\d+:\d+(?::\d+)? \[\d+\]\s*",  # NCCL: host:pid:tid [gpu]
    r"\[[\w.-]+:\d+(?::\d+){1,2}\]\s*",  # UCX: [host:pid:0:tid]
    r"[A-Za-z][\w.-]{0,60} +\| (?=\S)",  # docker compose
    r"> ?(?=\S)",
))
FRAME = re.compile(r'^File ["“](?P<file>[^"“”]+)["”],(?: line \d+(?=\D|$)|(?= in))(?:,? in (?P<func>.+))?')
EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Died)"
    r"|Exception|OutOfResources)|(?:\w+\.)*(?:exc|errors?|exceptions?)\.[A-Z]\w*)(?:: ?(?P<message>.*))?$")
AMD = re.compile(r"\bhip(?=[ _]?(?:error|out of memory|failure|runtime|driver|kernel|graph|oom|gpu|device))|\brccl")
ENGINES = {  # by what their logs contain
    "sglang": ("sglang", "sgl_kernel", "mem-fraction-static", "scheduler hit an exception", "cuda_graph_runner"),
    "vllm": ("vllm", "enginecore", "apiserver pid=", "gpu_memory_utilization"),
    "tensorrt_llm": ("tensorrt_llm", "[trt-llm]", "tensorrt-llm", "[tensorrt-llm]", "trtllm-serve", "py_executor"),
    "llama.cpp": ("llama_", "ggml_", "llama-server", "srv  ", "gguf")}
MARKS = re.compile(r"^[~^ ]+$")  # a line below a source line
MAX_GAP = MAX_MESSAGE_LINES = 8

LEVELS = {"E": "error", "F": "error", "W": "warning", "I": "info", "D": "info", "ERROR": "error", "CRITICAL": "error",
          "FATAL": "error", "WARNING": "warning", "WARN": "warning", "INFO": "info", "DEBUG": "info"}


class Line(NamedTuple):
    """One cleaned line without its prefix. `writer`: TP3, rank3, Worker_TP1. `level`: error, warning, info.

    Both are "" if unknown.
    """

    text: str
    writer: str = ""
    level: str = ""
    prefixed: bool = False
    repeats: int = 1


class Log(NamedTuple):
    """Cleaned lines, and their text for searching (`folded`); line i begins at `start[i]` of it."""

    lines: tuple[Line, ...]
    lower: str
    start: tuple[int, ...]
    engine: str = ""

    @classmethod
    def of(cls, lines: list[Line], engine: str = "") -> Log:
        low = [folded(line.text) for line in lines]
        starts = itertools.accumulate((len(line) + 1 for line in low[:-1]), initial=0)
        return cls(tuple(lines), "\n".join(low), tuple(starts) if lines else (), engine)

    def part(self, text: str, first: int, last: int) -> str:
        """Lines first..last-1 of `text`, which has the same lines."""
        return text[self.start[first]:self.start[last] if last < len(self.lines) else len(text)]


def containers(data: bytes | str) -> dict[str, str]:
    """Text of each container in a log; undecodable bytes become replacement characters."""
    if isinstance(data, bytes):
        data = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8", "replace")
    text = data if len(data) <= HEAD + 2 * TAIL else f"{data[:HEAD]}\n{GAP}\n{data[-2 * TAIL:]}"
    return unwrap(text.replace("\r\n", "\n"))


def clean(data: bytes | str) -> Log:
    """Cleaned log, of all containers if there are several; repeated lines are counted once."""
    text = "\n".join(containers(data).values())
    if "\x1b" in text or "[0m" in text:
        text = ANSI.sub("", text)
    text = text.replace("\r", "\n")
    if "%|" in text:
        text = PROGRESS.sub(r"\1\n", text)  # what follows a progress bar on its line is a line of its own
    text = CONTROL.sub("", text)
    lines = _reduced(text.split("\n"))
    return Log.of([_line(raw, repeats) for raw, repeats in lines], engine_of("\n".join(raw for raw, _ in lines)))


def engine_of(text: str) -> str:
    """Name of the engine that wrote a log, "" if unknown."""
    low = text.lower()
    counts = {name: sum(low.count(word) for word in words) for name, words in ENGINES.items()}
    best = max(counts, key=lambda name: counts[name])
    return best if counts[best] else ""


def _reduced(lines: list[str]) -> list[tuple[str, int]]:
    """(line, repeats); runs of lines that differ in numbers only are folded, copies in a very long log dropped."""
    seen: dict[str, int] = {}
    kept: list[tuple[str, int]] = []
    last_key, many = "", len(lines) > MAX_LINES
    for index, raw in enumerate(lines):
        raw = raw[:2 * MAX_CHARS].rstrip()
        if not raw:
            continue
        key = VARYING.sub("#", raw)
        if key == last_key:
            kept[-1] = (kept[-1][0], kept[-1][1] + 1)
            continue
        seen[key] = seen.get(key, 0) + 1
        copy = many and seen[key] > KEPT_COPIES and index < len(lines) - LAST_LINES
        last_key = "" if copy else key
        if not copy:
            kept.append((raw, 1))
    total = sum(min(len(raw), MAX_CHARS) for raw, _ in kept)
    most = min(MAX_LINES, len(kept) * MAX_TEXT // max(1, total))
    return _shortened(kept, most) if len(kept) > most else kept


def _shortened(kept: list[tuple[str, int]], most: int) -> list[tuple[str, int]]:
    """About `most` lines: the first, the last, and those around the first and last traces of failures."""
    found = [[i for i, (raw, _) in enumerate(kept) if any(word in raw for word in words)] for words in (STRONG, WEAK)]
    centres = {at for places in found for at in (*places[:WINDOWS], *places[-WINDOWS:])}
    chosen = {i for at in centres for i in range(max(0, at - CENTRE), min(len(kept), at + CENTRE))}
    room = max(most - len(chosen), most // 2)
    chosen |= {*range(room // 3), *range(len(kept) - 2 * room // 3, len(kept))}
    order = sorted(chosen)
    return [line for at, after in zip(order, [*order[1:], len(kept)], strict=True)
            for line in ((kept[at],) if after <= at + 1 else (kept[at], (GAP, 1)))]


def _line(raw: str, repeats: int) -> Line:
    text, writer, level, prefixed = raw[:MAX_CHARS], "", "", False
    if "│" in text or "┃" in text:
        text = FRAME_BORDER.sub("", text)
    for _ in range(6):
        for prefix in PREFIXES:
            match = prefix.match(text)
            if match and match.end():
                groups = match.groupdict()
                writer = writer or " ".join(WRITER.findall(groups.get("w") or ""))
                level = level or LEVELS.get(groups.get("l") or "", "")
                text, prefixed = text[match.end():], True
                break
        else:
            break
    return Line(text.strip(), writer, level, prefixed, repeats)


def folded(text: str) -> str:
    """Text for searching: lower case, AMD's names of errors as NVIDIA's."""
    low = text.lower()
    if "hip" not in low and "rccl" not in low:
        return low
    return AMD.sub(lambda match: "nccl" if match[0] == "rccl" else "cuda", low)


class Block(NamedTuple):
    """One traceback: lines first..last of a log; `at` is its exception line, None if cut off.

    `frames`: (file, function), outermost first. `said`: these, each followed by its source lines. `code`: the last one.
    """

    first: int
    last: int
    frames: tuple[tuple[str, str], ...] = ()
    at: int | None = None
    type: str = ""
    message: str = ""
    code: str = ""
    said: tuple[str, ...] = ()


def tracebacks(lines: Sequence[Line]) -> list[Block]:
    """All tracebacks, in order of their first line. A bare exception line is a block without frames."""
    ended: list[Block] = []
    opened: dict[str, Block] = {}  # by writer: ranks print at the same time
    writer = ""
    for index, line in enumerate(lines):
        writer = line.writer or writer
        here = opened.get(writer, Block(index, index))
        if HEADER in line.text:
            ended.append(here)
            opened[writer] = Block(index, index)
        elif frame := FRAME.match(line.text):
            frames = (*here.frames, (frame["file"], (frame["func"] or "").strip()))
            opened[writer] = here._replace(last=index, frames=frames, said=(*here.said, " ".join(frames[-1])))
        elif found := EXCEPTION.match(line.text):
            opened.pop(writer, None)
            last, message = _message(lines, index, found["message"] or "")
            ended.append(here._replace(last=last, at=index, type=found["type"], message=message))
        elif writer in opened and index - here.last > MAX_GAP + len(opened) * MAX_GAP:
            ended.append(opened.pop(writer))
        elif writer in opened and line.text and not MARKS.match(line.text):
            opened[writer] = here._replace(code=line.text, said=(*here.said, line.text))
    whole = (block for block in (*ended, *opened.values()) if block.frames or block.at is not None)
    return sorted(whole, key=lambda block: block.first)


def _message(lines: Sequence[Line], at: int, message: str) -> tuple[int, str]:
    """(last line, message) of an exception with a multi-line message."""
    last = at
    for line in lines[at + 1:at + 1 + MAX_MESSAGE_LINES]:
        if (HEADER in line.text or FRAME.match(line.text) or EXCEPTION.match(line.text)
                or line.text.startswith(("During handling of", "The above exception was"))
                or (line.prefixed and not lines[at].prefixed) or line.writer != lines[at].writer):
            break
        message, last = f"{message}\n{line.text}", last + 1
    return last, message.strip()
