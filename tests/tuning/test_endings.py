"""How whole studies end, from the command line to the last line printed, on real processes."""

from __future__ import annotations

import pathlib
import subprocess
from typing import Any

import pytest

from tests.tuning.test_loop import command

pytestmark = pytest.mark.slow


def study(folder: pathlib.Path, choices: dict[str, list[Any]], *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**command(folder, choices, *overrides), capture_output=True, timeout=200)


def test_a_study_where_everything_crashes_ends_with_3_and_a_bug_report(tmp_path: pathlib.Path) -> None:
    done = study(tmp_path, {"fault": ["exit"], "at": ["load", "graph-capture"]})
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr and "Crashes by signature" in done.stdout
    reports = sorted((tmp_path / "outputs" / "t" / "bugs").glob("*.md"))
    assert reports and all(str(p) in done.stdout.replace("\n", "") for p in reports)
    assert "## Reproduce" in reports[0].read_text() and "standin.py" in reports[0].read_text()


def test_a_study_whose_baseline_is_the_best_says_so(tmp_path: pathlib.Path) -> None:
    done = study(tmp_path, {"fault": ["none"], "at": ["serving"], "speed": [200, 20], "flags": ["a"],
                            "concurrency": [4]}, "study.min_gain=0.05")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "the baseline is already the best" in said and "launch.sh" in said


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
