"""Past studies steer the search, and lose weight when they are wrong."""

from __future__ import annotations

import math
import pathlib

import pytest

from autotune.cli.verbs import make_strategy
from autotune.config.compose import load
from autotune.records import Blame, Config, Crash, Energy, Measurement, Score, Stage, UsageError
from autotune.search.launch_aware import LaunchAware
from autotune.search.strategy import Limits, Measured, Observation
from autotune.search.transfer import past_observations
from autotune.storage.database import sqlite_url
from autotune.storage.study import Study
from tests.search.simulate import simulate
from tests.search.test_launch_aware import table

BETTER = [{"when": {"mode": "b"}, "times": 1.3}, {"when": {"fused": True}, "times": 1.1}]
WORSE = [{"when": {"mode": "b"}, "times": 0.5}, {"when": {"fused": True}, "times": 0.5}]


def finished(factors: list[dict[str, object]]) -> tuple[Observation, ...]:
    """All observations of a finished study on such a table."""
    of = table([{"when": {"mode": "c"}}], factors)
    return simulate(of, LaunchAware(of.space, Limits(), 1), 1, 8.0).told


def test_a_good_past_study_leads_straight_to_the_optimum_and_a_misleading_one_does_not_hide_it() -> None:
    of = table([{"when": {"mode": "c"}}], BETTER)
    trust, errors = [], []
    for past in (BETTER, WORSE):
        strategy = LaunchAware(of.space, Limits(), 0, finished(past))
        found = simulate(of, strategy, 0, 8.0)
        assert found.final_share >= 0.98
        if past is BETTER:
            step = found.reached(0.98)
            assert step is not None and step.launches <= 3 and found.crashed == 0
        report = strategy.past_report()
        assert strategy.past is not None and report is not None
        error = strategy.past.error(strategy.memory.measurements())
        assert error is not None and f"off by {math.expm1(error):.0%}" in report
        trust.append(strategy._value.prior.trust)
        errors.append(error)
    assert trust[1] < trust[0] and errors[1] > 3 * errors[0]


def test_past_observations_outside_this_space_are_left_out() -> None:
    space = table([]).space
    server: Config = {"mode": "b", "graphs": True, "fused": False, "depth": 4}
    past = [Observation({**server, **change}, {"concurrency": 8}, Measured(1.0), 1.0, 1.0)
            for change in ({"mode": "z"}, {"else": 1})]
    strategy = LaunchAware(space, past=past)
    assert strategy.past is not None and (strategy.past.given, strategy.past.used) == (2, 1)


def test_a_stored_study_is_read_with_its_crashes_and_relative_values(tmp_path: pathlib.Path) -> None:
    space = table([]).space
    study = Study.open(sqlite_url(tmp_path), "old", space, {"objective": "tokens_per_joule"})
    good = study.ask(space.baseline, 1)
    measured = Measurement(1000, 10.0, 20, 0, 32, Energy("nvml", 500.0, 10.0))
    study.tell(good, measured, Score(2.0), cost_s=340.0, launch_s=300.0)
    bad = study.ask({**space.baseline, "mode": "b"}, 2)
    study.tell(bad, Crash("oom", Stage.LOAD, Blame.CONFIG, "v1-3f9c21d07a", "x"), None, cost_s=100.0, launch_s=100.0)
    past = past_observations([str(tmp_path)], space, "tokens_per_joule")
    assert [type(o.outcome) for o in past] == [Measured, Crash]
    assert isinstance(past[0].outcome, Measured) and past[0].outcome.value == pytest.approx(1.0)
    assert past[1].server["mode"] == "b" and past[1].load is None
    other = past_observations([sqlite_url(tmp_path)], space, "tokens_per_s")
    assert isinstance(other[0].outcome, Measured) and other[0].outcome.value is None
    assert isinstance(other[1].outcome, Crash)


def test_a_missing_broken_or_useless_warm_start_is_refused_before_anything_runs(tmp_path: pathlib.Path) -> None:
    (tmp_path / "study.db").write_text("no database")
    for source, strategy, said in (
            (tmp_path / "nowhere", "autotune", "study.warm_start: no study in"),
            (tmp_path, "autotune", "cannot be read"),
            (tmp_path, "tpe", "study.strategy=tpe learns nothing from study.warm_start")):
        with pytest.raises(UsageError, match=said):
            make_strategy(load(["+space=b300", f"study.strategy={strategy}", f"study.warm_start=[{source}]"]))
