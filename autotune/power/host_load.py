"""CPU time that other programs take of this host while a server is measured: they slow it, or it is billed for them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable

import psutil

from autotune.power.process_tree import ProcessTree

CODE = "host_busy"
EVERY_S = 2.0  # between two looks


@dataclasses.dataclass(frozen=True)
class Look:
    """CPU seconds of all cores since the host's start, and of our own processes (waited-for ones too)."""

    busy_s: float
    idle_s: float
    own_s: float

    def share_of_others(self, before: Look) -> float:
        """What others took since an earlier look, a share of all cores' time; what a hypervisor took is theirs."""
        busy, idle = self.busy_s - before.busy_s, self.idle_s - before.idle_s
        return max(0.0, busy - (self.own_s - before.own_s)) / (busy + idle) if busy + idle > 0 else 0.0


class HostLoad:
    """Looks at the host now and then between a meter's readings, which costs two passes over the process table.

    Ours are this process, what it started, and the server's tree, so also servers that the same tuner measures side by
    side. In a container the host is what it can see of it.
    """

    def __init__(self, tree: ProcessTree | None, limit: float) -> None:
        self._tree, self._limit = tree, limit
        self._looks: list[tuple[float, Look]] = []

    def glance(self, t: float) -> None:
        """Look at `t` (CLOCK_MONOTONIC seconds), the time of a reading, unless that was done shortly before."""
        if not self._looks or t - self._looks[-1][0] >= EVERY_S:
            self._looks.append((t, self.look()))

    def look(self) -> Look:
        """What has been used up by now."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # Linux counts them in user as well
        return Look(sum(times) - guests - idle, idle, _spent_s(self._ours()))

    def reasons(self, start: float, end: float) -> tuple[str, ...]:
        """`host_busy` when others took more than the limit between two readings, by the last looks until each."""
        if not self._looks:
            return ()
        before = next((look for t, look in reversed(self._looks) if t <= start), self._looks[0][1])
        after = next((look for t, look in reversed(self._looks) if t <= end), before)
        if after is before:
            after = self.look()
        return (CODE,) if after.share_of_others(before) > self._limit else ()

    def _ours(self) -> Iterable[psutil.Process]:
        me = psutil.Process()
        processes = [me, *me.children(recursive=True), *(self._tree.members() if self._tree else ())]
        return {process.pid: process for process in processes}.values()


def _spent_s(processes: Iterable[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])  # user, system, and both of children that were waited for
    return total
