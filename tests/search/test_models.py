"""The value model and the crash model of the default strategy, on small sets of outcomes."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.records import Blame, Config, Crash, Stage, Value
from autotune.search import acquisition
from autotune.search.crash_model import CrashModel, Failure, word_weight
from autotune.search.grid import Grid
from autotune.search.launch_aware import LaunchAware
from autotune.search.strategy import Launch, Measured, Observation
from autotune.search.value_model import Data, Prior, ValueModel
from autotune.space.space import Param, Space

CHOICES: dict[str, list[Value]] = {
    "mode": ["a", "b", "c"], "graphs": [True, False], "fused": [False, True], "depth": [2, 4, 8, 16]}
SPACE = Space.parse({"name": "t", "engine": "t", "params": {
    **{name: {"choices": choices} for name, choices in CHOICES.items()},
    "concurrency": {"choices": [8, 64], "load": True}},
    "baseline": {"mode": "a", "graphs": True, "fused": False, "depth": 4, "concurrency": 8}}, "t")
GRID = Grid(SPACE)


def row(mode: str = "a", graphs: bool = True, fused: bool = False, depth: int = 4) -> np.ndarray:
    return GRID.server_row({"mode": mode, "graphs": graphs, "fused": fused, "depth": depth})


def crash(signature: str = "s", stage: Stage = Stage.GRAPH_CAPTURE) -> Crash:
    return Crash("some_crash", stage, Blame.CONFIG, signature, "it died")


def crashes(passed: list[np.ndarray], failed: list[np.ndarray]) -> CrashModel:
    failures = [Failure(np.append(r, np.int16(-1)), crash(), None, False) for r in failed]
    return CrashModel(GRID, np.array(passed), np.zeros((0, GRID.width + 1), dtype=np.int16), failures)


@pytest.mark.parametrize("effect", [0.0, 1.0])
def test_a_strong_interaction_is_found_and_none_is_invented(effect: float) -> None:
    rng = np.random.default_rng(1)
    rows = GRID.servers(rng)[rng.permutation(48)[:24]]
    both = (rows[:, 0] == 1) & (rows[:, 2] == 1)
    y = -0.5 * (rows[:, 0] == 1) - 0.5 * (rows[:, 2] == 1) + effect * both + rng.normal(0, 0.01, len(rows))
    data = Data(rows, np.zeros(len(rows), dtype=np.intp), y[:, None], np.full(len(rows), 0.01))
    strong = ValueModel(GRID, Prior(GRID)).strengths(data)[0][1].strong
    assert [set(pair[:2]) for pair in strong] == ([{0, 2}] if effect else [])


def test_parameters_without_effect_narrow_what_is_expected_of_others() -> None:
    rows = np.array([row(), row("b"), row("c"), row(graphs=False), row(fused=True)])

    def new(effects: list[float]) -> float:
        data = Data(rows, np.zeros(5, dtype=np.intp), np.array([effects]).T, np.full(5, 0.005))
        return ValueModel(GRID, Prior(GRID)).strengths(data)[0][1].new

    assert new([0, 0.001, 0, 0.002, 0]) < new([0, 0.3, -0.2, 0.2, -0.3])


def test_a_number_between_two_that_came_up_is_less_risky_than_another_new_choice() -> None:
    model = crashes([row(depth=2), row(depth=8), row(fused=True)], [])
    between, beyond, other = model.chance(np.array([row(depth=4), row(depth=16), row("b")]))
    assert between > beyond == pytest.approx(other, abs=0.02)


def test_a_crash_while_loading_concerns_the_parallel_layout() -> None:
    layout = Param("par", ("tp8", "tp4_dp2"))
    assert word_weight(layout, ("tp8",), crash(stage=Stage.LOAD)) > word_weight(layout, ("tp8",), crash())
    assert word_weight(Param("kind", ("fast", "slow")), ("fast",), crash(stage=Stage.LOAD)) == 1


def test_a_choice_that_always_crashes_is_told_from_chance_crashes_with_the_same_signature() -> None:
    flaky = [row(depth=8), row(graphs=False, depth=8)]
    dead = [row("c"), row("c", graphs=False), row("c", fused=True), row("c", depth=8), row("c", depth=2)]
    model = crashes([row(), row(graphs=False), row(fused=True), row(depth=2), row("b"), row("b", depth=2),
                     row("b", graphs=False), row("b", fused=True, depth=8)], [*flaky, *dead])
    chance = model.chance(np.array([row("c", graphs=False, depth=2), row("b", graphs=False, depth=2)]))
    assert chance[0] < 0.2 and chance[1] > 0.6


def test_each_crash_of_one_configuration_counts() -> None:
    passed, again = [row(), row("b"), row(fused=True), row("b", depth=8)], row("b", fused=True)
    once, thrice = (float(crashes(passed, [again] * n).chance(again[None])[0]) for n in (1, 3))
    assert thrice < once


def test_a_crash_whose_cause_others_share_is_expected() -> None:
    passed = [row(), row("b"), row(fused=True), row(graphs=False), row(depth=8)]
    first, second = row("b", fused=True), row("b", fused=True, depth=8)
    assert not crashes(passed, [first]).expected(tuple(first))
    assert crashes(passed, [first, second]).expected(tuple(second))


def test_contenders_are_worth_another_measurement_and_losers_are_not() -> None:
    strategy = LaunchAware(SPACE)
    for mode, value in (("a", 1.0), ("b", 1.01), ("c", 0.6)):
        strategy.tell(Observation({"mode": mode, "graphs": True, "fused": False, "depth": 4}, {"concurrency": 8},
                                  Measured(value, relative_noise=0.03), 340.0, 300.0))
    strategy.best()
    worth = {key[0][0]: w for key, w in acquisition.repeats(strategy.memory, strategy._beliefs).items()}
    assert min(worth[0], worth[1]) > 0.003 > worth[2]


def test_what_relieves_a_resource_that_was_short_is_tried_first() -> None:
    base: Config = {"mode": "a", "graphs": True, "fused": False, "depth": 4}

    def second(relieves: str, short: dict[str, float]) -> Config:
        strategy = LaunchAware(SPACE, relieves={relieves: "queue"})
        for load in SPACE.load_params[0].choices:
            measured = Measured(1.0, relative_noise=0.005, short=short)
            strategy.tell(Observation(base, {"concurrency": load}, measured, 340.0, 300.0))
        step = strategy.propose()
        assert isinstance(step, Launch)
        return {name: value for name, value in step.server.items() if value != base[name]}

    assert list(second("depth", {"queue": 1.0})) == ["depth"]
    assert list(second("fused", {"queue": 1.0})) == ["fused"]
    assert second("depth", {}) == second("fused", {}) == second("depth", {"power": 1.0})
