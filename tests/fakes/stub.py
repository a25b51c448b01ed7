"""Starts the stub server as a process, and reads its truth after it ended."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Any

SERVER = pathlib.Path(__file__).parent / "standin.py"
START_S = 30.0


class Stub:
    """A running stub server; arguments are those of standin.py. `truth` is there once it has been stopped."""

    def __init__(self, folder: pathlib.Path, *arguments: str) -> None:
        self._port_file, self._truth_file = folder / "stub.port", folder / "stub.truth"
        self._arguments = arguments
        self.truth: list[dict[str, Any]] = []

    def __enter__(self) -> Stub:
        self.process = subprocess.Popen([sys.executable, str(SERVER), "--port-file", str(self._port_file), "--truth",
                                         str(self._truth_file), *self._arguments], start_new_session=True)
        end = time.monotonic() + START_S
        while not self._port_file.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the stub server did not start")
            time.sleep(0.01)
        self.port = int(self._port_file.read_text())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> list[dict[str, Any]]:
        """End the server; returns what it says about every request."""
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        if not self.truth and self._truth_file.exists():
            self.truth = [json.loads(line) for line in self._truth_file.read_text().splitlines()]
        return self.truth
