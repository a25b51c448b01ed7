"""Random and broken bytes for the readers of answers and logs: only documented errors may be raised.

    python -m tests.benchmarks.fuzz [--seconds 600] [--seed 0]
    python -m tests.benchmarks.fuzz --logs 41000      # crash logs only, each within CLASSIFY_S of CPU

Inputs are real answers and log lines, cut, spliced, repeated and mangled, in pieces of random sizes. Readers: HTTP
parser and token stream of the load client (chunks skipped or not), the log reader, the crash classifier, the stage
reader, the redactor and the supervisor's bounded log. A failing input is written out, to become a test. Exit 1
on the first one; a reader that takes longer than `SLOW_S` on an input of at most 64 KiB fails as well.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Callable

from autotune.crash import log as logtext
from autotune.crash import source
from autotune.crash.classify import classify
from autotune.engine.spec import EngineSpec
from autotune.engine.stages import StageReader
from autotune.engine.supervisor import BoundedLog
from autotune.loadgen.http1 import AnswerParser
from autotune.loadgen.wire_formats import COMPLETIONS, GENERATE, TokenStream
from autotune.records import Stage
from autotune.utils.http import BadAnswer
from autotune.utils.redact import Redactor
from tests.crash.scores import read
from tests.crash.wrapped import FORMS
from tests.engine.standin_engine import ENGINE

SLOW_S = 20.0
CLASSIFY_S = 0.2
LARGEST = 65536
ROOT = pathlib.Path(__file__).parents[2]
ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2c\r\ndata: {\"choices\": [{\"text\": \"word\"}], \"usage\": null}\n\r\n1\r\n\n\r\n"
    b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n"
    b"data: {\"choices\":[{\"delta\":{\"content\":\"\xc3\xa4 \\ud83d\\ude00\"}}],"
    b"\"usage\":{\"completion_tokens\":3}}\n\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\ndata: {\"text\": \"hi\"}",
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 5\r\n\r\nbusy!",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    b"data: {\"meta_info\": {\"completion_tokens\": 2}}\n\n",
    b": comment\r\ndata: {\"error\": {\"message\": \"out of memory\"}}\r\n\r\n", b"data:\ndata: \n\n\r\r\n",
    b"event: x\nid: 1\n",
]
PIECES = [b"\r\n", b"\n", b"\r", b"data: ", b"{", b"}", b"[DONE]", b"\x00", b"\xff\xfe", b"\xf0\x9f", b"ffffffff\r\n",
          b"-1\r\n", b"0\r\n\r\n", b"Content-Length: 999999999999999999999\r\n", b"HTTP/1.1 ", b"\x1b[31m",
          b"[2026-01-01 00:00:00 TP3] ",
          b"Traceback (most recent call last):\n", b"  File \"x.py\", line 1, in f\n", b"RuntimeError: CUDA error\n",
          b"During handling of the above exception, another exception occurred:\n", b"password=", b"://u:p@h",
          b"9" * 400,
          b"\"" * 30, b"{\"a\":" * 200, b"\xe2\x80\xa8"]


def mangled(rng: random.Random, pool: list[bytes]) -> bytes:
    """A new input from old ones."""
    data = bytearray(rng.choice(pool))
    for _ in range(rng.randint(0, 8)):
        at = rng.randint(0, len(data))
        kind = rng.randrange(6)
        if kind == 0:
            data[at:at] = rng.choice(PIECES)
        elif kind == 1:
            del data[at:at + rng.randint(1, 40)]
        elif kind == 2 and data:
            data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind == 3:
            data[at:at] = rng.choice(pool)[:rng.randint(0, 4000)]
        elif kind == 4:
            data[at:at] = data[max(0, at - rng.randint(1, 60)):at] * rng.randint(1, 30)
        else:
            data[at:at] = rng.randbytes(rng.randint(1, 30))
    return bytes(data[:LARGEST])


def cut(rng: random.Random, data: bytes) -> list[bytes]:
    """The same bytes in pieces."""
    pieces, at = [], 0
    while at < len(data):
        size = rng.choice([1, 2, 7, 100, 5000, LARGEST])
        pieces.append(data[at:at + size])
        at += size
    return pieces


def answer(rng: random.Random, data: bytes) -> None:
    """The load client's parser and stream: a whole answer, then a running stream whose chunks may be skipped."""
    for head in (b"", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"):
        parser, stream = AnswerParser(), TokenStream(rng.choice((COMPLETIONS, GENERATE)))
        try:
            for n, piece in enumerate([head, *cut(rng, data)] if head else cut(rng, data)):
                if parser.between_chunks:
                    piece = piece[stream.skip_chunks(piece, float(n)):]
                if pieces := parser.feed(piece):
                    stream.take(pieces, float(n))
            parser.eof()
            stream.close()
        except BadAnswer:
            pass


class Logs:
    """The readers of a server's log, over one file."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.path = folder / "server.log"
        self.marks = EngineSpec.parse(dict(ENGINE), "standin").stages

    def __call__(self, rng: random.Random, data: bytes) -> None:
        log = BoundedLog(self.path, rng.choice([8192, 1 << 20]), Redactor(["open-sesame"]))
        stages = StageReader(self.path, self.marks)
        for piece in cut(rng, data):
            log.write(piece)
            if rng.random() < 0.1:
                stages.update()
        log.close()
        stages.update()
        logtext.clean(source.read_path(self.path))
        crash = classify(self.path, stage=rng.choice(list(Stage)), exit_status=rng.choice([None, 0, 1, -9, -11]),
                         after_s=1.0, timed_out=rng.random() < 0.2)
        if not crash.category or not crash.signature:
            raise ValueError("a crash without category or signature")
        if "open-sesame" in crash.excerpt:
            raise ValueError("a secret in an excerpt")


def classify_logs(count: int, seed: int) -> int:
    """Classify mangled crash logs, plain and wrapped; 1 at the first exception or log that takes too long."""
    cases = [case["log"] for case in read(ROOT / "tests/crash/cases.jsonl")]
    rng, slowest = random.Random(seed), 0.0
    forms = list(FORMS.values())
    classify("")  # loads the table
    for number in range(count):
        pool = [rng.choice(cases) if rng.random() < 0.5 else rng.choice(forms)(rng.choice(cases)) for _ in range(3)]
        data = mangled(rng, [*(log.encode() for log in pool), *PIECES])
        began = time.process_time()
        try:
            crash = classify(data)
            took = time.process_time() - began
            slowest = max(slowest, took)
            if not crash.category or not crash.signature:
                raise ValueError("a crash without category or signature")
            if took > CLASSIFY_S:
                raise TimeoutError(f"{took:.2f} s of CPU for {len(data)} bytes")
        except Exception as error:
            kept = pathlib.Path(tempfile.gettempdir(), f"autotune-fuzz-classify-{number}.bin")
            kept.write_bytes(data)
            print(f"log {number} ({len(data)} bytes, kept as {kept}): {type(error).__name__}: {error}")
            return 1
    print(f"{count} logs (slowest {slowest:.3f} s CPU): no exception")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--logs", type=int)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.logs:
        return classify_logs(options.logs, options.seed)
    logs = [p.read_bytes()[:LARGEST // 4] for p in sorted(ROOT.glob("tests/*/logs/**/*")) if p.is_file()]
    rng, count = random.Random(options.seed), collections.Counter[str]()
    slowest: dict[str, float] = {}
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as scratch:
        readers: dict[str, tuple[Callable[[random.Random, bytes], None], list[bytes]]] = {
            "answers": (answer, ANSWERS), "logs": (Logs(pathlib.Path(scratch)), [*logs, *PIECES])}
        while time.monotonic() < end:
            name = "logs" if rng.random() < 0.2 else "answers"
            reader, pool = readers[name]
            data, began = mangled(rng, pool), time.process_time()
            try:
                reader(rng, data)
                took = time.process_time() - began
                slowest[name] = max(slowest.get(name, 0.0), took)
                if took > SLOW_S:
                    raise TimeoutError(f"{took:.0f} s for {len(data)} bytes")
            except Exception as error:
                kept = pathlib.Path(tempfile.gettempdir(), f"autotune-fuzz-{name}-{count[name]}.bin")
                kept.write_bytes(data)
                print(f"{name}: input {count[name]} ({len(data)} bytes, kept as {kept}): "
                      f"{type(error).__name__}: {error}")
                return 1
            count[name] += 1
    print(f"{options.seconds:.0f} s: " + ", ".join(f"{n} {name} (slowest {slowest[name]:.2f} s CPU)"
                                                  for name, n in count.items()) + ": no crash")
    return 0


if __name__ == "__main__":
    sys.exit(main())
