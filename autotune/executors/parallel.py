"""Launches side by side on this host, each with GPUs and cores of its own: for screening, where they may disturb.

    slots = of(settings, bench)             # None: this host takes one launch at a time
    with slots.launch(server, folder, progress) as live: ...       # in several threads

A launch waits until as many GPUs as its configuration needs are free, the longest waiting one first. What neighbours do
to a measurement is measured (`neighbours.py`); whatever decides runs alone (`Slots.alone`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import threading
from collections import deque
from collections.abc import Iterator

from autotune.config.settings import Settings
from autotune.engine.command import build
from autotune.engine.gpus import Gpus
from autotune.engine.server import free_port
from autotune.executors.local import PLACED, Beside, LocalExecutor, LocalServer, Progress
from autotune.executors.preflight import fewest_gpus, side_by_side
from autotune.executors.topology import Layout, of_cores, of_gpus, pinned
from autotune.measure.correctness import Gate
from autotune.records import AutotuneError, Config

PORTS_APART = 64
"""Between the ports of two launches: engines take further ports near their own."""
START_S = 600.0
"""How long launches that are to be measured together wait for each other."""


class Ended(AutotuneError):
    """Another launch of this tuner failed or was interrupted."""


def of(settings: Settings, bench: LocalExecutor) -> ParallelExecutor | None:
    """The slots that `parallel.slots` asks for; None where that is one.

    Raises UsageError or HostCannotRun when this host has not so many.
    """
    count = side_by_side(settings, bench.gpus, bench.version)
    if count == 1:
        return None
    if settings.device == "cpu" or not bench.gpus.gpus:
        return ParallelExecutor(bench, of_cores(count), count)
    return ParallelExecutor(bench, of_gpus(bench.gpus.gpus), count, fewest_gpus(settings, bench.version))


@dataclasses.dataclass
class _Taken:
    """What one launch has."""

    units: tuple[int, ...]
    beside: Beside
    port: int = 0


class ParallelExecutor:
    """Implements `tune.Place`: at most `at_once` launches of at least `fewest` units each."""

    def __init__(self, bench: LocalExecutor, layout: Layout, at_once: int, fewest: int = 1) -> None:
        self.bench, self.layout, self.at_once, self.fewest = bench, layout, at_once, fewest
        self._free = set(range(len(layout.units)))
        self._taken: list[_Taken] = []
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._start: threading.Barrier | None = None

    @property
    def gate(self) -> Gate:
        return self.bench.gate

    @property
    def alone(self) -> LocalExecutor | ParallelExecutor:
        """Where one launch at a time is made: the whole host, or, where cores are what is shared out, one group."""
        if self.layout.units[0].gpu is not None:
            return self.bench
        return ParallelExecutor(self.bench, Layout(self.layout.units[:1], ((0.0,),)), 1)

    def units(self, config: Config) -> int:
        """GPUs, or groups of cores, that a configuration takes; more than there are it does not get."""
        if self.layout.units[0].gpu is None:
            return 1
        settings = self.bench.settings
        wanted = build(settings.engine, settings.space, config, device=settings.device, version=self.bench.version).gpus
        return min(wanted, len(self.layout.units))

    @contextlib.contextmanager
    def launch(self, config: Config, folder: pathlib.Path, progress: Progress) -> Iterator[LocalServer]:
        """Wait for a place, then as `Bench.launch`. Raises Ended once `end` was called."""

        def watched(stage: str, after_s: float) -> None:
            if self._ended:
                raise Ended("another launch of this tuner failed or was interrupted")
            progress(stage, after_s)

        with self._place(self.units(config), watched) as taken, pinned(self.layout.cpus(taken.units)):
            try:
                with self._bench(taken).launch(config, folder, watched) as live:
                    live.beside = taken.beside
                    if live.crash is not None:
                        self._leave_start()
                    yield live
            except BaseException:
                self._leave_start()
                raise

    def room(self) -> bool:
        """Whether the smallest launch could start now; not while a larger one waits."""
        with self._changed:
            return not self._waiting and len(self._taken) < self.at_once and len(self._free) >= self.fewest

    def check_room(self, folder: pathlib.Path) -> None:
        """Raises HostCannotRun when the disk of `folder` has no room for what these launches write."""
        self.bench.check_room(folder, self.at_once)

    def end(self) -> None:
        """End every launch: the threads that wait for a server, or measure it, get Ended."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._leave_start()

    @contextlib.contextmanager
    def together(self, count: int) -> Iterator[None]:
        """Within it, measurements begin when `count` servers are ready for theirs, or one of them is not to be."""
        self._start = threading.Barrier(count)
        try:
            yield
        finally:
            self._start = None

    @contextlib.contextmanager
    def _place(self, count: int, progress: Progress) -> Iterator[_Taken]:
        taken = self._wait(count, progress)
        try:
            yield taken
        finally:
            with self._changed:
                self._taken.remove(taken)
                self._free |= set(taken.units)
                self._count()
                self._changed.notify_all()

    def _wait(self, count: int, progress: Progress) -> _Taken:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                while self._waiting[0] is not ticket or len(self._free) < count or len(self._taken) >= self.at_once:
                    progress("waiting for a place", 0.0)
                    self._changed.wait(1.0)
                progress(PLACED, 0.0)
                units = self.layout.choose(self._free, count)
                taken = _Taken(units, Beside(self._together))
                self._free -= set(units)
                self._taken.append(taken)
                self._count()
                return taken
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _count(self) -> None:
        for taken in self._taken:
            taken.beside.now = len(self._taken) - 1
            taken.beside.most = max(taken.beside.most, taken.beside.now)

    def _together(self) -> None:
        if (start := self._start) is not None:
            with contextlib.suppress(threading.BrokenBarrierError):
                start.wait(START_S)

    def _leave_start(self) -> None:
        if (start := self._start) is not None:
            start.abort()

    def _bench(self, taken: _Taken) -> LocalExecutor:
        """This host as one launch sees it: its GPUs, and a port apart from the others'."""

        def port() -> int:
            with self._changed:
                others, found = [other.port for other in self._taken if other is not taken], free_port()
                while any(abs(found - other) < PORTS_APART for other in others):
                    found = free_port()
                taken.port = found
                return found

        units = [self.layout.units[i] for i in taken.units]
        if units[0].gpu is None:
            return dataclasses.replace(self.bench, port=port)
        gpus = Gpus(tuple(unit.gpu for unit in units if unit.gpu is not None), self.bench.gpus.driver)
        env = {"CUDA_VISIBLE_DEVICES": ",".join(str(unit.index) for unit in units), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return dataclasses.replace(self.bench, gpus=gpus, port=port, env=env)
