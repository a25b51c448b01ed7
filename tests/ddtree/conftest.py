"""A tiny random model for exact comparisons, the packaged one for real text, and a running server."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
HTTP = httpx.Client(verify=False, timeout=60)  # one for all: each new one would read the host's certificates


@dataclass
class Server:
    """A server process of this package on a port of its own; its log is in `log`."""

    flags: list[str]
    directory: Path
    port: int = 0
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> "Server":
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.log_file = self.directory / f"server-{self.port}.log"
        command = [sys.executable, "-m", "autotune.ddtree", "--port", str(self.port), "--device", "cpu"]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen([*command, *self.flags], cwd=ROOT, stderr=log, stdout=log)
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait_ready(self, limit_s: float = 90) -> "Server":
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log
            try:
                if HTTP.get(self.url + "/health", timeout=5).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"not ready after {limit_s} s:\n{self.log}")

    def workers(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def metric(self, name: str) -> float:
        lines = HTTP.get(self.url + "/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"ddtree:{name} "))

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def gone(pids: list[int], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A ready server with two slots and a small context."""
    flags = ["--max-running-requests", "2", "--context-length", "1024", "--threads", "1"]
    running = Server(flags, tmp_path_factory.mktemp("server")).start()
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    """For tests that start servers of their own: those in this list are stopped after."""
    started: list[Server] = []
    yield started
    for each in started:
        each.stop()


def eventually(condition: Callable[[], bool], limit_s: float = 30) -> None:
    """Waits for a condition, and fails where it doesn't come."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)
