"""What the load client needs of the operating system: a poller, files enough, and what its CPU time was."""

from __future__ import annotations

import resource
import select
import time
from typing import Any


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
