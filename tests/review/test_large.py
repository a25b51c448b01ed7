"""A study of 5,000 trials is still told in seconds and megabytes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from autotune.review.report import report
from tests.review.studies import LOG, Made, baseline

TRIALS = 5000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_report_of_5000_trials_takes_ten_seconds_and_five_megabytes(make: Callable[..., Made]) -> None:
    import optuna

    made = make()
    rng = random.Random(3)
    templates: dict[str, Any] = {}
    number = made.measure(baseline(made), 2.0)
    templates["served"] = made.study.inner.trials[number]
    number = made.crash(baseline(made, nvls=True), excerpt=LOG * 5)
    templates["crashed"] = made.study.inner.trials[number]
    fresh = []
    for i in range(TRIALS - 2):
        config = made.settings.space.sample(rng)
        crashed = bool(config["nvls"]) or rng.random() < 0.1
        source = templates["crashed" if crashed else "served"]
        attrs = {**source.user_attrs, "launch_id": 2 + i // 2}
        value = None
        if crashed:
            attrs["crash_signature"] = f"sig{rng.randint(0, 60):05d}"
        else:
            value = rng.uniform(1, 5)
            attrs |= {"tokens_per_j": value, "tokens_per_s": 40 * value, "objective": value}
        fresh.append(optuna.trial.create_trial(
            state=source.state, value=value, params=dict(config), user_attrs=attrs,
            distributions={p.name: optuna.distributions.CategoricalDistribution(list(p.choices))
                           for p in made.settings.space.params if p.name in config}))
    made.study.inner.add_trials(fresh)
    reopened = Made(made.settings, made.study)
    began = time.process_time()
    report(reopened.settings, reopened.study)
    spent_s = time.process_time() - began
    page = made.settings.folder / "report.html"
    print(f"\n{TRIALS} trials: {spent_s:.1f} s of CPU, {page.stat().st_size / 1e6:.2f} MB")
    assert page.stat().st_size <= 5e6
    assert spent_s <= 10
