"""CPU package energy from Linux's powercap files (RAPL), which only root can read on most systems."""

from __future__ import annotations

import pathlib
import threading
import time

from autotune.power.host_load import HostLoad, ProcessTree
from autotune.power.meter import MeterUnavailable, Powered, PowerSettings, Reading, SamplingMeter, Trace
from autotune.records import Energy

ROOT = pathlib.Path("/sys/class/powercap")
REFRESH_S = 10.0


class RaplMeter(SamplingMeter):
    """Meter over all CPU packages and their DRAM, including what other processes of the machine use.

    Domains inside a package (core, uncore) and psys are left out: they would count energy twice.
    Counters wrap after `max_energy_range_uj`, so a thread reads them every 10 s.
    """

    source = "rapl"

    def __init__(self, settings: PowerSettings, powered: Powered, trace: pathlib.Path | None,
                 root: pathlib.Path = ROOT) -> None:
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
