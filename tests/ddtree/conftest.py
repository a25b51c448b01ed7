"""Server processes of the embedded engine."""

import ast
import contextlib
import inspect
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from tests.processes import eventually

ROOT = Path(__file__).parents[2]
HTTP = httpx.Client(verify=False, timeout=60)  # one for all: each new one would read the host's certificates


@dataclass
class Server:
    """A server process on a free port."""

    flags: list[str]
    directory: Path
    port: int = 0
    codes: set[int] = field(default_factory=set)  # answers of /health
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
        def healthy() -> bool:
            assert self.process.poll() is None, self.log
            with contextlib.suppress(httpx.TransportError):
                self.codes.add(HTTP.get(self.url + "/health", timeout=5).status_code)
            return 200 in self.codes

        eventually(healthy, limit_s)
        return self

    def workers(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children()]

    def metric(self, name: str) -> float:
        lines = HTTP.get(self.url + "/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"ddtree:{name} "))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module", autouse=True)
def late_imports(request: pytest.FixtureRequest) -> None:
    """Run a test module's imports under TYPE_CHECKING: only the worker that runs its tests loads torch (1.5 s)."""
    for node in ast.parse(inspect.getsource(request.module)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(node.body, []), request.module.__file__, "exec"), vars(request.module))


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
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start servers that are stopped after the test."""
    started: list[Server] = []

    def start_one(*flags: str) -> Server:
        started.append(Server(list(flags), tmp_path).start())
        return started[-1]

    yield start_one
    for each in started:
        each.stop()
