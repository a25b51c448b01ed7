"""Launches on the hosts of a Ray cluster: the driver proposes, Ray places, plain data comes back.

    with connected(settings) as hosts:          # a `tune.Place`
        report = hosts.preflight()              # this study's needs, looked at on a host of the cluster
        with hosts.launch(server, folder, progress) as live: ...

A launch is an actor (`remote.Launcher`) that Ray gives GPUs by number and type. A host that is lost takes its launches
with it: `HostLost`, upon which the loop tells FAIL and asks again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from autotune.config.settings import Settings
from autotune.engine.command import build
from autotune.executors import preflight
from autotune.executors.local import PLACED, HostLost, check_room, resolved_key, working_power
from autotune.executors.ray_worker import RayWorker
from autotune.measure.correctness import Gate
from autotune.power.meter import PowerSettings
from autotune.records import AutotuneError, Config, Crash, HostCannotRun, Outcome, from_json
from autotune.utils.files import fresh, write_json

REACH_S = 10.0


@dataclasses.dataclass
class RayServer:
    """A launch on another host, as the loop sees it."""

    hosts: RayExecutor
    actor: Any
    folder: pathlib.Path
    told: dict[str, Any]
    neighbours: None = None  # what else runs on that host is Ray's affair

    def __post_init__(self) -> None:
        self.crash: Crash | None = from_json(self.told["crash"], Crash | None)
        self.launch_s: float = self.told["launch_s"]
        self.argv: list[str] = self.told["argv"]
        self.env: dict[str, str] = self.told["env"]
        self.resolved: dict[str, Any] = self.told["resolved"]

    @property
    def alive(self) -> bool:
        return self.crash is None and bool(self.told["alive"])

    @property
    def resolved_key(self) -> str | None:
        return resolved_key(self.resolved, self.env)

    def measure(self, load: Config, label: int | str) -> Outcome:
        """Measure one load part there; its files come back with it. Raises HostLost."""
        self.told |= self.hosts.get(self.actor.measure.remote(dict(load), label))
        self.hosts.keep(self.actor, self.folder)
        outcome: Outcome = from_json(self.told["outcome"], Outcome)
        return outcome


class RayExecutor:
    """Implements `tune.Place` on a cluster that is connected."""

    def __init__(self, ray: Any, settings: Settings) -> None:
        self.ray, self.settings = ray, settings
        self.power: PowerSettings = settings.power
        self.version: str | None = None
        self.models: set[str] | None = None
        self.gate = Gate(settings.folder / "agreement.json", settings.agreement, settings.workload.prompt_source())
        self._actors: set[Any] = set()
        self._lock = threading.Lock()

    def preflight(self) -> tuple[preflight.Preflight, PowerSettings, dict[str, str]]:
        """(preflight, power settings, meters refused) as a host of the cluster sees them, with the baseline's GPUs."""
        space = self.settings.space
        gpus = self._gpus(space.split(space.baseline)[0])
        report, power, refused = self.get(self.ray.remote(_look).options(**self._needs(gpus)).remote(self.settings))
        self.power, self.version = power, report.version
        self.models = {gpu.name for gpu in report.gpus.gpus}
        return report, power, refused

    def room(self) -> bool:
        """Whether Ray could place another launch of the baseline's size now."""
        space = self.settings.space
        free = self.ray.available_resources()
        needs = self._needs(self._gpus(space.split(space.baseline)[0]))
        return bool(free.get("CPU", 0) >= needs["num_cpus"] and free.get("GPU", 0) >= needs["num_gpus"])

    def check_room(self, folder: pathlib.Path) -> None:
        """Raises HostCannotRun when the disk of `folder`, where hosts' files come to, is full."""
        check_room(self.settings, folder)

    @contextlib.contextmanager
    def launch(self, config: Config, folder: pathlib.Path,
               progress: Callable[[str, float], None]) -> Iterator[RayServer]:
        """Have the server started on some host. Raises HostLost when that host goes."""
        progress("waiting for a place", 0.0)
        actor = self.ray.remote(RayWorker).options(max_restarts=0, **self._needs(self._gpus(config))).remote(
            self.settings, self.power, self.version)
        with self._lock:
            self._actors.add(actor)
        try:
            host = self.get(actor.host.remote())
            if self.models is not None and set(host["gpus"]) - self.models:
                others = ", ".join(sorted(set(host["gpus"])))
                raise HostCannotRun(f"Ray placed a launch on {host['name']} with {others}, and the study is of "
                                    f"{', '.join(sorted(self.models))}: executor.gpu_type=TYPE keeps launches on one "
                                    "kind")
            progress(f"{PLACED} on {host['name']}", 0.0)
            references = json.loads(self.gate.file.read_text()) if self.gate.file.exists() else None
            told = self.get(actor.start.remote(dict(config), references))
            if references is None and told["references"] is not None:
                write_json(self.gate.file, told["references"])
            self.keep(actor, folder)
            progress("crashed" if told["crash"] else "serving", told["launch_s"])
            yield RayServer(self, actor, folder, told)
            with contextlib.suppress(HostLost):  # everything was told by now
                self.keep(actor, folder, last=True)
        finally:
            with self._lock:
                self._actors.discard(actor)
            with contextlib.suppress(Exception):  # it may be gone already
                self.ray.kill(actor)

    def end(self) -> None:
        """End every launch, wherever it is; those who wait for one get HostLost."""
        with self._lock:
            actors = list(self._actors)
        for actor in actors:
            with contextlib.suppress(Exception):
                self.ray.kill(actor)

    def get(self, reference: Any) -> Any:
        """What a call returned. Raises HostLost when its host, or its process there, is gone."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(reference)
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(getattr(error, "cause", None), AutotuneError) else None
            raise cause or AutotuneError(f"a launch failed on its host: {str(error).strip().splitlines()[-1][:300]}"
                                         ) from error
        except errors.RayError as error:
            if getattr(error, "actor_init_failed", False):  # it would fail wherever it is made
                raise AutotuneError("a launch could not be prepared on its host: "
                                    f"{str(error).strip().splitlines()[-1][:300]}") from error
            raise HostLost(f"its host is lost ({type(error).__name__})") from error

    def keep(self, actor: Any, folder: pathlib.Path, last: bool = False) -> None:
        """Bring the launch's files here; `last` ends it."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.get((actor.stop if last else actor.files).remote()).items():
            fresh(folder / pathlib.PurePath(name).name).write_bytes(content)

    def _gpus(self, server: Config) -> int:
        if self.settings.device == "cpu" or not self.settings.space.needs.get("gpus"):
            return 0
        return build(self.settings.engine, self.settings.space, server, device=self.settings.device,
                     version=self.version).gpus

    def _needs(self, gpus: int) -> dict[str, Any]:
        kind = self.settings.executor.gpu_type
        return {"num_cpus": self.settings.executor.cpus, "num_gpus": gpus,
                **({"accelerator_type": kind} if kind else {})}


def _look(settings: Settings) -> tuple[preflight.Preflight, PowerSettings, dict[str, str]]:
    """Runs on a host of the cluster."""
    report = preflight.check(settings)
    power, refused = working_power(settings, report.gpus)
    return report, power, refused


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
    try:
        _reach(address)
        with _own_signals():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="autotune")
    except (OSError, RuntimeError, ValueError) as error:
        raise AutotuneError(f"no Ray cluster at executor.address={address} ({' '.join(str(error).split())[:200]}): "
                            "start one with ray start --head") from error
    try:
        yield RayExecutor(ray, settings)
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raises OSError at once where nobody listens: Ray itself tries for several minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself and would end us past our own clearing up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
