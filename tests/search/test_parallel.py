"""Several launches side by side: a pending launch counts as neither success nor failure, and is not repeated."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from autotune.records import Blame, Config, Crash, Stage, config_key
from autotune.search import observations as memory
from autotune.search import regions
from autotune.search.launch_aware import LaunchAware
from autotune.search.optuna_samplers import SAMPLERS, OptunaStrategy
from autotune.search.strategy import Launch, Limits, Measured, Observation, Stop, StopKind
from autotune.space.space import Space
from tests.search.generate import random_table
from tests.search.simulate import Fleet, simulate


def space_of(loads: list[int], baseline: dict[str, Any], **choices: list[Any]) -> Space:
    params = {name: {"choices": values} for name, values in choices.items()}
    return Space.parse({"name": "s", "engine": "e", "baseline": baseline,
                        "params": {**params, "concurrency": {"choices": loads, "load": True}}}, "s")


SPACE = space_of([1, 64], {"a": "x", "b": False, "c": 1, "concurrency": 1},
                 a=["x", "y", "z"], b=[False, True], c=[1, 2, 4, 8])
BASE = SPACE.split(SPACE.baseline)[0]
LOADS = space_of([1, 8, 32, 64, 128], {"a": "x", "b": False, "c": "p", "concurrency": 8},
                 a=["x", "y", "z"], b=[False, True], c=["p", "q"])
CRASH = Crash("b_unsupported", Stage.NCCL_INIT, Blame.ENVIRONMENT, "v1-b", "b is not supported here")


def propose(strategy: LaunchAware) -> Config:
    step = strategy.propose()
    assert isinstance(step, Launch), step
    strategy.next_load(step.server)
    strategy.pending(step.server)
    return step.server


def measured(strategy: LaunchAware, server: Config, value: float, load: int = 1, noise: float | None = 0.01) -> None:
    strategy.tell(Observation(server, {"concurrency": load}, Measured(value, relative_noise=noise), 330, 300, 0))


def crashed(strategy: LaunchAware, server: Config, crash: Crash = CRASH, trial: int = 0) -> None:
    strategy.tell(Observation(server, None, crash, 20, 20, trial))


def differences(server: Config, base: Config = BASE) -> list[str]:
    return [name for name, value in base.items() if server[name] != value]


def test_the_first_launches_are_the_baseline_and_changes_of_categorical_parameters() -> None:
    space = space_of([1, 8, 64], {"n": 1, "a": "x", "b": False, "m": 1, "c": "p", "concurrency": 8},
                     n=[1, 2, 4, 8], a=["x", "y", "z"], b=[False, True], m=[1, 2, 4, 8], c=["p", "q"])
    strategy, base = LaunchAware(space, Limits()), space.split(space.baseline)[0]
    first, *others = [propose(strategy) for _ in range(4)]
    assert first == base
    assert sorted(differences(server, base) for server in others) == [["a"], ["b"], ["c"]]


def test_beliefs_of_the_space_decide_what_is_launched_beside_the_baseline() -> None:
    strategy = LaunchAware(dataclasses.replace(SPACE, belief={"a": {"z": (1.3, 1.6)}, "b": {True: (0.5, 0.7)}}))
    assert [propose(strategy) for _ in range(2)] == [BASE, {**BASE, "a": "z"}]
    assert all(not propose(strategy)["b"] for _ in range(3))


def test_first_launches_are_measured_under_different_loads_and_the_baseline_under_its_own() -> None:
    strategy = LaunchAware(LOADS, Limits())
    keys = [strategy.memory.key(propose(strategy)) for _ in range(4)]
    loads = [strategy.grid.load(strategy._asked[key])["concurrency"] for key in keys]
    assert loads[0] == 8 and len(set(loads)) == 4


def test_a_pending_measurement_lowers_the_expected_gain_most_under_its_own_load() -> None:
    strategy, base = LaunchAware(LOADS, Limits()), LOADS.split(LOADS.baseline)[0]
    measured(strategy, base, 1.0, 8)
    strategy._learn()
    row = strategy.grid.server_row(base)[None]
    before = strategy._forecast(row, strategy._expecting(), set()).gains[0]
    strategy.pending({**base, "b": True}, {"concurrency": 128})
    left = strategy._forecast(row, strategy._expecting(), set()).gains[0] / np.where(before > 0, before, 1.0)
    assert int(np.argmax(before)) == 4 and left[4] < 0.8 and left[4] < left[0]
    strategy.done({**base, "b": True})
    assert (strategy._forecast(row, strategy._expecting(), set()).gains[0] == before).all()


def test_the_expected_value_of_a_pending_launch_is_no_gain_of_others() -> None:
    gains = []
    for running in (None, {**BASE, "a": "y"}):
        strategy = LaunchAware(SPACE, Limits())
        for server, value in ((BASE, 1.0), ({**BASE, "a": "y", "c": 2}, 1.2), ({**BASE, "c": 2}, 0.8)):
            measured(strategy, server, value)
        if running is not None:
            strategy.pending(running, {"concurrency": 1})
        strategy._learn(True)
        mark = strategy._mark(strategy._expecting())
        assert mark is not None
        gains.append(mark)
    assert gains[1] > gains[0]


def test_a_crash_beside_a_pending_baseline_is_not_blamed_on_the_baseline() -> None:
    strategy = LaunchAware(SPACE, Limits())
    assert propose(strategy) == BASE
    other = propose(strategy)
    name = differences(other)[0]
    crashed(strategy, other, msgspec.structs.replace(CRASH, category="died", blame=Blame.CONFIG, signature="v1-d"))
    strategy.done(other)
    for _ in range(2):
        step = strategy.propose()
        assert isinstance(step, Launch) and step.server[name] != other[name]
        assert len(differences(step.server)) == 1 and "isolates" not in step.reason
        strategy.pending(step.server)
    assert not strategy.memory.passes and not len(strategy._crashes.passed)


def test_a_leader_is_measured_again_only_if_it_is_likely_to_keep_the_lead() -> None:
    alone, beside = LaunchAware(SPACE, Limits()), LaunchAware(SPACE, Limits())
    for strategy in (alone, beside):
        measured(strategy, BASE, 1.0, noise=0.02)
    for server in ({**BASE, "a": "y"}, {**BASE, "a": "z"}, {**BASE, "b": True}, {**BASE, "c": 4}):
        beside.pending(server, {"concurrency": 1})
    assert alone.next_load(BASE) == {"concurrency": 1} and beside.next_load(BASE) == {"concurrency": 64}


def test_the_share_of_less_likely_launches_grows_with_the_workers() -> None:
    shares = [regions._spared(n) for n in (0, 1, 3, 63)]
    assert shares[0] == regions.PLAUSIBLE and shares == sorted(set(shares)) and shares[-1] <= 1


def test_a_pending_launch_counts_for_the_budget_and_does_not_change_the_chances() -> None:
    alone, beside = LaunchAware(SPACE, Limits()), LaunchAware(SPACE, Limits())
    beside.pending({**BASE, "b": True})
    for strategy in (alone, beside):
        measured(strategy, BASE, 1.0, noise=None)
        strategy.propose()
    rows = alone.grid.servers(np.random.default_rng(0))
    assert (alone._crashes.chance(rows) == beside._crashes.chance(rows)).all()
    assert alone.best() == beside.best()
    alone.limits = beside.limits = Limits(launches=2)
    stop = beside.propose()
    assert isinstance(stop, Stop) and stop.kind is StopKind.LAUNCHES and isinstance(alone.propose(), Launch)


def test_a_late_baseline_is_measured_under_its_own_load() -> None:
    strategy = LaunchAware(SPACE, Limits())
    _, other = propose(strategy), propose(strategy)
    measured(strategy, other, 1.0)
    measured(strategy, other, 64.0, 64)
    strategy.done(other)
    strategy.done(BASE)  # its worker died, and another load part is known to be far better
    assert propose(strategy) == BASE and strategy.next_load(BASE) == {"concurrency": 1}
    measured(strategy, BASE, 1.0)
    assert strategy.next_load(BASE) != {"concurrency": 1}


def test_a_baseline_retried_after_a_transient_crash_is_measured_under_its_own_load() -> None:
    strategy = LaunchAware(dataclasses.replace(SPACE, baseline={**BASE, "concurrency": 64}), Limits())
    propose(strategy)
    crashed(strategy, BASE, msgspec.structs.replace(CRASH, blame=Blame.TRANSIENT))
    strategy.done(BASE)
    step = strategy.propose()
    assert isinstance(step, Launch) and step.server == BASE and step.intent == "retry"
    assert strategy.next_load(BASE) == {"concurrency": 64}


def test_a_region_closed_by_a_crash_is_closed_for_every_launch() -> None:
    strategy = LaunchAware(SPACE, Limits())
    measured(strategy, BASE, 1.0)
    crashed(strategy, {**BASE, "b": True}, trial=1)
    for _ in range(4):
        step = strategy.propose()
        if isinstance(step, Stop):
            break
        assert step.server["b"] is False
        strategy.pending(step.server)


def test_a_fleet_never_launches_a_running_server_and_is_faster_by_the_clock() -> None:
    table = random_table(3)
    fleet = Fleet(table, LaunchAware(table.space, Limits(), 0), 0, 4)
    four = fleet.run(8.0)
    one = simulate(table, LaunchAware(table.space, Limits(), 0), 0, 8.0)
    assert fleet.twice == 0 and fleet.events == []
    assert four.hours < one.hours and four.final_share > 0


def ask(strategy: OptunaStrategy) -> Config | None:
    """A configuration, marked as pending; None if nothing is left."""
    step = strategy.propose()
    if isinstance(step, Stop):
        return None
    load = strategy.next_load(step.server)
    assert load is not None
    strategy.pending(step.server)
    return {**step.server, **load}


def tell(strategy: OptunaStrategy, config: Config) -> None:
    server, load = SPACE.split(config)
    strategy.tell(Observation(server, load, Measured(1.0), 30, 20))
    strategy.done(server)


def test_optuna_samplers_keep_several_trials_apart() -> None:
    strategy = OptunaStrategy(SPACE, "tpe", Limits(), 0)
    configs = [ask(strategy) for _ in range(3)]
    for config in reversed(configs):
        assert config is not None
        tell(strategy, config)
    assert [t.state.name for t in strategy.study.trials] == ["COMPLETE"] * 3


@pytest.mark.parametrize("name", SAMPLERS)
def test_optuna_samplers_ask_again_for_a_launch_lost_with_its_host(name: str) -> None:
    strategy = OptunaStrategy(SPACE, name, Limits(), 0)
    first, second = ask(strategy), ask(strategy)
    assert first == SPACE.baseline and second is not None
    strategy.done(SPACE.split(second)[0])
    assert ask(strategy) == second
    strategy.done(BASE)
    assert ask(strategy) == first
    states = [t.state.name for t in strategy.study.trials]
    assert states.count("RUNNING") == 2 and states.count("WAITING") == 0


def test_a_grid_leaves_no_cell_out_when_its_server_part_runs_or_is_lost() -> None:
    strategy = OptunaStrategy(SPACE, "grid", Limits(), 0)
    running: list[Config] = []
    seen: list[str] = []
    lost = 0
    while True:
        while len(running) < 3 and (config := ask(strategy)) is not None:
            running.append(config)
        if not running:
            break
        config = running.pop(0)
        if lost < 3 and len(seen) % 4 == 3:
            lost += 1
            strategy.done(SPACE.split(config)[0])
            continue
        seen.append(config_key(config))
        tell(strategy, config)
    assert lost == 3 and len(seen) == len(set(seen)) == 48
    stop = strategy.propose()
    assert isinstance(stop, Stop) and stop.kind is StopKind.EXHAUSTED


def test_a_large_study_is_reduced_to_its_informative_observations() -> None:
    strategy = LaunchAware(SPACE, Limits())
    values = np.arange(500.0)
    chosen = memory._informative(values)
    assert len(chosen) == memory.MANY == len(set(chosen)) and chosen == sorted(chosen)
    assert set(range(460, 500)) <= set(chosen) and min(chosen) == 0
    failures = [msgspec.structs.replace(CRASH, signature=f"v1-{i % 3}") for i in range(90)]
    for i, crash in enumerate(failures):
        crashed(strategy, {**BASE, "c": (1, 2, 4, 8)[i % 4]}, crash, i)
    kept = strategy.memory.evidence()
    assert len(kept) == 3 * memory.OF_ONE_KIND and [f.trial for f in kept] == sorted(f.trial or 0 for f in kept)


def test_a_configuration_leads_while_most_of_its_measurements_keep_the_limits() -> None:
    strategy = LaunchAware(SPACE, Limits())
    for feasible, leading in ((True, 1), (False, 0), (True, 1)):
        strategy.tell(Observation(BASE, {"concurrency": 1}, Measured(1.0, feasible), 30, 20))
        assert len(strategy.memory.leading()) == leading
