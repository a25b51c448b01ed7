"""Bug reports: from what a study knows, and after launches spent on isolation, on real processes."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import yaml

from autotune import bugs
from tests.core.test_tune import ROOT, make_settings, tuner

GUILTY = {"fault": "exit", "at": "load"}


def test_isolation_finds_the_choices_that_crash_and_the_report_names_only_them(tmp_path: pathlib.Path) -> None:
    made = tuner(make_settings(tmp_path), [{}, {**GUILTY, "speed": 200, "flags": "b"}])
    made.run()
    before = len(made.study.records())
    bugs.isolate(made, 8)
    records = made.study.records()
    probes = records[before:]
    assert 0 < len(probes) <= 8
    assert {r.attrs["isolates"] for r in probes} == {records[before - 1].attrs["crash_signature"]}
    found = bugs.smallest(made.study.space, bugs.bugs(made.study.space, records)[0])
    assert found is not None and found.exact and found.choices == GUILTY
    text = bugs.write(made.folder, made.study.space, records, {"engine": "1"})[0].read_text()
    assert "| fault | exit | none |" in text and "| speed |" not in text and "RuntimeError" in text


def test_without_launches_the_report_says_that_a_choice_may_be_innocent(tmp_path: pathlib.Path) -> None:
    made = tuner(make_settings(tmp_path), [{}, {**GUILTY, "speed": 200}])
    made.run()
    bugs.isolate(made, 0)
    records = made.study.records()
    text = bugs.write(made.folder, made.study.space, records, {})[0].read_text()
    assert "may be innocent" in text and "| speed | 200 | 100 |" in text and "1 crashed, 0 worked" in text
    assert len(made.study.records()) == len(records) == 3


def test_a_study_where_everything_crashes_ends_with_3_and_a_bug_report(tmp_path: pathlib.Path) -> None:
    make_settings(tmp_path)
    path = tmp_path / "spaces" / "t.yaml"
    space = yaml.safe_load(path.read_text())
    space["params"]["fault"]["choices"] = ["exit"]
    space["params"]["at"]["choices"] = ["load", "graph-capture"]
    space["baseline"] |= {"fault": "exit", "at": "load"}
    path.write_text(yaml.safe_dump(space))
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "tune", "--spaces", str(tmp_path / "spaces"), "+space=t", "power=none",
         f"outputs={tmp_path / 'outputs'}", "objective=tokens_per_s"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr and "crash" in done.stdout.lower()
    reports = sorted((tmp_path / "outputs" / "t" / "bugs").glob("*.md"))
    assert reports and all(str(p) in done.stdout.replace("\n", "") for p in reports)
    assert "## Reproduce" in reports[0].read_text() and "standin.py" in reports[0].read_text()
