"""The GPUs and cores of a host: which lie together, which a launch is pinned to, and locks against other tuners.

    layout = of_gpus(gpus)                  # by NVLink, PCI and NUMA, from NVML; or of_cores(2)
    chosen = layout.choose({0, 1, 5}, 2)    # two units that lie together and leave others together
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from autotune.engine.gpus import Gpu, topology
from autotune.records import AutotuneError, HostCannotRun, digest
from autotune.utils.files import no_link

NODE_CPUS = "sys/devices/system/node"
SIBLINGS = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
ROOT = pathlib.Path("/")


@dataclasses.dataclass(frozen=True)
class Unit:
    """The smallest share of a host: logical CPUs, and on a host with GPUs one GPU (`index`: its number in NVML)."""

    cpus: tuple[int, ...]
    gpu: Gpu | None = None
    index: int | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """The units of a host and the distance between each two."""

    units: tuple[Unit, ...]
    apart: tuple[tuple[float, ...], ...]

    def choose(self, free: Collection[int], count: int) -> tuple[int, ...]:
        """`count` free units that lie together; of equal choices, one that leaves the others together.

        Raises ValueError when fewer are free.
        """
        if count > len(free):
            raise ValueError(f"{count} units of {len(free)} free ones")
        rest = sorted(free)
        return min(itertools.combinations(rest, count), key=lambda chosen: (
            self._width(chosen), self._width([i for i in rest if i not in chosen]), chosen))

    def cpus(self, chosen: Iterable[int]) -> set[int]:
        """The logical CPUs of some units."""
        return {cpu for i in chosen for cpu in self.units[i].cpus}

    def _width(self, chosen: Sequence[int]) -> float:
        return sum(self.apart[a][b] for a, b in itertools.combinations(chosen, 2))


def of_gpus(gpus: Sequence[Gpu]) -> Layout:
    """Each GPU with its share of the nearest cores. Raises NoNvml."""
    known, units = topology(gpus), list[Unit]()
    for i, gpu in enumerate(gpus):
        alike = [j for j in range(len(gpus)) if known.cpus[j] == known.cpus[i]]
        parts = split(cores(known.cpus[i]), len(alike))
        units.append(Unit(parts[alike.index(i)], gpu, known.index[i]))
    return Layout(tuple(units), known.distance)


def of_cores(count: int) -> Layout:
    """`count` groups of whole cores, each on as few NUMA nodes as possible. Raises HostCannotRun for too few cores."""
    found = cores(os.sched_getaffinity(0))
    if len(found) < count:
        raise HostCannotRun(f"parallel.slots={count}, and this host has {len(found)} core"
                            f"{'s' if len(found) > 1 else ''} to share out")
    units = tuple(Unit(part) for part in split(found, count))
    return Layout(units, tuple(tuple(float(abs(a - b)) for b in range(count)) for a in range(count)))


def cores(usable: Collection[int], root: pathlib.Path = ROOT) -> list[tuple[int, ...]]:
    """The usable logical CPUs by physical core, cores of one NUMA node side by side."""
    node = {cpu: int(path.name.removeprefix("node")) for path in sorted((root / NODE_CPUS).glob("node[0-9]*"))
            for cpu in listed(path / "cpulist")}
    found = {tuple(sorted({cpu, *listed(root / SIBLINGS.format(cpu))} & set(usable))) for cpu in usable}
    return sorted(found, key=lambda core: (node.get(core[0], 0), core))


def split(found: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """`count` parts of nearly the same size; with fewer cores than parts, each part is all of them."""
    ends = [round(len(found) * i / count) for i in range(count + 1)]
    parts = [found[a:b] for a, b in itertools.pairwise(ends)] if len(found) >= count else [found] * count
    return [tuple(sorted(cpu for core in part for cpu in core)) for part in parts]


def listed(path: pathlib.Path) -> set[int]:
    """The numbers of a file with a list in the kernel's notation, such as 0-3,8. Empty for a missing file."""
    ranges: list[tuple[str, str]] = []
    with contextlib.suppress(OSError):
        ranges = re.findall(r"(\d+)(?:-(\d+))?", path.read_text())
    return {number for low, high in ranges for number in range(int(low), int(high or low) + 1)}


@contextlib.contextmanager
def pinned(cpus: Collection[int]) -> Iterator[None]:
    """Keep this thread, and what it starts, on these logical CPUs. Empty: no change."""
    before = os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def locked(gpus: Sequence[Gpu]) -> Iterator[None]:
    """Hold the locks of `gpus`, one file each. Raises AutotuneError with the pid of the process that holds one."""
    with contextlib.ExitStack() as held:
        for gpu in sorted(gpus, key=lambda g: g.uuid):
            path = pathlib.Path(tempfile.gettempdir(), f"autotune-gpu-{digest(gpu.uuid, 16)}.lock")
            try:
                held.enter_context(exclusive(path, lambda pid, gpu=gpu: (  # type: ignore[misc]
                    f"{gpu.hashed} is used by another autotune (pid {pid}): wait for it, or choose other GPUs with "
                    "CUDA_VISIBLE_DEVICES")))
            except OSError:
                raise AutotuneError(f"cannot open {path}, the lock of a GPU: remove it if nobody uses that GPU"
                                    ) from None
        yield


@contextlib.contextmanager
def exclusive(path: pathlib.Path, refusal: Callable[[str], str]) -> Iterator[None]:
    """Hold the lock file `path`, which says this pid; the kernel releases it when the process dies.

    Raises AutotuneError(refusal(pid)) while another process holds it, OSError when it cannot be opened.
    """
    with contextlib.ExitStack() as held:
        descriptor = _open(path)
        held.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 100, 0).decode("utf-8", "replace").strip()
            raise AutotuneError(refusal(holder or "unknown")) from None
        with contextlib.suppress(OSError):  # the file of another user may be locked, not written
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield


def _open(path: pathlib.Path) -> int:
    """Open or create a file, never through a link; read-only where it belongs to another user. Raises OSError."""
    for flags in (os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR):
        with contextlib.suppress(OSError):
            return no_link(str(path), flags)
    return no_link(str(path), os.O_RDONLY)
