"""What the campaigns (faults, kills, soak) share: a small study in a folder of its own, and what it left behind.

    site = Site.make(folder, engine="standin")
    tuner = site.start("study.launches=4")
    tuner.wait()
    site.left(), site.torn(), site.trials()

Every process of a site carries AUTOTUNE_CAMPAIGN in its environment, so that what is left can be told from
everything else on the machine without looking at names.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import yaml

from tests.engine.standin_engine import ENGINE
from tests.storage.flat import flat

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A load that is over in two seconds: its figures mean nothing, its states do.
SHORT: dict[str, Any] = {
    "contexts": [8], "output_tokens": 8, "warmup_s": 0.2, "warmup_max_s": 12, "settle_s": 0.4, "drift": 9.0,
    "window_s": 0.5, "window_max_s": 0.6, "block_s": 0.1, "precision": 0.5, "min_requests": 1,
    "first_token_timeout_s": 3, "token_timeout_s": 2, "request_timeout_s": 4}
CONFIRM = {"finalists": 1, "min_rounds": 2, "max_rounds": 2}


@dataclasses.dataclass(frozen=True)
class Site:
    """A study's folder with a space and engine files of its own."""

    folder: pathlib.Path
    marker: str
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def make(cls, folder: pathlib.Path, space: Mapping[str, Any], engine: Mapping[str, Any] | None = None,
             env: Mapping[str, str] | None = None) -> Site:
        """Write the files of a site. `engine` is an engine file's content for an engine that conf/ does not have."""
        (folder / "spaces" / "engine").mkdir(parents=True)
        if engine is not None:
            (folder / "spaces" / "engine" / f"{engine['name']}.yaml").write_text(yaml.safe_dump(dict(engine)))
        (folder / "spaces" / "t.yaml").write_text(yaml.safe_dump({"name": "t", **space}))
        return cls(folder, uuid.uuid4().hex, env or {})

    @property
    def study(self) -> pathlib.Path:
        return self.folder / "outputs" / "t"

    def command(self, *overrides: str, verb: str = "tune") -> list[str]:
        return [sys.executable, "-m", "autotune", verb, "--spaces", str(self.folder / "spaces"), "+space=t",
                f"outputs={self.folder / 'outputs'}", *overrides]

    def start(self, *overrides: str, verb: str = "tune", stderr: pathlib.Path | None = None,
              env: Mapping[str, str] | None = None, wrap: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start a verb in a session of its own; what it says goes to `stderr` (default: tuner.log, appended)."""
        path = stderr or self.folder / "tuner.log"
        told = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        with path.open("ab") as log:
            return subprocess.Popen(
                [*wrap, *self.command(*overrides, verb=verb)], cwd=self.folder, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_interruptible,
                env={**told, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "AUTOTUNE_CAMPAIGN": self.marker,
                     **self.env, **(env or {})})

    # What is left

    def processes(self) -> dict[int, str]:
        """Live processes of this site: pid to command line."""
        ports = {str(command.get("port")) for command in self.records("command.json").values()}
        found = {}
        for process in psutil.process_iter(["cmdline", "environ"]):
            line = " ".join(process.info["cmdline"] or ())
            # a grandchild of the stand-in has an empty environment
            ours = (process.info["environ"] or {}).get("AUTOTUNE_CAMPAIGN") == self.marker or \
                line.partition("of the stand-in on port ")[2].strip() in ports
            if ours and alive(process.pid):
                found[process.pid] = line[:120]
        return found

    def settled(self, within_s: float) -> tuple[dict[int, str], float]:
        """Processes that are left after at most `within_s`, and how long the last one took to go."""
        began = time.monotonic()
        while (left := self.processes()) and time.monotonic() - began < within_s:
            time.sleep(0.05)
        return left, time.monotonic() - began

    def records(self, name: str) -> dict[str, dict[str, Any]]:
        """A JSON file of every launch that has it."""
        found = {}
        for path in sorted(self.study.glob(f"launches/*/{name}")):
            with contextlib.suppress(OSError, ValueError):
                found[path.parent.name] = json.loads(path.read_text())
        return found

    def bound_ports(self) -> list[int]:
        """Ports of the site's launches that somebody still listens on."""
        held = []
        for command in self.records("command.json").values():
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", int(command["port"]))) == 0:
                    held.append(int(command["port"]))
        return held

    def torn(self) -> list[str]:
        """Files under their final names that are not whole."""
        wrong = []
        for path in sorted(self.study.rglob("*")):
            if not path.is_file() or "artifacts" in path.parts:
                continue
            try:
                if path.suffix in (".json", ".jsonl"):
                    text = path.read_text(errors="surrogateescape")
                    lines = [text] if path.suffix == ".json" else text.splitlines()
                    if path.parent.name == "logs" and lines and not text.endswith("\n"):
                        lines.pop()  # our own log is a stream: its last line ends where its writer was killed
                    for line in lines:
                        json.loads(line)
                elif path.suffix == ".html" and not path.read_text().rstrip().endswith("</html>"):
                    raise ValueError("no end")
                elif path.name == "launch.sh" and subprocess.run(["bash", "-n", path], check=False).returncode:
                    raise ValueError("not a script")
            except ValueError as error:
                wrong.append(f"{path.relative_to(self.study)}: {error}")
        if (self.study / "study.db").exists():
            with contextlib.closing(self.database()) as db:
                said = db.execute("pragma integrity_check").fetchall()
                wrong += [] if said == [("ok",)] else [f"study.db: {said[:3]}"]
        return wrong

    def database(self) -> sqlite3.Connection:
        return sqlite3.connect(self.study / "study.db", timeout=30)

    def trials(self) -> list[Trial]:
        """Every trial in the database, read without Optuna."""
        if not (self.study / "study.db").exists():
            return []
        attrs: dict[int, dict[str, Any]] = collections.defaultdict(dict)
        params: dict[int, dict[str, Any]] = collections.defaultdict(dict)
        with contextlib.closing(self.database()) as db, \
                contextlib.suppress(sqlite3.OperationalError):  # killed before the tables were made
            for trial, key, value in db.execute("select trial_id, key, value_json from trial_user_attributes"):
                attrs[trial][key] = json.loads(value)
            for trial, key, value, of in db.execute(
                    "select trial_id, param_name, param_value, distribution_json from trial_params"):
                choices = json.loads(of)["attributes"].get("choices")
                params[trial][key] = choices[int(value)] if choices else value
            rows = db.execute("select trial_id, number, state, value from trials "
                              "left join trial_values using (trial_id) order by number")
            return [Trial(number, state, value, params[key], flat(attrs[key])) for key, number, state, value in rows]
        return []

    def wait_for(self, text: str, tuner: subprocess.Popen[bytes], within_s: float = 600.0, after: int = 0) -> None:
        """Wait until the tuner printed `text` past the position `after`. Raises TimeoutError."""
        deadline = time.monotonic() + within_s
        while text not in self.said()[after:]:
            if tuner.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"the tuner did not say {text!r}: {self.said()[-300:]!r}")
            time.sleep(0.02)

    def said(self) -> str:
        """What the tuner printed so far."""
        path = self.folder / "tuner.log"
        return path.read_text(errors="replace") if path.exists() else ""


