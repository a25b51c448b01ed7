"""The power meters by name, and the choice of one that works on this host."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping

from autotune.power import cpu_time, nvml, rapl
from autotune.power.meter import SOURCES, Meter, MeterUnavailable, NoMeter, Powered, PowerSettings


def open_meter(settings: PowerSettings, powered: Powered, trace: pathlib.Path | None = None) -> tuple[
        Meter, dict[str, str]]:
    """The meter of `settings`, and for each source that auto passed over, why it does not work.

    `trace` is where sampled power goes (power.csv). Raises MeterUnavailable when the named source does not
    work; auto always finds one (`none` at last).
    """
    makers: Mapping[str, Callable[[PowerSettings, Powered, pathlib.Path | None], Meter]] = {
        "nvml": nvml.NvmlMeter, "rapl": rapl.RaplMeter, "cpu_time": cpu_time.CpuTimeMeter, "none": NoMeter}
    if settings.source != "auto":
        return makers[settings.source](settings, powered, trace), {}
    refused: dict[str, str] = {}
    for source in SOURCES[:-1]:
        try:
            return makers[source](settings, powered, trace), refused
        except MeterUnavailable as error:
            refused[source] = str(error)
    return NoMeter(settings, powered, trace), refused
