"""NVIDIA GPUs of this host through NVML: identity, users, memory in use, topology. The only module that starts NVML."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from autotune.records import HostCannotRun, digest

T = TypeVar("T")
IDLE_SHARE = 0.05  # of a GPU's memory: a driver without users keeps less
NO_NVLINK = 100.0  # added to NVML's level of the common ancestor (0 to 50) for two GPUs without NVLink


class NoNvml(HostCannotRun):
    """NVML cannot be used on this host; the message says why and what helps."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU: its UUID (hashed wherever it is written), name and memory in GiB."""

    uuid: str
    name: str
    memory_gib: float

    @property
    def hashed(self) -> str:
        return f"{self.name} {digest(self.uuid, 8)}"


@dataclasses.dataclass(frozen=True)
class Gpus:
    """The GPUs that a server started here may use; `why_none` explains an empty list."""

    gpus: tuple[Gpu, ...]
    driver: str | None = None
    why_none: str = ""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Per GPU: NVML's index, the usable logical CPUs beside it, and its distance to each (0: itself)."""

    index: tuple[int, ...]
    cpus: tuple[frozenset[int], ...]
    distance: tuple[tuple[float, ...], ...]


def start_nvml() -> Any:
    """NVIDIA's binding, initialised until the process ends. Raises NoNvml."""
    try:
        import pynvml
    except ImportError as error:
        raise NoNvml("the package nvidia-ml-py is missing: pip install nvidia-ml-py") from error
    if not hasattr(pynvml, "_nvmlGetFunctionPointer"):
        raise NoNvml("an old package named pynvml hides NVIDIA's: pip uninstall pynvml && "
                     "pip install --force-reinstall nvidia-ml-py")
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError) as error:
        raise NoNvml(f"no NVIDIA driver answers: {error}") from error
    return pynvml


@contextlib.contextmanager
def session() -> Iterator[Any]:
    """NVIDIA's binding within the block. Raises NoNvml, also for an NVMLError in the block."""
    nvml = start_nvml()
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise NoNvml(f"NVML does not answer: {error}") from error
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def visible_gpus() -> Gpus:
    """All GPUs, limited to CUDA_VISIBLE_DEVICES when it is set. Never raises: `why_none` says what failed."""
    try:
        with session() as nvml:
            driver = str(nvml.nvmlSystemGetDriverVersion())
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            found = [Gpu(str(nvml.nvmlDeviceGetUUID(handle)), str(nvml.nvmlDeviceGetName(handle)),
                         nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30) for handle in handles]
    except NoNvml as error:
        return Gpus((), None, f"no NVIDIA GPU is visible here ({error})")
    kept = chosen(found, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Gpus(tuple(kept), driver, "" if kept else "CUDA_VISIBLE_DEVICES leaves no GPU")


def chosen(found: list[Gpu], variable: str | None) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; entries are indexes or UUID prefixes."""
    if variable is None:
        return found
    kept: list[Gpu] = []
    for entry in map(str.strip, variable.split(",")):
        match = [gpu for index, gpu in enumerate(found) if
                 (int(entry) == index if entry.isdecimal() else entry and gpu.uuid.startswith(entry))]
        if not match:
            break  # CUDA ignores everything after the first invalid entry
        kept += match[:1]
    return kept


def gpu_users(gpus: Gpus) -> list[str]:
    """Processes that compute on these GPUs or hold their memory, one sentence a GPU; [] when all are free."""
    uuids, found = [gpu.uuid for gpu in gpus.gpus], []
    used_mib = gpu_memory_used_mib(uuids)
    running = _read(uuids, lambda nvml, handle: {int(p.pid) for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)})
    for gpu in gpus.gpus:
        if pids := running.get(gpu.uuid):
            found.append(f"{gpu.hashed} is in use by {', '.join(map(process_text, sorted(pids)))}")
        elif (used := used_mib.get(gpu.uuid, 0.0)) > IDLE_SHARE * gpu.memory_gib * 1024:
            found.append(f"{gpu.hashed} has {used:.0f} MiB in use by processes that cannot be seen from here")
    return found


def gpu_memory_used_mib(uuids: Sequence[str]) -> dict[str, float]:
    """Memory in use per GPU in MiB, by UUID; a GPU that cannot be read is left out."""
    return _read(uuids, lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**20)


def _read(uuids: Sequence[str], metric: Callable[[Any, Any], T]) -> dict[str, T]:
    """`metric` of NVIDIA's binding and a GPU's handle, by UUID; a GPU that cannot be read is left out."""
    found: dict[str, T] = {}
    if not uuids:
        return found
    with contextlib.suppress(NoNvml), session() as nvml:
        for uuid in uuids:
            with contextlib.suppress(nvml.NVMLError):
                found[uuid] = metric(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    return found


def process_text(pid: int) -> str:
    """Pid, owner and the start of the command line of a process, as far as they are readable."""
    import psutil

    from autotune.utils.redact import Redactor

    try:
        process = psutil.Process(pid)
        line = " ".join(Redactor().argv(process.cmdline()))[:80] or process.name()
        return f"pid {pid} ({line}, user {process.username()})"
    except (psutil.Error, KeyError):
        return f"pid {pid}"


def topology(gpus: Sequence[Gpu]) -> Topology:
    """Topology of GPUs. A distance unknown to NVML counts as far, an unknown affinity as all CPUs. Raises NoNvml."""
    with session() as nvml:
        handles = [nvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus]
        return Topology(tuple(int(nvml.nvmlDeviceGetIndex(handle)) for handle in handles),
                        tuple(_cpus_beside(nvml, handle) for handle in handles),
                        tuple(tuple(_distance(nvml, a, b) for b in handles) for a in handles))


def _distance(nvml: Any, a: Any, b: Any) -> float:
    """0 for the same GPU; else NVML's level of the common ancestor, plus NO_NVLINK without NVLink."""
    if a is b:
        return 0.0
    level, apart = float(nvml.NVML_TOPOLOGY_SYSTEM), NO_NVLINK
    with contextlib.suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetP2PStatus(a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            apart = 0.0
    with contextlib.suppress(nvml.NVMLError):
        level = float(nvml.nvmlDeviceGetTopologyCommonAncestor(a, b))
    return level + apart


def _cpus_beside(nvml: Any, handle: Any) -> frozenset[int]:
    usable = frozenset(os.sched_getaffinity(0))
    with contextlib.suppress(nvml.NVMLError):
        masks = list(nvml.nvmlDeviceGetCpuAffinity(handle, max(usable) // 64 + 1))
        return frozenset(cpu for cpu in usable if masks[cpu // 64] >> (cpu % 64) & 1) or usable
    return usable
