"""Several workers on one study: no launch is made twice, none is lost with a dead worker, other hosts are refused."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import time
from typing import Any

import pytest

from autotune.config.settings import devices
from autotune.engine.gpus import Gpu
from autotune.engine.orphans import start_time
from autotune.executors.topology import locked
from autotune.records import AutotuneError, Blame, config_key
from autotune.storage.database import sqlite_url
from autotune.storage.study import Study
from autotune.storage.trial import TrialRecord
from autotune.tuning.worker import share_references
from tests.storage.test_study import open_study
from tests.tuning.test_loop import command, make_settings, tuner


def workers(folder: pathlib.Path, count: int, *overrides: str, choices: dict[str, list[Any]] | None = None,
            verb: str = "worker") -> list[subprocess.Popen[str]]:
    """`count` workers of one study on the stand-in, each a process of its own."""
    given = command(folder, {"fault": ["none", "exit"], "at": ["serving", "load"], **(choices or {})},
                    "study.launches=5", *overrides, verb=verb)
    return [subprocess.Popen(**given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(count)]


def ended(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What each printed; every one must have ended well."""
    said = [process.communicate(timeout=1200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said
    return said


def records(folder: pathlib.Path, url: str | None = None) -> list[TrialRecord]:
    settings = make_settings(folder)
    return Study.open(url or sqlite_url(settings.folder), "t", settings.space, {}, create=False).records()


def nothing_twice(found: list[TrialRecord]) -> None:
    """No two launches of one server part but a retry after a transient crash, which is made on purpose."""
    launched: dict[str, set[int | None]] = {}
    for record in found:
        if (record.state in ("COMPLETE", "PRUNED") and record.same_as is None
                and not (record.crash and record.crash.blame is Blame.TRANSIENT)):
            server = {k: v for k, v in record.config.items() if k != "concurrency"}
            launched.setdefault(config_key(server), set()).add(record.launch_id)
    assert {key: ids for key, ids in launched.items() if len(ids) > 1} == {}


@pytest.mark.slow
def test_workers_share_a_study_measure_nothing_twice_and_leave_tune_to_report(tmp_path: pathlib.Path) -> None:
    said = ended(workers(tmp_path, 3))
    found = records(tmp_path)
    nothing_twice(found)
    assert {r.state for r in found} <= {"COMPLETE", "PRUNED"}
    owners = {r.start.owner for r in found}
    assert len(owners) > 1, said
    launches: dict[int | None, set[str]] = {}
    for record in found:
        launches.setdefault(record.launch_id, set()).add(str(record.start.owner))
    assert all(len(who) == 1 for who in launches.values())  # a launch number belongs to one worker
    assert all("this worker made" in text for text in said)
    said = ended(workers(tmp_path, 1, "study.confirm.finalists=0", verb="tune"))
    assert len(records(tmp_path)) == len(found) and "launch script" in said[0]


@pytest.mark.slow
def test_trials_of_a_killed_worker_are_marked_fail_and_asked_again(tmp_path: pathlib.Path) -> None:
    both = workers(tmp_path, 2, "study.launches=4", choices={"fault": ["none"], "at": ["serving"]})
    deadline = time.monotonic() + 600
    running: list[TrialRecord] = []
    while time.monotonic() < deadline and not running:
        time.sleep(0.1)
        with contextlib.suppress(Exception):  # the tables may still be being made
            running = [r for r in records(tmp_path) if r.state == "RUNNING" and r.config["speed"] == 100]
    assert running and running[0].number == 0, "the baseline comes first"
    victim = next(p for p in both if f"|{p.pid}|" in str(running[0].start.owner))
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    said, = ended([p for p in both if p is not victim])
    found = records(tmp_path)
    dead = [r for r in found if r.state == "FAIL"]
    assert [r.start.fail_reason for r in dead] == ["the tuner died"]
    assert "it is marked FAIL and will be asked again" in " ".join(said.split())
    assert dead[0].number == 0
    again = {(r.launch_id, r.start.owner) for r in found if r.config == dead[0].config and r.state == "COMPLETE"}
    assert len(again) == 1 and dead[0].start.owner not in {owner for _, owner in again}
    nothing_twice(found)


@pytest.mark.slow
def test_a_worker_on_a_host_of_another_kind_or_with_other_settings_is_refused(tmp_path: pathlib.Path) -> None:
    ended(workers(tmp_path, 1, "study.launches=1"))
    for override, code, says in (("+engine.version={use:'9.9'}", 4, "cannot join study t"),
                                 ("workload.output_tokens=9", 2, "made with other conditions")):
        process, = workers(tmp_path, 1, override)
        said = process.communicate(timeout=600)[0]
        assert process.returncode == code and says in said and said.count("\n") == 1, said
        assert "9" in said


def test_hosts_of_one_kind_have_as_many_gpus_of_one_model() -> None:
    one, two = Gpu("GPU-1", "NVIDIA H200", 139), Gpu("GPU-2", "NVIDIA H200", 139)
    assert devices([one, two], "cpu") == ["2 x NVIDIA H200"] and devices([], "cpu x2") == ["cpu x2"]


def test_two_workers_of_a_study_never_measure_on_the_same_gpu(tmp_path: pathlib.Path) -> None:
    one, two = (Gpu(f"GPU-{tmp_path}-{n}", "NVIDIA H200", 139) for n in (1, 2))
    with locked([one]):
        with pytest.raises(AutotuneError, match="CUDA_VISIBLE_DEVICES"), locked([two, one]):
            pass
        with locked([two]):
            pass
    with locked([one, two]):
        pass


def test_the_baselines_outputs_reach_every_host(tmp_path: pathlib.Path) -> None:
    study = open_study(tmp_path)
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    share_references(study, there)
    assert not there.exists()
    here.write_text(json.dumps([[["a text", 48]]]))
    share_references(study, here)
    share_references(study, there)
    assert json.loads(there.read_text()) == [[["a text", 48]]]


def test_the_search_waits_for_launches_of_other_workers(tmp_path: pathlib.Path) -> None:
    made = tuner(make_settings(tmp_path), [{}])
    made.poll_s = 0.05
    other = open_other(made)
    trial = other.ask({**other.space.baseline, "flags": "b"}, launch=7)
    notes: list[str] = []
    setattr(made.listener, "note", notes.append)  # noqa: B010 -- a method of a protocol
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(made.run)
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and not any("other workers" in n for n in notes):
            time.sleep(0.05)
        assert not running.done()
        other.fail(trial, "interrupted")
    assert running.result() and made.sync.others == set()
    assert made.study.records()[-1].launch_id == 8  # numbers go on from what others use


def test_no_worker_sees_a_launch_as_ended_between_two_of_its_trials(tmp_path: pathlib.Path) -> None:
    made = tuner(make_settings(tmp_path), [{}])
    other, tell = open_other(made), made.strategy.tell

    def look() -> list[str]:
        with other.locked():
            return [record.state for record in other.records()]

    def observed(observation: Any) -> None:  # from here to the next trial, the others wait for the study lock
        looks.append(pool.submit(look))
        concurrent.futures.wait(looks, 0.5)
        tell(observation)

    looks = list[concurrent.futures.Future[list[str]]]()
    setattr(made.strategy, "tell", observed)  # noqa: B010 -- a method of a protocol
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        made.run()
    assert [look.result() for look in looks] == [["COMPLETE", "RUNNING"], ["COMPLETE", "COMPLETE"]]


def test_the_strategy_knows_the_load_part_that_others_measure(tmp_path: pathlib.Path) -> None:
    made = tuner(make_settings(tmp_path), [{}])
    other = open_other(made)
    server = {**made.study.space.split(made.study.space.baseline)[0], "flags": "b"}
    heard: list[tuple[Any, Any]] = []
    setattr(made.strategy, "pending", lambda *what: heard.append(what))  # noqa: B010 -- a method of a protocol
    first = other.ask({**server, "concurrency": 1}, launch=7)
    made.sync.trials()
    other.fail(first, "its next one")
    other.ask({**server, "concurrency": 4}, launch=7)
    made.sync.trials()
    assert heard == [(server, {"concurrency": 1}), (server, {"concurrency": 4})]


def open_other(made: Any) -> Study:
    """The study of a tuner as another worker opened it, which is this process's parent."""
    study = Study.open(sqlite_url(made.folder), "t", made.study.space, {"space_digest": made.study.space.digest})
    study.owner = study.owner.rsplit("|", 2)[0] + f"|{os.getppid()}|{start_time(os.getppid())}"
    return study
