"""One server process tree: started through the supervisor, followed until ready, queried, ended.

    with Server(command, engine, folder, ...) as server:
        failure = server.wait_ready(progress)      # None, or how it failed
        ...                                        # server.url, server.alive
    # here every process of it is gone

engine/supervisor.py guarantees that leaving the block, or dying in it, leaves no process behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from autotune.engine.command import Command
from autotune.engine.orphans import end_launch, record
from autotune.engine.spec import EngineSpec
from autotune.engine.stages import StageMark, StageReader
from autotune.engine.supervisor import FAILED
from autotune.loadgen.wire_formats import WIRE_FORMATS, Generation
from autotune.records import AutotuneError, Stage
from autotune.utils.files import write_json
from autotune.utils.http import BadAnswer, NoAnswer, ask, count, parts, text, usage_of
from autotune.utils.redact import Redactor
from autotune.utils.validation import NotNegative, Positive

POLL_S = 0.1
HEALTH_S = 10.0
PROMPT = "The quick brown fox"
SETTLE_S = 2.0  # for a server that just failed a request to exit


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Limits that hold for every server (conf/server)."""

    stage_limit_s: Positive  # for a stage that the engine file gives no limit of its own
    stage_limits_s: dict[str, Positive]  # overrides per stage, by name
    ready_poll_s: Positive
    request_timeout_s: Positive  # for the first completion
    log_limit_mib: Positive
    disk_free_mib: NotNegative  # free disk space that a launch needs besides its log
    gpu_free_s: NotNegative  # time for GPU memory to be given back


@dataclasses.dataclass(frozen=True)
class Failure:
    """A failed server before its log is read: the input of the crash classifier."""

    kind: str  # exited, stage_timeout, bad_answer or hung
    stage: Stage
    after_s: float
    exit_status: int | None
    detail: str  # one line of evidence


class SupervisorFailed(AutotuneError):
    """The supervisor of a server failed or was killed: no fault of the configuration."""


