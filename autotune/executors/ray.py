"""Launches on the hosts of a Ray cluster: this process proposes, Ray places, files and outcomes come back.

A launch is an actor (`RayWorker`) that Ray gives GPUs by number and type. A lost host ends its launches with HostLost,
upon which the loop marks their trials FAIL and asks them again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from autotune.config.settings import Settings
from autotune.engine.command import build
from autotune.engine.gpus import visible_gpus
from autotune.executors import preflight
from autotune.executors.base import PLACED, WAITING, Executor, HostLost, Progress, RunningServer
from autotune.executors.local import LocalExecutor, LocalServer
from autotune.power.meter import PowerSettings
from autotune.records import AutotuneError, Config, Crash, HostCannotRun, Measurement
from autotune.utils.files import fresh, last_bytes, write_json

REACH_S = 10.0
FILE_BYTES = 8 << 20  # of a longer file of a launch, the end is sent back


class RayWorker:
    """One launch on a host that Ray chose, in a process there; its folder is a temporary one until `stop`.

    However the process ends, its supervisor ends the server.
    """

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

    def start(self, config: Config, references: Any) -> tuple[dict[str, Any], bool, Any]:
        """Start the server. `references`: reference outputs of the baseline, None while there are none.

        Returns the fields of RunningServer, whether the server is alive, and the reference outputs known now.
        """
        kept = self.executor.gate.file
        if references is not None:
            write_json(kept, references)
        server = self.server = self._open.enter_context(
            self.executor.launch(config, self.folder, lambda stage, after_s: None))
        return ({name: getattr(server, name) for name in ("crash", "launch_s", "argv", "env", "resolved", "machine")},
                server.alive, json.loads(kept.read_text()) if kept.exists() else None)

    def measure(self, load: Config, label: int | str) -> tuple[Measurement | Crash, bool]:
        """The outcome of one load part, and whether the server still runs."""
        assert self.server is not None
        return self.server.measure(load, label), self.server.alive

    def files(self) -> dict[str, bytes]:
        """The launch's files by name."""
        return {path.name: last_bytes(path, FILE_BYTES) for path in sorted(self.folder.glob("*"))
                if path.is_file() and path.suffix != ".part"}

    def stop(self) -> dict[str, bytes]:
        """End the server and remove the folder; returns its final files."""
        self._open.close()
        files = self.files()
        shutil.rmtree(self.temporary, ignore_errors=True)
        return files


class RayServer(RunningServer):
    """A launch on another host. The number of its neighbours is not known."""

    def __init__(self, executor: RayExecutor, actor: Any, folder: pathlib.Path, started: dict[str, Any],
                 alive: bool) -> None:
        super().__init__(folder, **started)
        self.executor, self.actor, self._alive = executor, actor, alive

    @property
    def alive(self) -> bool:
        return self.crash is None and self._alive

    def measure(self, load: Config, label: int | str) -> Measurement | Crash:
        """See RunningServer. The files of the measurement come back with it."""
        outcome: Measurement | Crash
        outcome, self._alive = self.executor.get(self.actor.measure.remote(dict(load), label))
        self.executor.fetch_files(self.actor.files, self.folder)
        return outcome


