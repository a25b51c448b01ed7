"""A study of 5,000 trials is still told in seconds and megabytes."""

from __future__ import annotations

import json
import random
import sqlite3
import time
from collections.abc import Callable
from typing import Any

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
        attrs = {n: dict(db.execute("SELECT key, value_json FROM trial_user_attributes WHERE trial_id = ?", (n,)))
                 for n in (1, 2)}
        system = {n: dict(db.execute("SELECT key, value_json FROM trial_system_attributes WHERE trial_id = ?", (n,)))
                  for n in (1, 2)}
        distributions: dict[str, str] = dict(db.execute("SELECT param_name, distribution_json FROM trial_params"))
        states = dict(db.execute("SELECT trial_id, state FROM trials"))
        rows: dict[str, list[tuple[Any, ...]]] = {"trials": [], "params": [], "values": [], "user": [], "system": []}
        for number in range(2, trials):
            config = sample(made.settings.space, rng)
            crashed = bool(config["nvls"]) or rng.random() < 0.1
            source, trial = 2 if crashed else 1, number + 1
            own: dict[str, Any] = {"launch_id": number // 2}
            result = json.loads(attrs[source]["outcome"])
            if crashed:
                result["outcome"]["signature"] = f"sig{rng.randint(0, 60):05d}"
            else:
                value = rng.uniform(1, 5)
                result["outcome"]["output_tokens"] = round(400 * value)
                result["score"]["value"] = value
                rows["values"].append((trial, 0, value, "FINITE"))
            own["outcome"] = result
            rows["trials"].append((trial, number, 1, states[source], "2026-01-01 10:00:00", "2026-01-01 10:01:00"))
            rows["params"] += [(trial, name, [repr(c) for c in made.settings.space.param(name).choices].index(repr(v)),
                                distributions[name]) for name, v in config.items()]
            rows["user"] += [(trial, k, json.dumps(own[k]) if k in own else v) for k, v in attrs[source].items()]
            rows["system"] += [(trial, k, v) for k, v in system[source].items()]
        for table, columns in (
                ("trials", "trials (trial_id, number, study_id, state, datetime_start, datetime_complete)"),
                ("params", "trial_params (trial_id, param_name, param_value, distribution_json)"),
                ("values", "trial_values (trial_id, objective, value, value_type)"),
                ("user", "trial_user_attributes (trial_id, key, value_json)"),
                ("system", "trial_system_attributes (trial_id, key, value_json)")):
            marks = ", ".join("?" * len(rows[table][0]))
            db.executemany(f"INSERT INTO {columns} VALUES ({marks})", rows[table])


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
