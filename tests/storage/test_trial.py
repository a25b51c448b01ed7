"""The one stored form of a trial: what is written, read back, and read of studies of earlier releases."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import sqlite3
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import sqlalchemy

from autotune.cli.verbs import open_study
from autotune.config.compose import load
from autotune.export.launch_files import export
from autotune.records import Blame, Crash, Energy, Measurement, Outcome, Percentiles, Score, Stage
from autotune.report.story import read
from autotune.search.strategy import Measured
from autotune.search.transfer import past_observations
from autotune.storage.study import Study
from autotune.storage.trial import LaunchFacts
from autotune.utils.validation import from_json
from tests.storage.test_study import SPACE
from tests.storage.test_study import open_study as open_made

FULL = Measurement(
    1000, 10.5, 5, 1, 64, Energy("nvml", 500.0, 10.0, True, ("drift",), {"GPU-1": 500.0}, "GPUs", 499.0,
                                 {"GPU-1": (40.0, 50.0)}, {"GPU-1": 700.0}),
    ttft_ms=Percentiles(1.0, 2.0, 3.0, 1.5, 5), tpot_ms=Percentiles(1.0, 2.0, 3.0, 1.5), itl_ms=None, e2e_ms=None,
    prompt_tokens=7, accept_length=2.5, relative_error=0.01, output_agreement=0.99, reasons=("not_steady",),
    error_kinds={"reset": 1}, client_cpu_share=0.1, good_tokens=900)
LEAN = Measurement(1000, 10.0, 5, 0, None, Energy("none", None, 10.0))


@contextlib.contextmanager
def commits(study: Study) -> Iterator[list[str]]:
    """The first statement of each transaction that writes, heartbeats left out."""
    engine, counted, began = study.storage.engine, list[str](), list[str]()

    def executed(*event: Any) -> None:
        if event[2].split()[0] in ("INSERT", "UPDATE", "DELETE") and "heartbeat" not in event[2]:
            began.append(event[2])

    def committed(_: Any) -> None:
        counted.extend(began[:1])
        began.clear()

    sqlalchemy.event.listen(engine, "before_cursor_execute", executed)
    sqlalchemy.event.listen(engine, "commit", committed)
    yield counted


@pytest.mark.parametrize(("outcome", "score", "shown"), [
    (FULL, Score(2.0, {"tpot_p99_ms": 1.5, "ttft_p99_ms": 0.5}),
     {"feasible": False, "violated": ["tpot_p99_ms"], "tokens_per_j": 2.0, "tokens_per_s": 1000 / 10.5, "watts": 50.0}),
    (LEAN, Score(100.0), {"feasible": True, "tokens_per_s": 100.0}),
    (Crash("oom", Stage.LOAD, Blame.UNKNOWN, "v1-x", "excerpt", "explanation", "next", -9, 12.5), None,
     {"feasible": False, "crash_category": "oom", "crash_stage": "load", "crash_blame": "unknown",
      "crash_signature": "v1-x"})])
def test_a_trial_is_written_in_ten_commits_and_read_back_whole(
        tmp_path: pathlib.Path, outcome: Outcome, score: Score | None, shown: dict[str, Any]) -> None:
    study = open_made(tmp_path)
    facts = LaunchFacts(("python", "-m", "engine"), {"A": "b"}, {"tp": 1}, "key", 0, under_load=False)
    with commits(study) as counted:
        trial = study.ask(SPACE.baseline, launch=7, reason="because", confirm="baseline", confirm_after=3)
        study.tell(trial, outcome, score, facts, cost_s=62.0, launch_s=41.0)
    assert len(counted) <= 10
    record = open_made(tmp_path).record(trial.number)
    assert record.config == SPACE.baseline and record.value == (score and score.value)
    assert (record.outcome, record.score, record.launch) == (outcome, score, facts)
    assert (record.cost_s, record.launch_s, record.same_as) == (62.0, 41.0, None)
    assert (record.launch_id, record.confirm, record.start.confirm_after, record.start.reason) == (
        7, "baseline", 3, "because")
    attrs = study.inner.trials[trial.number].user_attrs
    plain = attrs["outcome"]["outcome"]
    assert from_json(json.loads(json.dumps(plain)), Outcome) == outcome
    assert None not in plain.values() or outcome is LEAN  # unknown fields are absent
    start = msgspec.to_builtins(record.start)
    assert {key: attrs[key] for key in attrs if key not in start and key != "outcome"} == shown


@pytest.fixture
def old_study(tmp_path: pathlib.Path) -> pathlib.Path:
    """The folder of a study that an earlier release wrote, with an attribute for each figure."""
    folder, source = tmp_path / "local", pathlib.Path(__file__).parent / "old_study"
    folder.mkdir()
    with contextlib.closing(sqlite3.connect(folder / "study.db")) as db:
        db.executescript((source / "study.sql").read_text())
    shutil.copy(source / "pivots.jsonl", folder)
    return folder


def test_a_study_of_an_earlier_release_opens_reports_exports_and_warm_starts(old_study: pathlib.Path) -> None:
    settings = load(["+space=local", f"outputs={old_study.parent}"], [])
    study = open_study(settings, create=False)
    records = study.records()
    assert [r.state for r in records].count("COMPLETE") == 25 and len(records) == 28
    first, crash = records[0], next(r for r in records if r.crash is not None)
    assert first.measurement is not None and first.measurement.tokens_per_j == pytest.approx(first.value)
    assert first.measurement.ttft_ms is not None and first.measurement.ttft_ms.n is None
    assert first.feasible and first.launch.argv and first.launch.resolved_key and first.cost_s
    assert crash.crash is not None and crash.crash.category == "parallel_layout_invalid"
    assert crash.crash.stage is Stage.ARG_PARSE and not crash.crashed_under_load
    assert study.attrs()["unavailable"] == [] and study.attrs()["confirmation"]["winner"] == 16
    story = read(settings, study)
    assert story.winner is not None and len(story.pivots) == 4
    assert "--max-running-requests 16" in pathlib.Path(export(settings, study)).read_text()
    past = past_observations([str(old_study)], settings.space, "tokens_per_joule")
    assert [type(o.outcome) for o in past].count(Measured) == 16 and len(past) == 19


def test_a_corrupt_value_of_an_earlier_release_is_one_line(old_study: pathlib.Path) -> None:
    with contextlib.closing(sqlite3.connect(old_study / "study.db")) as db, db:
        db.execute("update trial_user_attributes set value_json='\"x\"' where trial_id=1 and key='launch_s'")
    with pytest.raises(Exception, match="corrupt study database: trial 0: launch_s must be a finite number, not 'x'. "
                       "Restore a backup or use study.name=NAME."):
        open_study(load(["+space=local", f"outputs={old_study.parent}"], []), create=False).records()
