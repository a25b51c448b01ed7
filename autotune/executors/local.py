"""Launches on this host, one at a time: a server part becomes a running server, a load part a measurement."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from autotune.config.settings import Settings
from autotune.crash.classify import classify
from autotune.crash.exit_status import HostSnapshot
from autotune.engine.command import build
from autotune.engine.gpus import Gpus, gpu_memory_used_mib
from autotune.engine.server import Failure, Server, SupervisorFailed, free_port, suspended_s
from autotune.executors import preflight
from autotune.executors.base import Executor, LaunchCancelled, Progress, RunningServer
from autotune.loadgen.client import ClientDied
from autotune.loadgen.workload import Target
from autotune.measure.limits import Limits
from autotune.measure.objective import invalid_reasons
from autotune.power import open_meter
from autotune.power.host_load import CODE as BUSY
from autotune.power.host_load import HostLoad, ProcessTree
from autotune.power.meter import Powered, PowerSettings
from autotune.power.nvml import DISTURBED as GPU_DISTURBED
from autotune.records import (
    AutotuneError,
    Config,
    Crash,
    HostCannotRun,
    Measurement,
    Stage,
    canonical,
    config_key,
    digest,
)
from autotune.utils.http import LATE

TRIES = 3  # of a launch whose port was taken, and of a launch or measurement during which the machine was suspended
SUSPENDED_S = 1.0  # a shorter suspension spoils neither a window nor a start
GPU_SLACK_MIB = 512.0
GPU_POLL_S, GPU_WAIT_S = 0.5, 15.0
RESOLVED_CHARS = 256 << 10  # a longer report of the server's settings is stored as its digest: each trial keeps a copy
LOG = logging.getLogger("autotune")


@dataclasses.dataclass
class Slot:
    """The share of the host that a launch beside others has: see executors/parallel.py.

    `neighbours` are the most launches beside it since its last measurement began; `begin` is called before one.
    """

    units: tuple[int, ...]
    port: int = 0
    neighbours: int = 0
    begin: Callable[[], None] = lambda: None


class LocalServer(RunningServer):
    def __init__(self, executor: LocalExecutor, server: Server, config: Config, crash: Crash | None,
                 progress: Progress, host: HostSnapshot) -> None:
        self.executor, self.server, self.config, self.progress, self.host = executor, server, config, progress, host
        self.agreement: float | None = None
        self.slot: Slot | None = None
        self.measurements = 0
        env = server.redactor.mapping(server.command.env)
        super().__init__(server.folder, crash, server.after_s, server.redactor.argv(server.command.argv),
                         {name: str(value) for name, value in env.items()}, {})
        if crash is None:
            self.resolved = self._resolved()
            self.crash = self._check_output()

    @property
    def alive(self) -> bool:
        return self.crash is None and self.server.alive

    def measure(self, load: Config, label: int | str) -> Measurement | Crash:
        """See RunningServer. Measured once more on the warm server: a window that must not be compared (unsteady,
        disturbed) or whose load client died; twice more: an outcome during which the machine was suspended.

        Raises HostCannotRun when other programs still disturb it after `power.wait_s`, or the GPU the baseline."""
        outcome, began = self._tries(load, label), time.monotonic()
        settings = self.executor.power or self.executor.settings.power
        others = HostLoad(ProcessTree(self.server.pid) if self.server.pid is not None else None, settings.others)

        def say(text: str) -> None:
            self.progress(f"waiting: {text}", self.server.after_s)

        while settings.wait_s and self.server.alive and (codes := self._passing(outcome)):
            left_s = began + settings.wait_s - time.monotonic()
            if BUSY in codes:
                say("other programs")
                stays = others.wait(left_s, say)
                remedy = "end them and resume, or raise power.others"
            else:
                stays = f"the GPU stays disturbed ({', '.join(codes)})" if left_s <= 0 else ""
                remedy = "mend that (nvidia-smi -q -d PERFORMANCE,PIDS) and resume"
                say(f"the GPU is disturbed ({', '.join(codes)})")
                time.sleep(max(0.0, min(GPU_WAIT_S, left_s)))
            if stays:
                raise HostCannotRun(f"{stays}. The last window was measured but is not comparable "
                                    f"({', '.join(codes)}), also after power.wait_s={settings.wait_s:g} s: {remedy}")
            outcome = self._tries(load, label)
        return outcome

    def _passing(self, outcome: Measurement | Crash) -> list[str]:
        """Codes of a disturbance that may pass. A GPU's may be the configuration's own, except for the baseline."""
        waited = (BUSY, *(GPU_DISTURBED if self._is_baseline else ()))
        return [code for code in _reasons(self.executor, outcome) if code in waited]

    @property
    def _is_baseline(self) -> bool:
        space = self.executor.settings.space
        return config_key(self.config) == config_key(space.split(space.baseline)[0])

    def _tries(self, load: Config, label: int | str) -> Measurement | Crash:
        if self.slot is not None:
            self.slot.begin()
        for attempt in range(TRIES):
            before_s = suspended_s()
            try:
                outcome = self._measure(load, label)
            except ClientDied as error:
                if attempt:
                    raise
                again = str(error)
            else:
                slept = suspended_s() - before_s > SUSPENDED_S
                if slept and isinstance(outcome, Measurement):
                    outcome = msgspec.structs.replace(outcome, reasons=(*outcome.reasons, "suspended"))
                reasons = _reasons(self.executor, outcome) or ("suspended",) * slept
                if not reasons or not self.server.alive or attempt + 1 == TRIES or attempt and not slept:
                    break
                again = f"the window was {', '.join(reasons)}"
            LOG.warning("measuring again: %s", again, extra={"load": dict(load)})
            self.progress(f"again: {again}", self.server.after_s)
        if self.slot is not None:
            self.neighbours = self.slot.neighbours
        if self.executor.cancelled.is_set():
            raise LaunchCancelled
        return outcome

    def _measure(self, load: Config, label: int | str) -> Measurement | Crash:
        from autotune.measure.window import measure

        settings, server = self.executor.settings, self.server
        self.measurements += 1
        target = self.target()
        powered = Powered(server.pid, self.executor.uuids(server.command.gpus))
        meter, _ = open_meter(self.executor.power or settings.power, powered, self.folder / f"power-{label}.csv")
        with meter:
            found = measure(target, settings.workload.load(load, self.measurements), meter,
                            limits=Limits(settings.limits), alive=lambda: server.alive,
                            progress=lambda text: self.progress(text, server.after_s),
                            record=self.folder / f"requests-{label}.jsonl", hide=server.redactor.text)
        if isinstance(found, Measurement):
            return msgspec.structs.replace(found, output_agreement=self.agreement)
        if why := server.supervisor_failure:
            raise SupervisorFailed(f"{why}; the study is kept and can be resumed")
        if found.kind == "gpu_lost":
            raise AutotuneError(f"{found.detail}: the study stops here and can be resumed once this is mended")
        excerpt = server.redactor.text(found.excerpt)[-1000:]
        failure = server.failure(found.kind, f"{found.detail} {excerpt}".strip())
        return explain(server, dataclasses.replace(failure, stage=Stage.SERVING), self.host)

    def _check_output(self) -> Crash | None:
        """A Crash of category wrong_output when greedy outputs differ from the baseline's too often."""
        self.progress("agreement", self.server.after_s)
        verdict, problem = self.executor.gate.check(
            self.target(), self._is_baseline, self.server.redactor.text,
            lambda done, of: self.progress(f"agreement {done} of {of} outputs", self.server.after_s))
        if verdict is not None:
            self.agreement = verdict.agreement
            problem = verdict.problem if verdict.wrong else ""
        if not problem:
            return None
        failure = self.server.failure("hung" if LATE in problem else "bad_answer", problem)
        if verdict is None:
            return explain(self.server, dataclasses.replace(failure, stage=Stage.SERVING), self.host)
        return classify(problem, stage=Stage.SERVING, exit_status=None, after_s=failure.after_s, detail=problem)

    def target(self) -> Target:
        """The live server, for the load client."""
        engine, request = self.executor.settings.engine, self.executor.settings.engine.request
        return Target(self.server.url, request.api, request.model or self.server.model_name() or "default",
                      request.continuous_usage, engine.metrics)

    def _resolved(self) -> dict[str, Any]:
        """The settings that the server reports; {} when it reports none."""
        info = self.executor.settings.engine.info
        if info.path is None:
            return {}
        same = self.server.redactor.mapping(info.same(self.server.get_json(info.path)))
        text = canonical(same)
        return same if len(text) <= RESOLVED_CHARS else {"digest_of_too_much": digest(text)}


