"""The load client's own process: requests in flight over raw sockets, read with as little work as possible.

`python -m autotune.measure.load` reads a `LoadOrder` as one line of JSON from standard input, sends until it reads
another line or the end of input there, writes a JSON line of counters (a tick) every 0.2 s to standard output and,
when told to stop, the replies: a JSON line of them and, raw, the arrays of their events. A process of its own, so that
neither the tuner's threads nor its garbage collector delay a time stamp; nothing heavy is imported. `client.LoadClient`
is the other end.

What is read gets the time at which the kernel had it (`system.receiver`), however late the client came to read it; so
reading can wait until several streams have brought something.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import select
import signal
import socket
import sys
import time
from collections import deque
from typing import Any, BinaryIO

from autotune.framing import BadAnswer, Framing
from autotune.measure import sse, system
from autotune.measure.pacing import FULL_BYTES, TOKENS_BEFORE, WATCHED, Pacing
from autotune.measure.reply import Reply, packed
from autotune.measure.slot import CONNECTING, IDLE, READING, Slot
from autotune.measure.source import RequestSource
from autotune.measure.spec import LoadOrder
from autotune.measure.tally import Tally

TICK_S = 0.2
TIMERS_S = 0.5  # between two looks at the time limits of requests, which are tens of seconds
BACKOFF_S = (0.025, 1.0)  # a closed-loop connection pauses after errors in a row, from the first to the second
FEW = 16
SHORT = 16  # bytes: a read that may be the rest of an answer's end
GATHER_S = (0.0005, 0.003)  # after a wait that brought little, so that more of one step of the server is read together:
MANY = 16  # ... the second time from this concurrency on, where steps take longer


class Load:
    """Keeps the requests of a `LoadOrder` in flight until told to stop."""

    def __init__(self, order: LoadOrder, commands: int, out: BinaryIO) -> None:
        self.load, self.commands, self.out = order.load, commands, out
        host, _, port = order.target.base_url.removeprefix("http://").rstrip("/").rpartition(":")
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        self.family, self.address = found[0], found[4]
        self.source = RequestSource(order, f"{host}:{port}")
        watch_all = order.watch_all or not order.load.ignore_eos
        self.slots = [Slot(watched=watch_all or number < WATCHED) for number in range(order.load.concurrency)]
        self.pacing = Pacing()
        self.by_fd: dict[int, Slot] = {}
        self.poller = system.poller()
        self.tally = Tally()
        self.pausing: list[tuple[float, Slot]] = []  # slots that pause after an error
        self.rate = order.load.rate_per_s
        self.arrivals: deque[float] = deque()  # open loop: requests due that found no free connection
        self.next_arrival = 0.0
        self.arrival_rng = random.Random(f"{order.load.seed}/arrivals")
        self.stopping = False

    def run(self) -> None:
        """Send until told to stop, then report. Returns when the parent has everything, or is gone."""
        self.poller.register(self.commands, select.POLLIN)
        self.source.prepare(len(self.slots) if self.rate is None else 1)
        next_tick = next_timers = self.next_arrival = now = time.monotonic()
        if self.rate is None:
            for slot in self.slots:
                self._start(slot, now)
        by_fd, poll, gather_s = self.by_fd, self.poller.poll, GATHER_S[len(self.slots) >= MANY]
        gathered = False
        while not self.stopping:
            events = poll(0.0 if self.source.short else self._pause(next_tick))
            now = time.monotonic()
            for fd, mask in events:
                ready = by_fd.get(fd)
                if ready is None:
                    if fd == self.commands:
                        self._command()
                elif ready.plain:  # the hot path: a stream that goes on
                    try:
                        data, arrived = ready.receive()
                    except OSError as error:
                        self._failed_read(ready, now, error)
                        continue
                    ready.parts.append(data)
                    ready.stamps.append(arrived)
                    if len(data) < SHORT or data.endswith(b"\r\n\r\n"):
                        self._digest(ready, now)
                    elif not ready.watched and len(ready.parts) >= TOKENS_BEFORE:
                        self._digest(ready, now)
                        self._rest(ready, now)
                elif ready.state == READING and not ready.out:
                    self._read(ready, now)
                    self._rest(ready, now)
                else:
                    self._progress(ready, mask, now)
            while (resting := self.pacing.due(now)) is not None:
                self._look(resting, now)
            if now >= next_tick:
                for slot in self.slots:
                    if slot.parts:
                        self._digest(slot, now)
                        self._rest(slot, now)
                self._resume(now)
                if now >= next_timers:
                    self._timers(now)
                    next_timers = now + TIMERS_S
                self._tick(now)
                next_tick = max(next_tick + TICK_S, now)
            if self.rate is not None:
                self._arrive(now, self.rate)
            gathered = not gathered and 0 < len(events) < FEW
            if self.source.short and len(events) < FEW:
                self.source.refill()
            elif gathered:
                time.sleep(gather_s)
        self._report(time.monotonic())

    # Reading

    def _read(self, slot: Slot, now: float) -> int | None:
        """Read where every read is looked at: the head of an answer, an error's body, an answer that is not chunked.

        Returns how many bytes came; None when none could be read.
        """
        try:
            data, arrived = slot.receive()
        except OSError as error:
            self._failed_read(slot, now, error)
            return None
        slot.parts.append(data)
        slot.stamps.append(arrived)
        self._digest(slot, now)
        return len(data)

    def _look(self, slot: Slot, now: float) -> None:
        """Read a stream that was left alone, and leave it alone again or have the poller watch it."""
        reply = slot.reply
        size = self._read(slot, now)
        if slot.reply is not reply:
            if size:
                self.pacing.missed_end()
        elif slot.resting:
            pause = self.pacing.pause_s(slot, now) if size and size < FULL_BYTES and slot.plain else 0.0
            if pause:
                self.pacing.rest(slot, now, now + pause)
            else:
                self._wake(slot)

    def _wake(self, slot: Slot) -> None:
        """Have the poller watch a stream that was left alone."""
        if slot.resting:
            slot.resting = False
            self.poller.register(slot.fd, slot.interest)

    def _rest(self, slot: Slot, now: float) -> None:
        """Leave a running stream alone for a while, if it can be."""
        pause = self.pacing.pause_s(slot, now) if slot.plain else 0.0
        if pause and not slot.resting:
            self.poller.unregister(slot.fd)
            self.pacing.rest(slot, now, now + pause)

    def _failed_read(self, slot: Slot, now: float, error: OSError) -> None:
        if isinstance(error, BlockingIOError):
            return
        self._digest(slot, now)
        if slot.state == READING and slot.reply is not None:
            self._broken(slot, now, "reset", str(error))

    def _digest(self, slot: Slot, now: float) -> None:
        """Take in what was read. An empty read is the end of the connection."""
        parts, stamps, framing = slot.parts, slot.stamps, slot.framing
        slot.parts, slot.stamps = [], []
        closed = bool(parts) and not parts[-1]
        if closed:
            parts.pop()
            stamps.pop()
        try:
            if slot.plain:
                slot.stream.take(framing, parts, stamps)
            else:
                for data, stamp in zip(parts, stamps, strict=True):
                    self._take_careful(slot, data, stamp)
            if framing.done or (closed and framing.eof()):
                self._end(slot, now)
            elif closed:
                self._broken(slot, now, "reset" if framing.status is None else "partial",
                             "the server closed the connection")
        except BadAnswer as error:
            self._broken(slot, now, "malformed", str(error))

    def _take_careful(self, slot: Slot, data: bytes, now: float) -> None:
        framing = slot.framing
        while data:
            cut = data.find(sse.CHUNK_OF_EVENTS) + len(sse.CHUNK_OF_EVENTS)
            piece, data = (data[:cut], data[cut:]) if cut >= len(sse.CHUNK_OF_EVENTS) else (data, b"")
            payload = framing.feed(piece)
            if payload and framing.status == 200:
                slot.stream.feed(payload, now)
            elif payload:
                assert slot.reply is not None
                slot.reply.detail = (slot.reply.detail + payload.decode("utf-8", "replace"))[:2000]
            slot.plain = framing.status == 200 and framing.between_chunks
            if slot.plain and slot.stream.times:
                slot.stream.take(framing, [data], [now])
                return

    def _end(self, slot: Slot, now: float) -> None:
        """The answer is complete: replace the request first, then account for it."""
        done, framing, stream = slot.reply, slot.framing, slot.stream
        assert done is not None
        slot.used, slot.plain = True, False
        self._wake(slot)
        self.pacing.saw_end(stream)
        if not framing.reusable:
            self._drop(slot)
        self._free(slot, now, failed=framing.status != 200 or stream.error is not None)
        self.tally.ended(done, framing.status, stream, now)

    def _broken(self, slot: Slot, now: float, kind: str, detail: str) -> None:
        """The connection failed. A kept-alive one that was closed before any byte of the answer is tried again."""
        done, framing, stream = slot.reply, slot.framing, slot.stream
        assert done is not None
        stale = slot.used and framing.status is None
        slot.plain = False
        self._drop(slot)
        if kind == "reset" and stale and done.attempts <= self.load.retries:
            done.attempts += 1
            self.tally.kinds["retry"] += 1
            self._send(slot, now, done)
            return
        self._free(slot, now, failed=True)
        self.tally.broke(done, framing.status, stream, now, kind, detail)

    # Sending

    def _free(self, slot: Slot, now: float, failed: bool) -> None:
        """A slot without a request: in a closed loop it gets the next one, after errors with a pause."""
        slot.reply, slot.state = None, IDLE
        if self.rate is not None:
            return
        if failed:
            pause = min(BACKOFF_S[0] * 2 ** min(self.tally.errors_in_row, 10), BACKOFF_S[1])
            self.pausing.append((now + pause, slot))
        else:
            self._start(slot, now)

    def _start(self, slot: Slot, now: float, due: float | None = None) -> None:
        index, wanted, slot.request = self.source.next()
        sent = time.monotonic()
        self._send(slot, now, Reply(index, wanted, due=sent if due is None else due, sent=sent, watched=slot.watched))

    def _send(self, slot: Slot, now: float, new: Reply) -> None:
        slot.reply, slot.framing, slot.stream = new, Framing(), sse.TokenStream(new.wanted_tokens)
        slot.out, slot.parts, slot.stamps = slot.request, [], []
        if slot.sock is None:
            self._connect(slot, now)
        else:
            slot.state = READING
            self._flush(slot, now)

    def _connect(self, slot: Slot, now: float) -> None:
        sock = socket.socket(self.family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        slot.sock, slot.fd, slot.receive = sock, sock.fileno(), system.receiver(sock)
        slot.used, slot.state = False, CONNECTING
        self.by_fd[slot.fd] = slot
        slot.interest = select.POLLIN | select.POLLOUT
        self.poller.register(slot.fd, slot.interest)
        error = sock.connect_ex(self.address)
        if error and error != errno.EINPROGRESS:
            self._broken(slot, now, "connect", os.strerror(error))

    def _progress(self, slot: Slot, mask: int, now: float) -> None:
        """A connection that is being made, has request bytes left to send, or has nothing in flight."""
        assert slot.sock is not None
        if slot.state == CONNECTING:
            error = slot.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._broken(slot, now, "connect", os.strerror(error))
                return
            slot.state = READING
            self._flush(slot, now)
        elif slot.state == IDLE:  # the peer closed a kept-alive connection
            self._drop(slot)
        elif mask & select.POLLOUT:
            self._flush(slot, now)
        else:
            slot.out = b""  # an answer, or the end, before the whole request was taken
            self._read(slot, now)

    def _flush(self, slot: Slot, now: float) -> None:
        assert slot.sock is not None
        try:
            slot.out = slot.out[slot.sock.send(slot.out):]
        except BlockingIOError:
            pass
        except OSError as error:
            self._broken(slot, now, "reset", str(error))
            return
        interest = select.POLLIN | select.POLLOUT if slot.out else select.POLLIN
        if interest != slot.interest:
            slot.interest = interest
            self.poller.modify(slot.fd, interest)

    def _drop(self, slot: Slot) -> None:
        if slot.sock is not None:
            self.by_fd.pop(slot.fd, None)
            if not slot.resting:
                self.poller.unregister(slot.fd)
            slot.resting = False
            slot.close()

    # Time

    def _pause(self, next_tick: float) -> float:
        """Seconds the poller may wait."""
        due = min(next_tick, self.pacing.next_look)
        if self.rate is not None:
            due = min(due, self.next_arrival)
        return max(0.0, due - time.monotonic())

    def _arrive(self, now: float, rate: float) -> None:
        """Open loop: send the requests whose time has come; `late` are those that found no connection free."""
        if self.next_arrival > now and not self.arrivals:
            return
        idle = deque(slot for slot in self.slots if slot.reply is None)
        while self.next_arrival <= now:
            self.arrivals.append(self.next_arrival)
            if len(self.arrivals) > len(idle):
                self.tally.kinds["late"] += 1
            self.next_arrival += self.arrival_rng.expovariate(rate)
        while self.arrivals and idle:
            self._start(idle.popleft(), now, due=self.arrivals.popleft())

    def _timers(self, now: float) -> None:
        load = self.load
        for slot in self.slots:
            current = slot.reply
            if current is None:
                continue
            times = slot.stream.times
            if now - current.sent > load.request_timeout_s:
                self._broken(slot, now, "timeout_request", f"not done after {load.request_timeout_s:g} s")
            elif not times and now - current.sent > load.first_token_timeout_s:
                self._broken(slot, now, "timeout_first_token", f"no token within {load.first_token_timeout_s:g} s")
            elif times and now - times[-1] > load.token_timeout_s:
                self._broken(slot, now, "timeout_token", f"no further token within {load.token_timeout_s:g} s")

    def _resume(self, now: float) -> None:
        """Start requests of connections that have paused after an error for long enough."""
        if not self.pausing:
            return
        due = [slot for at, slot in self.pausing if at <= now]
        self.pausing = [(at, slot) for at, slot in self.pausing if at > now]
        for slot in due:
            self._start(slot, now)

    # Reporting

    def _tick(self, now: float) -> None:
        row = self.tally.row(now, (slot.stream for slot in self.slots if slot.reply is not None))
        self._write({**row, "cpu_s": system.cpu_s(), "wait_s": system.run_queue_wait_s()})

    def _write(self, row: dict[str, Any]) -> None:
        try:
            self.out.write(json.dumps(row).encode() + b"\n")
            self.out.flush()
        except BrokenPipeError:
            self.stopping = True

    def _command(self) -> None:
        if not os.read(self.commands, 4096):
            os._exit(1)  # the tuner is gone
        self.stopping = True

    def _report(self, now: float) -> None:
        for slot in self.slots:
            if slot.parts:
                self._digest(slot, now)
        self._tick(now)
        for slot in self.slots:
            if slot.reply is not None:
                slot.reply.times, slot.reply.counts = slot.stream.times, slot.stream.counts
                slot.reply.status = slot.framing.status
                self.tally.replies.append(slot.reply)
        replies, data = packed(self.tally.replies)
        self._write({"final": len(data), "replies": replies})
        self.out.write(data)
        self.out.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tuner's to handle: it stops us by the pipe
    commands = sys.stdin.buffer.fileno()
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(commands, 65536)
        if not piece:
            return
        data += piece
    order = LoadOrder.from_json(data)
    system.raise_file_limit(order.load.concurrency + 64)
    gc.disable()
    Load(order, commands, sys.stdout.buffer).run()


if __name__ == "__main__":
    main()
