"""HTTP/1.1 of one server's answers on non-blocking sockets: request bytes, parser, poller, arrival times.

llhttp (httptools) parses; the kernel says when bytes arrived, so that reading late does not make them late.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import httptools

from autotune.utils.http import BadAnswer

NO_BODY_LIMIT = 65536  # bytes of interim answers, head, chunk sizes and trailers, without any of the body
READ_BYTES = 65536
SO_TIMESTAMPNS = 35  # Linux, socket(7); Python has no name for it
_TIMESPEC = struct.Struct("@ll")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_TIMESPEC.size)
CLOCK_STEP_S = 0.005  # the wall clock was set when it moved this much against the monotonic one: stamps are void

# Reads once: (bytes, CLOCK_MONOTONIC seconds at which the last of them arrived). Raises OSError.
Receive = Callable[[], tuple[bytes, float]]


def request(host: str, path: str, body: bytes) -> bytes:
    """A POST of a JSON body, ready to send; `host` is HOST:PORT."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", "Accept: text/event-stream",
             f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


class AnswerParser:
    """Parses the answers on one connection, one at a time; `next_answer` makes it ready for another.

    `status` is None until the head was read; `done`: the answer is complete; `reusable`: the connection may carry
    another request; `between_chunks`: the next byte begins a chunk, so that whole chunks need not be fed. `close`
    breaks the reference cycle with llhttp's callbacks, since the client runs without a garbage collector.
    """

    __slots__ = ("_body", "_no_body_bytes", "_parser", "_sized", "_surplus", "between_chunks", "chunked", "done",
                 "on_body", "reusable", "status")

    def __init__(self) -> None:
        self._body: list[bytes] = []
        self.on_body = self._body.append  # llhttp calls it directly, for each chunk
        self._parser: Any = httptools.HttpResponseParser(self)
        self.next_answer()

    def next_answer(self) -> None:
        self.status: int | None = None
        self.chunked = self.between_chunks = self._sized = self.done = self._surplus = False
        self.reusable = True
        self._no_body_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The pieces of the body in `data`, one per chunk; valid until the next call. Raises BadAnswer."""
        self._body.clear()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise BadAnswer(f"not HTTP/1.1: {error}: {data[:40]!r}") from error
        if self._surplus:
            raise BadAnswer("bytes after the end of the answer")
        # A line end after the body's own last two is not part of the body: it ends the chunk.
        self.between_chunks = self.chunked and bool(self._body) and data.endswith(b"\n\n\r\n") \
            and self._body[-1].endswith(b"\n\n")
        self._no_body_bytes = 0 if self._body else self._no_body_bytes + len(data)
        if self._no_body_bytes > NO_BODY_LIMIT:
            raise BadAnswer(f"more than {NO_BODY_LIMIT >> 10} KiB without any of the body")
        return self._body

    def eof(self) -> bool:
        """Note that the peer closed the connection. True if that ends the answer as it should."""
        self.reusable = False
        self.done = self.done or (self.status is not None and not self._sized)
        return self.done

    def close(self) -> None:
        self._parser = None

    def on_message_begin(self) -> None:
        self._surplus = self.done

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"transfer-encoding":
            self._sized = self.chunked = True
        elif name == b"content-length":
            self._sized = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:  # an interim answer is passed over
            self.status = status

    def on_message_complete(self) -> None:
        if self.status is not None:
            self.done = True
            self.reusable = self._parser.should_keep_alive()


def poller() -> Any:
    """epoll, or poll with epoll's unit of time where there is none (the bits for reading and writing are the same)."""
    if hasattr(select, "epoll"):
        return select.epoll()
    made = select.poll()
    return types.SimpleNamespace(register=made.register, modify=made.modify, unregister=made.unregister,
                                 poll=lambda timeout_s: made.poll(timeout_s * 1000))


def receiver(sock: socket.socket) -> Receive:
    """A reader of a connection that gives arrival times: the kernel's on Linux, else the time of the read."""
    read, clock = sock.recv, time.monotonic
    if not sys.platform.startswith("linux"):
        return lambda: (read(READ_BYTES), clock())
    sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    read_with, wall, unpack = sock.recvmsg, time.time, _TIMESPEC.unpack_from
    apart = wall() - clock()

    def receive() -> tuple[bytes, float]:
        nonlocal apart
        data, ancillary, _, _ = read_with(READ_BYTES, _ANCILLARY_BYTES)
        now = clock()
        if not ancillary:
            return data, now  # the end of a connection has no stamp
        seconds, nanoseconds = unpack(ancillary[0][2])
        moved, apart = wall() - now - apart, wall() - now
        return data, min(now, seconds + nanoseconds * 1e-9 - apart) if -CLOCK_STEP_S < moved < CLOCK_STEP_S else now

    return receive


def can_wait_for_bytes() -> bool:
    """True if the poller can report a connection only when so many bytes are there (Linux: SO_RCVLOWAT)."""
    with contextlib.suppress(OSError), socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 2)
        return sys.platform.startswith("linux") and sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 2
    return False