class RayExecutor(Executor):
    """A cluster that is connected."""

    def __init__(self, ray: Any, settings: Settings) -> None:
        self.ray, self.settings, self.capacity = ray, settings, settings.executor.at_once
        self.power = settings.power
        self.version: str | None = None
        self.models: set[str] | None = None
        self._actors: set[Any] = set()
        self._lock = threading.Lock()

    def inspect(self) -> preflight.Preflight:
        """Check a host of the cluster, with as many GPUs as the baseline needs."""
        remote = self.ray.remote(preflight.check).options(**self._needs(self._baseline_gpus()))
        report: preflight.Preflight = self.get(remote.remote(self.settings))
        self.power, self.version = report.power, report.version
        self.models = {gpu.name for gpu in report.gpus.gpus}
        return report

    def has_room(self) -> bool:
        """See Executor: room for a launch of the baseline's size."""
        preflight.check_disk(self.settings, self.settings.folder)  # where the files of the hosts come to
        free, needs = self.ray.available_resources(), self._needs(self._baseline_gpus())
        return bool(free.get("CPU", 0) >= needs["num_cpus"] and free.get("GPU", 0) >= needs["num_gpus"])

    @contextlib.contextmanager
    def launch(self, config: Config, folder: pathlib.Path, progress: Progress) -> Iterator[RayServer]:
        """See Executor. Raises HostCannotRun on a host with other GPUs than those of the preflight."""
        progress(WAITING, 0.0)
        actor = self.ray.remote(RayWorker).options(max_restarts=0, **self._needs(self._gpus(config))).remote(
            self.settings, self.power, self.version)
        with self._lock:
            self._actors.add(actor)
        try:
            host, models = self.get(actor.host.remote())
            if self.models is not None and models - self.models:
                raise HostCannotRun(f"Ray placed a launch on {host} with {', '.join(sorted(models))}, and the study "
                                    f"is of {', '.join(sorted(self.models))}: executor.gpu_type=TYPE keeps launches "
                                    "on one kind")
            progress(f"{PLACED} on {host}", 0.0)
            kept = self.gate.file
            references = json.loads(kept.read_text()) if kept.exists() else None
            started, alive, made = self.get(actor.start.remote(dict(config), references))
            if references is None and made is not None:
                write_json(kept, made)
            self.fetch_files(actor.files, folder)
            server = RayServer(self, actor, folder, started, alive)
            progress("crashed" if server.crash else "serving", server.launch_s)
            yield server
            with contextlib.suppress(HostLost):  # every outcome is here by now
                self.fetch_files(actor.stop, folder)
        finally:
            with self._lock:
                self._actors.discard(actor)
            with contextlib.suppress(Exception):  # it may be gone already
                self.ray.kill(actor)

    def cancel(self) -> None:
        with self._lock:
            actors = list(self._actors)
        for actor in actors:
            with contextlib.suppress(Exception):
                self.ray.kill(actor)

    def get(self, reference: Any) -> Any:
        """The result of a remote call. Raises HostLost when its host, or its process there, is gone."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(reference)
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(getattr(error, "cause", None), AutotuneError) else None
            raise cause or AutotuneError(f"a launch failed on its host: {_last_line(error)}") from error
        except errors.RayError as error:
            if getattr(error, "actor_init_failed", False):  # it would fail on every host
                raise AutotuneError(f"a launch could not be prepared on its host: {_last_line(error)}") from error
            raise HostLost(f"its host is lost ({type(error).__name__})") from error

    def fetch_files(self, method: Any, folder: pathlib.Path) -> None:
        """Write the files that `method` of an actor returns to `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.get(method.remote()).items():
            fresh(folder / pathlib.PurePath(name).name).write_bytes(content)

    def _baseline_gpus(self) -> int:
        space = self.settings.space
        return self._gpus(space.split(space.baseline)[0])

    def _gpus(self, server: Config) -> int:
        if self.settings.device == "cpu" or not self.settings.space.needs.get("gpus"):
            return 0
        return build(self.settings.engine, self.settings.space, server, device=self.settings.device,
                     version=self.version).gpus

    def _needs(self, gpus: int) -> dict[str, Any]:
        kind = self.settings.executor.gpu_type
        return {"num_cpus": self.settings.executor.cpus, "num_gpus": gpus,
                **({"accelerator_type": kind} if kind else {})}


@contextlib.contextmanager
def connected(settings: Settings) -> Iterator[RayExecutor]:
    """The cluster of `executor.address`.

    Raises HostCannotRun when Ray is not installed here, AutotuneError when the cluster does not answer.
    """
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise HostCannotRun("executor=ray needs Ray: pip install 'autotune-llm[ray]'") from error
    address = settings.executor.address
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    try:
        if colon and port.isdecimal():  # where nobody listens, Ray itself tries for several minutes
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        with _keep_sigterm():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="autotune")
    except (OSError, RuntimeError, ValueError) as error:
        raise AutotuneError(f"no Ray cluster at executor.address={address} ({' '.join(str(error).split())[:200]}): "
                            "start one with ray start --head") from error
    try:
        yield RayExecutor(ray, settings)
    finally:
        ray.shutdown()


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1][:300]


@contextlib.contextmanager
def _keep_sigterm() -> Iterator[None]:
    """Restore our SIGTERM handler, which `ray.init` replaces with one that skips our cleanup."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
