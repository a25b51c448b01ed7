"""The protocol of a power meter, its settings and errors.

A meter counts joules since some moment of its own; a window is the difference of two readings. It is opened
once per launch, names its source, and says why a window's energy must not be trusted. No meter ever reports 0 W
for want of a sensor: it then cannot be opened, or its energy is None.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

from autotune.records import AutotuneError, Energy, HostCannotRun, UsageError

SOURCES = ("nvml", "rapl", "cpu_time", "none")


class MeterUnavailable(HostCannotRun):
    """This host cannot measure in that way; the message says why and what would help."""


class DeviceLost(AutotuneError):
    """A device fell off the bus or needs a reset: nothing can be measured until a person has acted."""


@dataclasses.dataclass(frozen=True)
class PowerSettings:
    """How energy is measured.

    `source` is `auto` (the first of nvml, rapl, cpu_time that works) or one of nvml, rapl, cpu_time, none.
    `watts_per_core` is what a busy core is assumed to take (cpu_time only; None: no such assumption, and
    cpu_time is unavailable). `sample_s` is the interval of instantaneous samples; a gap in them above
    `max_gap_s`, or their integral off the counter by more than `tolerance` (a share), is a validity code; so
    is CPU time of other programs above `others`, a share of all cores (rapl and cpu_time; 1 allows it all).
    """

    source: str
    watts_per_core: float | None
    sample_s: float
    max_gap_s: float
    tolerance: float
    others: float

    def __post_init__(self) -> None:
        if self.source not in ("auto", *SOURCES):
            raise UsageError(f"power={self.source!r} is not one of auto, {', '.join(SOURCES)}")
        if self.watts_per_core is not None and self.watts_per_core <= 0:
            raise UsageError(f"watts_per_core={self.watts_per_core} must be above 0 (or null)")
        if not 0 <= self.others <= 1:
            raise UsageError(f"power.others={self.others} is not a share between 0 and 1")
        if self.sample_s < 0.05:
            raise UsageError(f"sample_s={self.sample_s}: drivers refresh power about every 0.1 s; use 0.05 or more")


@dataclasses.dataclass(frozen=True)
class Powered:
    """Whose energy: the server's root process, and its GPUs (UUIDs as `nvidia-smi -L` prints them)."""

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
    """A way to know joules. Use as a context manager: sampling runs between enter and exit.

    `read` raises DeviceLost; `energy` gives the window between two readings, with its validity codes.
    """

    source: str

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None: ...

    def read(self) -> Reading: ...

    def energy(self, start: Reading, end: Reading) -> Energy: ...


class NoMeter:
    """No energy: the objective is then tokens per second."""

    source = "none"

    def __init__(self, settings: PowerSettings, powered: Powered, trace: pathlib.Path | None) -> None:
        del settings, powered, trace

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        return None

    def read(self) -> Reading:
        return Reading(time.monotonic(), {})

    def energy(self, start: Reading, end: Reading) -> Energy:
        return Energy(source="none", joules=None, window_s=end.t - start.t)
