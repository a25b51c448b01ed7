"""The default strategy, over whole simulated studies and step by step."""

from __future__ import annotations

import copy
import dataclasses
import pathlib
import statistics
from typing import Any

import pytest

from autotune.cli.verbs import make_strategy
from autotune.config.compose import load
from autotune.records import Blame, Config, Crash, Stage, config_key
from autotune.search.grid import Grid
from autotune.search.launch_aware import LaunchAware
from autotune.search.observations import Observations
from autotune.search.strategy import Launch, Limits, Measured, Observation, Stop, StopKind
from tests.search.generate import random_table
from tests.search.simulate import Run, simulate
from tests.search.tables import Table

TABLES = pathlib.Path(__file__).resolve().parents[1] / "benchmarks" / "tables"

PLAIN: dict[str, Any] = {
    "name": "plain", "client_params": ["concurrency"],
    "params": {"mode": ["a", "b", "c"], "graphs": [False, True], "fused": [False, True], "depth": [2, 4, 8],
               "concurrency": [8, 32, 64]},
    "baseline": {"mode": "a", "graphs": True, "fused": False, "depth": 4, "concurrency": 32},
    "launch_s": 300, "measure_s": 40, "noise_cv": 0.01,
    "tokens_per_s": {"by_concurrency": {8: 600, 32: 1700, 64: 2400},
                     "factors": [{"when": {"graphs": False}, "times": 0.85}, {"when": {"mode": "c"}, "times": 0.9},
                                 {"when": {"depth": 8}, "times": 0.95}, {"when": {"depth": 2}, "times": 0.93}]},
    "watts": {"by_concurrency": {8: 1500, 32: 1700, 64: 1900}, "factors": []},
    "crashes": [],
}


def table(crashes: list[dict[str, Any]], factors: list[dict[str, Any]] = [], **other: Any) -> Table:  # noqa: B006
    spec = copy.deepcopy(PLAIN) | other
    spec["tokens_per_s"]["factors"] += factors
    spec["crashes"] = [{"stage": "load", "log": f"log{i}", "after_s": 100, **rule} for i, rule in enumerate(crashes)]
    return Table(spec)


def run(of: Table, seed: int = 0, hours: float = 8.0, **other: Any) -> tuple[Run, LaunchAware]:
    strategy = LaunchAware(of.space, Limits(), seed)
    return simulate(of, strategy, seed, hours, **other), strategy


def crash(blame: Blame = Blame.CONFIG, stage: Stage = Stage.LOAD, signature: str = "sig") -> Crash:
    return Crash("some_crash", stage, blame, signature, "it died")


def answer(strategy: LaunchAware, step: Launch, value: float) -> None:
    """Measure `value` under every load part that the strategy asks for on this launch."""
    launch_s = 300.0
    while (load := strategy.next_load(step.server)) is not None:
        strategy.tell(Observation(step.server, load, Measured(value, relative_noise=0.005), launch_s + 40, launch_s))
        launch_s = 0.0


def failed(strategy: LaunchAware, server: Config, crash: Crash) -> None:
    strategy.tell(Observation(server, None, crash, 100.0, 100.0))


def launched(strategy: LaunchAware) -> Launch:
    step = strategy.propose()
    assert isinstance(step, Launch)
    return step


def test_the_baseline_comes_first_and_under_its_own_load() -> None:
    strategy = LaunchAware(table([]).space)
    assert launched(strategy).server == {"mode": "a", "graphs": True, "fused": False, "depth": 4}
    assert strategy.next_load(launched(strategy).server) == {"concurrency": 32}


def test_a_study_in_which_every_launch_crashes_ends_for_that_reason() -> None:
    found, strategy = run(table([{"when": {}}]))
    assert found.stop is not None and found.stop.kind is StopKind.CRASHES
    assert found.crashed == found.launches <= 20
    assert strategy.best() is None


def test_a_study_with_the_best_baseline_ends_with_that_reason() -> None:
    worse = [{"when": {"mode": "b"}, "times": 0.8}, {"when": {"fused": True}, "times": 0.9},
             {"when": {"concurrency": 64}, "times": 0.7}]
    found, _ = run(table([], worse))
    assert found.stop is not None and found.stop.kind is StopKind.GAIN
    assert found.stop.reason.startswith("the baseline is already the best")
    assert found.final_share == pytest.approx(1.0)


