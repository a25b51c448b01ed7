"""Requests and their answers on the load client's connections: sent, read and digested with as little work as possible.

What is read gets the time at which the kernel had it (`system.receiver`), however late the client came to read it; so
reading can wait until several streams, or one stream several times, have brought something.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time

from autotune.loadgen import sockets, sse
from autotune.loadgen.http1 import Framing
from autotune.loadgen.read_batching import FEWEST_WATCHED, LEAST_TIMEOUT_S, LONGEST_S, MOST_WATCHED, UNSEEN_S, Pacing
from autotune.loadgen.requests import RequestSource
from autotune.loadgen.result import Reply
from autotune.loadgen.slot import CONNECTING, IDLE, READING, Slot
from autotune.loadgen.spec import LoadOrder
from autotune.loadgen.tally import Tally
from autotune.utils.http import BadAnswer

LAST_READS = 64  # of one connection when the load ends, however fast its server sends
BACKOFF_S = (0.025, 1.0)  # a closed-loop connection pauses after errors in a row, from the first to the second


class Exchanges:
    """The connections of a `LoadOrder`, each with at most one request in flight; a closed loop replaces finished ones.

    `by_fd` finds the slot that `poller` reports. Every `now` is in CLOCK_MONOTONIC seconds.
    """

    def __init__(self, order: LoadOrder) -> None:
        self.load = order.load
        host, _, port = order.target.base_url.removeprefix("http://").rstrip("/").rpartition(":")
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        self.family, self.address = found[0], found[4]
        self.source = RequestSource(order, f"{host}:{port}")
        watch_all = (order.watch_all or not order.load.ignore_eos or order.load.concurrency <= FEWEST_WATCHED
                     or order.load.token_timeout_s < LEAST_TIMEOUT_S)
        self.slots = [Slot(number, watched=watch_all) for number in range(order.load.concurrency)]
        self.pacing = Pacing(enabled=not watch_all and sockets.can_wait_for_bytes())
        self.by_fd: dict[int, Slot] = {}
        self.poller = sockets.poller()
        self.tally = Tally()
        self.pausing: list[tuple[float, Slot]] = []  # slots that pause after an error
        self._ended: list[tuple[Reply, int | None, sse.TokenStream, float]] = []
        self.closed_loop = order.load.rate_per_s is None

    # Reading

    def ready(self, slot: Slot, mask: int, now: float) -> None:
        """The poller reports a slot that isn't in the midst of a stream."""
        if slot.state == READING and not slot.out:
            self.read(slot, now)
        else:
            self._progress(slot, mask, now)

    def read(self, slot: Slot, now: float) -> float:
        """Read once and digest at once, but for a beginning as it should be, which the next look digests.

        Returns when the last of it arrived, `now` when nothing could be read.
        """
        slot.look_at = now + LONGEST_S
        try:
            data, arrived = slot.receive()
        except OSError as error:
            self.failed_read(slot, now, error)
            return now
        slot.parts.append(data)
        slot.stamps.append(arrived)
        if slot.watched or slot.reply is None or not self.pacing.token_bytes or not sse.begins_counting(data):
            self.digest(slot, now)
        else:
            slot.wait_for(self.pacing.rest_bytes(slot.reply.wanted_tokens))
        return arrived

    def look(self, now: float) -> None:
        """Digest what was read, read the streams that have gathered bytes for long, and account for what ended.

        Many together cost half of what one by one do, each after a wait in which other processes had the caches.
        """
        for slot in self.slots:
            if slot.parts:
                self.digest(slot, now)
            elif slot.wait > 1 and slot.look_at <= now and slot.state == READING:
                reply = slot.reply
                if now - self.read(slot, now) > UNSEEN_S and slot.reply is not reply:
                    self.pacing.saw_late_end()
        self.account()

    def close(self, now: float) -> None:
        """Read all that has arrived by now, and send nothing more."""
        self.closed_loop = False
        for slot in self.slots:
            if slot.parts:
                self.digest(slot, now)
            for _ in range(LAST_READS):
                if slot.state != READING or slot.out or self.read(slot, now) == now:
                    break  # nothing more is there
                if slot.parts:
                    self.digest(slot, now)
        self.account()

    def failed_read(self, slot: Slot, now: float, error: OSError) -> None:
        """A read that failed; nothing when only nothing was there."""
        if isinstance(error, BlockingIOError):
            return
        self.digest(slot, now)
        if slot.state == READING and slot.reply is not None:
            self.broken(slot, now, "reset", str(error))

    def digest(self, slot: Slot, now: float) -> None:
        """Take in what was read. An empty read is the end of the connection."""
        parts, stamps, framing, reply = slot.parts, slot.stamps, slot.framing, slot.reply
        slot.parts, slot.stamps = [], []
        closed = bool(parts) and not parts[-1]
        if closed:
            parts.pop()
            stamps.pop()
        try:
            if slot.plain:
                self._take(slot, parts, stamps)
            else:
                for data, stamp in zip(parts, stamps, strict=True):
                    self._take_careful(slot, data, stamp)
            if framing.done or (closed and framing.eof()):
                self._end(slot, now, stamps[-1] if stamps else now)
            elif closed:
                self.broken(slot, now, "reset" if framing.status is None else "partial",
                            "the server closed the connection")
            elif not slot.watched and slot.reply is reply:
                slot.wait_for(self.pacing.wait_bytes(slot))
                slot.look_at = self.pacing.look_at(slot, now)
        except BadAnswer as error:
            self.broken(slot, now, "malformed", str(error))

    def _take(self, slot: Slot, parts: list[bytes], stamps: list[float]) -> None:
        """Parts of a running stream."""
        stream = slot.stream
        if not slot.watched:
            slot.size += sum(map(len, parts))
            stream.take(slot.framing, parts, stamps)
        elif self.pacing.enabled and stream.counting:
            known = len(stream.counts)
            stream.take(slot.framing, parts, stamps)
            self.pacing.saw_parts(parts, stream.counts[known - 1:], stream.times[known - 1:])
        else:
            stream.take(slot.framing, parts, stamps)

    def _take_careful(self, slot: Slot, data: bytes, now: float) -> None:
        """Bytes where all is looked at: the head of an answer, an error's body, an answer that isn't chunked."""
        framing = slot.framing
        taken = slot.stream.begin(framing, data, now)
        if taken == len(data) > 0:
            slot.plain, slot.size = True, len(data) - data.index(b"\r\n\r\n")
            return
        data = data[taken:]
        begun, size = framing.status is not None, len(data)
        while data:
            cut = data.find(sse.CHUNK_OF_EVENTS) + len(sse.CHUNK_OF_EVENTS)
            piece, data = (data[:cut], data[cut:]) if cut >= len(sse.CHUNK_OF_EVENTS) else (data, b"")
            payload = framing.feed(piece)
            if payload and framing.status == 200:
                slot.size += len(payload)
                slot.stream.feed(payload, now)
            elif payload:
                assert slot.reply is not None
                slot.reply.detail = (slot.reply.detail + payload.decode("utf-8", "replace"))[:2000]
            elif not begun and framing.status == 200 and not data:
                self.pacing.head_bytes = size
            slot.plain = framing.status == 200 and framing.between_chunks and bool(slot.stream.times)
            if data and slot.plain:
                self._take(slot, [data], [now])
                return

    def _end(self, slot: Slot, now: float, arrived: float) -> None:
        """The answer is complete since `arrived`: replace the request. A good one is accounted for by the next look."""
        done, framing, stream = slot.reply, slot.framing, slot.stream
        assert done is not None
        slot.used, slot.plain = True, False
        self.pacing.ended += 1
        if not framing.reusable:
            self._drop(slot)
        self._ended.append((done, framing.status, stream, arrived))
        failed = framing.status != 200 or stream.error is not None
        if failed:
            self.account()
        self._free(slot, now, failed)

    def account(self) -> None:
        """Bring the answers that are complete to the books."""
        for done, status, stream, ended in self._ended:
            self.tally.ended(done, status, stream, ended)
        self._ended.clear()

    def broken(self, slot: Slot, now: float, kind: str, detail: str) -> None:
        """The connection failed. A kept-alive one that was closed before any byte of the answer is tried again."""
        done, framing, stream = slot.reply, slot.framing, slot.stream
        assert done is not None
        stale = slot.used and framing.status is None
        slot.plain = False
        self._drop(slot)
        self.account()
        if kind == "reset" and stale and done.attempts <= self.load.retries:
            done.attempts += 1
            self.tally.kinds["retry"] += 1
            self._send(slot, now, sse.TokenStream(done.wanted_tokens), done)
            return
        self._free(slot, now, failed=True)
        self.tally.broke(done, framing.status, stream, now, kind, detail)

    # Sending

    def start(self, slot: Slot, now: float, due: float | None = None) -> None:
        """Send the next request on a free slot; it was `due` when it is sent, if no time is given."""
        index, wanted, slot.request = self.source.next()
        if slot.number < MOST_WATCHED and self.pacing.enabled:
            slot.watched = slot.number < self.pacing.watch
        sent = time.monotonic()
        stream = sse.TokenStream(wanted)
        self._send(slot, now, stream, Reply(index, wanted, due=sent if due is None else due, sent=sent,
                                            watched=slot.watched, times=stream.times, counts=stream.counts))

    def resume(self, now: float) -> None:
        """Start requests of connections that have paused after an error for long enough."""
        if not self.pausing:
            return
        due = [slot for at, slot in self.pausing if at <= now]
        self.pausing = [(at, slot) for at, slot in self.pausing if at > now]
        for slot in due:
            self.start(slot, now)

    def _free(self, slot: Slot, now: float, failed: bool) -> None:
        """A slot without a request: in a closed loop it gets the next one, after errors with a pause."""
        slot.reply, slot.state = None, IDLE
        if not self.closed_loop:
            return
        if failed:
            pause = min(BACKOFF_S[0] * 2 ** min(self.tally.errors_in_row, 10), BACKOFF_S[1])
            self.pausing.append((now + pause, slot))
        else:
            self.start(slot, now)

    def _send(self, slot: Slot, now: float, stream: sse.TokenStream, new: Reply) -> None:
        slot.reply, slot.framing, slot.stream = new, Framing(), stream
        slot.out, slot.parts, slot.stamps = slot.request, [], []
        slot.size, slot.look_at = 0, now + LONGEST_S
        if slot.sock is None:
            self._connect(slot, now)
        else:
            slot.state = READING
            self._flush(slot, now)

    def _connect(self, slot: Slot, now: float) -> None:
        sock = socket.socket(self.family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        slot.sock, slot.fd, slot.receive = sock, sock.fileno(), sockets.receiver(sock)
        slot.used, slot.state = False, CONNECTING
        self.by_fd[slot.fd] = slot
        slot.interest = select.POLLIN | select.POLLOUT
        self.poller.register(slot.fd, slot.interest)
        error = sock.connect_ex(self.address)
        if error and error != errno.EINPROGRESS:
            self.broken(slot, now, "connect", os.strerror(error))

    def _progress(self, slot: Slot, mask: int, now: float) -> None:
        """A connection that is being made, has request bytes left to send, or has nothing in flight."""
        assert slot.sock is not None
        if slot.state == CONNECTING:
            error = slot.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self.broken(slot, now, "connect", os.strerror(error))
                return
            slot.state = READING
            self._flush(slot, now)
        elif slot.state == IDLE:  # the peer closed a kept-alive connection
            self._drop(slot)
        elif mask & select.POLLOUT:
            self._flush(slot, now)
        else:
            slot.out = b""  # an answer, or the end, before the whole request was taken
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
            slot.close()
