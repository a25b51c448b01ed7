"""CPU use of this host during a window: the server's process tree, and other programs that slow it or are billed for.

The validity code of a window in which other programs took too much is `host_busy`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable

import psutil

CODE = "host_busy"
SAMPLE_S = 2.0  # least time between two samples


class ProcessTree:
    """Follows the processes that started from `root`, which leads a session of its own.

    A child that left the session is found while its parent lives, and remembered.
    """

    def __init__(self, root: int) -> None:
        self.root = root
        self._seen: set[int] = set()

    def members(self) -> list[psutil.Process]:
        """Live processes of the tree; one pass over the process table, some milliseconds."""
        inside = {pid for pid in psutil.pids() if self._in_session(pid)}
        outside = ({self.root} | self._seen) - (inside - {self.root})
        members: dict[int, psutil.Process] = {}
        for pid in inside | outside:
            with contextlib.suppress(psutil.Error):
                members[pid] = psutil.Process(pid)
                if pid in outside:
                    members.update((child.pid, child) for child in members[pid].children(recursive=True))
        self._seen = set(members)
        return list(members.values())

    def _in_session(self, pid: int) -> bool:
        try:
            return os.getsid(pid) == self.root
        except OSError:
            return False


@dataclasses.dataclass(frozen=True)
class CpuSample:
    """CPU seconds of all cores since boot, and of our own processes (including waited-for children)."""

    busy_s: float
    idle_s: float
    own_s: float

    def share_of_others(self, before: CpuSample) -> float:
        """Share of all cores' time that others took since an earlier sample; stolen time counts as theirs."""
        busy, idle = self.busy_s - before.busy_s, self.idle_s - before.idle_s
        return max(0.0, busy - (self.own_s - before.own_s)) / (busy + idle) if busy + idle > 0 else 0.0


class HostLoad:
    """Samples the host's CPU times beside a meter's readings; one sample is two passes over the process table.

    Our own processes are this one, its descendants, and the server's tree. In a container the host is what the
    container can see of it.
    """

    def __init__(self, tree: ProcessTree | None, limit: float) -> None:
        self._tree, self._limit = tree, limit
        self._samples: list[tuple[float, CpuSample]] = []

    def record(self, t: float) -> None:
        """Sample at `t` (CLOCK_MONOTONIC s), the time of a reading, unless the last sample is younger than 2 s."""
        if not self._samples or t - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((t, self.sample()))

    def sample(self) -> CpuSample:
        """CPU seconds used up to now."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # Linux counts them in user as well
        return CpuSample(sum(times) - guests - idle, idle, _spent_s(self._ours()))

    def reasons(self, start: float, end: float) -> tuple[str, ...]:
        """`host_busy` when others took more than the limit between two readings, by the last samples until each."""
        if not self._samples:
            return ()
        before = next((sample for t, sample in reversed(self._samples) if t <= start), self._samples[0][1])
        after = next((sample for t, sample in reversed(self._samples) if t <= end), before)
        if after is before:
            after = self.sample()
        return (CODE,) if after.share_of_others(before) > self._limit else ()

    def wait(self, seconds: float, tell: Callable[[str], None]) -> str:
        """Wait until others take no more than the limit, `seconds` at most; "" then, else what they take.

        `tell` gets the programs about every 2 s.
        """
        end, said = time.monotonic() + seconds, ""
        while True:
            before, spent = self.sample(), _spent_by_program()
            time.sleep(SAMPLE_S)
            share = self.sample().share_of_others(before)
            if share <= self._limit:
                return ""
            ours = {process.pid for process in self._ours()}
            more = {key: now - spent.get(key, now) for key, now in _spent_by_program().items() if key[0] not in ours}
            names = [f"{name} (pid {pid}, {100 * more[pid, name] / SAMPLE_S:.0f} % of a core)"
                     for pid, name in sorted(more, key=lambda key: -more[key])[:3] if more[pid, name] > SAMPLE_S / 20]
            said = f"other programs take {100 * share:.0f} % of this host's cores: {', '.join(names) or 'none visible'}"
            if time.monotonic() >= end:
                return said
            tell(said)

    def _ours(self) -> Iterable[psutil.Process]:
        me = psutil.Process()
        processes = [me, *me.children(recursive=True), *(self._tree.members() if self._tree else ())]
        return {process.pid: process for process in processes}.values()


def _spent_by_program() -> dict[tuple[int, str], float]:
    """CPU seconds of every visible process, by pid and name."""
    spent: dict[tuple[int, str], float] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            spent[process.pid, process.name()] = sum(process.cpu_times()[:2])
    return spent


def _spent_s(processes: Iterable[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])  # user, system, and both of children that were waited for
    return total
