"""The tuner's end of the load client: starts its process, follows its counters, collects its replies."""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time

import msgspec

import autotune
from autotune.loadgen.result import Final, Reply, Tick, unpacked
from autotune.loadgen.workload import LoadOrder
from autotune.records import AutotuneError

STOP_S = 60.0
DRAIN_S = 2.0  # between two reads of counters, long before they fill the pipe
_decode = msgspec.json.Decoder(Tick | Final).decode


class ClientDied(AutotuneError):
    """The load client's process ended by itself or was killed. The server is not to blame."""


class LoadClient:
    """A running load. Use as a context manager: the process is gone at the end, whatever happened."""

    def __init__(self, order: LoadOrder) -> None:
        self.order = order
        self.ticks: list[Tick] = []
        self._buffer = b""

    def __enter__(self) -> LoadClient:
        self._stderr = tempfile.TemporaryFile()
        root = str(pathlib.Path(autotune.__file__).parent.parent)
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
        self._process = subprocess.Popen([sys.executable, "-m", "autotune.loadgen.process"], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, stderr=self._stderr,
                                         env={**os.environ, "PYTHONPATH": path})
        assert self._process.stdin is not None and self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        self._gone = select.poll()
        self._gone.register(self._out, 0)  # only its end is reported, so that no counter wakes this process
        try:
            self._process.stdin.write(self.order.to_json() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._fail()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError), self._process:  # closes the pipes and waits for the end
            self._process.kill()
        self._stderr.close()

    def wait(self, seconds: float) -> Tick | None:
        """Follow the load for `seconds`; returns the latest counters. Raises AutotuneError when the client died."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            self._gone.poll(1000 * max(0.0, min(left, DRAIN_S)))
            while select.select([self._out], [], [], 0.0)[0]:
                self._read()
            if left <= 0:
                return self.ticks[-1] if self.ticks else None

    def stop(self) -> list[Reply]:
        """End the load and return every request of it, those still in flight included."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"stop\n")
            self._process.stdin.flush()
        end = time.monotonic() + STOP_S
        while (final := self._read()) is None:
            if time.monotonic() > end:
                raise AutotuneError(f"the load client did not stop within {STOP_S:g} s")
        while len(self._buffer) < final.size:
            self._receive()
        return unpacked(self._buffer[:final.size])

    def _read(self) -> Final | None:
        """Take the next counters. Returns the line that announces the packed replies, which follow it."""
        self._receive()
        while b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            message = _decode(line)
            if isinstance(message, Final):
                return message
            self.ticks.append(message)
        return None

    def _receive(self) -> None:
        data = os.read(self._out, 1 << 20)
        if not data:
            self._fail()
        self._buffer += data

    def _fail(self) -> None:
        self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        raise ClientDied(f"the load client ended with status {self._process.returncode}"
                         + (f": {lines[-1]}" if lines else ""))
