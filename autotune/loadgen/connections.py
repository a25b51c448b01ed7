"""The load client's connections: requests sent, answers read and parsed with as little work as possible.

Bytes have the time at which the kernel received them (`http1.receiver`), however late they are read, so reading can
wait until several streams, or one stream several times, have brought something.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import select
import socket
import time

from autotune.loadgen import http1
from autotune.loadgen.http1 import AnswerParser, Receive
from autotune.loadgen.read_batching import FEWEST_WATCHED, LEAST_TIMEOUT_S, LONGEST_S, MOST_WATCHED, UNSEEN_S, Pacing
from autotune.loadgen.requests import Request, RequestSource
from autotune.loadgen.result import Reply, Tally
from autotune.loadgen.wire_formats import CHUNK_OF_EVENTS, TokenStream, begins_counting
from autotune.loadgen.workload import LoadOrder
from autotune.utils.http import BadAnswer

LAST_READS = 64  # of one connection when the load ends, however fast its server sends
BACKOFF_S = (0.025, 1.0)  # pause of a closed-loop connection after errors in a row, first and longest
ERROR_CHARS = 2000  # kept of an error's body
CONNECTING, READING, IDLE = range(3)


def _no_socket() -> tuple[bytes, float]:
    raise OSError("no connection to read from")


@dataclasses.dataclass(slots=True, eq=False)
class Slot:
    """One connection and the request in flight on it, moved by `Connections`.

    The poller watches `fd` for `interest`. `parts` were read at the times `stamps` and are not parsed yet. `plain`: the
    next bytes belong to a running stream. A `watched` slot is read at once, others when the kernel has `wait` bytes, or
    at `read_by` (CLOCK_MONOTONIC seconds). `size` is the payload so far in bytes, `out` the request bytes still to be
    sent; `used`: this connection has carried an answer before.
    """

    number: int
    watched: bool = True
    wait: int = 1
    size: int = 0
    read_by: float = 0.0
    sock: socket.socket | None = None
    fd: int = -1
    interest: int = select.POLLIN
    receive: Receive = _no_socket
    state: int = IDLE
    parts: list[bytes] = dataclasses.field(default_factory=list)
    stamps: list[float] = dataclasses.field(default_factory=list)
    plain: bool = False
    out: bytes = b""
    used: bool = False
    request: Request | None = None
    reply: Reply | None = None
    parser: AnswerParser = dataclasses.field(default_factory=AnswerParser)
    stream: TokenStream = dataclasses.field(default_factory=TokenStream)

    def wait_for(self, size: int) -> None:
        """Have the kernel report this connection when `size` bytes are there, or its end."""
        if size != self.wait and self.sock is not None:
            self.wait = size
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)


class Connections:
    """The connections of a `LoadOrder`, each with at most one request in flight; a closed loop replaces finished ones.

    `by_fd` finds the slot that `poller` reports. Every `now` is in CLOCK_MONOTONIC seconds.
    """

    def __init__(self, order: LoadOrder) -> None:
        self.retries, workload = order.load.workload.retries, order.load.workload
        host, _, port = order.target.base_url.removeprefix("http://").rstrip("/").rpartition(":")
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        self.family, self.address = found[0], found[4]
        self.source = RequestSource(order, f"{host}:{port}")
        watch_all = (order.watch_all or not workload.ignore_eos or order.load.concurrency <= FEWEST_WATCHED
                     or workload.token_timeout_s < LEAST_TIMEOUT_S)
        self.slots = [Slot(number, watched=watch_all) for number in range(order.load.concurrency)]
        self.pacing = Pacing(enabled=not watch_all and http1.can_wait_for_bytes())
        self.by_fd: dict[int, Slot] = {}
        self.poller = http1.poller()
        self.tally = Tally()
        self.pausing: list[tuple[float, Slot]] = []  # (end of the pause, slot)
        self._ended: list[tuple[Reply, int | None, TokenStream, float]] = []
        self.closed_loop = workload.rate_per_s is None

    def read(self, slot: Slot, now: float) -> float:
        """Read once and parse at once, except for an ordinary beginning of an answer, which `look` parses.

        Returns when the last of it arrived, `now` when nothing could be read.
        """
        slot.read_by = now + LONGEST_S
        try:
            data, arrived = slot.receive()
        except OSError as error:
            self.failed_read(slot, now, error)
            return now
        slot.parts.append(data)
        slot.stamps.append(arrived)
        if slot.watched or slot.reply is None or not self.pacing.token_bytes or not begins_counting(data):
            self.parse(slot, now)
        else:
            slot.wait_for(self.pacing.rest_bytes(slot.reply.wanted_tokens))
        return arrived

    def look(self, now: float) -> None:
        """Parse what was read, read the streams that have gathered bytes for long, and account for ended requests.

        Many together cost half of what one by one do, each after a wait in which other processes had the caches.
        """
        for slot in self.slots:
            if slot.parts:
                self.parse(slot, now)
            elif slot.wait > 1 and slot.read_by <= now and slot.state == READING:
                reply = slot.reply
                if now - self.read(slot, now) > UNSEEN_S and slot.reply is not reply:
                    self.pacing.saw_late_end()
        self.account()

    def close(self, now: float) -> None:
        """Read all that has arrived by now, and send nothing more."""
        self.closed_loop = False
        for slot in self.slots:
            if slot.parts:
                self.parse(slot, now)
            for _ in range(LAST_READS):
                if slot.state != READING or slot.out or self.read(slot, now) == now:
                    break  # nothing more is there
                if slot.parts:
                    self.parse(slot, now)
        self.account()

    def failed_read(self, slot: Slot, now: float, error: OSError) -> None:
        """Handle a read that failed; no bytes to read is no failure."""
        if not isinstance(error, BlockingIOError):
            self.parse(slot, now)
            if slot.state == READING and slot.reply is not None:
                self.broken(slot, now, "reset", str(error))

    def parse(self, slot: Slot, now: float) -> None:
        """Parse what was read. An empty read is the end of the connection."""
        parts, stamps, parser, stream, reply = slot.parts, slot.stamps, slot.parser, slot.stream, slot.reply
        slot.parts, slot.stamps = [], []
        closed = bool(parts) and not parts[-1]
        if closed:
            parts.pop()
            stamps.pop()
        known = len(stream.counts)
        try:
            for data, stamp in zip(parts, stamps, strict=True):
                self._take(slot, data, stamp)
            if slot.watched and known and stream.counting and self.pacing.enabled:
                self.pacing.saw_parts(parts, stream.counts[known - 1:], stream.times[known - 1:])
            if parser.done or (closed and parser.eof()):
                self._end(slot, now, stamps[-1] if stamps else now)
            elif closed:
                self.broken(slot, now, "reset" if parser.status is None else "partial",
                            "the server closed the connection")
            elif not slot.watched and slot.reply is reply:
                slot.wait_for(self.pacing.wait_bytes(stream, slot.size))
                slot.read_by = self.pacing.look_at(stream, now)
        except BadAnswer as error:
            self.broken(slot, now, "malformed", str(error))

    def _take(self, slot: Slot, data: bytes, now: float) -> None:
        """Parse bytes of an answer that arrived at `now`. Raises BadAnswer."""
        parser, stream = slot.parser, slot.stream
        rest, begun = b"", parser.status is not None
        if not begun and (first := data.find(CHUNK_OF_EVENTS) + len(CHUNK_OF_EVENTS)) >= len(CHUNK_OF_EVENTS):
            data, rest = data[:first], data[first:]  # the first event is an arrival of its own: TPOT counts from it
        elif parser.between_chunks and (skipped := stream.skip_chunks(data, now)):
            slot.size += skipped
            data = data[skipped:]
        if data:
            pieces = parser.feed(data)
            if parser.status == 200:
                if pieces:
                    slot.size += len(data) if begun else sum(map(len, pieces))
                    stream.take(pieces, now)
                    slot.plain = parser.chunked and bool(stream.times)
                elif not begun:
                    self.pacing.head_bytes = len(data)
            elif pieces:
                assert slot.reply is not None
                slot.reply.detail = (slot.reply.detail + b"".join(pieces).decode("utf-8", "replace"))[:ERROR_CHARS]
        if rest:
            self._take(slot, rest, now)

    def _end(self, slot: Slot, now: float, arrived: float) -> None:
        """The answer is complete since `arrived`: replace the request. The next `look` accounts for a good one."""
        done, parser, stream = slot.reply, slot.parser, slot.stream
        assert done is not None
        slot.used, slot.plain = True, False
        self.pacing.ended += 1
        if not parser.reusable:
            self._drop(slot)
        self._ended.append((done, parser.status, stream, arrived))
        if failed := parser.status != 200 or stream.error is not None:
            self.account()
        self._free(slot, now, failed)

    def account(self) -> None:
        """Tally the complete answers."""
        for done, status, stream, ended in self._ended:
            self.tally.complete(done, status, stream, ended)
        self._ended.clear()

    def broken(self, slot: Slot, now: float, kind: str, detail: str) -> None:
        """The connection failed. A reused one that closed before any byte of the answer is retried on a new one."""
        done, parser = slot.reply, slot.parser
        assert done is not None
        stale = slot.used and parser.status is None
        slot.plain = False
        self._drop(slot)
        self.account()
        if kind == "reset" and stale and done.attempts <= self.retries:
            done.attempts += 1
            self.tally.kinds["retry"] += 1
            self._send(slot, now, done)
        else:
            self._free(slot, now, failed=True)
            self.tally.ended(done, parser.status, now, kind, detail)

    def start(self, slot: Slot, now: float, due: float | None = None) -> None:
        """Send the next request on a free slot; it was `due` when it is sent, if no time is given."""
        slot.request = new = self.source.next()
        if slot.number < MOST_WATCHED and self.pacing.enabled:
            slot.watched = slot.number < self.pacing.watch
        sent = time.monotonic()
        self._send(slot, now, Reply(new.index, new.wanted_tokens, due=sent if due is None else due, sent=sent,
                                    watched=slot.watched))

    def resume(self, now: float) -> None:
        """Start requests on connections whose pause after an error is over."""
        due = [slot for at, slot in self.pausing if at <= now]
        self.pausing = [(at, slot) for at, slot in self.pausing if at > now]
        for slot in due:
            self.start(slot, now)

    def _free(self, slot: Slot, now: float, failed: bool) -> None:
        """Free a slot: in a closed loop it gets the next request, after an error with a pause."""
        slot.reply, slot.state = None, IDLE
        if self.closed_loop and failed:
            pause = min(BACKOFF_S[0] * 2 ** min(self.tally.errors_in_row, 10), BACKOFF_S[1])
            self.pausing.append((now + pause, slot))
        elif self.closed_loop:
            self.start(slot, now)

    def _send(self, slot: Slot, now: float, new: Reply) -> None:
        assert slot.request is not None
        slot.reply, slot.stream = new, TokenStream(slot.request.wire_format, slot.request.wanted_tokens)
        new.times, new.counts = slot.stream.times, slot.stream.counts
        slot.out, slot.parts, slot.stamps = slot.request.data, [], []
        slot.size, slot.read_by = 0, now + LONGEST_S
        if slot.sock is None:
            self._connect(slot, now)
        else:
            slot.parser.next_answer()
            slot.state = READING
            self._flush(slot, now)

    def _connect(self, slot: Slot, now: float) -> None:
        sock = socket.socket(self.family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        slot.sock, slot.fd, slot.receive = sock, sock.fileno(), http1.receiver(sock)
        slot.parser.close()
        slot.parser = AnswerParser()
        slot.used, slot.state = False, CONNECTING
        self.by_fd[slot.fd] = slot
        slot.interest = select.POLLIN | select.POLLOUT
        self.poller.register(slot.fd, slot.interest)
        if (error := sock.connect_ex(self.address)) not in (0, errno.EINPROGRESS):
            self.broken(slot, now, "connect", os.strerror(error))

    def ready(self, slot: Slot, mask: int, now: float) -> None:
        """Handle an event of the poller on a slot that is not in the midst of a stream."""
        assert slot.sock is not None
        if slot.state == READING and not slot.out:
            self.read(slot, now)
        elif slot.state == CONNECTING:
            if error := slot.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.broken(slot, now, "connect", os.strerror(error))
            else:
                slot.state = READING
                self._flush(slot, now)
        elif slot.state == IDLE:  # the peer closed a kept-alive connection
            self._drop(slot)
        elif mask & select.POLLOUT:
            self._flush(slot, now)
        else:
            slot.out = b""  # an answer, or the end, before the whole request was sent
            self.read(slot, now)

    def _flush(self, slot: Slot, now: float) -> None:
        assert slot.sock is not None
        slot.wait_for(1 if slot.watched else self.pacing.before_first())
        try:
            slot.out = slot.out[slot.sock.send(slot.out):]
        except BlockingIOError:
            pass
        except OSError as error:
            self.broken(slot, now, "reset", str(error))
            return
        interest = select.POLLIN | select.POLLOUT if slot.out else select.POLLIN
        if interest != slot.interest:
            slot.interest = interest
            self.poller.modify(slot.fd, interest)

    def _drop(self, slot: Slot) -> None:
        if slot.sock is not None:
            self.by_fd.pop(slot.fd, None)
            self.poller.unregister(slot.fd)
            slot.sock.close()
            slot.sock, slot.fd, slot.receive, slot.wait = None, -1, _no_socket, 1
