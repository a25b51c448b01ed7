"""One launch and its measurements: from a server part to outcomes. Knows neither Optuna nor strategies.

    bench = Bench(settings, version, gpus, power)
    with bench.launch(server, folder, progress) as live:
        outcome = live.crash or live.measure({"concurrency": 8}, 3)

A configuration's failure comes back as a Crash value; an exception is our own fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from autotune.config.settings import Settings
from autotune.crash.classify import classify
from autotune.crash.host_evidence import HostSnapshot
from autotune.engine.command import build
from autotune.engine.gpus import Gpus, gpu_memory_used_mib
from autotune.engine.server import Failure, Server, SupervisorFailed, free_port, suspended_s
from autotune.loadgen.client import ClientDied
from autotune.loadgen.spec import Target
from autotune.measure.correctness import Gate, sentence
from autotune.measure.limits import Limits
from autotune.measure.objective import invalid_reasons
from autotune.measure.workload import target_of
from autotune.power.meter import Powered, PowerSettings
from autotune.power.registry import open_meter
from autotune.records import (
    AutotuneError,
    Config,
    Crash,
    HostCannotRun,
    Measurement,
    Stage,
    Value,
    canonical,
    config_key,
    digest,
)
from autotune.utils.files import free_mib
from autotune.utils.http import LATE

TRIES = 3
"""Of a launch whose port was taken, and of a launch or measurement during which the machine was suspended."""
SUSPENDED_S = 1.0
"""A shorter suspension spoils neither a window nor a start."""
GPU_SLACK_MIB = 512.0
MOST_RESOLVED = 256 << 10
"""Characters of what a server says that it resolved, which each of its trials keeps."""
PLACED = "placed"
"""Begins the stage at which a launch that had to wait for its place has one: waiting is no cost of a configuration."""
LOG = logging.getLogger("autotune")
Progress = Callable[[str, float], None]


class HostLost(AutotuneError):
    """The host of a launch is gone, and the launch with it: nothing was learned about its configuration."""


def resolved_key(resolved: Mapping[str, Any], env: Mapping[str, str]) -> str | None:
    """Hash of the settings a server reports plus the environment that we set. None if it reports nothing.

    Two launches with the same key are the same server, whichever executor started them.
    """
    return digest(canonical([resolved, env])) if resolved else None


@dataclasses.dataclass
class Beside:
    """Launches beside one on this host: how many there are `now`, and the `most` since its measurement began."""

    together: Callable[[], None] = lambda: None  # waits for those that are to be measured at the same time
    now: int = 0
    most: int = 0

    def begin(self) -> None:
        """A measurement begins."""
        self.together()
        self.most = self.now


class LocalServer:
    """A launch as the loop sees it: crashed at start, or serving."""

    def __init__(self, bench: LocalExecutor, server: Server, config: Config, folder: pathlib.Path, crash: Crash | None,
                 progress: Progress, host: HostSnapshot) -> None:
        self.bench, self.server, self.config, self.folder, self.crash = bench, server, config, folder, crash
        self.progress, self.host = progress, host
        self.launch_s = server.after_s
        self.argv = server.redactor.argv(server.command.argv)
        self.env = {name: str(value) for name, value in server.redactor.mapping(server.command.env).items()}
        self.resolved = self._resolved() if crash is None else {}
        self.agreement: float | None = None
        self.beside: Beside | None = None
        self.measurements = 0

    @property
    def alive(self) -> bool:
        return self.crash is None and self.server.alive

    @property
    def resolved_key(self) -> str | None:
        return resolved_key(self.resolved, self.env)

    @property
    def neighbours(self) -> int | None:
        """Most launches that ran beside this one during its last measurement; None: it is made to run alone."""
        return None if self.beside is None else self.beside.most

    def agrees(self) -> Crash | None:
        """Compare greedy outputs with the baseline's; a Crash of category wrong_output when they part too often."""
        settings = self.bench.settings
        gate = self.bench.gate
        is_baseline = config_key(self.config) == config_key(settings.space.split(settings.space.baseline)[0])
        self.progress("agreement", self.server.after_s)
        for _ in range(TRIES):
            before_s = suspended_s()
            verdict, problem = gate.check(self._target(), is_baseline, self.server.redactor.text)
            if not problem or not self._was_suspended(before_s, "agreement"):
                break
        if verdict is not None:
            self.agreement = verdict.agreement
            problem = sentence(verdict) if verdict.wrong else ""
        if not problem:
            return None
        failure = self.server.failure("hung" if LATE in problem else "bad_answer", problem)
        if verdict is None:
            return self.bench.crash(self.server, dataclasses.replace(failure, stage=Stage.SERVING), self.host)
        return classify(problem, stage=Stage.SERVING, exit_status=None, after_s=failure.after_s, detail=problem)

    def _target(self) -> Target:
        settings = self.bench.settings
        return target_of(settings.engine, self.server.url, self.server.model_name() or "default")

    def measure(self, load: Config, label: int | str) -> Measurement | Crash:
        """Measure one load part; a server that fails under it is a Crash at stage serving.

        A window that may not be compared (not steady, disturbed) is measured once more on the warm server, and so is
        one whose load client died; one during which the machine was suspended does not count.
        """
        if self.beside is not None:
            self.beside.begin()
        found = self._unsuspended(load, label)
        reasons = invalid_reasons(self.bench.settings.objective, found) if isinstance(found, Measurement) else ()
        if reasons and self.server.alive:
            LOG.info("measuring again: %s", ", ".join(reasons), extra={"load": dict(load)})
            self.progress(f"again: the window was {', '.join(reasons)}", self.server.after_s)
            return self._unsuspended(load, label)
        return found

    def _unsuspended(self, load: Config, label: int | str) -> Measurement | Crash:
        for _ in range(TRIES):
            before_s = suspended_s()
            try:
                found = self._measure(load, label)
            except ClientDied as error:
                LOG.warning("measuring again: %s", error, extra={"load": dict(load)})
                self.progress(f"again: {error}", self.server.after_s)
                found = self._measure(load, label)
            if not self._was_suspended(before_s, "measurement") or not self.server.alive:
                return found
        return msgspec.structs.replace(found, reasons=(*found.reasons, "suspended")) if isinstance(found, Measurement) \
            else found

    def _was_suspended(self, before_s: float, what: str) -> bool:
        """True when the machine was suspended since `before_s`, so that `what` says nothing about the server."""
        lost_s = suspended_s() - before_s
        if lost_s > SUSPENDED_S:
            LOG.warning("the machine was suspended for %.0f s during the %s", lost_s, what)
            self.progress(f"again: the machine was suspended for {lost_s:.0f} s", self.server.after_s)
        return lost_s > SUSPENDED_S

    def _measure(self, load: Config, label: int | str) -> Measurement | Crash:
        from autotune.measure.window import measure

        settings = self.bench.settings
        self.measurements += 1
        target = self._target()
        powered = Powered(self.server.pid, self.bench.uuids(self.server.command.gpus))
        meter, _ = open_meter(self.bench.power, powered, self.folder / f"power-{label}.csv")
        with meter:
            found = measure(target, settings.workload.load(load, self.measurements), meter, settings.workload.window(),
                            limits=Limits(settings.limits), alive=lambda: self.server.alive,
                            progress=lambda text: self.progress(text, self.server.after_s),
                            record=self.folder / f"requests-{label}.jsonl", hide=self.server.redactor.text)
        if isinstance(found, Measurement):
            return msgspec.structs.replace(found, output_agreement=self.agreement)
        if why := self.server.supervisor_failure:
            raise SupervisorFailed(f"{why}; the study is kept and can be resumed")
        if found.host_fault:
            raise AutotuneError(f"{found.detail}: the study stops here and can be resumed once this is mended")
        excerpt = self.server.redactor.text(found.excerpt)[-1000:]
        failure = self.server.failure(found.kind, f"{found.detail} {excerpt}".strip())
        return self.bench.crash(self.server, dataclasses.replace(failure, stage=Stage.SERVING), self.host)

    def _resolved(self) -> dict[str, Any]:
        info = self.bench.settings.engine.info
        if info.path is None:
            return {}
        same = self.server.redactor.mapping(info.same(self.server.get_json(info.path)))
        text = canonical(same)
        return same if len(text) <= MOST_RESOLVED else {"digest_of_too_much": digest(text)}


