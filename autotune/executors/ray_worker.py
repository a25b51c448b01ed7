"""One launch on a host that Ray chose: an actor in a process of its own there.

    worker = RayWorker(settings, power, version)
    started = worker.start({"tp": 2}, references)       # crash, argv, launch_s, ...
    outcome, alive = worker.measure({"concurrency": 8}, 3)
    worker.files()                                      # {"server.log": b"...", ...}
    worker.stop()

However the process ends, its supervisor ends the server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shutil
import socket
import tempfile
from typing import Any, NamedTuple

from autotune.config.settings import Settings
from autotune.engine.gpus import visible_gpus
from autotune.executors.local import LocalExecutor, LocalServer
from autotune.power.meter import PowerSettings
from autotune.records import Config, Crash, Measurement
from autotune.utils.files import write_json

FILE_BYTES = 8 << 20  # of a longer file, the end is sent back


class Started(NamedTuple):
    """A launch after its start (see RunningServer), and the baseline's reference outputs if there are any yet."""

    crash: Crash | None
    launch_s: float
    argv: list[str]
    env: dict[str, str]
    resolved: dict[str, Any]
    alive: bool
    references: Any


class RayWorker:
    """One launch; its folder is a temporary one of this host until `stop`."""

    def __init__(self, settings: Settings, power: PowerSettings, version: str | None) -> None:
        self.temporary = pathlib.Path(tempfile.mkdtemp(prefix="autotune-launch-"))
        settings = dataclasses.replace(settings, outputs=self.temporary)
        settings.folder.mkdir(parents=True)
        self.folder = settings.folder / "launch"
        self.executor = LocalExecutor(settings, version, visible_gpus(), power, apart=True)
        self.server: LocalServer | None = None
        self._open = contextlib.ExitStack()

    def host(self) -> tuple[str, set[str]]:
        """The host's name, and the models of the GPUs given to this process."""
        return socket.gethostname(), {gpu.name for gpu in self.executor.gpus.gpus}

    def start(self, config: Config, references: Any) -> Started:
        """Start the server; `references` are the baseline's outputs, None while there are none."""
        kept = self.executor.gate.file
        if references is not None:
            write_json(kept, references)
        server = self._open.enter_context(self.executor.launch(config, self.folder, lambda stage, after_s: None))
        self.server = server
        return Started(server.crash, server.launch_s, server.argv, server.env, server.resolved, server.alive,
                       json.loads(kept.read_text()) if kept.exists() else None)

    def measure(self, load: Config, label: int | str) -> tuple[Measurement | Crash, bool]:
        """The outcome of one load part, and whether the server still runs."""
        assert self.server is not None
        return self.server.measure(load, label), self.server.alive

    def files(self) -> dict[str, bytes]:
        """The launch's files by name."""
        return {path.name: _end_of(path) for path in sorted(self.folder.glob("*"))
                if path.is_file() and path.suffix != ".part"} if self.folder.is_dir() else {}

    def stop(self) -> dict[str, bytes]:
        """End the server and remove the folder; returns its final files."""
        self._open.close()
        files = self.files()
        shutil.rmtree(self.temporary, ignore_errors=True)
        return files


def _end_of(path: pathlib.Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - FILE_BYTES))
        return file.read()
