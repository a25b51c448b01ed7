"""One connection of the load client, and the request that is in flight on it."""

from __future__ import annotations

import select
import socket

from autotune.loadgen import sse
from autotune.loadgen.http1 import Framing
from autotune.loadgen.result import Reply
from autotune.loadgen.sockets import Receive

CONNECTING, READING, IDLE = range(3)


class Slot:
    """State that `exchanges.Exchanges` moves. `interest` is what the poller watches for on `fd`; `parts` is what was
    read and not yet digested, at the times `stamps`; `plain` says that more of a running stream comes next. A `watched`
    slot is always read at once; others when the kernel has `wait` bytes. `size` is the payload so far in bytes,
    it is read at `look_at` at the latest (CLOCK_MONOTONIC
    seconds)."""

    __slots__ = ("fd", "framing", "interest", "look_at", "number", "out", "parts", "plain", "receive", "reply",
                 "request", "size", "sock", "stamps", "state", "stream", "used", "wait", "watched")

    def __init__(self, number: int, watched: bool = True) -> None:
        self.number = number
        self.watched = watched
        self.wait = 1
        self.size = 0
        self.look_at = 0.0
        self.sock: socket.socket | None = None
        self.fd = -1
        self.interest = select.POLLIN
        self.receive: Receive = _no_socket
        self.state = IDLE
        self.parts: list[bytes] = []
        self.stamps: list[float] = []
        self.plain = False
        self.out = b""  # what is still to be sent
        self.request = b""
        self.used = False  # this connection has carried an answer before
        self.reply: Reply | None = None
        self.framing = Framing()
        self.stream = sse.TokenStream()

    def wait_for(self, size: int) -> None:
        """Have the kernel report this connection when `size` bytes are there, or its end."""
        if size != self.wait and self.sock is not None:
            self.wait = size
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def close(self) -> None:
        """Close the socket; the slot can be connected again."""
        if self.sock is not None:
            self.sock.close()
        self.sock, self.fd, self.receive, self.wait = None, -1, _no_socket, 1


def _no_socket() -> tuple[bytes, float]:
    raise OSError("no connection to read from")
