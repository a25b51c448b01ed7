"""Process control: whatever a server does, the tuner learns how it failed and nothing of it stays behind."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from autotune.crash.classify import classify
from autotune.engine.orphans import end_launch, end_orphans, members
from autotune.engine.server import Server, SupervisorFailed
from autotune.records import Stage
from tests.engine.standin_engine import SETTINGS, server
from tests.processes import alive, eventually
from tests.utils.test_http import dripping, said, serving

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def short_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.engine.server.SETTLE_S", 0.2)


def left(folder: pathlib.Path) -> set[int]:
    """Live processes of the launch in `folder`, found by its own record."""
    owner = json.loads((folder / "owner.json").read_text())
    return members(owner["session"], owner["marker"], int(owner["server_started"]))


@pytest.mark.parametrize("fault", ["none", "ignore-sigterm"])
def test_a_good_server_becomes_ready_and_leaves_nothing(tmp_path: pathlib.Path, fault: str) -> None:
    with server(tmp_path, fault=fault) as live:
        assert live.wait_ready() is None
        assert live.alive and live.stages.stage is Stage.SERVING
        assert live.model_name() == "standin"
    ended = json.loads((tmp_path / "exit.json").read_text())
    assert ended["ended_by"] == "tuner" and ended["exit_status"] == live.exit_status is not None
    assert fault == "none" or live.exit_status == -signal.SIGKILL
    assert left(tmp_path) == set()


@pytest.mark.parametrize(("fault", "at", "status"), [
    *(("exit", at, 1) for at in ("device-init", "load", "graph-capture", "warmup")),
    ("segfault", "load", -signal.SIGSEGV), ("killed", "load", -signal.SIGKILL), ("silent-exit", "load", 0)])
def test_an_exit_is_reported_with_its_status_and_the_stage_where_it_happened(tmp_path: pathlib.Path, fault: str,
                                                                             at: str, status: int) -> None:
    with server(tmp_path, fault=fault, at=at) as live:
        failure = live.wait_ready()
    assert failure is not None
    assert (failure.kind, str(failure.stage), failure.exit_status) == ("exited", at, status)
    assert ("something broke" in live.log.read_text()) is (fault == "exit")


@pytest.mark.parametrize(("fault", "at", "kind", "says"), [
    ("hang", Stage.LOAD, "stage_timeout", "no end of stage load after 0.5 s"),
    ("garbage", Stage.SERVING, "bad_answer", "bad answer: not JSON")])
def test_a_hang_and_a_bad_answer_are_failures_of_one_line(tmp_path: pathlib.Path, fault: str, at: Stage, kind: str,
                                                          says: str) -> None:
    settings = dataclasses.replace(SETTINGS, stage_limits_s={"load": 0.5 if fault == "hang" else 20.0})
    with server(tmp_path, settings, fault=fault, at=str(at)) as live:
        failure = live.wait_ready()
    assert failure is not None and failure.kind == kind and says in failure.detail
    assert failure.stage is (at if fault == "hang" else Stage.WARMUP) and left(tmp_path) == set()


@pytest.mark.parametrize("killed", [False, True])
def test_children_in_sessions_of_their_own_are_ended_with_their_server(tmp_path: pathlib.Path, killed: bool) -> None:
    with server(tmp_path, fault="grandchildren") as live:
        assert live.wait_ready() is None
        pids = sleepers(tmp_path)
        assert len(pids) >= 6 and live.pid is not None
        if killed:
            os.kill(live.pid, signal.SIGKILL)
            eventually(lambda: not live.alive)
    assert not any(map(alive, pids))
    assert (json.loads((tmp_path / "exit.json").read_text())["left"] >= 6) is killed


@pytest.mark.parametrize(("argv", "says"), [(("/nonexistent/program",), "cannot start the server"),
                                            (("a", "b\0c"), "null")])
def test_a_command_that_cannot_start_is_a_failure_not_an_exception(tmp_path: pathlib.Path, argv: tuple[str, ...],
                                                                   says: str) -> None:
    live = server(tmp_path, fault="none")
    live.command = dataclasses.replace(live.command, argv=argv)
    with live:
        failure = live.wait_ready()
    assert failure is not None and failure.exit_status == 127
    assert says in live.log.read_text()


@pytest.mark.parametrize("name", ["server.log", "owner.json"])
def test_a_supervisor_that_cannot_write_ends_its_server_and_is_no_fault_of_the_configuration(
        tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    live = server(tmp_path, fault="none")
    (tmp_path / name / "in the way").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(pathlib.Path, "unlink", lambda *_, **__: None)  # the folder came after the tuner had looked
        live.start()
    with pytest.raises(SupervisorFailed, match=rf"server\'s supervisor failed \(.*{name}.*resumed"):
        live.wait_ready()
    live.stop()
    assert "Traceback" not in capfd.readouterr().err
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", live.port), 1)


def test_seconds_in_which_the_machine_slept_are_known_since_the_start(
        tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = server(tmp_path, fault="none")
    assert live.suspended_s == pytest.approx(0.0, abs=0.5)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: now + 100 * (clock == time.CLOCK_BOOTTIME))
    assert live.suspended_s == pytest.approx(100.0, abs=2.0)


def test_a_flooded_log_keeps_its_head_and_its_tail(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_FLOOD_MB", "20")
    with server(tmp_path, fault="flood", at="load") as live:
        failure = live.wait_ready()
    assert failure is not None and failure.exit_status == 1
    text = live.log.read_text()
    assert live.log.stat().st_size < 2.5 * 2**20
    assert "Load weight begin" in text and "after the flood" in text and "left out here" in text


def test_secrets_in_the_environment_do_not_reach_the_log(tmp_path: pathlib.Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-value-1234567")
    live = server(tmp_path, fault="exit", at="load")
    live.command = dataclasses.replace(live.command, argv=(*live.command.argv, "--message", "canary-value-1234567"))
    with live:
        live.wait_ready()
    assert "[redacted]" in live.log.read_text()
    for file in tmp_path.iterdir():
        assert "canary-value-1234567" not in file.read_text()


TUNER = """
import pathlib, sys, time
from tests.engine.standin_engine import server
live = server(pathlib.Path(sys.argv[1]), fault=sys.argv[2])
live.apart = sys.argv[3] == "apart"
live.start()
failure = live.wait_ready()
print("ready" if failure is None else failure, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("fault", "place"), [("none", "child"), ("ignore-sigterm", "child"),
                                              ("grandchildren", "child"), ("none", "apart")])
