"""The load client's own process: when to read, send, give up and report.

It reads a `LoadOrder` as one line of JSON from standard input and sends requests until it reads another line or the end
of input. It writes a `Tick` as a JSON line every 0.2 s to standard output and, at the end, a `Final` line and the
packed replies. Nothing heavy is imported. `client.LoadClient` is the other end.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import select
import signal
import sys
import time
from collections import deque
from typing import BinaryIO

import msgspec

from autotune.loadgen.connections import Connections
from autotune.loadgen.result import Final, Tick, packed
from autotune.loadgen.workload import LoadOrder

TICK_S = 0.2
TIMERS_S = 0.5  # between two checks of the time limits of requests, which are tens of seconds
REFILL_S = 0.002  # time in a tick to make requests ahead
FEW = 16  # events of the poller after which more are worth waiting for
SHORT = 16  # bytes: a read that may be the rest of an answer's end


class Load:
    """Keeps the requests of a `LoadOrder` in flight until a command comes."""

    def __init__(self, order: LoadOrder, commands: int, out: BinaryIO) -> None:
        self.load, self.commands, self.out = order.load, commands, out
        self.connections = Connections(order)
        self.rate = order.load.workload.rate_per_s
        self.arrivals: deque[float] = deque()  # open loop: requests due that found no free connection
        self.next_arrival = time.monotonic() if self.rate else float("inf")
        self.arrival_rng = random.Random(f"{order.load.workload.seed}/arrivals")
        self.gather_s = 0.0
        self.stopping = False

    def run(self) -> None:
        """Send until a command comes, then report. Returns when the parent has everything, or is gone."""
        work = self.connections
        work.poller.register(self.commands, select.POLLIN)
        work.source.refill(float("inf"), len(work.slots) if self.rate is None else 1)
        next_tick = next_timers = now = time.monotonic()
        if self.rate is None:
            for idle in work.slots:
                work.start(idle, now)
        by_fd, parse = work.by_fd, work.parse
        while not self.stopping:
            events = self._wait(min(next_tick, self.next_arrival))
            now = time.monotonic()
            for fd, mask in events:
                slot = by_fd.get(fd)
                if slot is None:
                    if fd == self.commands:
                        self._command()
                elif slot.plain:  # the hot path: a stream that goes on
                    try:
                        data, arrived = slot.receive()
                    except OSError as error:
                        work.failed_read(slot, now, error)
                        continue
                    slot.parts.append(data)
                    slot.stamps.append(arrived)
                    if slot.wait > 1 or len(data) < SHORT or data.endswith(b"\r\n\r\n"):
                        parse(slot, now)
                else:
                    work.ready(slot, mask, now)
            if now >= next_tick:
                work.look(now)
                self.gather_s = work.pacing.gather_s(self.load.concurrency)
                work.resume(now)
                work.source.refill(REFILL_S)
                if now >= next_timers:
                    self._timers(now)
                    next_timers = now + TIMERS_S
                self._tick(now)
                next_tick = max(next_tick + TICK_S, now)
            if now >= self.next_arrival or self.arrivals:
                self._arrive(now)
        self._report(time.monotonic())

    def _wait(self, until: float) -> list[tuple[int, int]]:
        """The poller's events, at `until` the latest. When few come, a short pause lets more of them come."""
        source, poll = self.connections.source, self.connections.poller.poll
        short = source.short
        events: list[tuple[int, int]] = poll(0.0 if short else max(0.0, until - time.monotonic()))
        if short and len(events) < FEW:
            source.refill()
            events = poll(0.0)
        elif 0 < len(events) < FEW:
            time.sleep(self.gather_s if self.rate is None else max(0.0, min(self.gather_s, until - time.monotonic())))
            events = poll(0.0)
        return events

    def _arrive(self, now: float) -> None:
        """Open loop: send the requests that are due; `late` counts those that found no connection free."""
        assert self.rate is not None
        idle = deque(slot for slot in self.connections.slots if slot.reply is None)
        while self.next_arrival <= now:
            self.arrivals.append(self.next_arrival)
            if len(self.arrivals) > len(idle):
                self.connections.tally.kinds["late"] += 1
            self.next_arrival += self.arrival_rng.expovariate(self.rate)
        while self.arrivals and idle:
            self.connections.start(idle.popleft(), now, due=self.arrivals.popleft())

    def _timers(self, now: float) -> None:
        workload, broken = self.load.workload, self.connections.broken
        for slot, sent_s in [(slot, slot.reply.sent) for slot in self.connections.slots if slot.reply is not None]:
            times = slot.stream.times
            if now - sent_s > workload.request_timeout_s:
                broken(slot, now, "timeout_request", f"not done after {workload.request_timeout_s:g} s")
            elif not times and now - sent_s > workload.first_token_timeout_s:
                broken(slot, now, "timeout_first_token", f"no token within {workload.first_token_timeout_s:g} s")
            elif times and now - times[-1] > workload.token_timeout_s:
                broken(slot, now, "timeout_token", f"no further token within {workload.token_timeout_s:g} s")

    def _tick(self, now: float) -> None:
        work = self.connections
        streams = [slot.stream for slot in work.slots if slot.reply is not None]
        self._write(work.tally.tick(now, streams, work.pacing.unread_tokens(streams, now), time.process_time(),
                                    run_queue_wait_s()))

    def _write(self, message: Tick | Final) -> None:
        try:
            self.out.write(msgspec.json.encode(message) + b"\n")
            self.out.flush()
        except BrokenPipeError:
            self.stopping = True

    def _command(self) -> None:
        if not os.read(self.commands, 4096):
            os._exit(1)  # the tuner is gone
        self.stopping = True

    def _report(self, now: float) -> None:
        work = self.connections
        work.close(now)
        self._tick(time.monotonic())
        for slot in work.slots:
            if slot.reply is not None:
                slot.reply.status = slot.parser.status
                work.tally.replies.append(slot.reply)
        data = packed(work.tally.replies)
        self._write(Final(len(data)))
        self.out.write(data)
        self.out.flush()


def raise_file_limit(wanted: int) -> None:
    """Allow this process `wanted` open files, as far as the hard limit lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))


def run_queue_wait_s() -> float | None:
    """Seconds this process was ready to run and did not (Linux: /proc/self/schedstat); None where unknown."""
    try:
        with open("/proc/self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tuner handles Ctrl-C and stops this process by the pipe
    commands = os.fdopen(sys.stdin.fileno(), "rb", buffering=0)  # the poller must see what follows the first line
    line = commands.readline()
    if line.endswith(b"\n"):
        order = LoadOrder.from_json(line)
        raise_file_limit(order.load.concurrency + 64)
        gc.disable()
        Load(order, commands.fileno(), sys.stdout.buffer).run()


if __name__ == "__main__":
    main()
