"""A fake inference server: a real process that speaks the protocols of real ones, fast, and fails on command.

It answers /v1/completions, /v1/chat/completions and /generate (SGLang's own) with made-up tokens at set times, and
/health, /server_info, /v1/models and /metrics. Two ways to start it:

    python tests/fakes/standin.py --port-file P --truth T.jsonl --itl-ms 10 --fault cut:7
    python tests/fakes/standin.py --port 30000 --fault hang --at load --tokens-per-s 100

With --port-file it serves at once. When it ends, --truth gets a line for every request: the CLOCK_MONOTONIC seconds at
which the kernel received it and at which each token was sent. Without --port-file it is an engine: it prints the log
mark of each stage before it serves, and --fault happens at stage --at. Faults of stage `serving` spare the first
request, with which a tuner checks that the server is ready; KIND:EVERY is a fault of every so many-th request.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import heapq
import json
import math
import os
import pathlib
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

WORDS = ("the", "of", "a", "tree", "draft", "token", "joule", "server", "block", "verify", "accept", "watt", "long",
         "short", "batch", "cache", "page", "rank", "graph", "stream", "slow", "fast", "one", "two", "three", "four")
SO_TIMESTAMPNS = 35  # of Linux, socket(7); Python has no name for it
MARKS = {"device-init": "Init device", "nccl-init": "Init torch distributed begin", "load": "Load weight begin",
         "kv-alloc": "Load weight end", "graph-capture": "Capture cuda graph begin", "warmup": "Warmup begin"}
# Faults of one answer
ANSWERS = ("http500", "http429", "error_event", "abort", "cut", "reset", "malformed", "stall", "empty", "close_idle",
           "silent", "bad_http", "endless", "garbage")
# Faults of a stage, and of a request at stage `serving` after --after requests
AT_ONCE = ("exit", "silent-exit", "segfault", "killed", "hang", "flood", "not-utf8", "frozen")
# Faults of the process
PROCESS = (*AT_ONCE, "late", "hold-gpu", "ignore-sigterm", "grandchildren", "keep-port", "die-under-load")
SLEEPER = "import os,time; os.setsid(); time.sleep(600)  # of the stand-in on port %d"


def say(text: str) -> None:
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}", flush=True)


def misbehave(fault: str, message: str) -> None:
    """Commit a fault of a stage."""
    if fault == "exit":
        say(f"Traceback (most recent call last):\n  File \"server.py\", line 1, in load\nRuntimeError: {message}")
        sys.exit(1)
    if fault == "silent-exit":
        sys.exit(0)
    if fault in ("segfault", "killed"):
        os.kill(os.getpid(), signal.SIGSEGV if fault == "segfault" else signal.SIGKILL)
    if fault == "hang":
        time.sleep(3600)
    if fault == "flood":
        line = b"x" * 1000 + b"\n"
        for _ in range(int(os.environ.get("STANDIN_FLOOD_MB", "100")) * 1000):
            sys.stdout.buffer.write(line)
        say("RuntimeError: after the flood")
        sys.exit(1)
    if fault == "not-utf8":
        sys.stdout.buffer.write(b"\xff\xfe\x80 broken \xc3\x28 bytes\nRuntimeError: not \xff text\n")
        sys.stdout.flush()
        sys.exit(1)
    if fault == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)  # neither answers nor ends; SIGTERM waits until it goes on
    if fault == "hold-gpu":  # memory that stays in use after the process
        with open(os.environ["FAKE_NVML"], "a") as state:
            state.write("0.used_mib 40000\n")
    if fault == "late":
        time.sleep(float(os.environ.get("STANDIN_LATE_S", "30")))


class Stream:
    """One request being answered."""

    def __init__(self, number: int, api: str, body: dict[str, Any], received: float, args: argparse.Namespace,
                 connection: Connection) -> None:
        sampling = body.get("sampling_params", body)
        self.number, self.api, self.received, self.connection = number, api, received, connection
        self.wanted = int(sampling.get("max_new_tokens" if api == "sglang" else "max_tokens", 16))
        prompt = body.get("prompt", body.get("text", body.get("input_ids", body.get("messages", ""))))
        text = json.dumps(prompt)
        self.prompt_tokens = len(prompt) if isinstance(prompt, list) else max(1, round(len(prompt) / args.chars))
        self.seed = hashlib.sha256(text.encode()).hexdigest()
        options = body.get("stream_options") or {}
        self.usage_wanted = bool(options.get("include_usage"))
        self.continuous = bool(options.get("continuous_usage_stats"))
        self.stream = bool(body.get("stream"))
        self.sent: list[float] = []
        self.counts: list[int] = []
        self.tokens = self.steps = 0
        self.begins = received  # when its prompt has been read
        self.fault: str | None = None
        self.words = self._words(args)

    @property
    def running(self) -> bool:
        return self.connection.stream is self

    def _words(self, args: argparse.Namespace) -> list[str]:
        """Greedy output: a function of the prompt; `--noise` flips tokens at random, `--corrupt` always."""
        rng = random.Random(self.seed)
        if not (args.loop or args.noise or args.corrupt):
            return rng.choices(WORDS, k=self.wanted)
        words = []
        noise = random.Random() if args.noise else None
        for position in range(self.wanted):
            word = rng.choices(WORDS)[0]
            if args.loop:
                word = WORDS[position % 3]
            if noise is not None and noise.random() < args.noise:
                rng, noise = random.Random(random.random()), None
                word = rng.choices(WORDS)[0]
            if args.corrupt and position % args.corrupt == args.corrupt - 1:
                word = "XX"
            words.append(word)
        return words


def taken(data: bytes) -> tuple[str, str, bytes, bytes] | None:
    """(method, path, body, rest) of the HTTP request that `data` begins with; None until all of it is there."""
    head, end, rest = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    length = next((int(x.split(":")[1]) for x in lines[1:] if x.lower().startswith("content-length:")), 0)
    if not end or len(rest) < length:
        return None
    method, path, _ = lines[0].split(" ", 2)
    return method, path, rest[:length], rest[length:]


def answer(status: int, kind: str, body: bytes) -> bytes:
    """A whole HTTP answer."""
    return f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def arrival(beside: list[tuple[int, int, bytes]]) -> float:
    """When the kernel got what was just read, by its time stamp; now, where it gives none."""
    now = time.monotonic()
    for level, kind, data in beside:
        if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
            seconds, nanoseconds = struct.unpack("qq", data[:16])
            ago = time.time() - float(seconds) - float(nanoseconds) / 1e9
            return now - max(0.0, ago)
    return now


class Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.data = b""
        self.stream: Stream | None = None
        self.out = b""
        self.corked = self.watched = False


class Server:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.listener = socket.create_server((args.host, args.port), backlog=4096)
        self.listener.setblocking(False)
        self.poller = select.epoll()
        self.poller.register(self.listener, select.EPOLLIN)
        self.connections: dict[int, Connection] = {}
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.streams: list[Stream] = []
        self.total_tokens = self.total_steps = self.running = self.order = 0
        self.ended = False
        self.started = time.monotonic()

    def run(self) -> None:
        if self.args.port_file:
            path = pathlib.Path(self.args.port_file)
            part = path.with_suffix(".part")
            part.write_text(str(self.listener.getsockname()[1]))
            part.replace(path)
        while not self.ended:
            wait = max(0.0, self.due[0][0] - time.monotonic()) if self.due else 0.2
            for fd, mask in self.poller.poll(min(wait, 0.2)):
                if fd == self.listener.fileno():
                    self.accept()
                elif fd in self.connections:
                    self.ready(self.connections[fd], mask)
            now = time.monotonic()
            while self.due and self.due[0][0] <= now:
                heapq.heappop(self.due)[2]()
            if self.args.die_after_s and now - self.started > self.args.die_after_s:
                os._exit(7)
        if self.args.truth:
            with open(self.args.truth, "w", encoding="utf-8") as file:
                for s in self.streams:
                    file.write(json.dumps({"number": s.number, "received": s.received, "sent": s.sent, "fault": s.fault,
                                           "counts": s.counts, "tokens": s.tokens, "wanted": s.wanted,
                                           "prompt_tokens": s.prompt_tokens, "steps": s.steps}) + "\n")

    def at(self, moment: float, call: Callable[[], None]) -> None:
        """Have the loop make a call at a moment (CLOCK_MONOTONIC seconds)."""
        self.order += 1
        heapq.heappush(self.due, (moment, self.order, call))

    def end(self, *_: object) -> None:
        """Handle a signal: leave the loop, so that the truth is written."""
        self.ended = True

    def accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            self.connections[sock.fileno()] = Connection(sock)
            self.poller.register(sock, select.EPOLLIN)

    def ready(self, c: Connection, mask: int) -> None:
        if mask & select.EPOLLOUT:
            self.send(c, b"")
            return
        try:
            data, beside, _, _ = c.sock.recvmsg(1 << 20, socket.CMSG_SPACE(16))
        except OSError:
            data, beside = b"", []
        if not data:
            self.drop(c)
            return
        c.data += data
        if (found := taken(c.data)) is not None:
            method, path, body, c.data = found
            self.request(c, method, path, body, arrival(beside))

    def request(self, c: Connection, method: str, path: str, body: bytes, now: float) -> None:
        if method == "GET":
            self.get(c, path)
            return
        self.kill_if_due()
        api = {"/generate": "sglang", "/v1/chat/completions": "chat", "/v1/completions": "openai"}.get(path)
        try:
            value = json.loads(body)
        except ValueError:
            api = None
        if api is None or method != "POST":
            self.plain(c, 400, {"error": {"message": f"{method} {path} with {len(body)} bytes is not served here"}})
            return
        s = Stream(len(self.streams), api, value, now, self.args, c)
        self.streams.append(s)
        s.fault = self.fault(s.number)
        if s.fault in ("http500", "http429"):
            self.plain(c, int(s.fault[4:]), {"error": {"message": "made to fail"}})
        elif s.fault == "garbage":
            self.send(c, answer(200, "application/json", b"<html>this is no completion</html>"))
        elif s.fault == "bad_http":
            self.send(c, b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        elif s.fault != "silent":
            self.begin(c, s)

    def begin(self, c: Connection, s: Stream) -> None:
        """Answer a request: the whole of it at once, or a stream of tokens at their times."""
        if not s.stream:
            s.tokens = s.wanted
            self.total_tokens += s.tokens
            self.whole(c, s)
            return
        self.open(c, s)
        if s.fault == "error_event":
            self.event(c, json.dumps({"error": {"message": "prompt is too long", "code": 400}}))
            self.event(c, json.dumps({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}))
        refused = self.echoed() and s.number % 3 == 2
        if refused:
            self.event(c, json.dumps({"error": {"message": f"no access{self.echoed()}"}}))
        if refused or s.fault in ("error_event", "empty"):
            self.finish(c, s)
            return
        if self.args.ping:
            self.write(c, b": ping\n\n")
        if s.api == "chat":
            self.event(c, json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
        self.plan(s, s.received + self.args.ttft_ms / 1000)

    def whole(self, c: Connection, s: Stream) -> None:
        """Send the answer to a request that is not streamed."""
        text = " ".join(s.words) + self.echoed()
        usage = json.loads(self.usage(s))
        self.plain(c, 200, {"text": text, "meta_info": usage} if s.api == "sglang" else
                   {"choices": [{"text": text, "message": {"content": text}, "finish_reason": "length"}],
                    "usage": usage})

    def open(self, c: Connection, s: Stream) -> None:
        """Begin a streamed answer."""
        c.stream = s
        self.running += 1
        framing = {"chunked": "Transfer-Encoding: chunked\r\n", "close": "Connection: close\r\n"}[self.args.framing]
        self.send(c, f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{framing}\r\n".encode())

    def fault(self, number: int) -> str | None:
        for spec in self.args.fault:
            kind, _, every = spec.partition(":")
            spared = (number + 1) % int(every) if every else self.args.at != "serving" or (
                number == 0 and kind != "garbage")
            if kind in ANSWERS and not spared:
                return str(kind)
        return None

    def echoed(self) -> str:
        """Variables of the environment, which careless servers put into their answers."""
        return "".join(f" {os.environ.get(name)}" for name in self.args.echo.split(",") if name)

    def kill_if_due(self) -> None:
        """Commit a process fault of stage `serving`."""
        if self.args.at != "serving" or len(self.streams) < self.args.after:
            return
        if "die-under-load" in self.args.fault:
            say("RuntimeError: CUDA error: out of memory while serving")
            os._exit(1)
        for fault in AT_ONCE:
            if fault in self.args.fault:
                misbehave(fault, self.args.message)

    def plan(self, s: Stream, at: float) -> None:
        if self.args.align and self.args.itl_ms:  # as a server does that decodes all its requests in one step
            step = self.args.itl_ms / 1000
            at = self.started + math.ceil((at - self.started) / step) * step
        self.at(at, functools.partial(self.advance, s))

    def advance(self, s: Stream) -> None:
        """The steps that are due; those of a burst are sent at once."""
        c = s.connection
        c.corked = s.running and self.args.burst > 1
        while s.running and not self.step(c, s):
            pass
        if c.corked:
            c.corked = False
            self.send(c, b"")

    def step(self, c: Connection, s: Stream) -> bool:
        """One decode step: the tokens of one event. Whether the next one has to wait for its time."""
        pattern = self.args.chunk_tokens
        n = 1 if not s.tokens else pattern[s.steps % len(pattern)]
        n = n if s.fault == "endless" else min(n, s.wanted - s.tokens)
        s.steps += 1
        if s.fault in ("cut", "reset", "malformed", "stall", "abort") and (s.tokens + n) * 2 >= s.wanted:
            s.tokens += n
            self.break_off(c, s)
            return True
        self.give(c, s, n)
        self.total_steps += 1
        if s.running and self.args.burst > 1 and len(s.sent) % self.args.burst:
            return False
        if s.running:
            due = s.received + (self.args.ttft_ms + self.args.itl_ms * len(s.sent)) / 1000
            # at a pace of its own, a step that came late makes the next ones late
            self.plan(s, s.sent[-1] + self.args.itl_ms / 1000 if self.args.tokens_per_s else max(s.sent[-1], due))
        return True

    def give(self, c: Connection, s: Stream, tokens: int) -> None:
        """Send the next tokens of a stream in one event, and its end after the last one."""
        begin, s.tokens = s.tokens, s.tokens + tokens
        last = s.tokens >= s.wanted and s.fault != "endless"
        self.event(c, self.data(s, " ".join(s.words[begin:s.tokens]) + " ", last))
        if s.running:
            s.sent.append(time.monotonic())
            s.counts.append(s.tokens)
            self.total_tokens += tokens
        if s.running and last:
            if s.usage_wanted and self.args.usage != "none":
                self.event(c, '{"choices":[],"usage":' + self.usage(s) + "}")
            self.finish(c, s)

    def usage(self, s: Stream) -> str:
        steps = f',"spec_verify_ct":{s.steps}' if self.args.speculative else ""
        return f'{{"prompt_tokens":{s.prompt_tokens},"completion_tokens":{s.tokens}{steps}}}'

    def data(self, s: Stream, text: str, last: bool) -> str:
        if s.api == "sglang":
            reason = f'{{"type":"length","length":{s.wanted}}}' if last else "null"
            shown = " ".join(s.words[:s.tokens])
            return (f'{{"text":"{shown}","meta_info":{{"id":"{s.number}","finish_reason":{reason},'
                    + self.usage(s)[1:] + "}")
        reason = '"length"' if last else "null"
        usage = f',"usage":{self.usage(s)}' if s.continuous and self.args.usage == "full" else ""
        piece = f'"delta":{{"content":"{text}"}}' if s.api == "chat" else f'"text":"{text}"'
        return (f'{{"id":"cmpl-{s.number}","object":"text_completion","created":1700000000,"model":"stub","choices":'
                f'[{{"index":0,{piece},"logprobs":null,"finish_reason":{reason},"matched_stop":null}}]{usage}}}')

    def break_off(self, c: Connection, s: Stream) -> None:
        if s.fault == "stall":
            return
        if s.fault == "malformed":
            self.write(c, b"data: {\"choices\": [{\"text\": \n\n")
            self.event(c, "[DONE]")
        elif s.fault == "abort":
            self.event(c, json.dumps({"text": "", "meta_info": {
                "finish_reason": {"type": "abort", "message": "out of memory"}, "completion_tokens": s.tokens}}))
            self.finish(c, s)
            return
        elif s.fault == "reset":
            c.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.running -= 1
        c.stream = None
        self.drop(c)

    def finish(self, c: Connection, s: Stream) -> None:
        if s.fault != "empty" or s.api != "sglang":
            self.event(c, "[DONE]")
        self.running -= 1
        c.stream = None
        if self.args.framing == "chunked":
            self.send(c, b"0\r\n\r\n")
        if self.args.framing == "close" or s.fault == "close_idle":
            self.drop(c)

    def event(self, c: Connection, data: str) -> None:
        self.write(c, ("data: " + data + self.args.eol * 2).encode())

    def write(self, c: Connection, payload: bytes) -> None:
        """Send payload in the answer's framing; `--split` breaks it into pieces of that many bytes."""
        if self.args.framing != "chunked":
            self.send(c, payload)
        elif self.args.split:
            for i in range(0, len(payload), self.args.split):
                piece = payload[i:i + self.args.split]
                self.send(c, b"%x\r\n%b\r\n" % (len(piece), piece))
        else:
            self.send(c, b"%x\r\n%b\r\n" % (len(payload), payload))

    def send(self, c: Connection, data: bytes) -> None:
        data = c.out + data if c.out else data
        if c.corked:
            c.out = data
            return
        try:
            sent = c.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.drop(c)
            return
        c.out = data[sent:]
        if c.watched != bool(c.out):
            c.watched = bool(c.out)
            self.poller.modify(c.sock, select.EPOLLIN | (select.EPOLLOUT if c.out else 0))

    def drop(self, c: Connection) -> None:
        if self.connections.pop(c.sock.fileno(), None) is None:
            return
        self.running -= c.stream is not None
        c.stream = None
        self.poller.unregister(c.sock)
        c.sock.close()

    def get(self, c: Connection, path: str) -> None:
        if path == "/metrics":
            text = (f"# HELP stub:num_running_reqs running\n# TYPE stub:num_running_reqs gauge\n"
                    f'stub:num_running_reqs{{model="stub",rank="0"}} {self.running}.0\n'
                    f'stub:num_queue_reqs{{model="stub"}} {self.args.queued}\n'
                    f'stub:num_retracted_reqs_total{{model="stub"}} {self.args.retracted * len(self.streams)}\n'
                    f"stub:generation_tokens_total {self.total_tokens}\n"
                    f"stub:verify_steps_total {self.total_steps}\n")
            self.send(c, answer(200, "text/plain; version=0.0.4", text.encode()))
        elif path == "/v1/models":
            self.plain(c, 200, {"data": [{"id": "standin", "object": "model"}]})
        elif path == "/server_info":
            args = self.args
            self.plain(c, 200, {"flags": args.flags, "tokens_per_s": args.tokens_per_s, "fault": ",".join(args.fault),
                                "api_key": args.api_key or None, "argv": sys.argv[1:]})
        else:
            self.plain(c, 200 if path == "/health" else 404, {})

    def plain(self, c: Connection, status: int, value: Any) -> None:
        self.send(c, answer(status, "application/json", json.dumps(value).encode()))


