"""The loop on real processes: every outcome recorded once, resumable, nothing left running."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import yaml

from autotune.config.compose import load
from autotune.config.settings import Settings
from autotune.engine.gpus import Gpus
from autotune.engine.orphans import members
from autotune.executors.local import LocalExecutor
from autotune.measure.objective import evaluator
from autotune.records import Config
from autotune.search.strategy import Best, Launch, Observation, Pivot, Stop, StopKind
from autotune.storage.database import sqlite_url
from autotune.storage.study import Study
from autotune.tuning import bug_reports
from autotune.tuning.loop import Tuner
from autotune.tuning.worker import new_launch_folder
from tests.engine.standin_engine import ENGINE

ROOT = str(pathlib.Path(__file__).resolve().parents[2])


class Listed:
    """A strategy that works through a list of server parts, each under every load part."""

    def __init__(self, servers: list[Config], loads: list[Config]) -> None:
        self.servers, self.loads = servers, loads
        self.told: list[Observation] = []
        self.busy: list[Config] = []

    def propose(self) -> Launch | Stop:
        done = [o.server for o in self.told]
        for server in self.servers:
            if server not in done and server not in self.busy:
                return Launch(server, "next on the list", 0.1, 0.5)
        return Stop(StopKind.EXHAUSTED, "the list is done")

    def next_load(self, server: Config) -> Config | None:
        done = [o.load for o in self.told if o.server == server]
        return next((c for c in self.loads if c not in done), None)

    def tell(self, observation: Observation) -> None:
        self.told.append(observation)

    def pending(self, server: Config, load: Config | None = None) -> None:
        self.busy.append(server)

    def done(self, server: Config) -> None:
        self.busy = [other for other in self.busy if other != server]

    def best(self) -> Best | None:
        return None

    def pivots(self) -> list[Pivot]:
        return []


class Silent:
    """A listener and an annotator that ignore everything."""

    def __getattr__(self, name: str) -> Any:
        return lambda *ignored: None


def make_settings(folder: pathlib.Path) -> Settings:
    """Settings of a study on the stand-in engine, everything short."""
    (folder / "spaces" / "engine").mkdir(parents=True, exist_ok=True)
    engine = {**ENGINE, "info": {"path": "/server_info", "ignore": ["argv"]}}
    (folder / "spaces" / "engine" / "standin.yaml").write_text(yaml.safe_dump(engine))
    space = {
        "name": "t", "engine": "standin",
        "params": {"speed": {"choices": [100, 200]},
                   "fault": {"choices": ["none", "exit", "silent-exit", "hang", "die-under-load", "http500",
                                         "cut", "garbage"]},
                   "at": {"choices": ["serving", "load", "graph-capture"]},
                   "flags": {"choices": ["a", "b"]},
                   "concurrency": {"choices": [1, 4], "load": True}},
        "baseline": {"speed": 100, "fault": "none", "at": "serving", "flags": "a", "concurrency": 1},
        "workload": {"contexts": [8], "output_tokens": 8, "warmup_s": 0.2, "warmup_max_s": 1.5, "settle_s": 0.4,
                     "drift": 0.9, "window_s": 0.5, "window_max_s": 0.6, "block_s": 0.1, "precision": 0.5,
                     "min_requests": 1, "token_timeout_s": 3},
        "server": {"stage_limits_s": {"load": 4.0, "warmup": 15.0}, "ready_poll_s": 0.1},
    }
    (folder / "spaces" / "t.yaml").write_text(yaml.safe_dump(space))
    return load(["+space=t", f"outputs={folder / 'outputs'}", "power=none", "objective=tokens_per_s"],
                [str(folder / "spaces")])


def command(folder: pathlib.Path, choices: dict[str, list[Any]], *overrides: str, verb: str = "tune") -> dict[str, Any]:
    """Arguments of a process that runs a verb on the stand-in with these choices. The first is the baseline's."""
    path = folder / "spaces" / "t.yaml"
    if not path.exists():
        make_settings(folder)
    space = yaml.safe_load(path.read_text())
    for name, values in choices.items():
        space["params"][name]["choices"] = values
        space["baseline"][name] = values[0]
    path.write_text(yaml.safe_dump(space))
    return {"args": [sys.executable, "-m", "autotune", verb, "--spaces", str(folder / "spaces"), "+space=t",
                     "power=none", f"outputs={folder / 'outputs'}", "objective=tokens_per_s", *overrides],
            "cwd": folder, "env": {**os.environ, "PYTHONPATH": ROOT, "COLUMNS": "200"}, "text": True}


