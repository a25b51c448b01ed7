"""The protocol of a power meter, its settings and errors.

A meter counts joules since some moment of its own; a window is the difference of two readings. It is opened
once per launch, names its source, and says why a window's energy must not be trusted. No meter reports 0 W
for want of a sensor: opening it fails, or its energy is None.
"""

from __future__ import annotations

import abc
import dataclasses
import pathlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Protocol, Self, TextIO

from msgspec import Meta

from autotune.records import AutotuneError, Energy, HostCannotRun
from autotune.utils.files import fresh
from autotune.utils.validation import NotNegative, Positive, Share


class MeterUnavailable(HostCannotRun):
    """This host cannot measure in that way; the message says why and what would help."""


class DeviceLost(AutotuneError):
    """A device fell off the bus or needs a reset: nothing can be measured until a person has acted."""


@dataclasses.dataclass(frozen=True)
class PowerSettings:
    """Choice and limits of the energy measurement (conf/power).

    source: `auto` (the first meter of the registry that works) or a meter's name.
    watts_per_core: W that a busy core is assumed to take (cpu_time only); None makes cpu_time unavailable.
    sample_s: interval of power samples. A gap above `max_gap_s`, or their integral off the counter by more than the
    share `tolerance`, is a validity code.
    others: share of all cores that other programs may take before a window is `host_busy` (rapl, cpu_time; 1: all).
    wait_s: longest wait for other programs to end after that, before the study stops with exit code 4.
    """

    source: str
    watts_per_core: Positive | None
    sample_s: Annotated[float, Meta(ge=0.05, description="0.05 s or more (drivers refresh power about every 0.1 s)")]
    max_gap_s: float
    tolerance: float
    others: Share
    wait_s: NotNegative


@dataclasses.dataclass(frozen=True)
class Powered:
    """The server whose energy is measured: its root process, and its GPUs (UUIDs as `nvidia-smi -L` prints them)."""

    pid: int | None
    gpus: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Reading:
    """Joules per device since a moment of the meter's own, at `t` (CLOCK_MONOTONIC seconds)."""

    t: float
    joules: Mapping[str, float]

    @property
    def total(self) -> float | None:
        return sum(self.joules.values()) if self.joules else None


class Meter(Protocol):
    """A source of joules. Use as a context manager: sampling runs between enter and exit.

    `read` raises DeviceLost; `energy` gives the window between two readings, with its validity codes.
    """

    source: str

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def read(self) -> Reading: ...

    def energy(self, start: Reading, end: Reading) -> Energy: ...


class NoMeter:
    """No energy: the objective is then tokens per second."""

    source = "none"

    def __init__(self, settings: PowerSettings, powered: Powered, trace: pathlib.Path | None) -> None:
        del settings, powered, trace

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def read(self) -> Reading:
        return Reading(time.monotonic(), {})

    def energy(self, start: Reading, end: Reading) -> Energy:
        return Energy(source="none", joules=None, window_s=end.t - start.t)


class SamplingMeter(abc.ABC):
    """Base of a meter whose `_sample` runs in a thread every `every_s` while the meter is open."""

    def __init__(self, trace: Trace, every_s: float) -> None:
        self._trace, self._every_s, self._stop = trace, every_s, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._trace.open()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._trace.close()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._sample()

    @abc.abstractmethod
    def _sample(self) -> None:
        """Read the device once."""


class Trace:
    """A meter's power.csv, written as samples come. Does nothing without a path."""

    def __init__(self, path: pathlib.Path | None, columns: str) -> None:
        self._path, self._columns = path, columns
        self._file: TextIO | None = None
        self._previous: Reading | None = None

    def open(self) -> None:
        """Start the file anew. Raises OSError."""
        if self._path:
            self._file = fresh(self._path).open("w", encoding="utf-8")
            self._file.write(f"t_s,device,{self._columns}\n")

    def close(self) -> None:
        if self._file:
            self._file.close()

    def row(self, t: float, device: str, cells: Sequence[object]) -> None:
        """One sample; an unknown value is an empty cell."""
        if self._file:
            self._file.write(f"{t:.3f},{device},{','.join('' if c is None else str(c) for c in cells)}\n")

    def watts(self, reading: Reading, assumed: bool) -> None:
        """Mean power per device since the previous reading."""
        previous, self._previous = self._previous, reading
        if previous and reading.t > previous.t:
            for device, joules in reading.joules.items():
                watts = (joules - previous.joules[device]) / (reading.t - previous.t)
                self.row(reading.t, device, (f"{watts:.3f}", int(assumed)))
