"""Bug reports: from what a study knows, and after launches spent on isolation, on real processes."""

from __future__ import annotations

import pathlib

import pytest

from autotune.tuning import bug_reports
from tests.tuning.test_loop import make_settings, tuner

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
