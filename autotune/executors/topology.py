"""What launches side by side are given: GPUs that lie together, with the CPU cores beside them, or groups of cores.

    layout = of_gpus(gpus)                  # NVML: NVLink, PCI and NUMA neighbours; or of_cores(2)
    chosen = layout.choose({0, 1, 5}, 2)    # two places that lie together, so that the others lie together as well
    with pinned(layout.cpus(chosen)):
        ...                                 # whatever this thread starts stays on these cores
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from autotune.engine.gpus import Gpu, topology
from autotune.records import HostCannotRun

NODE_CPUS = "sys/devices/system/node"
SIBLINGS = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclasses.dataclass(frozen=True)
class Unit:
    """The least that a launch is given: logical CPUs, and on a host with GPUs one of them (`index`: NVML's number)."""

    cpus: tuple[int, ...]
    gpu: Gpu | None = None
    index: int | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """A host's units, and how far apart each two are."""

    units: tuple[Unit, ...]
    apart: tuple[tuple[float, ...], ...]

    def choose(self, free: Collection[int], count: int) -> tuple[int, ...]:
        """`count` of the free units that lie together, and of several such choices one that leaves the rest together.

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


def of_gpus(gpus: Sequence[Gpu], root: pathlib.Path = pathlib.Path("/")) -> Layout:
    """Each GPU with its share of the cores beside it. Raises NoNvml."""
    known = topology(gpus)
    units = []
    for i, gpu in enumerate(gpus):
        alike = [j for j in range(len(gpus)) if known.cpus[j] == known.cpus[i]]
        parts = split(cores(known.cpus[i], root), len(alike))
        units.append(Unit(parts[alike.index(i)], gpu, known.index[i]))
    return Layout(tuple(units), known.distance)


def of_cores(count: int, root: pathlib.Path = pathlib.Path("/")) -> Layout:
    """`count` groups of whole cores, each on as few NUMA nodes as may be. Raises HostCannotRun for too few cores."""
    found = cores(os.sched_getaffinity(0), root)
    if len(found) < count:
        raise HostCannotRun(f"parallel.slots={count}, and this host has {len(found)} core"
                            f"{'s' if len(found) > 1 else ''} to share out")
    units = tuple(Unit(part) for part in split(found, count))
    return Layout(units, tuple(tuple(float(abs(a - b)) for b in range(count)) for a in range(count)))


def cores(usable: Collection[int], root: pathlib.Path = pathlib.Path("/")) -> list[tuple[int, ...]]:
    """The usable logical CPUs by physical core, cores of one NUMA node side by side."""
    node: Mapping[int, int] = {cpu: int(path.name.removeprefix("node"))
                               for path in sorted((root / NODE_CPUS).glob("node[0-9]*"))
                               for cpu in listed(_read(path / "cpulist"))}
    found = {tuple(sorted(({cpu, *listed(_read(root / SIBLINGS.format(cpu)))}) & set(usable))) for cpu in usable}
    return sorted(found, key=lambda core: (node.get(core[0], 0), core))


def split(found: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """`count` parts of nearly the same size; with fewer cores than that each part is all of them."""
    if len(found) < count:
        return [tuple(sorted(cpu for core in found for cpu in core))] * count
    ends = [round(len(found) * i / count) for i in range(count + 1)]
    return [tuple(sorted(cpu for core in found[a:b] for cpu in core)) for a, b in itertools.pairwise(ends)]


def listed(text: str) -> set[int]:
    """The numbers of a list as the kernel writes it: 0-3,8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low.isdecimal():
            found |= set(range(int(low), int(high or low) + 1))
    return found


@contextlib.contextmanager
def pinned(cpus: Collection[int]) -> Iterator[None]:
    """Keep this thread, and the processes and threads that it starts, on these logical CPUs. Empty: as it is."""
    before = os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
