"""The power meters by name, and the choice of one that works on this host. A new meter is one line in METERS."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from autotune.power.cpu_time import CpuTimeMeter
from autotune.power.meter import Meter, MeterUnavailable, NoMeter, Powered, PowerSettings
from autotune.power.nvml import NvmlMeter
from autotune.power.rapl import RaplMeter
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

    `trace` is the file for sampled power (power.csv). Raises MeterUnavailable when the named source does not
    work and UsageError for an unknown one; `auto` always finds one (`none` at last).
    """
    check_source(settings)
    if settings.source != "auto":
        return METERS[settings.source](settings, powered, trace), {}
    refused: dict[str, str] = {}
    for source, make in METERS.items():
        try:
            return make(settings, powered, trace), refused
        except MeterUnavailable as error:
            refused[source] = str(error)
    raise MeterUnavailable("no power meter is registered")
