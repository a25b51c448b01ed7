"""A study of 5,000 trials is still told in seconds and megabytes."""

from __future__ import annotations

import json
import random
import sqlite3
import time
from collections.abc import Callable

import pytest

from autotune.cli.verbs import open_study
from autotune.report.render import report
from tests.report.studies import LOG, Made, baseline
from tests.space.configurations import sample

TRIALS = 5000


def multiply(made: Made, trials: int) -> None:
    """Fill the study's database up to `trials` with varied copies of its first two trials, a measured and a crashed
    one. Straight into Optuna's tables: through its interface that many trials take most of an hour."""
    rng = random.Random(3)
    with sqlite3.connect(made.settings.folder / "study.db") as db:
        distributions: dict[str, str] = dict(db.execute("SELECT param_name, distribution_json FROM trial_params"))
        outcomes = dict(db.execute("SELECT trial_id, value_json FROM trial_user_attributes WHERE key = 'outcome'"))
        for number in range(2, trials):
            config = sample(made.settings.space, rng)
            crashed = bool(config["nvls"]) or rng.random() < 0.1
            source, trial = 2 if crashed else 1, number + 1
            result = json.loads(outcomes[source])
            columns = "study_id, state, datetime_start, datetime_complete"
            db.execute(f"INSERT INTO trials (trial_id, number, {columns}) SELECT ?, ?, {columns} FROM trials "
                       "WHERE trial_id = ?", (trial, number, source))
            for table in ("trial_user_attributes", "trial_system_attributes"):
                db.execute(f"INSERT INTO {table} (trial_id, key, value_json) SELECT ?, key, value_json FROM {table} "
                           "WHERE trial_id = ?", (trial, source))
            if crashed:
                result["outcome"]["signature"] = f"sig{rng.randint(0, 60):05d}"
            else:
                value = rng.uniform(1, 5)
                result["outcome"]["output_tokens"] = round(400 * value)
                result["score"]["value"] = value
                db.execute("INSERT INTO trial_values (trial_id, objective, value, value_type) "
                           "VALUES (?, 0, ?, 'FINITE')", (trial, value))
            db.executemany("UPDATE trial_user_attributes SET value_json = ? WHERE trial_id = ? AND key = ?",
                           [(json.dumps(result), trial, "outcome"), (str(number // 2), trial, "launch_id")])
            db.executemany(
                "INSERT INTO trial_params (trial_id, param_name, param_value, distribution_json) VALUES (?, ?, ?, ?)",
                [(trial, name, [repr(c) for c in made.settings.space.param(name).choices].index(repr(v)),
                  distributions[name]) for name, v in config.items()])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_report_of_5000_trials_stays_below_five_megabytes(make: Callable[..., Made]) -> None:
    made = make()
    made.measure(baseline(made, tree_budget=8), 2.0)
    made.crash(baseline(made, tree_budget=8, nvls=True), excerpt=LOG * 5)
    multiply(made, TRIALS)
    began = time.process_time()
    study = open_study(made.settings, create=False)
    report(made.settings, study)
    spent_s = time.process_time() - began
    page = made.settings.folder / "report.html"
    print(f"\n{TRIALS} trials: {spent_s:.1f} s of CPU time, {page.stat().st_size / 1e6:.2f} MB")
    assert len(study.records()) == TRIALS
    assert page.stat().st_size <= 5e6
