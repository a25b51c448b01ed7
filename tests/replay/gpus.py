"""The replay's GPUs: what the server writes for the stand-in of NVIDIA's library (tests/fakes/nvml.c) to answer with.

Energy is the integral of power over told time, by which the library counts as well.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tests.replay.clock import Clock

# GPUs of one server differ; the mean is 1.
SPREAD = (1.012, 0.991, 1.004, 0.986, 1.009, 0.997, 1.013, 0.988)


class Gpus:
    """All GPUs of the host. `spec` is the table's section gpus, `folder` the replay's."""

    def __init__(self, folder: pathlib.Path, clock: Clock, spec: Mapping[str, Any]) -> None:
        self.clock, self.spec = clock, spec
        self.state, self.book = folder / "nvml", folder / "gpus.json"
        self.at, self.joules = clock.now(), [1000.0] * spec["count"]
        self.watts = [float(spec["idle_w"])] * spec["count"]
        self.used_mib = 0
        self.pids: list[int] = []
        if self.book.exists():
            kept = json.loads(self.book.read_text())
            self.joules, self.at, self.watts = kept["joules"], kept["at"], kept["watts"]

    def set(self, watts: float, used_mib: int | None = None, pids: Sequence[int] | None = None) -> None:
        """From now on the GPUs together draw `watts`; memory in use and processes as they were unless given."""
        now = self.clock.now()
        self.joules = [j + w * (now - self.at) for j, w in zip(self.joules, self.watts, strict=True)]
        count = self.spec["count"]
        self.at, self.watts = now, [watts / count * SPREAD[i % len(SPREAD)] for i in range(count)]
        self.used_mib = self.used_mib if used_mib is None else used_mib
        self.pids = self.pids if pids is None else list(pids)
        self._write()

    def idle(self) -> None:
        """No server: its memory is free and its processes are gone."""
        self.set(self.spec["idle_w"] * self.spec["count"], 0, [])

    def _write(self) -> None:
        spec = self.spec
        lines = [f"count {spec['count']}", f"driver {spec['driver']}", f"clock {self.clock.file}"]
        for i, watts in enumerate(self.watts):
            uuid = hashlib.sha256(f"replay {i}".encode()).hexdigest()
            told = {"uuid": f"GPU-{uuid[:8]}-{uuid[8:12]}-{uuid[12:16]}-{uuid[16:20]}-{uuid[20:32]}",
                    "name": spec["name"], "memory_mib": spec["memory_mib"], "used_mib": self.used_mib,
                    "power_mw": f"{watts * 1000:.0f}", "base_mj": f"{self.joules[i] * 1000:.0f}",
                    "since_s": f"{self.at:.6f}", "counter_mw": f"{watts * 1000:.0f}",
                    "temp": round(33 + watts / 25), "limit_mw": spec["limit_w"] * 1000}
            if self.pids:
                told["pids"] = self.pids[i % len(self.pids)]
            lines += [f"{i}.{key} {value}" for key, value in told.items()]
        _replace(self.book, json.dumps({"joules": self.joules, "at": self.at, "watts": self.watts}))
        _replace(self.state, "\n".join(lines) + "\n")


def _replace(path: pathlib.Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