def test_a_choice_that_always_crashes_is_closed_by_a_complete_pivot() -> None:
    stubborn = table([{"when": {"mode": "b", "fused": True}, "stage": "graph_capture"}, {"when": {"mode": "b"}}])
    found, strategy = run(stubborn)
    closed = [p for p in strategy.pivots() if p.action == "close" and p.region == {"mode": ("b",)}]
    assert closed, found.stop
    pivot = closed[-1]
    assert pivot.trials and pivot.signatures
    assert 0.5 < pivot.belief <= 1 and 0 <= pivot.chance < 0.5
    assert pivot.upper_gain > 0 and pivot.cost_s > 0 and pivot.launches_saved >= 0
    assert "mode=b" in pivot.reason and "comes up" in pivot.reopens_when and pivot.alternative
    assert found.crashed <= 4 and found.final_share > 0.98


def test_a_choice_that_crashes_at_its_first_request_is_closed_by_a_pivot() -> None:
    healthy = table([{"when": {"mode": "b"}, "stage": "serving", "log": "segfault", "after_s": 0}],
                    [{"when": {"depth": 8}, "times": 1.5}])
    found, strategy = run(healthy)
    pivots = [p for p in strategy.pivots() if p.region == {"mode": ("b",)}]
    assert [p.action for p in pivots] == ["close"], found.stop
    assert pivots[0].belief > 0.5 and pivots[0].chance < 0.2 and pivots[0].upper_gain > 0
    assert pivots[0].signatures == ("segfault",) and "a launch with mode=b is measured" in pivots[0].reopens_when
    assert found.crashed <= 3 and found.final_share > 0.98


def test_a_crash_at_the_readiness_request_closes_a_region_like_a_failed_start() -> None:
    strategy = LaunchAware(table([]).space)
    dead: list[Config] = []
    while isinstance(step := strategy.propose(), Launch) and len(dead) < 5:
        if step.server["mode"] == "b":
            dead.append(step.server)
            strategy.tell(Observation(step.server, None, crash(Blame.UNKNOWN, Stage.SERVING), 60, 60))
        else:
            answer(strategy, step, 100.0 + (step.server["depth"] == 8))
    assert len(dead) in (1, 2, 3) and dead[:1] != dead[1:2]
    (closed,) = [p for p in strategy.pivots() if p.action == "close"]
    assert closed.region == {"mode": ("b",)} and "a launch with mode=b comes up" in closed.reopens_when


def test_a_choice_that_crashes_under_one_load_only_stays_open() -> None:
    heavy = table([{"when": {"mode": "b", "concurrency": 64}, "stage": "serving", "log": "oom", "after_s": 0}],
                  [{"when": {"mode": "b"}, "times": 4.0}])
    found, strategy = run(heavy)
    assert found.final_share > 0.98
    assert [p.action for p in strategy.pivots() if p.region == {"mode": ("b",)}] in ([], ["close", "reopen"])


@pytest.mark.parametrize("seed", range(3))
def test_a_region_stays_open_after_the_first_crashes_in_it(seed: int) -> None:
    trap = table([{"when": {"mode": "b", "graphs": True}, "stage": "graph_capture"}, {"when": {"fused": True}}],
                 [{"when": {"mode": "b"}, "times": 1.6}])
    assert run(trap, seed)[0].final_share >= 0.98


@pytest.mark.parametrize("seed", range(2))
def test_a_layout_that_is_best_only_under_a_limit_is_found(seed: int) -> None:
    assert run(Table.load(TABLES / "layout_and_load.yaml"), seed)[0].final_share >= 0.94


@pytest.mark.parametrize("factors", [[{"when": {"mode": "b"}, "times": 1.2}], []])
def test_a_feature_that_the_host_lacks_costs_one_launch_and_is_not_probed_again(factors: list[dict[str, Any]]) -> None:
    lacking = table([{"when": {"fused": True}, "stage": "nccl_init", "log": "fused_multicast_unsupported"}], factors)
    found, strategy = run(lacking, blame=Blame.ENVIRONMENT)
    with_it = [s for s in strategy.memory.servers.values() if strategy.grid.server(s.row)["fused"] is True]
    assert len(with_it) == 1 == found.crashed and found.final_share >= 0.98
    assert found.launches == len(strategy.memory.servers)  # the baseline is not launched again to check the host
    if not factors:
        (closed,) = [p for p in strategy.pivots() if p.region == {"fused": (True,)}]
        assert closed.action == "close" and "this host lacks it" in closed.reason
        assert closed.reopens_when == "the host is repaired and a launch with fused=True comes up"


def test_a_suspected_host_is_checked_with_the_last_good_configuration() -> None:
    strategy = LaunchAware(table([]).space)
    first = launched(strategy)
    answer(strategy, first, 1.0)
    strategy.tell(Observation({"mode": "b", "graphs": False, "fused": False, "depth": 4}, {"concurrency": 32},
                              Measured(1.0), 340.0, 300.0))
    failed(strategy, {"mode": "b", "graphs": True, "fused": False, "depth": 4}, crash(Blame.ENVIRONMENT))
    again = launched(strategy)
    assert again.intent == "confirm"
    failed(strategy, again.server, crash(Blame.ENVIRONMENT))
    stop = strategy.propose()
    assert isinstance(stop, Stop) and stop.kind is StopKind.HOST


