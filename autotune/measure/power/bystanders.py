"""CPU time that other programs take of this host while a server is measured: they slow it, or it is billed for them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable

import psutil

from autotune.measure.power.tree import ProcessTree

CODE = "host_busy"


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


class Bystanders:
    """Looks at the host at each reading of a meter; ours are this process, what it started, and the server's tree.

    Servers that the same tuner measures side by side are ours too. In a container the host is what it can see of it.
    """

    def __init__(self, tree: ProcessTree | None, limit: float) -> None:
        self._tree, self._limit = tree, limit
        self._looks: dict[float, Look] = {}

    def look(self, t: float) -> Look:
        """Remember what was used up at `t` (CLOCK_MONOTONIC seconds), the time of a reading."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # Linux counts them in user as well
        self._looks[t] = Look(sum(times) - guests - idle, idle, _spent_s(self._ours()))
        return self._looks[t]

    def reasons(self, start: float, end: float) -> tuple[str, ...]:
        """`host_busy` when others took more than the limit between two readings."""
        looks = self._looks
        if start not in looks or end not in looks:
            return ()
        return (CODE,) if looks[end].share_of_others(looks[start]) > self._limit else ()

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