def tuner(settings: Settings, servers: list[dict[str, Any]]) -> Tuner:
    settings.folder.mkdir(parents=True, exist_ok=True)
    study = Study.open(sqlite_url(settings.folder), "t", settings.space, {"space_digest": settings.space.digest})
    base = settings.space.split(settings.space.baseline)[0]
    listed = Listed([{**base, **s} for s in servers], [{"concurrency": 1}, {"concurrency": 4}])
    bench = LocalExecutor(settings, "1", Gpus(()), settings.power)
    silent: Any = Silent()
    return Tuner(study, listed, bench, settings.folder, evaluator(settings.objective, {}), silent, silent.attach,
                 silent.annotate)


def test_each_load_part_on_one_launch_is_a_trial_of_its_own(tmp_path: pathlib.Path) -> None:
    made = tuner(make_settings(tmp_path), [{}])
    made.run()
    one, four = made.study.records()
    assert (one.state, four.state) == ("COMPLETE", "COMPLETE")
    assert one.launch_id == four.launch_id == 1
    assert one.launch_s and four.launch_s == 0
    assert four.value is not None and one.value is not None and four.value > 2 * one.value
    folder = made.folder / "launches" / "0001"
    assert (folder / "exit.json").exists() and (folder / "requests-0.jsonl").read_text().count("\n") > 1


@pytest.mark.parametrize(("fault", "at", "stage"), [
    ("exit", "load", "load"), ("die-under-load", "serving", "serving"),
    *(pytest.param(*fault, marks=pytest.mark.slow) for fault in (
        ("hang", "load", "load"),
        ("exit", "graph-capture", "graph-capture"), ("silent-exit", "load", "load"), ("garbage", "serving", "warmup"),
        ("http500", "serving", "serving"), ("cut", "serving", "serving")))])
def test_a_crash_is_pruned_and_the_study_goes_on(tmp_path: pathlib.Path, fault: str, at: str, stage: str) -> None:
    made = tuner(make_settings(tmp_path), [{"fault": fault, "at": at}, {}])
    made.run()
    first, *_, last = made.study.records()
    assert first.crash is not None and (first.state, first.crash.stage) == ("PRUNED", stage)
    assert first.crash.signature and first.crash.category and first.crash.explanation
    assert last.state == "COMPLETE"


def test_two_configurations_of_the_same_server_are_measured_once(tmp_path: pathlib.Path) -> None:
    settings = make_settings(tmp_path)
    made = tuner(settings, [{"at": "load"}, {"at": "graph-capture"}])  # the stand-in resolves both to the same
    made.run()
    records = made.study.records()
    pairs = [(one, two) for one, two in zip(records[:2], records[2:], strict=True) if not one.invalid_reasons]
    assert pairs and len(records) == 4  # on a busy machine, a window may be invalid and is then no source
    assert [(two.same_as, two.value) for _, two in pairs] == [(one.number, one.value) for one, _ in pairs]


def test_saying_something_else_than_the_baseline_is_wrong_output(tmp_path: pathlib.Path) -> None:
    made = tuner(make_settings(tmp_path), [{}, {"flags": "b"}])
    made.run()
    (made.folder / "agreement.json").write_text(json.dumps([[[f"other text {i}", 48] for i in range(12)]] * 2))
    again = tuner(make_settings(tmp_path), [{}, {"flags": "b"}, {"speed": 200}])
    again.run()
    last = again.study.records()[-1]
    assert last.crash is not None and (last.state, last.crash.stage) == ("PRUNED", "serving")
    assert last.crash.category == "wrong_output"


def test_a_study_stops_between_two_load_parts_and_is_taken_up_where_it_stopped(tmp_path: pathlib.Path) -> None:
    settings = make_settings(tmp_path)
    made = tuner(settings, [{}, {"speed": 200}])
    made.trials = 1
    assert made.run().kind is StopKind.TRIALS
    assert [r.config["concurrency"] for r in made.study.records()] == [1]
    again = tuner(settings, [{}, {"speed": 200}])
    again.trials = 3
    assert "all 3 trials" in again.run().reason
    found = again.study.records()
    assert [r.config["speed"] for r in found] == [100, 200, 200] and [r.launch_id for r in found] == [1, 2, 2]


