"""One launch on a host that somebody else chose: what runs there, and what it sends back as plain data.

    launcher = Launcher(settings, power, version)         # in a process of its own on that host
    told = launcher.start({"tp": 2}, references)          # {"crash": {...} or None, "launch_s": 41.0, ...}
    launcher.measure({"concurrency": 8}, 3)               # {"outcome": {"type": "measurement", ...}, ...}
    launcher.files()                                      # {"server.log": b"...", ...}
    launcher.stop()

Ending the process, however it ends, ends the server: that is the supervisor's work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shutil
import socket
import tempfile
from typing import Any

from autotune.config.settings import Settings
from autotune.engine.gpus import visible_gpus
from autotune.executors.local import LocalExecutor, LocalServer
from autotune.power.meter import PowerSettings
from autotune.records import Config, to_json
from autotune.utils.files import write_json

FILE_BYTES = 8 << 20
"""Of a longer file the end comes back."""


class RayWorker:
    """One launch; its folder lives in a temporary place of this host until `stop`."""

    def __init__(self, settings: Settings, power: PowerSettings, version: str | None) -> None:
        self.place = pathlib.Path(tempfile.mkdtemp(prefix="autotune-launch-"))
        settings = dataclasses.replace(settings, outputs=self.place)
        settings.folder.mkdir(parents=True)
        self.folder = settings.folder / "launch"
        self.bench = LocalExecutor(settings, version, visible_gpus(), power, apart=True)
        self.live: LocalServer | None = None
        self._open = contextlib.ExitStack()

    def host(self) -> dict[str, Any]:
        """Where this is: the host's name, and the models of the GPUs given to it."""
        return {"name": socket.gethostname(), "gpus": [gpu.name for gpu in self.bench.gpus.gpus]}

    def start(self, server: Config, references: Any) -> dict[str, Any]:
        """Start the server; `references` are the baseline's outputs, None when nobody has any yet."""
        if references is not None:
            write_json(self.bench.gate.file, references)
        self.live = self._open.enter_context(self.bench.launch(server, self.folder, _quiet))
        made = self.bench.gate.file
        return {"crash": to_json(self.live.crash), "argv": list(self.live.argv),
                "env": dict(self.live.env), "resolved": self.live.resolved, "launch_s": self.live.launch_s,
                "alive": self.live.alive, "references": json.loads(made.read_text()) if made.exists() else None}

    def measure(self, load: Config, label: int | str) -> dict[str, Any]:
        """Measure one load part on the live server."""
        assert self.live is not None
        return {"outcome": to_json(self.live.measure(load, label)), "alive": self.live.alive}

    def files(self) -> dict[str, bytes]:
        """The launch's files by name."""
        return {path.name: _end_of(path) for path in sorted(self.folder.glob("*"))
                if path.is_file() and path.suffix != ".part"} if self.folder.is_dir() else {}

    def stop(self) -> dict[str, bytes]:
        """End the server and forget the folder; returns its files as they are at the end."""
        self._open.close()
        files = self.files()
        shutil.rmtree(self.place, ignore_errors=True)
        return files


def _quiet(stage: str, after_s: float) -> None:
    """Stages are in the log that comes back."""


def _end_of(path: pathlib.Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - FILE_BYTES))
        return file.read()
