"""The study: nothing mixed, nothing lost, nothing counted twice."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from autotune.records import AutotuneError, Blame, Crash, Energy, Measurement, Score, Stage, UsageError
from autotune.space.space import Space
from autotune.storage.database import SQLITE_WAIT_S, redacted, sqlite_url
from autotune.storage.locks import StudyLock, owner_alive, owner_id
from autotune.storage.schema import add_pivot, read_pivots
from autotune.storage.study import TABLES, Study
from autotune.storage.trial import LaunchFacts

SPACE = Space.parse({
    "name": "s", "engine": "e",
    "params": {"parallel": {"choices": ["tp8", "ep8"]}, "nvls": {"choices": [False, True]},
               "budget": {"choices": [0, 8]}, "topk": {"choices": [1, 2], "when": {"budget": 8}},
               "mem": {"range": [0.8, 0.94], "step": 0.02}, "graphs": {"range": [8, 32], "step": 8},
               "concurrency": {"choices": [1, 64], "load": True}},
    "baseline": {"parallel": "tp8", "nvls": False, "budget": 8, "topk": 2, "mem": 0.9, "graphs": 16, "concurrency": 64},
}, "s")
IDENTITY = {"space_digest": "d1", "engine_version": "1.0", "devices": ["gpu a"]}
ENV = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).resolve().parents[2])}
CRASH = Crash("cublas_error", Stage.GRAPH_CAPTURE, Blame.CONFIG, "v1-abc", "CUBLAS_STATUS_INTERNAL_ERROR")


def open_study(folder: pathlib.Path, **identity: Any) -> Study:
    return Study.open(sqlite_url(folder), "s", SPACE, {**IDENTITY, **identity})


def process(folder: pathlib.Path, program: str) -> subprocess.Popen[bytes]:
    """Another process that runs `program` on the study `study`."""
    setup = "import sys; from tests.storage.test_study import *; study = open_study(pathlib.Path(sys.argv[1])); "
    return subprocess.Popen([sys.executable, "-c", setup + program, str(folder)], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, env=ENV)


def measured(joules: float | None = 500.0) -> Measurement:
    return Measurement(1000, 10.0, 5, 0, 64, Energy("nvml", joules, 10.0))


def test_conditional_parameters_that_do_not_exist_are_absent(tmp_path: pathlib.Path) -> None:
    study = open_study(tmp_path)
    config = {k: v for k, v in {**SPACE.baseline, "budget": 0}.items() if k != "topk"}
    study.fail(study.ask(config, launch=1), "why not")
    assert study.records()[0].config == config


def test_a_crash_is_under_load_when_a_load_was_on_the_server_whatever_the_stage(tmp_path: pathlib.Path) -> None:
    study, dead = open_study(tmp_path), Crash("segfault", Stage.SERVING, Blame.UNKNOWN, "v1-abc", "x")
    for known in (False, True, None):  # None: a study of an earlier release
        study.tell(study.ask(SPACE.baseline, launch=1), dead, None, LaunchFacts(under_load=known), cost_s=1, launch_s=1)
    assert [record.crashed_under_load for record in study.records()] == [False, True, True]


def test_outcomes_are_graded_by_the_same_constraints_on_every_trial(tmp_path: pathlib.Path) -> None:
    study = open_study(tmp_path)
    outcomes: list[tuple[Measurement | Crash, Score | None]] = [
        (CRASH, None), (measured(), Score(2.0, {"tpot_p99_ms": 1.5, "e2e_p99_ms": 0.5})),
        (measured(), Score(2.0, {"tpot_p99_ms": 0.75})), (measured(None), Score(None, {}, ("no_energy",)))]
    for launch, (outcome, score) in enumerate(outcomes):
        study.tell(study.ask(SPACE.baseline, launch), outcome, score, cost_s=3, launch_s=2)
    assert [t.constraints for t in study.inner.trials] == [
        {"crash": 2.0, "limits": 0.0}, {"crash": 0.0, "limits": 0.5}, {"crash": 0.0, "limits": -0.25},
        {"crash": 0.0, "limits": 1.0}]
    assert [(r.state, r.feasible, r.crashed) for r in study.records()] == [
        ("PRUNED", False, True), ("COMPLETE", False, False), ("COMPLETE", True, False), ("PRUNED", False, False)]
    assert "watts" not in study.records()[3].figures


def test_another_space_engine_or_gpu_is_refused(tmp_path: pathlib.Path) -> None:
    open_study(tmp_path, devices=["2 x NVIDIA H200"])
    for change in ({"space_digest": "d2"}, {"engine_version": "2"}, {"devices": ["4 x NVIDIA H200"]}):
        with pytest.raises(UsageError, match=f"{next(iter(change))} was .*study.name=NAME"):
            open_study(tmp_path, **{"devices": ["2 x NVIDIA H200"], **change})
    open_study(tmp_path, devices=["2 x NVIDIA H200"], engine_file="d2")  # which an earlier release did not store


def test_trials_of_a_dead_tuner_are_told_fail_and_of_a_living_one_left(tmp_path: pathlib.Path) -> None:
    open_study(tmp_path)
    assert process(tmp_path, "study.ask(SPACE.baseline, launch=1)").wait(120) == 0
    study = open_study(tmp_path)
    study.ask(SPACE.baseline, launch=2)
    assert study.fail_stale_trials() == [0]
    assert [r.state for r in study.records()] == ["FAIL", "RUNNING"]
    assert study.records()[0].start.fail_reason == "the tuner died"


def test_a_study_has_one_tuner_at_a_time_wherever_its_outputs_are(tmp_path: pathlib.Path) -> None:
    open_study(tmp_path).lead()
    own = open_study(tmp_path)
    own.set_attr("tuner", owner_id().rsplit("|", 1)[0] + "|1")  # one that is dead
    with process(tmp_path, "study.lead(); print('leads', flush=True); sys.stdin.read()") as other:
        assert other.stdout is not None and other.stdout.readline() == b"leads\n"
        with pytest.raises(AutotuneError, match=rf"another autotune \(pid {other.pid}\) tunes study s .* verb worker"):
            own.lead()
        other.kill()
    own.lead()
    own.lead()


def test_a_tuner_elsewhere_lives_while_its_trial_does(tmp_path: pathlib.Path) -> None:
    study, elsewhere = open_study(tmp_path), "far/1|boot|77|1"
    study.set_attr("tuner", elsewhere)
    study.lead()
    study.set_attr("tuner", elsewhere)
    study.ask(SPACE.baseline, launch=1).set_user_attr("owner", elsewhere)
    with pytest.raises(AutotuneError, match=r"\(on far/1, pid 77\)"):
        study.lead()


def test_a_trial_that_was_just_made_when_the_user_interrupted_is_not_left_running(tmp_path: pathlib.Path) -> None:
    study = open_study(tmp_path)
    with pytest.raises(KeyboardInterrupt), study.fail_running_on_exit():
        study.ask(SPACE.baseline, launch=1)
        raise KeyboardInterrupt
    (record,) = study.records()
    assert (record.state, record.start.fail_reason) == ("FAIL", "KeyboardInterrupt")


@pytest.mark.slow
def test_who_is_interrupted_does_not_wait_long_for_a_database_that_is_locked(tmp_path: pathlib.Path) -> None:
    """Found by the fault campaign: the second Ctrl-C left a transaction of our own open, and the end waited for it."""
    study = Study.open(sqlite_url(tmp_path), "s", SPACE, IDENTITY, wait_s=300.0)
    began = time.monotonic()
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db", isolation_level=None)) as other:
        with pytest.raises(KeyboardInterrupt), study.fail_running_on_exit():
            study.ask(SPACE.baseline, launch=1)
            other.execute("BEGIN IMMEDIATE")
            raise KeyboardInterrupt
        assert time.monotonic() - began < 4 * SQLITE_WAIT_S
    assert [r.state for r in study.records()] == ["RUNNING"]  # which the next tuner tells FAIL


def test_owners_of_other_hosts_count_as_alive() -> None:
    host, boot, pid, start = owner_id().split("|")
    assert owner_alive(owner_id())
    assert owner_alive(f"elsewhere|{boot}|{pid}|{start}")
    assert not owner_alive(f"{host}|{boot}|{pid}|1")
    assert not owner_alive(f"{host}|other-boot|{pid}|{start}")
    assert not owner_alive("")


def test_a_result_is_copied_for_a_configuration_of_the_same_server(tmp_path: pathlib.Path) -> None:
    study = open_study(tmp_path)
    study.tell(study.ask({**SPACE.baseline, "topk": 1}, launch=2), measured(), Score(2.0), cost_s=5, launch_s=4,
               same_as=0)
    copy = study.records()[0]
    assert (copy.value, copy.same_as, copy.launch_id, copy.cost_s) == (2.0, 0, 2, 5)


@pytest.mark.parametrize(("url", "code"), [
    ("nonsense", 2), ("mysqll://me:hunter22@host/db", 2), ("mysql+nodriver://me:hunter22@host/db", 2),
    ("mysql://me:hunter22@host/db", 4), ("sqlite:////nonexistent/folder/x.db?password=hunter22", 1)])
def test_a_storage_that_cannot_be_opened_is_one_line_without_its_password(url: str, code: int) -> None:
    says = "cannot open the study storage" if code == 1 else "study.storage: "
    with pytest.raises(AutotuneError, match=says) as caught:
        Study.open(url, "s", SPACE, IDENTITY)
    assert caught.value.exit_code == code and "hunter22" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"no database", b"SQLite format 3\0" + b"\xff" * 8000])
def test_a_file_that_is_no_database_says_what_to_do_too(content: bytes, tmp_path: pathlib.Path) -> None:
    (tmp_path / "study.db").write_bytes(content)
    with pytest.raises(AutotuneError, match="cannot open the study storage .*If it is corrupt: Restore a backup"):
        open_study(tmp_path)


@contextlib.contextmanager
def held_elsewhere(url: str) -> Iterator[None]:
    """Another process holds the lock `topic`, and is killed at the end."""
    program = ("import sys, time\nfrom autotune.storage.locks import StudyLock\n"
               "with StudyLock(sys.argv[1], 'topic').held():\n    print('mine', flush=True)\n    time.sleep(600)\n")
    with subprocess.Popen([sys.executable, "-c", program, url], stdout=subprocess.PIPE, text=True, env=ENV) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "mine\n"
        yield
        holder.kill()


def test_the_study_lock_is_exclusive_and_released_by_a_dead_holder(tmp_path: pathlib.Path) -> None:
    url = sqlite_url(tmp_path)
    with held_elsewhere(url), pytest.raises(AutotuneError, match="waiting for the study lock"), \
            StudyLock(url, "topic", wait_s=0.3).held():
        pass
    lock = StudyLock(url, "topic", wait_s=5)
    with lock.held(), lock.held():  # a thread may hold it twice
        pass


def test_a_reader_waits_while_a_worker_creates_the_tables(tmp_path: pathlib.Path) -> None:
    url = sqlite_url(tmp_path)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with StudyLock(url, TABLES).held():
            reader = pool.submit(Study.open, url, "s", SPACE, {}, create=False)
            time.sleep(1.0)
            assert not reader.done() and not (tmp_path / "study.db").exists()
        with pytest.raises(UsageError, match="there is no study s yet"):
            reader.result(60)


def test_the_study_lock_excludes_threads_of_one_process(tmp_path: pathlib.Path) -> None:
    lock, events = StudyLock(sqlite_url(tmp_path), "topic"), list[str]()

    def work(_: int) -> None:
        with lock.held():
            events.append("in")
            time.sleep(0.001)
            events.append("out")

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(40)))
    assert events == ["in", "out"] * 40


def test_the_outcome_of_a_trial_marked_fail_meanwhile_is_dropped(tmp_path: pathlib.Path) -> None:
    study = open_study(tmp_path)
    trial = study.ask(SPACE.baseline, launch=1)
    assert open_study(tmp_path).fail(trial, "another worker took its owner to be dead")
    assert study.tell(trial, CRASH, None, cost_s=1, launch_s=1) is False
    assert [(r.state, r.crashed) for r in study.records()] == [("FAIL", False)]


def test_a_worker_of_another_host_without_heartbeat_is_dead(tmp_path: pathlib.Path) -> None:
    elsewhere = open_study(tmp_path)
    elsewhere.owner = "other-host/1|boot|1|1"
    elsewhere.ask(SPACE.baseline, launch=1)
    study = Study.open(sqlite_url(tmp_path), "s", SPACE, {}, lost_after_s=2)
    assert study.fail_stale_trials() == []
    elsewhere._running._beating.clear()  # its host lost its power
    deadline = time.monotonic() + 20
    while not (dead := study.fail_stale_trials()) and time.monotonic() < deadline:
        time.sleep(0.3)
    assert dead == [0] and study.records()[0].state == "FAIL"


def test_pivots_are_appended_but_not_twice_in_a_row_for_one_region(tmp_path: pathlib.Path) -> None:
    def add(action: str, region: str = "tp2_ep", trials: str = "10") -> bool:
        return add_pivot(tmp_path, {"key": f"{action}:parallel={region}:{trials}", "action": action,
                                    "region": {"parallel": [region]}})

    assert add("close") and add("close", "dp2")
    assert not add("close")  # a strategy that resumes, or another worker, decides again
    assert add("close", trials="10,12")  # there is new evidence
    assert add("reopen") and add("close")  # closed again on the same evidence
    assert [p["action"] for p in read_pivots(tmp_path)] == ["close", "close", "close", "reopen", "close"]


@pytest.mark.parametrize("url", ["postgresql://me:%s@127.0.0.1:5432/db", "postgresql:///db?host=h&password=%s"])
@pytest.mark.parametrize("password", ["s3cret%2Fof%2Btests", "a/b"])
def test_a_url_is_shown_without_its_password(url: str, password: str) -> None:
    shown = redacted(url % password)
    assert password not in shown and shown.startswith("postgresql://") and ("@127.0.0.1:" in shown) is ("@" in url)