@dataclasses.dataclass(frozen=True)
class Trial:
    number: int
    state: str
    value: float | None
    params: Mapping[str, Any]
    attrs: Mapping[str, Any]

    @property
    def finished(self) -> bool:
        return self.state in ("COMPLETE", "PRUNED")

    @property
    def measured(self) -> bool:
        """Measured, also where the noise of this machine made the window one that may not be compared."""
        return self.finished and "window_s" in self.attrs and "crash_signature" not in self.attrs

    @property
    def key(self) -> str:
        return json.dumps(dict(sorted(self.params.items())))


def space(engine: str, choices: Mapping[str, Sequence[Any]], workload: Mapping[str, Any] | None = None,
          **more: Any) -> dict[str, Any]:
    """A space of these choices, the first of each its baseline; `concurrency` is the load."""
    return {"engine": engine, "baseline": {name: values[0] for name, values in choices.items()},
            "params": {name: {"choices": list(values), **({"load": True} if name == "concurrency" else {})}
                       for name, values in choices.items()},
            "workload": {**SHORT, **(workload or {})},
            "agreement": {"prompts": 2, "output_tokens": 4, "context_tokens": 8}, **more}


def standin(params: Mapping[str, Any], **extra: Any) -> dict[str, Any]:
    """The engine file of the stand-in: parameters by name to flag, besides those it has."""
    return {**ENGINE, "params": {**ENGINE["params"], **params}, "info": {"path": "/server_info"}, **extra}


def _interruptible() -> None:
    """Let SIGINT through: a job in the background ignores it, a tuner on a terminal does not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def tree(pid: int) -> set[int]:
    """A process and its live descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    return set()


def end(site: Site, tuner: subprocess.Popen[bytes]) -> None:
    """End whatever of a site still runs, after it was looked at."""
    for pid in {tuner.pid, *site.processes()}:
        if alive(pid) and pid != os.getpid():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    tuner.wait()