@dataclasses.dataclass
class LocalExecutor(Executor):
    """This host. `preflight` sets `version`, `gpus` and `power` (a meter that works here) unless they are given."""

    settings: Settings
    version: str | None = None
    gpus: Gpus = Gpus(())
    power: PowerSettings | None = None
    port: Callable[[], int] = free_port
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of every server; configurations override it
    apart: bool = False  # keep the supervisor out of this process's children: see engine/supervisor.py
    cancelled: threading.Event = dataclasses.field(default_factory=threading.Event)

    def inspect(self) -> preflight.Preflight:
        report = preflight.check(self.settings)
        self.version, self.gpus, self.power = report.version, report.gpus, report.power
        return report

    @contextlib.contextmanager
    def launch(self, config: Config, folder: pathlib.Path, progress: Progress) -> Iterator[LocalServer]:
        """See Executor. On leaving, GPU memory is free again as well."""

        def watched(stage: str, after_s: float) -> None:
            if self.cancelled.is_set():
                raise LaunchCancelled
            progress(stage, after_s)

        before = gpu_memory_used_mib([g.uuid for g in self.gpus.gpus])
        for attempt in range(TRIES):
            if self.cancelled.is_set():
                raise LaunchCancelled
            preflight.check_disk(self.settings, folder)
            server, host = self._server(config, folder), HostSnapshot.take()
            with server:
                failure = server.wait_ready(lambda stage, after_s: watched(str(stage), after_s))
                crash = None if failure is None else explain(server, failure, host)
                running = LocalServer(self, server, config, crash, watched, host)
                again = _innocent(server, running.crash) if running.crash and attempt + 1 < TRIES else ""
                if again:
                    LOG.warning("launch %s: %s; starting it again", folder.name, again)
                    watched(f"again: {again}", server.after_s)
                    continue
                LOG.info("launch %s: %s after %.1f s", folder.name,
                         running.crash.category if running.crash else "ready", server.after_s)
                yield running
            break
        self._wait_for_gpu_memory(before, progress)

    def cancel(self) -> None:
        self.cancelled.set()

    def uuids(self, count: int) -> tuple[str, ...]:
        """UUIDs of the GPUs that a server of `count` GPUs gets: the first ones visible, none on device cpu."""
        return () if self.settings.device == "cpu" else tuple(g.uuid for g in self.gpus.gpus[:count])

    def _server(self, config: Config, folder: pathlib.Path) -> Server:
        """The server of a server part, not yet started, on a port that is free now."""
        settings, port = self.settings, self.port()
        command = build(settings.engine, settings.space, config, port=port, device=settings.device,
                        version=self.version)
        return Server(command, settings.engine, folder, settings.server, port, env=self.env, apart=self.apart)

    def _wait_for_gpu_memory(self, before: Mapping[str, float], progress: Progress) -> None:
        deadline = time.monotonic() + self.settings.server.gpu_free_s
        while before and (held := [more for uuid, used in gpu_memory_used_mib(list(before)).items()
                                   if (more := used - before[uuid]) > GPU_SLACK_MIB]):
            if time.monotonic() > deadline:
                LOG.warning("GPU memory not given back: %.0f MiB on %d GPUs", sum(held), len(held))
                progress(f"{sum(held):.0f} MiB of GPU memory not given back", 0.0)
                return
            time.sleep(GPU_POLL_S)


def _reasons(executor: LocalExecutor, outcome: Measurement | Crash) -> tuple[str, ...]:
    """Validity codes of a measurement; none of a crash."""
    return invalid_reasons(executor.settings.objective, outcome) if isinstance(outcome, Measurement) else ()


def explain(server: Server, failure: Failure, before: HostSnapshot) -> Crash:
    """The crash behind a failure, read from the server's log and from kernel events since `before`."""
    return classify(server.log, stage=failure.stage, exit_status=failure.exit_status, after_s=failure.after_s,
                    timed_out=failure.kind in ("stage_timeout", "hung"), evidence=before.since(),
                    detail=failure.detail)


def _innocent(server: Server, crash: Crash) -> str:
    """The cause of a crash at start that says nothing about the configuration; "" when there is none."""
    if crash.category == "port_in_use":
        return f"port {server.port} was taken"
    lost_s = server.suspended_s
    return f"the machine was suspended for {lost_s:.0f} s" if lost_s > SUSPENDED_S else ""
