"""CPU seconds of the server's processes times an assumed number of watts per core.

For machines without a readable sensor. Always reported as assumed: it ranks configurations by CPU work per token and
says nothing about real watts. A server that competes with other programs for CPU time is measured wrongly: such a
window is `host_busy`.
"""

from __future__ import annotations

import pathlib
import time
from typing import Self

import psutil

from autotune.power.host_load import HostLoad, ProcessTree
from autotune.power.meter import MeterUnavailable, Powered, PowerSettings, Reading, Trace
from autotune.records import Energy

DEVICE = "cpu"


class CpuTimeMeter:
    """Meter over the process tree of `powered.pid`: its descendants and everything in its session.

    A child's time counts once: as its own while it lives, and as its parent's `children` time after the parent has
    waited for it. A process that vanished without being waited for stays counted as last seen.
    """

    source = "cpu_time"

    def __init__(self, settings: PowerSettings, powered: Powered, trace: pathlib.Path | None) -> None:
        if settings.watts_per_core is None:
            raise MeterUnavailable("cpu_time: set power.watts_per_core to what a busy core of this machine takes")
        if powered.pid is None:
            raise MeterUnavailable("cpu_time: the server's process id is not known")
        self._watts, self._tree = settings.watts_per_core, ProcessTree(powered.pid)
        self._others = HostLoad(self._tree, settings.others)
        self._trace = Trace(trace, "watts,assumed")
        self._seen: dict[tuple[int, float], tuple[float, float, int]] = {}  # own + children, children, parent
        self._total = 0.0
        self._last_t = time.time()

    def __enter__(self) -> Self:
        self._trace.open()
        self.read()
        return self

    def __exit__(self, *error: object) -> None:
        self._trace.close()

    def read(self) -> Reading:
        """CPU joules since the first reading. One pass over the process table: some milliseconds."""
        now = time.time()
        seen: dict[tuple[int, float], tuple[float, float, int]] = {}
        for process in self._tree.members():
            try:
                with process.oneshot():
                    times, created, parent = process.cpu_times(), process.create_time(), process.ppid()
            except psutil.Error:
                continue
            children = times.children_user + times.children_system
            seen[process.pid, created] = (times.user + times.system + children, children, parent)
        self._total += self._growth(seen)
        self._seen, self._last_t = seen, now
        reading = Reading(time.monotonic(), {DEVICE: self._total * self._watts})
        self._others.record(reading.t)
        self._trace.watts(reading, assumed=True)
        return reading

    def energy(self, start: Reading, end: Reading) -> Energy:
        joules = end.joules[DEVICE] - start.joules[DEVICE]
        reasons = self._others.reasons(start.t, end.t) if joules > 0 else ("counter_flat",)
        return Energy(source=self.source, joules=joules if joules > 0 else None, window_s=end.t - start.t,
                      assumed=True, reasons=reasons, per_device_j={DEVICE: joules} if joules > 0 else {},
                      scope="server processes")

    def _growth(self, seen: dict[tuple[int, float], tuple[float, float, int]]) -> float:
        growth = 0.0
        absorbed = {key[0]: value[1] - self._seen[key][1] for key, value in seen.items() if key in self._seen}
        for key, (total, _, _) in seen.items():
            if key in self._seen:
                growth += total - self._seen[key][0]
            elif self._seen and key[1] >= self._last_t - 1:  # born since the last reading
                growth += total
        for key, (total, _, parent) in self._seen.items():
            if key not in seen and absorbed.get(parent, 0.0) >= total:
                growth -= total  # its parent has waited for it and now carries its time
                absorbed[parent] -= total
        return max(0.0, growth)
