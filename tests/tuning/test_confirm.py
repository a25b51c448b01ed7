"""The confirmation on a study: finalists, budget, and taking it up where it was interrupted."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from autotune.measure.finalists import BASELINE
from autotune.records import config_key
from autotune.storage.trial import TrialRecord
from autotune.tuning.confirm import Budget, Plan, blocks, confirm, finalists
from tests.conftest import Maker
from tests.report.studies import baseline
from tests.tuning.test_loop import Silent, make_settings, tuner


def test_finalists_are_the_best_load_of_each_server_that_beats_the_baseline(make: Maker) -> None:
    made = make()
    made.measure(baseline(made), 2.0)
    made.measure(baseline(made, concurrency=8), 2.4, same_launch=True)
    made.measure(baseline(made, tree_budget=8), 2.6)
    made.measure(baseline(made, tree_budget=8, concurrency=8), 3.0, same_launch=True)
    made.measure(baseline(made, tree_budget=16), 1.9)
    made.measure(baseline(made, tp=2), 4.0, reasons=("drifted",))
    assert [number for number, _ in finalists(made.settings.space, made.study.records())] == [3, 1]


def test_interrupted_launches_and_those_beside_the_search_are_not_charged_to_the_budget(make: Maker) -> None:
    made, budget = make(), Budget(4, None)
    made.measure(baseline(made), 2.0)
    made.crash(baseline(made, nvls=True))
    made.study.fail(made.study.ask(baseline(made, tp=2), 99), "interrupted")
    made.measure(baseline(made), 2.0, confirm="alone")
    made.crash(baseline(made, nvls=True), isolates="nvls0001")
    assert budget.left(made.study.records()) == 2 and budget.spent(made.study.records()) == ""
    made.measure(baseline(made), 2.0, confirm=BASELINE)
    made.measure(baseline(made, tp=2), 2.0, confirm="4")
    assert budget.spent(made.study.records()) == "all 4 launches are used"
    assert Budget(None, 0.001).spent(made.study.records()) == "all 0.001 hours are used"
    assert Budget(None, None).spent(made.study.records()) == "" and Budget(None, None).left([]) is None


def test_a_launch_that_was_interrupted_before_its_last_load_is_not_a_block(make: Maker) -> None:
    made = make()
    attrs: dict[str, Any] = {"confirm": "3", "confirm_after": 1, "confirm_round": 2}
    made.measure(baseline(made), 2.0)
    made.measure(baseline(made, tp=2), 2.0, **attrs)
    made.study.fail(made.study.ask(baseline(made, tp=2, concurrency=8), made.launches, **attrs), "interrupted")
    made.measure(baseline(made, tp=2), 2.1, **attrs)
    made.measure(baseline(made, tp=2, concurrency=8), 2.2, same_launch=True, **attrs)
    found = blocks(made.study.records(), 1)
    assert list(found) == [(2, "3")] and [len(launch) for launch in found[2, "3"]] == [2, 2]


def test_the_plan_measures_the_baselines_server_under_each_finalists_load(make: Maker) -> None:
    space = (made := make()).settings.space
    base, other = baseline(made), baseline(made, tree_budget=8, concurrency=8)
    plan = Plan({BASELINE: base, "3": other, "load-3": {**base, "concurrency": 8}}, 3)
    server, loads = plan.launch(space, BASELINE, ("3", "load-3"))
    assert server == space.split(base)[0] and [load["concurrency"] for load in loads] == [4, 8]
    assert plan.launch(space, "3", ("3", "load-3"))[1] == [{"concurrency": 8}, {"concurrency": 4}]


class Interrupting(Silent):
    """Ctrl-C after so many outcomes of the confirmation."""

    def __init__(self, after: int) -> None:
        self.left = after

    def outcome(self, record: TrialRecord) -> None:
        if record.confirm is not None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt


def test_a_confirmation_goes_on_after_any_interruption_and_tells_server_from_load(tmp_path: pathlib.Path) -> None:
    settings = make_settings(tmp_path)
    rules = settings.study.confirm.__class__(finalists=1, alpha=0.2, min_rounds=2, max_rounds=2, worth=0.01)
    made, decision = tuner(settings, [{}, {"speed": 200}]), None
    made.run()
    for after in (0, 3, 100, 100):
        made.listener = Interrupting(after)
        try:
            decision = confirm(made, rules, Budget(None, None))
        except KeyboardInterrupt:
            assert decision is None
    assert decision is not None and decision.rounds == 2
    records = [r for r in made.study.records() if r.confirm and r.state == "COMPLETE"]
    told = made.study.attrs()["confirmation"]
    assert told["decided"] == "improved" and set(told["finalists"]) == {"3", "1"}
    kept = {(r.start.confirm_round, r.confirm, config_key(r.config)) for r in records if not r.invalid_reasons}
    assert len(kept) == 2 * 2 * 2
    server = told["finalists"]["3"]["server"]["gain"]
    assert server == pytest.approx(1.0, abs=0.5) and told["finalists"]["3"]["load"]["gain"] > 1