PROGRAM = """
import pathlib, sys
from tests.tuning.test_loop import make_settings, tuner
settings = make_settings(pathlib.Path(sys.argv[1]))
made = tuner(settings, [{}, {"speed": 200}])
made.study.fail_stale_trials()
made.run()
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["launch", "window"])
def test_a_killed_tuner_leaves_nothing_and_the_next_one_counts_nothing_twice(tmp_path: pathlib.Path,
                                                                            moment: str) -> None:
    env = {**os.environ, "PYTHONPATH": ROOT}
    victim = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, env=env)
    folder = tmp_path / "outputs" / "t" / "launches" / "0001"
    wanted = folder / ("owner.json" if moment == "launch" else "power-0.csv")
    log = folder / "server.log"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if moment == "launch" and wanted.exists():
            break
        if moment == "window" and log.exists() and b"ready to roll" in log.read_bytes():
            time.sleep(0.4)
            break
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, env=env, check=True, timeout=60)
    owner = json.loads((folder / "owner.json").read_text())
    assert members(owner["session"], owner["marker"], int(owner["server_started"])) == set()
    settings = make_settings(tmp_path)
    records = tuner(settings, []).study.records()
    complete = [(r.config["speed"], r.config["concurrency"]) for r in records if r.state == "COMPLETE"]
    assert sorted(complete) == [(100, 1), (100, 4), (200, 1), (200, 4)]
    assert {r.state for r in records} <= {"COMPLETE", "FAIL"}
    assert sum(r.state == "FAIL" for r in records) <= 1


def test_a_folder_of_another_name_among_the_launches_is_no_launch(tmp_path: pathlib.Path) -> None:
    for name in ("1\u00b2", "9x", "0007"):
        (tmp_path / "launches" / name).mkdir(parents=True)
    assert new_launch_folder(tmp_path, []) == 8


GUILTY = {"fault": "exit", "at": "load"}


@pytest.mark.slow
def test_isolation_finds_the_choices_that_crash_and_the_report_names_only_them(tmp_path: pathlib.Path) -> None:
    made = tuner(make_settings(tmp_path), [{}, {**GUILTY, "speed": 200, "flags": "b"}])
    made.run()
    before = len(made.study.records())
    bug_reports.isolate(made, 8)
    records = made.study.records()
    probes = records[before:]
    assert 0 < len(probes) <= 8
    crash = records[before - 1].crash
    assert crash is not None and {r.start.isolates for r in probes} == {crash.signature}
    found = bug_reports.smallest(made.study.space, bug_reports.bugs(made.study.space, records)[0])
    assert found is not None and found.exact and found.choices == GUILTY
    text = bug_reports.write(made.folder, made.study.space, records, {"engine": "1"})[0].read_text()
    assert "| fault | exit | none |" in text and "| speed |" not in text and "RuntimeError" in text


def test_without_launches_the_report_says_that_a_choice_may_be_innocent(tmp_path: pathlib.Path) -> None:
    made = tuner(make_settings(tmp_path), [{}, {**GUILTY, "speed": 200}])
    made.run()
    bug_reports.isolate(made, 0)
    records = made.study.records()
    text = bug_reports.write(made.folder, made.study.space, records, {})[0].read_text()
    assert "may be innocent" in text and "| speed | 200 | 100 |" in text and "1 crashed, 0 worked" in text
    assert len(made.study.records()) == len(records) == 3


def study(folder: pathlib.Path, choices: dict[str, list[Any]], *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**command(folder, choices, *overrides), capture_output=True, timeout=200)


@pytest.mark.slow
def test_a_study_where_everything_crashes_ends_with_3_and_a_bug_report(tmp_path: pathlib.Path) -> None:
    done = study(tmp_path, {"fault": ["exit"], "at": ["load", "graph-capture"]})
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr and "Crashes by signature" in done.stdout
    reports = sorted((tmp_path / "outputs" / "t" / "bugs").glob("*.md"))
    assert reports and all(str(p) in done.stdout.replace("\n", "") for p in reports)
    assert "## Reproduce" in reports[0].read_text() and "standin.py" in reports[0].read_text()


@pytest.mark.slow
def test_a_study_whose_baseline_is_the_best_says_so(tmp_path: pathlib.Path) -> None:
    done = study(tmp_path, {"fault": ["none"], "at": ["serving"], "speed": [200, 20], "flags": ["a"],
                            "concurrency": [4]}, "study.min_gain=0.05")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "the baseline is already the best" in said and "launch.sh" in said


@pytest.mark.slow
def test_a_choice_that_cannot_run_here_is_never_launched_and_the_report_says_why(tmp_path: pathlib.Path) -> None:
    done = study(tmp_path, {"fault": ["none"], "at": ["serving"], "speed": [200], "flags": ["a", "b"],
                            "concurrency": [4]}, "study.launches=4", "study.confirm.finalists=0",
                 "engine.version.use=2.0",
                 "++engine.params.flags={choices: {a: {args: [--flags, a]}, "
                 "b: [{versions: '>=3', args: [--flags, b]}]}}")
    assert done.returncode == 0, done.stderr + done.stdout
    because = "engine standin cannot express flags=b in version 2.0"
    assert "launch 2" not in done.stdout and "CRASH" not in done.stdout
    report = (tmp_path / "outputs/t/report.md").read_text()
    assert because in " ".join(report.split()), report
    done = subprocess.run(**command(tmp_path, {}, verb="report"), capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert because in " ".join((tmp_path / "outputs/t/report.md").read_text().split())