def test_killing_the_tuner_leaves_no_process(tmp_path: pathlib.Path, fault: str, place: str) -> None:
    folder = tmp_path / "launches" / "0001"
    tuner = subprocess.Popen([sys.executable, "-c", TUNER, str(folder), fault, place], stdout=subprocess.PIPE, cwd=ROOT,
                             env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert tuner.stdout is not None and tuner.stdout.readline() == b"ready\n"
    grandchildren = sleepers(folder)
    assert bool(grandchildren) is (fault == "grandchildren")
    if place == "apart":
        for child in psutil.Process(tuner.pid).children():  # as Ray does on its way out
            child.kill()
    tuner.kill()
    tuner.communicate()
    if place == "apart":
        eventually(lambda: (folder / "exit.json").exists())  # the supervisor's last act
    else:
        end_orphans(tmp_path)
    assert left(folder) == set() and not any(map(alive, grandchildren))


def test_orphans_are_ended_even_when_the_supervisor_was_killed_too(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "launches" / "0001"
    live = server(folder, fault="ignore-sigterm")
    live.start()
    assert live.wait_ready() is None
    owner = json.loads((folder / "owner.json").read_text())
    os.kill(owner["supervisor"], signal.SIGKILL)
    assert live._supervisor is not None
    live._supervisor.wait()
    assert left(folder)
    assert end_orphans(tmp_path) == {}  # its tuner, this process, is alive: not an orphan
    assert end_launch(folder) >= 1 and left(folder) == set()


def test_a_record_that_is_damaged_or_of_another_boot_ends_nothing(tmp_path: pathlib.Path) -> None:
    (folder := tmp_path / "launches" / "0001").mkdir(parents=True)
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    other = {"boot": "another", "supervisor_started": "1", "server_started": "1", "marker": "x", "tuner": 1,
             "tuner_started": "0", **dict.fromkeys(("supervisor", "server", "session"), bystander.pid)}
    for text in ("", "{", "5", "[" * 100_000, '{"boot": [' + "[" * 100_000, '{"supervisor": "x"}', json.dumps(other)):
        (folder / "owner.json").write_text(text)
        assert end_orphans(tmp_path) == {} and bystander.poll() is None
    bystander.kill()
    bystander.wait()


def sleepers(folder: pathlib.Path) -> set[int]:
    """Pids of the sleeping grandchildren of the stand-in that was launched in `folder`."""
    wanted = f"# of the stand-in on port {json.loads((folder / 'command.json').read_text())['port']}"
    return {process.pid for process in psutil.process_iter(["cmdline"])
            if wanted in " ".join(process.info["cmdline"] or ()) and alive(process.pid)}


def odd_server(tmp_path: pathlib.Path, url: str) -> Server:
    """A server object that was never started and asks what listens at `url`."""
    made = server(tmp_path, dataclasses.replace(SETTINGS, request_timeout_s=0.5), fault="none")
    made.url = url
    return made


@pytest.mark.parametrize("body", [
    b"[" * 200_000, b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", b"[1]", b'"x"', b'{"data": ["x"]}', b'{"data": 5}',
    b'{"data": [{"id": [1]}]}', b'{"data": []}'])
def test_a_server_that_describes_itself_in_a_wrong_form_says_nothing(tmp_path: pathlib.Path, body: bytes) -> None:
    with serving(said(body), said(body)) as url:
        odd = odd_server(tmp_path, url)
        assert odd.model_name() is None and (b"data" in body or odd.get_json("/server_info") == {})
    for answer in (said(b'{"detail": "Not Found"}', b"HTTP/1.1 404 X\r\n"), dripping(b"HTTP/1.1 200 OK\r\n\r\n")):
        with serving(answer) as url:
            assert odd_server(tmp_path, url).get_json("/server_info") == {}


@pytest.mark.parametrize(("body", "told"), [
    (b'{"usage":{"completion_tokens":' + b"9" * 4000 + b"}}", "bad answer"), (b"[" * 200_000, "bad answer"),
    (b"[1]", "bad answer"), (b'{"usage": [1]}', "bad answer"), (b"{}", "without token counts"),
    (b'{"usage": {"completion_tokens": 0}}', "no token generated")])
def test_a_first_completion_in_a_wrong_form_is_one_line_that_says_so(tmp_path: pathlib.Path, body: bytes,
                                                                    told: str) -> None:
    with serving(said(b'{"data": [{"id": "m"}]}'), said(body)) as url:
        problem = odd_server(tmp_path, url).first_completion()
    assert problem is not None and told in problem and len(problem) < 500
    crash = classify(problem, stage=Stage.WARMUP, exit_status=None, after_s=1.0, detail=problem)
    assert crash.category == "http_server_error"
