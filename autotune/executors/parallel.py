"""Several launches side by side on this host, each with GPUs and cores of its own, and the threads that make them.

A launch waits until as many GPUs as its configuration needs are free; the longest waiting one is next. Launches side by
side disturb each other (tuning/confirm.py measures by how much), so confirmation uses `ParallelExecutor.alone`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import pathlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from autotune.engine.command import build
from autotune.engine.gpus import Gpus
from autotune.engine.server import free_port
from autotune.executors.base import PLACED, WAITING, Executor, LaunchCancelled, Progress
from autotune.executors.local import LocalExecutor, LocalServer, Slot
from autotune.executors.preflight import Preflight, fewest_gpus, launches_at_once
from autotune.executors.topology import Layout, of_cores, of_gpus, pinned
from autotune.records import Config

PORTS_APART = 64  # between the ports of two launches: engines take further ports near their own
START_S = 600.0  # how long launches of `together` wait for each other


class LaunchPool:
    """Runs launches in threads, at most `executor.capacity` at once; with a capacity of one in the caller's thread.

    Leaving the block by an exception cancels every launch and waits for its end.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.running: set[concurrent.futures.Future[None]] = set()
        self._threads = None if executor.capacity == 1 else \
            concurrent.futures.ThreadPoolExecutor(executor.capacity, "launch")

    def __enter__(self) -> LaunchPool:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._threads is not None:
            if error is not None:
                self.executor.cancel()
            self._threads.shutdown()

    def has_room(self) -> bool:
        """True when another launch can start now. Raises the error of a launch that failed."""
        self._collect()
        return len(self.running) < self.executor.capacity and self.executor.has_room()

    def submit(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._threads is None:
            work(*arguments)
        else:
            self.running.add(self._threads.submit(work, *arguments))

    def wait(self, timeout_s: float) -> None:
        """Wait until a launch ends. Raises its error if it failed."""
        if not self.running:
            time.sleep(timeout_s)
        concurrent.futures.wait(self.running, timeout_s, concurrent.futures.FIRST_COMPLETED)
        self._collect()

    def _collect(self) -> None:
        for ended in [launch for launch in self.running if launch.done()]:
            self.running.discard(ended)
            ended.result()


def side_by_side(host: LocalExecutor) -> LocalExecutor | ParallelExecutor:
    """The executor that `parallel.slots` asks for on a host after its preflight.

    Raises UsageError or HostCannotRun when the host has too few GPUs or cores.
    """
    settings = host.settings
    count = launches_at_once(settings, host.gpus, host.version)
    if count == 1:
        return host
    if settings.device == "cpu" or not host.gpus.gpus:
        return ParallelExecutor(host, of_cores(count), count)
    return ParallelExecutor(host, of_gpus(host.gpus.gpus), count, fewest_gpus(settings, host.version))


class ParallelExecutor(Executor):
    """At most `capacity` launches of at least `fewest` units each: GPUs, or groups of cores on a host without them."""

    def __init__(self, host: LocalExecutor, layout: Layout, capacity: int, fewest: int = 1) -> None:
        self.host, self.layout, self.capacity, self.fewest = host, layout, capacity, fewest
        self.settings = host.settings
        self._free = set(range(len(layout.units)))
        self._taken: list[Slot] = []
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        self._start: threading.Barrier | None = None

    @property
    def alone(self) -> Executor:
        """An executor for launches without neighbours: the whole host, or one group where cores are shared out."""
        if self.layout.units[0].gpu is not None:
            return self.host
        return ParallelExecutor(self.host, Layout(self.layout.units[:1], ((0.0,),)), 1)

    def units(self, config: Config) -> int:
        """GPUs, or groups of cores, that a configuration gets: at most those of the host."""
        if self.layout.units[0].gpu is None:
            return 1
        wanted = build(self.settings.engine, self.settings.space, config, device=self.settings.device,
                       version=self.host.version).gpus
        return min(wanted, len(self.layout.units))

    def inspect(self) -> Preflight:
        return self.host.inspect()

    def has_room(self) -> bool:
        """See Executor: room for the smallest launch, unless a larger one waits."""
        with self._changed:
            free = not self._waiting and len(self._taken) < self.capacity and len(self._free) >= self.fewest
        return free and super().has_room()

    @contextlib.contextmanager
    def launch(self, config: Config, folder: pathlib.Path, progress: Progress) -> Iterator[LocalServer]:
        """See Executor. Waits for free units first."""
        slot = self._wait(self.units(config), progress)
        try:
            with pinned(self.layout.cpus(slot.units)), self._host(slot).launch(config, folder, progress) as server:
                server.slot, server.neighbours = slot, slot.neighbours
                if server.crash is not None:
                    self._leave_start()
                yield server
        except BaseException:
            self._leave_start()
            raise
        finally:
            self._free_slot(slot)

    def cancel(self) -> None:
        self.host.cancel()
        with self._changed:
            self._changed.notify_all()
        self._leave_start()

    @contextlib.contextmanager
    def together(self, count: int) -> Iterator[None]:
        """In the block, measurements begin once `count` servers are ready for theirs, or one of them failed."""
        self._start = threading.Barrier(count)
        try:
            yield
        finally:
            self._start = None

    def _free_slot(self, slot: Slot) -> None:
        with self._changed:
            self._taken.remove(slot)
            self._free |= set(slot.units)
            self._changed.notify_all()

    def _wait(self, count: int, progress: Progress) -> Slot:
        """Take a slot of `count` units once they are free."""
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                while self._waiting[0] is not ticket or len(self._free) < count or len(self._taken) >= self.capacity:
                    if self.host.cancelled.is_set():
                        raise LaunchCancelled
                    progress(WAITING, 0.0)
                    self._changed.wait(1.0)
                progress(PLACED, 0.0)
                slot = Slot(self.layout.choose(self._free, count))
                slot.begin = lambda: self._begin(slot)
                self._free -= set(slot.units)
                self._taken.append(slot)
                for taken in self._taken:
                    taken.neighbours = max(taken.neighbours, len(self._taken) - 1)
                return slot
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _begin(self, slot: Slot) -> None:
        """A measurement begins: wait for those of `together`, then count neighbours anew."""
        if (start := self._start) is not None:
            with contextlib.suppress(threading.BrokenBarrierError):
                start.wait(START_S)
        slot.neighbours = len(self._taken) - 1

    def _leave_start(self) -> None:
        if (start := self._start) is not None:
            start.abort()

    def _host(self, slot: Slot) -> LocalExecutor:
        """This host as one launch sees it: its GPUs, and a port apart from those of other launches."""

        def port() -> int:
            with self._changed:
                others, found = [other.port for other in self._taken if other is not slot], free_port()
                while any(abs(found - other) < PORTS_APART for other in others):
                    found = free_port()
                slot.port = found
                return found

        units = [self.layout.units[i] for i in slot.units]
        gpus = Gpus(tuple(unit.gpu for unit in units if unit.gpu is not None), self.host.gpus.driver)
        if not gpus.gpus:
            return dataclasses.replace(self.host, port=port)
        env = {"CUDA_VISIBLE_DEVICES": ",".join(str(unit.index) for unit in units), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return dataclasses.replace(self.host, gpus=gpus, port=port, env=env)
