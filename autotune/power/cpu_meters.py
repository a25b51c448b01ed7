"""CPU energy: RAPL counters, or CPU seconds of the server's processes times an assumed number of watts per core.

Other programs that compete for CPU time spoil both: such a window is `host_busy`.
"""

from __future__ import annotations

import pathlib
import threading
import time
from typing import Self

import psutil

from autotune.power.host_load import HostLoad, ProcessTree
from autotune.power.meter import MeterUnavailable, Powered, PowerSettings, Reading, SamplingMeter, Trace
from autotune.records import Energy

DEVICE = "cpu"
POWERCAP = pathlib.Path("/sys/class/powercap")
REFRESH_S = 10.0


class CpuTimeMeter:
    """CPU seconds of the process tree of `powered.pid` times `watts_per_core`, for machines without a readable sensor.

    Always reported as assumed: it ranks configurations by CPU work per token and says nothing about real watts. A
    child's time counts once: as its own while it lives, and as its parent's `children` time after the parent has waited
    for it. A process that vanished without being waited for stays counted as last seen.
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


class RaplMeter(SamplingMeter):
    """Linux's powercap counters of all CPU packages and their DRAM, which only root can read on most systems.

    They include what other processes use. Domains inside a package (core, uncore) and psys are left out: they would
    count energy twice. Counters wrap after `max_energy_range_uj`, so a thread reads them every 10 s.
    """

    source = "rapl"

    def __init__(self, settings: PowerSettings, powered: Powered, trace: pathlib.Path | None,
                 root: pathlib.Path = POWERCAP) -> None:
        self._others = HostLoad(ProcessTree(powered.pid) if powered.pid else None, settings.others)
        self._domains = {f"{zone.name} {_text(zone / 'name')}": zone for zone in sorted(root.glob("*rapl*:*"))
                         if _text(zone / "name").startswith(("package", "dram"))}
        if not self._domains:
            raise MeterUnavailable(f"rapl: no CPU package under {root}")
        try:
            self._range = {name: _number(zone / "max_energy_range_uj") for name, zone in self._domains.items()}
            self._last = {name: _number(zone / "energy_uj") for name, zone in self._domains.items()}
        except (OSError, ValueError) as error:
            raise MeterUnavailable(f"rapl: cannot read the energy counters (root only, as a rule): {error}") from error
        self._micro = dict.fromkeys(self._domains, 0)
        self._lock = threading.Lock()
        super().__init__(Trace(trace, "watts,assumed"), REFRESH_S)

    def read(self) -> Reading:
        """Joules per package since the meter was made."""
        with self._lock:
            for name, zone in self._domains.items():
                try:
                    value = _number(zone / "energy_uj")
                except (OSError, ValueError):
                    continue  # the counter stands still for this window: reported as flat
                self._micro[name] += (value - self._last[name]) % (self._range[name] + 1)
                self._last[name] = value
            reading = Reading(time.monotonic(), {name: micro / 1e6 for name, micro in self._micro.items()})
            self._trace.watts(reading, assumed=False)
            self._others.record(reading.t)
            return reading

    def energy(self, start: Reading, end: Reading) -> Energy:
        per_device = {name: end.joules[name] - start.joules[name] for name in self._domains}
        flat = min(per_device.values()) <= 0
        return Energy(source=self.source, joules=None if flat else sum(per_device.values()), window_s=end.t - start.t,
                      reasons=("counter_flat",) if flat else self._others.reasons(start.t, end.t),
                      per_device_j=per_device, scope="CPU packages")

    def _sample(self) -> None:
        self.read()


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: pathlib.Path) -> int:
    return int(path.read_text("ascii"))
