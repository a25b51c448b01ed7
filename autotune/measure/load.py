"""The load client's own process: requests in flight over raw sockets, read with as little work as possible.

`python -m autotune.measure.load` reads a pickled `LoadOrder` from standard input, sends until it reads a
line or the end of input there, writes a JSON line of counters (`tick`) every 0.1 s to standard output and,
when told to stop, the pickled replies. A process of its own, so that neither the tuner's threads nor its
garbage collector delay a time stamp; nothing heavy is imported. `client.LoadClient` is the other end.

Every read of one round of the poller gets the time at which the poller returned: what is readable then had
arrived by then.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import resource
import select
import signal
import socket
import sys
import time
from collections import Counter, deque
from typing import Any, BinaryIO

from autotune.measure import body, http, reply, sse
from autotune.measure.prompts import PromptSet
from autotune.measure.spec import LoadOrder

TICK_S = 0.1
BACKOFF_S = (0.05, 1.0)
READ_BYTES = 65536
READY_REQUESTS = 64
CONNECTING, READING, IDLE = range(3)


class Slot:
    """One connection, and the request that is in flight on it."""

    __slots__ = ("fd", "framing", "out", "receive", "reply", "request", "sock", "state", "stream", "used")

    def __init__(self) -> None:
        self.sock: socket.socket | None = None
        self.fd = -1
        self.receive: Any = None
        self.state = IDLE
        self.out = b""
        self.request = b""
        self.used = False  # this connection has carried an answer before
        self.reply: reply.Reply | None = None
        self.framing = http.Framing()
        self.stream = sse.TokenStream()


class Load:
    """Keeps the requests of a `LoadSpec` in flight until told to stop."""

    def __init__(self, order: LoadOrder, commands: int, out: BinaryIO) -> None:
        self.order, self.load, self.target = order, order.load, order.target
        self.prompts = PromptSet(order.load.prompts, order.load.context_tokens, order.chars_per_token)
        self.commands, self.out = commands, out
        host, _, port = order.target.base_url.removeprefix("http://").rstrip("/").rpartition(":")
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        self.address: Any = address
        self.family, self.host = family, f"{host}:{port}"
        self.slots = [Slot() for _ in range(order.load.concurrency)]
        self.by_fd: dict[int, Slot] = {}
        self.poller = _poller()
        self.next_index = 0
        self.ready: deque[tuple[int, int, bytes]] = deque()
        self.replies: list[reply.Reply] = []
        self.kinds: Counter[str] = Counter()
        self.details: dict[str, str] = {}
        self.waiting: list[tuple[float, Slot]] = []  # slots that pause after an error
        self.arrivals: deque[float] = deque()  # open loop: requests due that found no free connection
        self.next_arrival = 0.0
        self.errors_in_row = 0
        self.finished = self.finished_events = self.finished_tokens = self.finished_counted = self.loose_events = 0
        self.stopping = False

    def run(self) -> None:
        """Send until told to stop, then report. Returns when the parent has everything, or is gone."""
        self.poller.register(self.commands, select.POLLIN)
        closed = self.load.rate_per_s is None
        self.ready.extend(self._build() for _ in range(len(self.slots) if closed else 1))
        now = time.monotonic()
        next_tick = now
        if self.load.rate_per_s is None:
            for slot in self.slots:
                self._start(slot, now)
        else:
            self.arrival_rng = random.Random(f"{self.load.seed}/arrivals")
            self.next_arrival = now
        receive_from, poll = self.by_fd, self.poller.poll
        while not self.stopping:
            events = poll(self._pause(next_tick))
            now = time.monotonic()
            for fd, mask in events:
                ready = receive_from.get(fd)
                if ready is not None:
                    if ready.state == READING and not ready.out:
                        self._read(ready, now)
                    else:
                        self._progress(ready, mask, now)
                elif fd == self.commands:
                    self._command()
            if now >= next_tick:
                self._timers(now)
                self._tick(now)
                next_tick = max(next_tick + TICK_S, now)
            if self.load.rate_per_s is not None:
                self._arrive(now)
            if len(self.ready) < READY_REQUESTS and len(events) < 8:
                self.ready.append(self._build())
        self._report(time.monotonic())

    # Reading

    def _read(self, slot: Slot, now: float) -> None:
        try:
            data = slot.receive(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._broken(slot, now, "reset", str(error))
            return
        try:
            if not data:
                if slot.framing.eof():
                    self._end(slot, now)
                else:
                    got = slot.framing.status is not None
                    self._broken(slot, now, "partial" if got else "reset", "the server closed the connection")
                return
            payload = slot.framing.feed(data)
            if payload:
                if slot.framing.status == 200:
                    slot.stream.feed(payload, now)
                else:
                    assert slot.reply is not None
                    slot.reply.detail = (slot.reply.detail + payload.decode("utf-8", "replace"))[:2000]
            if slot.framing.done:
                self._end(slot, now)
        except (http.BadAnswer, sse.BadStream) as error:
            self._broken(slot, now, "malformed", str(error))

    def _end(self, slot: Slot, now: float) -> None:
        """The answer is complete: replace the request first, then account for it."""
        done, framing, stream = slot.reply, slot.framing, slot.stream
        assert done is not None
        reusable = framing.reusable
        slot.used = True
        ok = framing.status == 200 and stream.error is None
        if not reusable:
            self._drop(slot)
        self._next(slot, now, failed=not ok)
        self._close(done, framing, stream, now)

    def _close(self, done: reply.Reply, framing: http.Framing, stream: sse.TokenStream, now: float) -> None:
        done.ended, done.status = now, framing.status
        kind, detail = reply.OK, ""
        if framing.status != 200:
            kind, detail = f"http_{framing.status}", done.detail
        else:
            try:
                self._fill(done, stream)
            except sse.BadStream as error:
                kind, detail = "malformed", str(error)
            if stream.error is not None:
                kind, detail = stream.kind or "stream_error", stream.error
            elif kind == reply.OK and not stream.finished and done.completion_tokens is None:
                kind, detail = "partial", "the stream ended without [DONE], usage or a finish reason"
            elif kind == reply.OK and not done.tokens:
                kind, detail = "empty", "no output token"
        self._account(done, kind, detail)

    def _fill(self, done: reply.Reply, stream: sse.TokenStream) -> None:
        """Move what the stream gave into the reply."""
        done.times, done.counts = stream.times, stream.counts
        end = stream.close()
        done.completion_tokens = end.get("completion_tokens")
        done.prompt_tokens = end.get("prompt_tokens")
        done.verify_steps = end.get("verify_steps")

    def _account(self, done: reply.Reply, kind: str, detail: str) -> None:
        done.kind, done.detail = kind, detail[:500]
        self.replies.append(done)
        self.finished += kind == reply.OK
        if kind == reply.OK:
            self.errors_in_row = 0
        else:
            self.errors_in_row += 1
            self.kinds[kind] += 1
            self.details.setdefault(kind, detail[:500])
        if done.counted:
            self.finished_counted += done.tokens
        else:
            self.loose_events += len(done.times)
            if done.completion_tokens is not None:
                self.finished_events += len(done.times)
                self.finished_tokens += done.completion_tokens

    def _broken(self, slot: Slot, now: float, kind: str, detail: str) -> None:
        """The connection failed. A kept-alive one that was closed before any byte of the answer is tried again."""
        done, stream = slot.reply, slot.stream
        assert done is not None
        fresh = slot.used and slot.framing.status is None and not stream.times
        self._drop(slot)
        if kind == "reset" and fresh and done.attempts <= self.load.retries:
            done.attempts += 1
            self.kinds["retry"] += 1
            self._send(slot, now, done)
            return
        done.ended, done.status = now, slot.framing.status
        try:
            self._fill(done, stream)
        except sse.BadStream:
            done.completion_tokens = None
        done.completion_tokens = None if kind != "malformed" else done.completion_tokens
        self._next(slot, now, failed=True)
        self._account(done, kind, detail)

    # Sending

    def _next(self, slot: Slot, now: float, failed: bool) -> None:
        slot.reply, slot.state = None, IDLE
        if failed and self.load.rate_per_s is None:
            pause = min(BACKOFF_S[0] * 2 ** min(self.errors_in_row, 10) * 0.5, BACKOFF_S[1])
            self.waiting.append((now + pause, slot))
        elif self.load.rate_per_s is None:
            self._start(slot, now)

    def _start(self, slot: Slot, now: float, due: float | None = None) -> None:
        index, wanted, slot.request = self.ready.popleft() if self.ready else self._build()
        sent = time.monotonic()
        self._send(slot, now, reply.Reply(index, wanted, due=sent if due is None else due, sent=sent))

    def _send(self, slot: Slot, now: float, new: reply.Reply) -> None:
        slot.reply, slot.framing, slot.stream = new, http.Framing(), sse.TokenStream()
        slot.out = slot.request
        if slot.sock is None:
            self._connect(slot, now)
        else:
            slot.state = READING
            self._flush(slot, now)

    def _build(self) -> tuple[int, int, bytes]:
        """The next request: (index, output tokens wanted, bytes to send)."""
        index, load = self.next_index, self.load
        self.next_index += 1
        rng = random.Random(f"{load.seed}/length/{index}")
        wanted = load.output_tokens * (1 + load.output_spread * (2 * rng.random() - 1))
        if load.rate_per_s is None and index < load.concurrency:
            wanted *= rng.random()  # the rest of a request already under way: finishes spread from the start
        wanted = max(1, round(wanted))
        path, content = body.request_body(self.target, self.prompts.prompt(index), wanted, load.temperature,
                                          load.ignore_eos)
        return index, wanted, http.request(self.host, path, body.encode(content), body.auth(self.target))

    def _connect(self, slot: Slot, now: float) -> None:
        sock = socket.socket(self.family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        slot.sock, slot.fd, slot.receive, slot.used, slot.state = sock, sock.fileno(), sock.recv, False, CONNECTING
        self.by_fd[slot.fd] = slot
        self.poller.register(slot.fd, select.POLLIN | select.POLLOUT)
        error = sock.connect_ex(self.address)
        if error and error not in (115, 36):  # EINPROGRESS on Linux and macOS
            self._broken(slot, now, "connect", os.strerror(error))

    def _progress(self, slot: Slot, mask: int, now: float) -> None:
        """A connection that is being made, or has request bytes left to send."""
        assert slot.sock is not None
        if slot.state == CONNECTING:
            error = slot.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._broken(slot, now, "connect", os.strerror(error))
                return
            slot.state = READING
            self._flush(slot, now)
        elif slot.state == IDLE:  # nothing in flight: the peer closed a kept-alive connection
            self._drop(slot)
        elif mask & select.POLLOUT:
            self._flush(slot, now)
        else:
            slot.out = b""
            self._read(slot, now)

    def _flush(self, slot: Slot, now: float) -> None:
        assert slot.sock is not None
        try:
            sent = slot.sock.send(slot.out)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._broken(slot, now, "reset", str(error))
            return
        slot.out = slot.out[sent:]
        self.poller.modify(slot.fd, select.POLLIN | select.POLLOUT if slot.out else select.POLLIN)

    def _drop(self, slot: Slot) -> None:
        if slot.sock is not None:
            self.by_fd.pop(slot.fd, None)
            self.poller.unregister(slot.fd)
            slot.sock.close()
            slot.sock, slot.fd, slot.receive = None, -1, None

    # Time

    def _pause(self, next_tick: float) -> float:
        """Seconds the poller may wait."""
        if len(self.ready) < READY_REQUESTS:
            return 0.0
        due = min(next_tick, self.next_arrival) if self.load.rate_per_s is not None else next_tick
        return max(0.0, due - time.monotonic())

    def _arrive(self, now: float) -> None:
        """Open loop: requests whose time has come."""
        rate = self.load.rate_per_s
        assert rate is not None
        while self.next_arrival <= now:
            self.arrivals.append(self.next_arrival)
            self.kinds["late"] += all(s.reply is not None for s in self.slots)
            self.next_arrival += self.arrival_rng.expovariate(rate)
        while self.arrivals:
            slot = next((s for s in self.slots if s.reply is None), None)
            if slot is None:
                return
            self._start(slot, now, due=self.arrivals.popleft())

    def _timers(self, now: float) -> None:
        load = self.load
        for slot in self.slots:
            current = slot.reply
            if current is None:
                continue
            if now - current.due > load.request_timeout_s:
                self._broken(slot, now, "timeout_request", f"not done after {load.request_timeout_s:g} s")
            elif not slot.stream.times and now - current.sent > load.first_token_timeout_s:
                self._broken(slot, now, "timeout_first_token", f"no token within {load.first_token_timeout_s:g} s")
            elif slot.stream.times and now - slot.stream.times[-1] > load.token_timeout_s:
                self._broken(slot, now, "timeout_token", f"no further token within {load.token_timeout_s:g} s")
        due = [slot for at, slot in self.waiting if at <= now]
        if due:
            self.waiting = [(at, slot) for at, slot in self.waiting if at > now]
            for slot in due:
                self._start(slot, now)

    # Reporting

    def _tick(self, now: float) -> None:
        counted, events, flying = self.finished_counted, self.loose_events, 0
        for slot in self.slots:
            if slot.reply is not None:
                flying += 1
                counts = slot.stream.counts
                if counts and counts[0]:
                    counted += counts[-1]
                else:
                    events += len(counts)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self._write({"t": now, "counted": counted, "events": events, "in_flight": flying, "finished": self.finished,
                     "ratio": self.finished_tokens / self.finished_events if self.finished_events else 1.0,
                     "kinds": dict(self.kinds), "details": self.details,
                     "cpu_s": usage.ru_utime + usage.ru_stime, "wait_s": _run_queue_wait_s()})

    def _write(self, row: dict[str, Any]) -> None:
        try:
            self.out.write(json.dumps(row).encode() + b"\n")
            self.out.flush()
        except BrokenPipeError:
            self.stopping = True

    def _command(self) -> None:
        text = os.read(self.commands, 4096)
        if not text:
            os._exit(1)  # the tuner is gone
        self.stopping = True

    def _report(self, now: float) -> None:
        for slot in self.slots:
            if slot.reply is not None:
                current, stream = slot.reply, slot.stream
                current.times, current.counts = stream.times, stream.counts
                current.status = slot.framing.status
                self.replies.append(current)
        data = pickle.dumps(self.replies, protocol=5)
        self._tick(now)
        self._write({"final": len(data)})
        self.out.write(data)
        self.out.flush()


def _run_queue_wait_s() -> float | None:
    """Seconds this process was ready to run and did not (Linux: /proc/self/schedstat); None elsewhere."""
    try:
        with open("/proc/self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


class _Poll:
    """select.poll with select.epoll's unit of time, for systems without epoll."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self.register, self.modify, self.unregister = self._poll.register, self._poll.modify, self._poll.unregister

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        return self._poll.poll(timeout * 1000)


def _poller() -> Any:
    """epoll where there is one (its event bits for reading and writing are those of poll)."""
    return select.epoll() if hasattr(select, "epoll") else _Poll()


def _raise_file_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tuner's to handle: it stops us by the pipe
    commands = sys.stdin.buffer.fileno()
    size = int.from_bytes(os.read(commands, 8), "big")
    data = b""
    while len(data) < size:
        piece = os.read(commands, size - len(data))
        if not piece:
            return
        data += piece
    order: LoadOrder = pickle.loads(data)
    _raise_file_limit(order.load.concurrency + 64)
    gc.disable()
    Load(order, commands, sys.stdout.buffer).run()


if __name__ == "__main__":
    main()
