"""What the load client needs of the operating system: a poller, arrival times, files enough, what its CPU time was."""

from __future__ import annotations

import resource
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

READ_BYTES = 65536
SO_TIMESTAMPNS = 35
"""Of Linux (socket(7)); Python has no name for it."""
_TIMESPEC = struct.Struct("@ll")
_BESIDE = socket.CMSG_SPACE(_TIMESPEC.size)

SET_S = 0.005
"""A wall clock that moved so much against the monotonic one was set: stamps of before are worth nothing."""

Receive = Callable[[], tuple[bytes, float]]
"""Reads what is there: (bytes, CLOCK_MONOTONIC seconds at which the last of them arrived). Raises OSError."""


class _Poll:
    """select.poll with select.epoll's unit of time, for systems without epoll."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self.register, self.modify, self.unregister = self._poll.register, self._poll.modify, self._poll.unregister

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        return self._poll.poll(timeout * 1000)


def poller() -> Any:
    """epoll where there is one (its event bits for reading and writing are those of poll)."""
    return select.epoll() if hasattr(select, "epoll") else _Poll()


def receiver(sock: socket.socket) -> Receive:
    """How to read a connection with the times of arrival: the kernel's where it gives them (Linux), else the read's.

    A client that is busy, or was put aside by the scheduler, reads late; the kernel's stamp does not know of it.
    """
    read, clock = sock.recv, time.monotonic
    if not sys.platform.startswith("linux"):
        return lambda: (read(READ_BYTES), clock())
    sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    read_with, wall, unpack = sock.recvmsg, time.time, _TIMESPEC.unpack_from
    apart = wall() - clock()

    def receive() -> tuple[bytes, float]:
        nonlocal apart
        data, beside, _, _ = read_with(READ_BYTES, _BESIDE)
        now = clock()
        if not beside:
            return data, now  # the end of a connection has no stamp
        seconds, nanoseconds = unpack(beside[0][2])
        moved, apart = wall() - now - apart, wall() - now
        return data, min(now, seconds + nanoseconds * 1e-9 - apart) if -SET_S < moved < SET_S else now

    return receive


def can_wait_for_bytes() -> bool:
    """Whether the poller can be told to report a connection only when so many bytes are there (Linux: SO_RCVLOWAT)."""
    if not sys.platform.startswith("linux"):
        return False
    with socket.socket() as sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 2)
            return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 2
        except OSError:
            return False


def raise_file_limit(wanted: int) -> None:
    """Allow this process `wanted` open files, as far as the hard limit lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))


def cpu_s() -> float:
    """CPU seconds of this process, system calls included."""
    return time.process_time()


def run_queue_wait_s() -> float | None:
    """Seconds this process was ready to run and did not (Linux: /proc/self/schedstat); None elsewhere."""
    try:
        with open("/proc/self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None