def test_a_transient_crash_earns_one_retry_and_then_counts() -> None:
    strategy = LaunchAware(table([]).space)
    answer(strategy, launched(strategy), 1.0)
    step = launched(strategy)
    failed(strategy, step.server, crash(Blame.TRANSIENT))
    retry = launched(strategy)
    assert (retry.server, retry.intent) == (step.server, "retry")
    failed(strategy, step.server, crash(Blame.TRANSIENT))
    assert launched(strategy).server != step.server


def test_proposals_obey_the_conditions_and_rules_of_a_large_space() -> None:
    settings = load(["+space=b300"])
    space, strategy, seen = settings.space, make_strategy(settings), set()
    for i in range(5):
        step = strategy.propose()
        assert isinstance(step, Launch)
        load_part = strategy.next_load(step.server)
        assert load_part is not None
        config = space.check({**step.server, **load_part})
        assert space.forbidden(config) is None
        assert config_key(config) not in seen
        seen.add(config_key(config))
        strategy.tell(Observation(step.server, load_part, Measured(1 + i / 10, relative_noise=0.01), 600.0, 540.0))


def test_the_same_observations_resume_the_search() -> None:
    strategy, other = (LaunchAware(table([]).space, Limits(), 3) for _ in range(2))
    for value in (1.0, 1.1, 0.9, 1.05):
        step = launched(strategy)
        load = strategy.next_load(step.server)
        observation = Observation(step.server, load, Measured(value, relative_noise=0.01), 340.0, 300.0)
        strategy.tell(observation)
        other.tell(observation)
    assert launched(other).server == launched(strategy).server


@pytest.mark.parametrize(("limits", "kind"), [(Limits(launches=1), StopKind.LAUNCHES), (Limits(hours=0.05),
                         StopKind.HOURS), (Limits(gain=0.9), StopKind.GAIN)])
def test_every_stop_names_the_rule_that_ended_the_search(limits: Limits, kind: StopKind) -> None:
    strategy = LaunchAware(table([]).space, limits)
    simulate(table([]), strategy, 0, 8.0)
    stop = strategy.propose()
    assert isinstance(stop, Stop) and stop.kind is kind and stop.reason


def test_a_server_that_came_up_once_and_then_crashed_twice_is_not_proposed_again() -> None:
    strategy = LaunchAware(table([]).space)
    answer(strategy, launched(strategy), 1.0)
    server = launched(strategy).server
    strategy.tell(Observation(server, {"concurrency": 64}, crash(stage=Stage.SERVING), 340.0, 300.0))
    for _ in range(2):
        failed(strategy, server, crash())
    for _ in range(8):
        step = launched(strategy)
        assert step.server != server
        answer(strategy, step, 0.9)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("tables", "launches"), [
    (range(500, 508), 12), pytest.param(range(600, 700), 40, marks=pytest.mark.slow)])
def test_stated_chances_of_launches_match_the_share_that_comes_up(tables: range, launches: int) -> None:
    bins: dict[int, list[tuple[float, bool]]] = {}
    for i in tables:
        of = random_table(i)
        for chance, up in simulate(of, LaunchAware(of.space, Limits(), 0), 0, 1e6, launches).forecasts:
            bins.setdefault(sum(chance >= edge for edge in (0.4, 0.7, 0.9)), []).append((chance, up))
    for forecasts in bins.values():
        stated, came_up = statistics.mean(c for c, _ in forecasts), statistics.mean(up for _, up in forecasts)
        allowed = 0.08 + 2 * (stated * (1 - stated) / len(forecasts)) ** 0.5
        assert abs(stated - came_up) <= allowed, (stated, came_up, len(forecasts))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_tables_are_solved() -> None:
    runs = [run(random_table(i))[0] for i in range(300, 360)]
    assert sum(r.reached(0.98) is not None for r in runs) >= 0.9 * len(runs)
    assert statistics.median(r.launches for r in runs) < 40


def always(signature: str = "same") -> Table:
    return table([{"when": {}, "log": signature}])


@pytest.mark.parametrize("blame", [Blame.UNKNOWN, Blame.CONFIG, Blame.TRANSIENT])
def test_an_engine_that_always_dies_alike_ends_the_study_after_four_launches(blame: Blame) -> None:
    found, strategy = run(always(), blame=blame)
    assert found.launches == 4 and found.stop is not None and found.stop.kind is StopKind.CRASHES
    assert "the host, the model or the fixed arguments" in found.stop.reason
    assert len(strategy.memory.servers) == 3  # one of them was retried


