"""Several launches side by side: pending ones count as neither success nor failure, and are not repeated."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from autotune.records import Blame, Config, Crash, Stage, config_key
from autotune.search.protocol import Launch, Limits, Measured, Observation, Stop, StopKind
from autotune.search.samplers import SAMPLERS, OptunaStrategy
from autotune.search.strategy import LaunchAware
from autotune.space.space import Space
from tests.search.generate import random_table
from tests.search.parallel import Fleet
from tests.search.simulate import simulate

SPACE = Space.parse({
    "name": "s", "engine": "e",
    "params": {"a": {"choices": ["x", "y", "z"]}, "b": {"choices": [False, True]}, "c": {"choices": [1, 2, 4, 8]},
               "concurrency": {"choices": [1, 64], "load": True}},
    "baseline": {"a": "x", "b": False, "c": 1, "concurrency": 1}}, "s")
BASE = SPACE.split(SPACE.baseline)[0]
LOADS = Space.parse({
    "name": "s", "engine": "e",
    "params": {"a": {"choices": ["x", "y", "z"]}, "b": {"choices": [False, True]}, "c": {"choices": ["p", "q"]},
               "concurrency": {"choices": [1, 8, 32, 64, 128], "load": True}},
    "baseline": {"a": "x", "b": False, "c": "p", "concurrency": 8}}, "s")
CRASH = Crash("b_unsupported", Stage.NCCL_INIT, Blame.ENVIRONMENT, "v1-b", "b is not supported here")


def propose(strategy: LaunchAware) -> Config:
    step = strategy.propose()
    assert isinstance(step, Launch), step
    strategy.next_load(step.server)
    strategy.pending(step.server)
    return step.server


def differences(server: Config) -> set[str]:
    return {name for name, value in server.items() if BASE[name] != value}


def test_while_the_baseline_is_pending_others_try_one_change_each_and_not_the_same() -> None:
    strategy = LaunchAware(SPACE, Limits())
    first, *others = [propose(strategy) for _ in range(4)]
    assert first == BASE
    tried = [next(iter(differences(server))) + str(server[next(iter(differences(server)))]) for server in others]
    assert all(len(differences(server)) == 1 for server in others) and len(set(tried)) == 3


def test_four_who_ask_at_the_start_get_the_baseline_and_three_parameters_the_modes_before_the_numbers() -> None:
    space = Space.parse({
        "name": "s", "engine": "e",
        "params": {"n": {"choices": [1, 2, 4, 8]}, "a": {"choices": ["x", "y", "z"]}, "b": {"choices": [False, True]},
                   "m": {"choices": [1, 2, 4, 8]}, "c": {"choices": ["p", "q"]},
                   "concurrency": {"choices": [1, 8, 64], "load": True}},
        "baseline": {"n": 1, "a": "x", "b": False, "m": 1, "c": "p", "concurrency": 8}}, "s")
    base = space.split(space.baseline)[0]
    strategy = LaunchAware(space, Limits())
    first, *others = [propose(strategy) for _ in range(4)]
    assert first == base
    changed = [[name for name in base if server[name] != base[name]] for server in others]
    assert sorted(changed) == [["a"], ["b"], ["c"]]


def test_what_the_space_believes_decides_what_is_launched_beside_the_baseline() -> None:
    believed = dataclasses.replace(SPACE, belief={"a": {"z": (1.3, 1.6)}, "b": {True: (0.5, 0.7)}})
    strategy = LaunchAware(believed, Limits())
    assert propose(strategy) == BASE
    assert propose(strategy) == {**BASE, "a": "z"}
    assert all(not propose(strategy)["b"] for _ in range(3))


def test_launches_at_the_start_are_measured_under_different_loads_and_the_baseline_under_its_own() -> None:
    strategy = LaunchAware(LOADS, Limits())
    keys = [strategy.memory.key(propose(strategy)) for _ in range(4)]
    loads = [strategy.grid.load(strategy._asked[key])["concurrency"] for key in keys]
    assert loads[0] == 8 and len(set(loads)) == 4


def test_what_is_measured_elsewhere_now_promises_less_here_under_that_load_part_above_all() -> None:
    strategy, base = LaunchAware(LOADS, Limits()), LOADS.split(LOADS.baseline)[0]
    strategy.tell(Observation(base, {"concurrency": 8}, Measured(1.0, relative_noise=0.01), 330, 300, 0))
    strategy._learn()
    row = strategy.grid.server_row(base)[None]
    before = strategy._forecast(row, strategy._expecting(), set()).gains[0]
    strategy.pending({**base, "b": True}, {"concurrency": 128})
    left = strategy._forecast(row, strategy._expecting(), set()).gains[0] / np.where(before > 0, before, 1.0)
    assert int(np.argmax(before)) == 4 and left[4] < 0.8 and left[4] < left[0]
    strategy.done({**base, "b": True})
    assert (strategy._forecast(row, strategy._expecting(), set()).gains[0] == before).all()


def test_what_pending_launches_are_expected_to_reach_is_no_gain_of_others() -> None:
    gains = []
    for running in (None, {**BASE, "a": "y"}):
        strategy = LaunchAware(SPACE, Limits())
        for server, value in ((BASE, 1.0), ({**BASE, "a": "y", "c": 2}, 1.2), ({**BASE, "c": 2}, 0.8)):
            strategy.tell(Observation(server, {"concurrency": 1}, Measured(value, relative_noise=0.01), 330, 300))
        if running is not None:
            strategy.pending(running, {"concurrency": 1})
        strategy._learn(True)
        mark = strategy._mark(strategy._expecting())
        assert mark is not None
        gains.append(mark)
    assert gains[1] > gains[0]


def test_a_pending_baseline_is_hoped_to_come_up_and_a_crash_beside_it_is_not_blamed_on_it() -> None:
    strategy = LaunchAware(SPACE, Limits())
    assert propose(strategy) == BASE
    other = propose(strategy)
    name = next(iter(differences(other)))
    crash = msgspec.structs.replace(CRASH, category="died", blame=Blame.CONFIG, signature="v1-d", excerpt="it died")
    strategy.tell(Observation(other, None, crash, 20, 20, 0))
    strategy.done(other)
    for _ in range(2):
        step = strategy.propose()
        assert isinstance(step, Launch) and step.server[name] != other[name]
        assert len(differences(step.server)) == 1 and "isolates" not in step.reason
        strategy.pending(step.server)
    assert not strategy.memory.passes and not len(strategy._crashes.passed)


def test_a_leader_is_measured_again_only_if_it_is_likely_to_stay_it() -> None:
    alone, beside = LaunchAware(SPACE, Limits()), LaunchAware(SPACE, Limits())
    for strategy in (alone, beside):
        strategy.tell(Observation(BASE, {"concurrency": 1}, Measured(1.0, relative_noise=0.02), 330, 300, 0))
    for server in ({**BASE, "a": "y"}, {**BASE, "a": "z"}, {**BASE, "b": True}, {**BASE, "c": 4}):
        beside.pending(server, {"concurrency": 1})
    assert alone.next_load(BASE) == {"concurrency": 1} and beside.next_load(BASE) == {"concurrency": 64}


def test_more_workers_make_the_less_likely_launches_earlier() -> None:
    from autotune.search import regions

    shares = [regions._spared(n) for n in (0, 1, 3, 63)]
    assert shares[0] == regions.PLAUSIBLE and shares == sorted(set(shares)) and shares[-1] <= 1


def test_a_pending_launch_says_nothing_about_chances() -> None:
    told, pending = LaunchAware(SPACE, Limits()), LaunchAware(SPACE, Limits())
    for strategy in (told, pending):
        strategy.tell(Observation(BASE, {"concurrency": 1}, Measured(1.0), 330, 300))
    pending.pending({**BASE, "b": True})
    told.propose()
    pending.propose()
    rows = told.grid.servers(np.random.default_rng(0))
    assert (told._crashes.chance(rows) == pending._crashes.chance(rows)).all()
    assert told.best() == pending.best()


def test_what_ended_without_news_comes_up_again() -> None:
    strategy = LaunchAware(SPACE, Limits())
    assert propose(strategy) == BASE
    second = propose(strategy)
    assert second != BASE
    strategy.done(BASE)  # its host was lost
    assert propose(strategy) == BASE


def test_a_baseline_that_comes_late_is_measured_under_its_own_load_part() -> None:
    strategy = LaunchAware(SPACE, Limits())
    assert propose(strategy) == BASE
    other = propose(strategy)
    for load, value in ((1, 1.0), (64, 64.0)):
        strategy.tell(Observation(other, {"concurrency": load}, Measured(value, relative_noise=0.01), 330, 300, load))
    strategy.done(other)
    strategy.done(BASE)  # its worker died, and another load part is known to be far better
    step = strategy.propose()
    assert isinstance(step, Launch) and step.server == BASE
    assert strategy.next_load(BASE) == {"concurrency": 1}
    strategy.tell(Observation(BASE, {"concurrency": 1}, Measured(1.0, relative_noise=0.01), 330, 300, 1))
    assert strategy.next_load(BASE) != {"concurrency": 1}


def test_a_baseline_retried_after_a_transient_crash_is_measured_under_its_own_load_part() -> None:
    space = dataclasses.replace(SPACE, baseline={**BASE, "concurrency": 64})
    strategy = LaunchAware(space, Limits())
    propose(strategy)
    strategy.tell(Observation(BASE, None, msgspec.structs.replace(CRASH, blame=Blame.TRANSIENT), 20, 20, 0))
    strategy.done(BASE)
    step = strategy.propose()
    assert isinstance(step, Launch) and step.server == BASE and step.intent == "retry"
    assert strategy.next_load(BASE) == {"concurrency": 64}


def test_a_region_closed_by_the_crash_of_one_is_closed_for_all() -> None:
    workers = [LaunchAware(SPACE, Limits()) for _ in range(3)]
    for strategy in workers:
        strategy.tell(Observation(BASE, {"concurrency": 1}, Measured(1.0, relative_noise=0.01), 330, 300, 0))
        strategy.tell(Observation({**BASE, "b": True}, None, CRASH, 20, 20, 1))
    for strategy in workers:
        for _ in range(4):
            step = strategy.propose()
            if isinstance(step, Stop):
                break
            assert step.server["b"] is False
            strategy.pending(step.server)


def test_budgets_count_pending_launches() -> None:
    strategy = LaunchAware(SPACE, Limits(launches=2))
    propose(strategy)
    propose(strategy)
    stop = strategy.propose()
    assert isinstance(stop, Stop) and stop.kind is StopKind.LAUNCHES


def test_one_worker_of_a_fleet_does_what_one_tuner_does() -> None:
    table = random_table(1)
    fleet = Fleet(table, LaunchAware(table.space, Limits(), 0), 0, 1).run(8.0)
    alone = simulate(table, LaunchAware(table.space, Limits(), 0), 0, 8.0)
    assert [s.share for s in fleet.steps] == [s.share for s in alone.steps] and fleet.launches == alone.launches


def test_a_fleet_never_launches_what_runs_and_is_faster_by_the_clock() -> None:
    table = random_table(3)
    fleet = Fleet(table, LaunchAware(table.space, Limits(), 0), 0, 4)
    four = fleet.run(8.0)
    one = Fleet(table, LaunchAware(table.space, Limits(), 0), 0, 1).run(8.0)
    assert fleet.twice == 0 and fleet.running == []
    assert four.hours < one.hours and four.final_share > 0


def test_samplers_of_optuna_keep_several_trials_apart() -> None:
    strategy = OptunaStrategy(SPACE, "tpe", Limits(), 0)
    servers = []
    for _ in range(3):
        step = strategy.propose()
        assert isinstance(step, Launch)
        load = strategy.next_load(step.server)
        assert load is not None
        strategy.pending(step.server)
        servers.append((step.server, load))
    for server, load in reversed(servers):
        strategy.tell(Observation(server, load, Measured(1.0), 30, 20))
        strategy.done(server)
    states = [t.state.name for t in strategy.study.trials]
    assert states.count("COMPLETE") == 3 and states.count("RUNNING") == 0


def ask(strategy: OptunaStrategy) -> Config | None:
    """A configuration that is pending from now on; None: nothing is left."""
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


def test_samplers_of_optuna_ask_again_for_what_was_lost_with_its_host() -> None:
    for name in SAMPLERS:
        strategy = OptunaStrategy(SPACE, name, Limits(), 0)
        first, second = ask(strategy), ask(strategy)
        assert first == SPACE.baseline and second is not None
        strategy.done(SPACE.split(second)[0])
        assert ask(strategy) == second, name
        strategy.done(BASE)
        assert ask(strategy) == first, name
        states = [t.state.name for t in strategy.study.trials]
        assert states.count("RUNNING") == 2 and states.count("WAITING") == 0


def test_a_grid_leaves_no_cell_out_whose_server_part_runs_elsewhere_or_is_lost() -> None:
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


def test_a_large_memory_is_asked_through_a_choice_of_it() -> None:
    from autotune.search import observations as memory

    strategy = LaunchAware(SPACE, Limits())
    values = np.arange(500.0)
    chosen = memory._informative(values)
    assert len(chosen) == memory.MANY == len(set(chosen)) and chosen == sorted(chosen)
    assert set(range(460, 500)) <= set(chosen) and min(chosen) == 0
    failures = [msgspec.structs.replace(CRASH, signature=f"v1-{i % 3}") for i in range(90)]
    for i, crash in enumerate(failures):
        strategy.tell(Observation({**BASE, "c": (1, 2, 4, 8)[i % 4]}, None, crash, 20, 20, i))
    kept = strategy.memory.evidence()
    assert len(kept) == 3 * memory.OF_ONE_KIND and [f.trial for f in kept] == sorted(f.trial or 0 for f in kept)


def test_facts_of_a_memory_are_those_of_its_servers() -> None:
    from autotune.search.observations import Observations

    strategy = LaunchAware(SPACE, Limits())
    memory: Observations = strategy.memory
    rows = memory.grid.servers(np.random.default_rng(0))
    assert memory.passed().shape == memory.crashed().shape == (0, 3) and memory.served().shape == (0, 4)
    for i, row in enumerate(np.concatenate([rows, rows[::-1]] * 2)):  # more than the first room for rows, and repeats
        server = memory.grid.server(row)
        crash = i % 3 == 0
        strategy.tell(Observation(server, None if crash else {"concurrency": (1, 64)[i % 2]},
                                  CRASH if crash else Measured(1.0, i % 5 > 0), 30, 20, i))
        servers = list(memory.servers.values())
        assert memory.passed().tolist() == [s.row.tolist() for s in servers if s.came_up]
        assert memory.crashed().tolist() == [s.row.tolist() for s in servers if s.launch_crashes and not s.came_up]
        assert memory.served().tolist() == [[*s.row.tolist(), *memory.grid.load_rows[j].tolist()]
                                            for s in servers for j in s.values]
        assert memory.feasible() == [(key, load) for key, s in memory.servers.items() for load, seen in s.values.items()
                                     if 2 * sum(m.feasible for m in seen) > len(seen)]
    assert len(memory.servers) == len(rows) == 24
