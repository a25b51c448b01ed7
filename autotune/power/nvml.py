"""GPU energy from NVIDIA's counter, cross-checked by sampled power.

The counter at both ends of a window is the measurement; a thread reads the field `POWER_INSTANT` of each GPU every
0.1 s to check it and to see throttling. Each metric is read by itself, so an unsupported one hides no other. NVML stays
initialised until the process ends: the counters may start anew when the driver unloads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from autotune.engine.gpus import NoNvml, start_nvml
from autotune.power.host_load import ProcessTree
from autotune.power.meter import DeviceLost, MeterUnavailable, Powered, PowerSettings, Reading, SamplingMeter, Trace
from autotune.records import Energy

SCOPE_GPU, SCOPE_MODULE = 0, 1
MIN_WINDOW_S = 5.0  # the counter is refreshed every 0.1 s or so: at 5 s both ends together are off by up to 4 %
SLOW_SHARE = 0.02  # share of samples with a slowdown bit that spoils a window
SLOWDOWNS = {"thermal_slowdown": 0x20 | 0x40, "power_brake": 0x80, "hw_slowdown": 0x08}
FOREIGN = "other_process_on_gpu"
DISTURBED = (*SLOWDOWNS, FOREIGN)
PROCESS_CHECK_S = 2.0
MODULE_ABOVE = 1.1  # a module (CPU and GPU) draws at least that much more than its GPU


class Sample(NamedTuple):
    """One reading of one GPU at CLOCK_MONOTONIC `t`; None where a metric gave nothing."""

    t: float
    watts: float | None
    module_watts: float | None
    temperature: float | None
    slowdowns: int | None


@dataclasses.dataclass
class Gpu:
    """One GPU of the server and its samples."""

    uuid: str
    handle: Any
    samples: list[Sample] = dataclasses.field(default_factory=list)
    foreign_pids: list[tuple[float, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    limit_w: float | None = None
    module: bool = False  # whether the module scope answers

    def between(self, start: float, end: float) -> list[Sample]:
        return [sample for sample in list(self.samples) if start <= sample.t <= end]


class NvmlMeter(SamplingMeter):
    """Meter over the GPUs of `powered.gpus` (UUIDs). Raises MeterUnavailable without driver, counter, or with MIG."""

    source = "nvml"

    def __init__(self, settings: PowerSettings, powered: Powered, trace: pathlib.Path | None) -> None:
        try:
            self._nvml = start_nvml()
        except NoNvml as error:
            raise MeterUnavailable(f"nvml: {error}") from error
        if not powered.gpus:
            raise MeterUnavailable("nvml: the server was given no GPU")
        super().__init__(Trace(trace, "watts,module_watts,temperature_c,slowdown_bits"), settings.sample_s)
        self._settings, self._checked = settings, 0.0
        self._tree = ProcessTree(powered.pid) if powered.pid is not None else None
        self._gpus = [self._open(uuid) for uuid in powered.gpus]
        self._lost: str | None = None

    def read(self) -> Reading:
        """Joules per UUID since the driver was loaded. Raises DeviceLost."""
        joules: dict[str, float] = {}
        for gpu in self._gpus:
            try:
                joules[gpu.uuid] = self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu.handle) / 1000
            except self._nvml.NVMLError as error:
                self._note(gpu, error)
        if self._lost:
            raise DeviceLost(self._lost)
        return Reading(time.monotonic(), joules if len(joules) == len(self._gpus) else {})

    def energy(self, start: Reading, end: Reading) -> Energy:
        """The window between two readings, with its validity codes."""
        length = end.t - start.t
        if not start.joules or not end.joules:
            return Energy(source=self.source, joules=None, window_s=length, reasons=("counter_failed",))
        counter = {uuid: end.joules[uuid] - start.joules[uuid] for uuid in end.joules}
        least = min(counter.values())
        broken = least <= 0
        reasons = ["counter_went_back" if least < 0 else "counter_flat"] if broken else []
        if length < MIN_WINDOW_S:
            reasons.append("window_too_short")
        sampled = self._integrals(start.t, end.t, module=False)
        per_device, scope, check = self._scoped(counter, sampled, start.t, end.t)
        if sampled is None:
            reasons.append("trace_gap")
        elif not broken and any(abs(check[u] - j) > self._settings.tolerance * max(j, check[u])
                                for u, j in per_device.items()):
            reasons.append("trace_disagrees")
        reasons += self._spoilers(start.t, end.t)
        return Energy(source=self.source, joules=None if broken else sum(per_device.values()), window_s=length,
                      reasons=tuple(reasons), per_device_j={} if broken else per_device, scope=scope,
                      cross_check_j=sum(check.values()) if sampled is not None else None,
                      temperature_c=self._temperatures(start.t, end.t),
                      power_limit_w={g.uuid: g.limit_w for g in self._gpus if g.limit_w is not None})

    def _scoped(self, counter: dict[str, float], sampled: dict[str, float] | None, start: float,
                end: float) -> tuple[dict[str, float], str, dict[str, float]]:
        """(joules per device, scope, cross-check). Where the counter is a whole module's (Grace), the GPU's
        sampled power is the energy, and the module's sampled power checks the counter's own kind of sum."""
        if sampled is None:
            return counter, "gpu", {}
        module = self._integrals(start, end, module=True)
        if module and all(module[u] > MODULE_ABOVE * sampled[u] for u in counter) and \
                all(abs(counter[u] - module[u]) < abs(counter[u] - sampled[u]) for u in counter):
            agrees = {u: sampled[u] * counter[u] / module[u] for u in counter}
            return sampled, "gpu, sampled (the counter is the module's)", agrees
        return counter, "gpu", sampled

    def _open(self, uuid: str) -> Gpu:
        nvml = self._nvml
        if uuid.startswith("MIG-"):
            raise MeterUnavailable(f"nvml: {uuid} is a MIG slice; energy is only known for whole GPUs: turn MIG off")
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError as error:
            raise MeterUnavailable(f"nvml: no GPU {uuid}: {error} (nvidia-smi -L lists them)") from error
        with contextlib.suppress(nvml.NVMLError):
            if nvml.nvmlDeviceGetMigMode(handle)[0] == 1:
                raise MeterUnavailable(f"nvml: {uuid} has MIG on; energy is only known for whole GPUs: turn it off")
        try:
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except nvml.NVMLError as error:
            raise MeterUnavailable(f"nvml: {uuid} has no energy counter: {error} (needs Volta or newer; "
                                   "virtual GPUs have none)") from error
        gpu = Gpu(uuid, handle)
        with contextlib.suppress(nvml.NVMLError):
            gpu.limit_w = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
        gpu.module = self._power(gpu, SCOPE_MODULE) is not None
        return gpu

    def _sample(self) -> None:
        now = time.monotonic()
        for gpu in self._gpus:
            self._sample_gpu(gpu)
        if now - self._checked >= PROCESS_CHECK_S:
            self._checked = now
            self._check_processes(now)

    def _sample_gpu(self, gpu: Gpu) -> None:
        watts = self._power(gpu, SCOPE_GPU)
        t = time.monotonic()
        module = self._power(gpu, SCOPE_MODULE) if gpu.module else None
        bits = self._try(gpu, self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        if bits is None:  # renamed in newer drivers
            bits = self._try(gpu, self._nvml.nvmlDeviceGetCurrentClocksEventReasons)
        heat = self._try(gpu, self._nvml.nvmlDeviceGetTemperature, self._nvml.NVML_TEMPERATURE_GPU)
        gpu.samples.append(Sample(t, watts, module, heat, bits))
        self._trace.row(t, gpu.uuid, [None if v is None else f"{v:g}" for v in (watts, module, heat, bits)])

    def _power(self, gpu: Gpu, scope: int) -> float | None:
        """Power now in W; None when this scope does not answer."""
        nvml = self._nvml
        values = self._try(gpu, nvml.nvmlDeviceGetFieldValues, [(nvml.NVML_FI_DEV_POWER_INSTANT, scope)])
        if values is None or values[0].nvmlReturn != nvml.NVML_SUCCESS:
            return None
        return float(values[0].value.uiVal) / 1000

    def _try(self, gpu: Gpu, call: Any, *args: Any) -> Any:
        try:
            return call(gpu.handle, *args)
        except self._nvml.NVMLError as error:
            self._note(gpu, error)
            return None

    def _note(self, gpu: Gpu, error: Any) -> None:
        if error.value in (self._nvml.NVML_ERROR_GPU_IS_LOST, self._nvml.NVML_ERROR_RESET_REQUIRED):
            self._lost = f"GPU {gpu.uuid}: {error}: it needs a reset or a reboot before anything can be measured"

    def _check_processes(self, now: float) -> None:
        """Note foreign processes on each GPU, unless NVML gives process ids of another namespace."""
        if self._tree is None:
            return
        ours: set[int] | None = None
        for gpu in self._gpus:
            listed = self._try(gpu, self._nvml.nvmlDeviceGetComputeRunningProcesses)
            if not listed:
                continue
            if ours is None:
                ours = {p.pid for p in self._tree.members()} | {os.getpid()}
            pids = {int(p.pid) for p in listed}
            if pids & ours:  # else another namespace, as in some containers
                gpu.foreign_pids.append((now, tuple(sorted(pids - ours))))

    def _integrals(self, start: float, end: float, module: bool) -> dict[str, float] | None:
        """Joules per GPU by the trapezoidal rule; None when samples are missing, also at the ends."""
        found: dict[str, float] = {}
        for gpu in self._gpus:
            points = [(sample.t, watts) for sample in list(gpu.samples)
                      if (watts := sample.module_watts if module else sample.watts) is not None]
            joules = integrate(points, start, end, self._settings.max_gap_s)
            if joules is None:
                return None
            found[gpu.uuid] = joules
        return found

    def _spoilers(self, start: float, end: float) -> list[str]:
        found: list[str] = []
        for gpu in self._gpus:
            inside = gpu.between(start, end)
            for name, mask in SLOWDOWNS.items():
                slow = sum(1 for sample in inside if (sample.slowdowns or 0) & mask)
                if slow > SLOW_SHARE * len(inside) and not (name == "hw_slowdown" and found):
                    found.append(name)
            if any(others for t, others in gpu.foreign_pids if start - PROCESS_CHECK_S <= t <= end):
                found.append(FOREIGN)
        return list(dict.fromkeys(found))

    def _temperatures(self, start: float, end: float) -> Mapping[str, tuple[float, float]]:
        heats = {gpu.uuid: [float(sample.temperature) for sample in gpu.between(start, end)
                            if sample.temperature is not None] for gpu in self._gpus}
        return {uuid: (heat[0], heat[-1]) for uuid, heat in heats.items() if heat}


def integrate(points: Sequence[tuple[float, float]], start: float, end: float, max_gap: float) -> float | None:
    """Integral of samples (t in s, W) over [start, end] in J, linear in between and level for up to `max_gap`
    beyond the first and last; None when neighbouring samples, or the ends, are further apart than that."""
    inside = [p for p in points if start < p[0] < end]
    before = [p for p in points if p[0] <= start][-1:]
    after = [p for p in points if p[0] >= end][:1]
    if not inside and not (before and after):
        return None
    nodes = before + inside + after
    if nodes[0][0] - start > max_gap or end - nodes[-1][0] > max_gap:
        return None
    if any(b[0] - a[0] > max_gap for a, b in zip(nodes, nodes[1:], strict=False)):
        return None
    total = 0.0
    if nodes[0][0] > start:
        total += nodes[0][1] * (nodes[0][0] - start)
    if nodes[-1][0] < end:
        total += nodes[-1][1] * (end - nodes[-1][0])
    for (t0, w0), (t1, w1) in zip(nodes, nodes[1:], strict=False):
        a, b = max(t0, start), min(t1, end)
        slope = (w1 - w0) / (t1 - t0) if t1 > t0 else 0.0
        total += (b - a) * (w0 + slope * ((a + b) / 2 - t0))
    return total