@dataclasses.dataclass
class LocalExecutor:
    """What the launches of one tuner share."""

    settings: Settings
    version: str | None
    gpus: Gpus
    power: PowerSettings  # its source is a meter that works here, not auto
    port: Callable[[], int] = free_port
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of its servers, below what configurations set
    apart: bool = False  # this process may kill its children: see `engine.supervisor`

    @property
    def gate(self) -> Gate:
        """The agreement gate of this study."""
        return Gate(self.settings.folder / "agreement.json", self.settings.agreement,
                    self.settings.workload.prompt_source())

    @contextlib.contextmanager
    def launch(self, config: Mapping[str, Value], folder: pathlib.Path, progress: Progress) -> Iterator[LocalServer]:
        """Start the server for a server part. On leaving, every process of it is gone and its GPU memory free."""
        before = gpu_memory_used_mib([g.uuid for g in self.gpus.gpus])
        for attempt in range(TRIES):
            self.check_room(folder)
            server, host = self.server(config, folder), HostSnapshot.take()
            with server:
                failure = server.wait_ready(lambda stage, after_s: progress(str(stage), after_s))
                crash = None if failure is None else self.crash(server, failure, host)
                again = "" if crash is None or attempt + 1 == TRIES else self._again(server, crash)
                if again:
                    LOG.warning("launch %s: %s; starting it again", folder.name, again)
                    progress(f"again: {again}", server.after_s)
                    continue
                live = LocalServer(self, server, config, folder, crash, progress, host)
                if crash is None:
                    live.crash = live.agrees()
                LOG.info("launch %s: %s after %.1f s", folder.name, crash.category if crash else "ready",
                         server.after_s)
                yield live
            break
        self._wait_for_gpu_memory(before, progress)

    def check_room(self, folder: pathlib.Path, launches: int = 1) -> None:
        """Raises HostCannotRun when the disk of `folder` has no room for what so many launches write."""
        check_room(self.settings, folder, launches)

    @staticmethod
    def _again(server: Server, crash: Crash) -> str:
        """Why a crash at start says nothing about the configuration; "" when it does."""
        if crash.category == "port_in_use":
            return f"port {server.port} was taken"
        lost_s = server.suspended_s
        return f"the machine was suspended for {lost_s:.0f} s" if lost_s > SUSPENDED_S else ""

    def end(self) -> None:
        """Launches here are made one at a time, in the thread that would end them."""

    def room(self) -> bool:
        """Whether another launch could start now: the loop never asks for two at once here."""
        return True

    def server(self, config: Config, folder: pathlib.Path) -> Server:
        """The server object for a server part, not yet started, on a port that is free now."""
        settings, port = self.settings, self.port()
        command = build(settings.engine, settings.space, config, port=port, device=settings.device,
                        version=self.version)
        return Server(command, settings.engine, folder, settings.server, port, env=self.env,
                      apart=self.apart)

    def crash(self, server: Server, failure: Failure, before: HostSnapshot) -> Crash:
        """What a failure means, read from the log and from what the kernel did since `before`."""
        return classify(server.log, stage=failure.stage, exit_status=failure.exit_status, after_s=failure.after_s,
                        timed_out=failure.kind in ("stage_timeout", "hung"), evidence=before.since(),
                        detail=failure.detail)

    def uuids(self, count: int) -> tuple[str, ...]:
        """UUIDs of the GPUs that a server of `count` GPUs gets: the first ones visible, none on device cpu."""
        return () if self.settings.device == "cpu" else tuple(g.uuid for g in self.gpus.gpus[:count])

    def _wait_for_gpu_memory(self, before: Mapping[str, float], progress: Progress) -> None:
        deadline = time.monotonic() + self.settings.server.gpu_free_s
        while before:
            now = gpu_memory_used_mib(list(before))
            held = {u: now[u] - before[u] for u in before if u in now and now[u] - before[u] > GPU_SLACK_MIB}
            if not held:
                return
            if time.monotonic() > deadline:
                total = sum(held.values())
                LOG.warning("GPU memory not given back: %.0f MiB on %d GPUs", total, len(held))
                progress(f"{total:.0f} MiB of GPU memory not given back", 0.0)
                return
            time.sleep(0.5)


def working_power(settings: Settings, gpus: Gpus) -> tuple[PowerSettings, dict[str, str]]:
    """The power settings with `auto` replaced by the meter that works here, and why the others do not.

    Raises MeterUnavailable (exit 4) when a meter asked for by name does not work.
    """
    uuids = () if settings.device == "cpu" else tuple(g.uuid for g in gpus.gpus[:1])
    meter, refused = open_meter(settings.power, Powered(os.getpid(), uuids))
    return dataclasses.replace(settings.power, source=meter.source), refused


def check_room(settings: Settings, folder: pathlib.Path, launches: int = 1) -> None:
    """Raises HostCannotRun when the disk of `folder` has no room for what so many launches write."""
    while not folder.exists():
        folder = folder.parent
    free, server = free_mib(folder), settings.server
    needed = launches * (server.disk_free_mib + server.log_limit_mib)
    who = "a launch" if launches == 1 else f"{launches} launches side by side"
    if free < needed:
        raise HostCannotRun(
            f"only {free:.0f} MiB are free on the disk of {folder}, and {who} may need {needed:.0f}: make "
            "room and run the same command, the study is kept (server.disk_free_mib and server.log_limit_mib say how "
            "much)")