class Server:
    """A server and its supervisor. `start` or a `with` block launches it; `stop` or the end of the block ends it."""

    def __init__(self, command: Command, engine: EngineSpec, folder: pathlib.Path, settings: ServerSettings,
                 port: int, host: str = "127.0.0.1", env: Mapping[str, str] | None = None, apart: bool = False) -> None:
        """`env`: variables of this launch that are no part of the configuration's command. `apart`: the supervisor is
        no child of this process, which may kill its children."""
        self.env, self.apart = dict(env or {}), apart
        self.command, self.engine, self.folder, self.settings = command, engine, folder, settings
        self.url, self.port = f"http://{host}:{port}", port
        self.log = folder / "server.log"
        self.redactor = Redactor.from_command(command.argv, command.env, engine.vars, os.environ)
        ready = [StageMark(Stage.ARG_PARSE, engine.ready.log)] if engine.ready.log is not None else []
        self.stages = StageReader(self.log, [*engine.stages, *ready])
        self.marker = uuid.uuid4().hex
        self.started, self._suspended_s = time.monotonic(), suspended_s()
        self._supervisor: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the supervisor, which starts the server. Raises AutotuneError when the supervisor cannot start."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("owner.json", "exit.json"):  # of an earlier try in this folder
            (self.folder / name).unlink(missing_ok=True)
        write_json(self.folder / "command.json", {
            "argv": self.redactor.argv(self.command.argv), "env": self.redactor.data(self.command.env),
            "gpus": self.command.gpus, "engine": self.engine.name, "port": self.port, "placed": self.env})
        order = {
            "argv": self.command.argv, "cwd": os.getcwd(), "folder": str(self.folder), "port": self.port,
            "env": {**os.environ, **self.env, **self.command.env, "AUTOTUNE_LAUNCH": self.marker},
            "secrets": self.redactor.values, "term_s": self.engine.stop_s,
            "log_limit_bytes": int(self.settings.log_limit_mib * 2**20), "tuner": os.getpid(),
        }
        path = [str(pathlib.Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.started, self._suspended_s = time.monotonic(), suspended_s()
        try:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-m", "autotune.engine.supervisor", *(["--apart"] if self.apart else [])],
                stdin=subprocess.PIPE, start_new_session=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)})
            assert self._supervisor.stdin is not None
            self._supervisor.stdin.write(json.dumps(order).encode() + b"\n")
            self._supervisor.stdin.flush()
        except OSError as error:
            raise AutotuneError(f"cannot start the server's supervisor: {error}") from error

    @property
    def alive(self) -> bool:
        """True while the server's main process runs (the supervisor ends with it)."""
        return self._supervisor is not None and self._supervisor.poll() is None

    @property
    def after_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def suspended_s(self) -> float:
        """Seconds since the start in which the machine was suspended."""
        return suspended_s() - self._suspended_s

    @property
    def pid(self) -> int | None:
        """The server's main process; None before it started or when unreadable."""
        pid = record(self.folder / "owner.json").get("server")
        return pid if isinstance(pid, int) else None

    @property
    def exit_status(self) -> int | None:
        """Return code of the main process (negative: killed by that signal); None while it runs or is unknown."""
        status = record(self.folder / "exit.json").get("exit_status")
        return status if isinstance(status, int) else None

    @property
    def supervisor_failure(self) -> str:
        """The reason why the supervisor failed or is gone; "" when it did its work."""
        if self._supervisor is None or self.alive:
            return ""
        if not (self.folder / "exit.json").exists():
            return "the server's supervisor was killed or could not write: see the disk and the kernel's log (dmesg)"
        by = str(record(self.folder / "exit.json").get("ended_by"))
        return f"the server's supervisor failed ({by.removeprefix(FAILED)})" if by.startswith(FAILED) else ""

    def wait_ready(self, progress: Callable[[Stage, float], None] = lambda stage, after_s: None) -> Failure | None:
        """Wait until alive, log mark seen, health 200 and one completion generated. None: ready.

        Raises SupervisorFailed. Stage limits do not count time in which the machine was suspended.
        """
        ready, healthy, detail, next_ask = self.engine.ready, False, "", 0.0
        while self.alive:
            stage = self.stages.update()
            progress(stage, self.after_s)
            marked = ready.log is None or ready.log in self.stages.seen
            if time.monotonic() >= next_ask and (marked or stage is Stage.WARMUP):
                healthy, detail = self._healthy(ready.path)
                next_ask = time.monotonic() + self.settings.ready_poll_s
            if marked and healthy:
                self.stages.enter(Stage.WARMUP)
                if (problem := self.first_completion()) is None:
                    self.stages.enter(Stage.SERVING)
                    progress(Stage.SERVING, self.after_s)
                    return None
                deadline = time.monotonic() + SETTLE_S
                while self.alive and time.monotonic() < deadline:
                    time.sleep(POLL_S)
                return self.failure("bad_answer" if self.alive else "exited", problem)
            if time.monotonic() - self.stages.entered > (limit_s := self.stage_limit_s(stage)):
                last = f" (last answer: {detail})" if detail else ""
                return self.failure("stage_timeout", f"no end of stage {stage} after {limit_s:g} s{last}")
            time.sleep(POLL_S)
        self.stages.update()
        if why := self.supervisor_failure:
            raise SupervisorFailed(f"{why}; the study is kept and can be resumed")
        return self.failure("exited", f"the server process ended with status {self.exit_status}")

    def failure(self, kind: str, detail: str) -> Failure:
        """A Failure at the present stage."""
        return Failure(kind, self.stages.stage, self.after_s, self.exit_status, self.redactor.text(detail))

    def stage_limit_s(self, stage: Stage) -> float:
        """Time limit of a stage: the user's, else the engine's, else the general one."""
        usual_s = self.engine.stage_limits_s.get(stage, self.settings.stage_limit_s)
        return self.settings.stage_limits_s.get(stage, usual_s)

    def first_completion(self) -> str | None:
        """Generate a few tokens; None when it worked, else one line of what came back."""
        wire = WIRE_FORMATS[self.engine.request.api]
        path, model = wire.path, self.engine.request.model or self.model_name() or "default"
        try:
            answer = ask(self.url + path, wire.body(Generation(model, PROMPT, output_tokens=4)),
                         within_s=self.settings.request_timeout_s)
            said = repr(self.redactor.text(answer.text)[:300])
            if answer.status != 200:
                return f"POST {path}: HTTP {answer.status}: {said}"
            produced = count(usage_of(answer.json()), "completion_tokens")
        except (NoAnswer, BadAnswer) as error:
            return f"POST {path}: {'no' if isinstance(error, NoAnswer) else 'bad'} answer: {error}"
        if produced is None:
            return f"POST {path}: an answer without token counts: {said}"
        return None if produced else f"POST {path}: no token generated"

    def model_name(self) -> str | None:
        """The first name that /v1/models lists; None when there is none."""
        with contextlib.suppress(BadAnswer):
            for model in parts(self.get_json("/v1/models"), "data"):
                return text(model, "id") or None
        return None

    def get_json(self, path: str) -> dict[str, Any]:
        """A JSON object from the server; {} when it does not answer with one."""
        with contextlib.suppress(NoAnswer, BadAnswer):
            answer = ask(self.url + path, within_s=self.settings.request_timeout_s)
            return answer.json() if answer.status == 200 else {}
        return {}

    def stop(self) -> int | None:
        """End every process of the server and return its exit status. Safe to call twice."""
        supervisor = self._supervisor
        if supervisor is None or supervisor.stdin is None:
            return None
        with contextlib.suppress(OSError):
            supervisor.stdin.close()
        try:
            supervisor.wait(self.engine.stop_s + 30)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()
        if not (self.folder / "exit.json").exists():  # the supervisor was killed
            end_launch(self.folder)
        return self.exit_status

    def _healthy(self, path: str) -> tuple[bool, str]:
        try:
            status = ask(self.url + path, within_s=HEALTH_S).status
        except (NoAnswer, BadAnswer) as error:
            return False, f"GET {path}: {error}"
        return status == 200, f"GET {path}: HTTP {status}"


def suspended_s() -> float:
    """Seconds since boot in which the machine was suspended: CLOCK_BOOTTIME counts them, CLOCK_MONOTONIC does not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago. Another program may take it; launches are retried on that."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
