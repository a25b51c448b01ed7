"""Energy meters by name, and the choice of one that works on this host. A new meter is one line in METERS."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from autotune.power.cpu_meters import CpuTimeMeter, RaplMeter
from autotune.power.meter import Meter, MeterUnavailable, NoMeter, Powered, PowerSettings
from autotune.power.nvml import NvmlMeter
from autotune.records import UsageError

# `auto` takes the first that works.
METERS: dict[str, Callable[[PowerSettings, Powered, pathlib.Path | None], Meter]] = {
    "nvml": NvmlMeter,
    "rapl": RaplMeter,
    "cpu_time": CpuTimeMeter,
    "none": NoMeter,
}


def check_source(settings: PowerSettings) -> None:
    """Raises UsageError for a power source that is neither `auto` nor a registered meter."""
    if settings.source not in ("auto", *METERS):
        raise UsageError(f"power={settings.source!r} is not one of auto, {', '.join(METERS)}")


def open_meter(settings: PowerSettings, powered: Powered, trace: pathlib.Path | None = None) -> tuple[
        Meter, dict[str, str]]:
    """The meter of `settings`, and the reason for each source that `auto` passed over.

    `trace` is the file for sampled power (power.csv). Raises MeterUnavailable when the named source does not work;
    `auto` always finds one (`none` at last).
    """
    refused: dict[str, str] = {}
    for source in METERS if settings.source == "auto" else (settings.source,):
        try:
            return METERS[source](settings, powered, trace), refused
        except MeterUnavailable as error:
            refused[source] = str(error)
    raise MeterUnavailable(refused[settings.source])