def test_a_crashed_baseline_is_evidence_like_any_other() -> None:
    dead = table([{"when": {"mode": "a"}}, {"when": {"mode": "b"}}], [{"when": {"fused": True}, "times": 1.2}])
    found, _ = run(dead)
    assert found.final_share > 0.98
    first, second = [o for o in found.told if o.launch_s > 0][:2]
    assert all(first.server[name] != value for name, value in second.server.items())


@pytest.mark.parametrize("seed", range(2))
def test_two_choices_that_are_good_only_together_are_found(seed: int) -> None:
    deceptive = table([], [{"when": {"mode": "b"}, "times": 0.8}, {"when": {"fused": True}, "times": 0.8},
                           {"when": {"mode": "b", "fused": True}, "times": 2.2}])
    assert run(deceptive.shuffled(seed), seed)[0].final_share > 0.98


def test_a_space_without_any_effect_is_left_early() -> None:
    flat = copy.deepcopy(PLAIN) | {"name": "flat"}
    flat["tokens_per_s"]["factors"] = []
    assert run(Table(flat))[0].launches <= 14


def test_a_crash_of_a_configuration_whose_choices_all_worked_is_retried_once_per_signature() -> None:
    strategy = LaunchAware(table([]).space)
    base = launched(strategy).server
    for change in ({}, {"mode": "b"}, {"fused": True}, {"depth": 8}):
        strategy.tell(Observation({**base, **change}, {"concurrency": 32}, Measured(1.0), 340.0, 300.0))
    first, second = ({**base, "mode": "b", "fused": True}, {**base, "mode": "b", "depth": 8})
    failed(strategy, first, crash(signature="odd"))
    retry = launched(strategy)
    assert (retry.intent, retry.server) == ("retry", first)
    failed(strategy, first, crash(signature="odd"))
    failed(strategy, second, crash(signature="odd"))
    assert launched(strategy).intent != "retry"


def test_a_crash_that_costs_hours_is_not_bought_twice() -> None:
    hangs = table([{"when": {"mode": "b"}, "after_s": 7200}, {"when": {"fused": True}, "after_s": 7200}],
                  [{"when": {"depth": 8}, "times": 1.2}])
    found, _ = run(hangs)
    assert found.crashed <= 2 and found.final_share > 0.98


def test_numbers_mean_the_same_in_any_order() -> None:
    space = table([]).space
    depth = next(p for p in space.params if p.name == "depth")
    turned = dataclasses.replace(space, params=tuple(
        dataclasses.replace(p, choices=(8, 2, 4)) if p is depth else p for p in space.params))
    assert [p.choices for p in LaunchAware(turned).grid.params] == [p.choices for p in LaunchAware(space).grid.params]


def test_a_shuffled_table_has_the_same_optimum_in_another_order() -> None:
    of = table([], [{"when": {"mode": "b"}, "times": 1.2}])
    turned = of.shuffled(1)
    assert turned.optimum[0] == of.optimum[0] and turned.optimum[1] == pytest.approx(of.optimum[1])
    assert [list(of.params), *of.params.values()] != [list(turned.params), *turned.params.values()]
    assert turned.params == of.shuffled(1).params


def test_a_measurement_that_straddles_its_limit_is_repeated_and_the_mean_decides() -> None:
    space = table([]).space
    memory, far = Observations(Grid(space)), Observations(Grid(space))
    server, load = space.split(space.baseline)

    def tell(ratio: float) -> None:
        measured = Measured(1.0, ratio <= 1, {"ttft_p99_ms": ratio}, 0.005, {"ttft_p99_ms": 0.05})
        memory.add(Observation(server, load, measured, 40.0, 0.0))

    key, at = memory.key(server), memory.grid.load_index(load)
    tell(1.03)
    assert memory.feasible() == [] and memory.promising(key, -1.0) == at and memory.promising(key, 1.0) is None
    tell(0.90)
    assert memory.feasible() == [(key, at)] and memory.uncertain(key, at)
    for _ in range(4):
        tell(0.97)
    assert memory.feasible() == [(key, at)] and not memory.straddles(key, at)  # six are enough
    far.add(Observation(server, load, Measured(1.0, False, {"ttft_p99_ms": 1.2}, 0.005, {"ttft_p99_ms": 0.05}), 40.0))
    assert not far.straddles(key, at) and far.feasible() == []


def test_a_limit_of_zero_errors_that_is_kept_exactly_is_decided() -> None:
    space = table([]).space
    memory = Observations(Grid(space))
    server, load = space.split(space.baseline)
    measured = Measured(1.0, True, {"error_rate": 1.0, "tpot_p99_ms": 0.8}, 0.02, {"tpot_p99_ms": 0.02})
    memory.add(Observation(server, load, measured, 40.0, 0.0))
    assert not memory.straddles(memory.key(server), memory.grid.load_index(load))
