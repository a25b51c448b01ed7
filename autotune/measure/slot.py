"""One connection of the load client, and the request that is in flight on it."""

from __future__ import annotations

import select
import socket

from autotune.framing import Framing
from autotune.measure import sse
from autotune.measure.reply import Reply
from autotune.measure.system import Receive

CONNECTING, READING, IDLE = range(3)


class Slot:
    """State that `load.Load` moves. `interest` is what the poller watches for on `fd`; `parts` is what was read and
    not yet digested, at the times `stamps`; `plain` says that more of a running stream comes next. A `watched` slot is
    always read at once; a `resting` one is not polled until its look number `look` is due."""

    __slots__ = ("fd", "framing", "interest", "look", "out", "parts", "plain", "receive", "reply", "request", "resting",
                 "sock", "stamps", "state", "stream", "used", "watched")

    def __init__(self, watched: bool = True) -> None:
        self.watched = watched
        self.resting = False
        self.look = 0
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

    def close(self) -> None:
        """Close the socket; the slot can be connected again."""
        if self.sock is not None:
            self.sock.close()
        self.sock, self.fd, self.receive = None, -1, _no_socket


def _no_socket() -> tuple[bytes, float]:
    raise OSError("no connection to read from")