# Options by name; the type of each is that of its default, and False is a switch.
OPTIONS: dict[str, str | int | float | bool] = {
    "host": "127.0.0.1", "port": 0,
    "port-file": "",  # written once the server listens
    "truth": "",
    "ttft-ms": 20.0, "itl-ms": 5.0,
    "align": False,  # all streams send at the same moments, --itl-ms apart
    "burst": 1,  # events sent at once, as a reader that lags behind sees them
    "speculative": False,  # report verify steps in the usage
    "split": 0, "ping": False,
    "chars": 4.0,  # characters per prompt token
    "at": "load",  # stage of the fault: serving, or one of MARKS
    "after": 6,  # requests served before a process fault of stage serving
    "message": "CUDA error: something broke",
    "stage-s": 0.02, "noise": 0.0, "corrupt": 0, "loop": False, "queued": 0, "retracted": 0, "die-after-s": 0.0,
    "flags": "",  # anything, to tell configurations apart
    "api-key": "",  # printed in the log, as careless servers do
    "admin-api-key": "", "hf-token": "",
    "say": "",  # a file whose lines are printed at the start
    "echo": "",  # variables whose values answers and errors hold
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in OPTIONS.items():
        kind: dict[str, Any] = {"action": "store_true"} if default is False else {
            "default": default, "type": type(default)}
        p.add_argument(f"--{name}", **kind)
    p.add_argument("--tokens-per-s", type=float, help="speed of one request, in place of the two times")
    p.add_argument("--chunk-tokens", type=lambda t: [int(x) for x in t.split(",")], default=[1])
    p.add_argument("--usage", choices=["full", "final", "none"], default="full")
    p.add_argument("--framing", choices=["chunked", "close"], default="chunked")
    p.add_argument("--eol", type=lambda t: {"lf": "\n", "crlf": "\r\n"}[t], default="lf")
    p.add_argument("--fault", action="append", default=[], help=f"none, {', '.join(PROCESS)}, or KIND[:EVERY] with "
                   f"KIND of {', '.join(ANSWERS)}")
    args = p.parse_args(argv)
    unknown = {f.partition(":")[0] for f in args.fault} - {"none", *ANSWERS, *PROCESS}
    if unknown:
        p.error(f"unknown fault {', '.join(unknown)}")
    if args.tokens_per_s:
        args.ttft_ms = args.itl_ms = 1000 / args.tokens_per_s
    return args


def stages(args: argparse.Namespace) -> None:
    """Start as an engine does: print the log marks, and commit the fault of the stage that has one."""
    if {"ignore-sigterm", "keep-port"} & set(args.fault):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.api_key:
        say(f"server_args=ServerArgs(port={args.port}, api_key='{args.api_key}')")
    if args.say:
        for line in pathlib.Path(args.say).read_text().splitlines():
            say(line)
    for stage, mark in MARKS.items():
        say(mark)
        time.sleep(args.stage_s)
        for fault in args.fault if stage == args.at else []:
            misbehave(fault, args.message)
    if "grandchildren" in args.fault:
        sleeper = SLEEPER % args.port
        for _ in range(3):
            subprocess.Popen([sys.executable, "-c", sleeper])
            subprocess.run([sys.executable, "-c", "import subprocess,sys;"
                            f"subprocess.Popen([sys.executable,'-c',{sleeper!r}],env={{}})"], check=True)


def main() -> None:
    args = arguments()
    if not args.port_file:
        stages(args)
    server = Server(args)
    if args.port_file:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, server.end)
    else:
        if "keep-port" in args.fault:  # a child in a session of its own has the socket, and ignores SIGTERM
            os.set_inheritable(server.listener.fileno(), True)
            subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
                              + SLEEPER % args.port], close_fds=False)
        say("The server is fired up and ready to roll!")
    server.run()


if __name__ == "__main__":
    main()
