"""Failure isolation: find the choices that cause a crash, in few launches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.crash.classify import classify
from autotune.crash.isolate import Isolated, Isolation, suspects
from autotune.records import Config, UsageError, config_key
from autotune.space.space import Space


def space(params: Mapping[str, Any], baseline: Config, forbid: list[dict[str, Any]] | None = None) -> Space:
    return Space.parse({"name": "s", "engine": "e", "params": params, "baseline": dict(baseline), "forbid": forbid})


FLAGS = [f"flag{i}" for i in range(8)]
EIGHT = space({name: {"choices": [False, True]} for name in FLAGS}, dict.fromkeys(FLAGS, False))
ALL: Config = dict.fromkeys(FLAGS, True)
NONE: Config = dict.fromkeys(FLAGS, False)


def crashes_with(*guilty: str) -> Callable[[Config], bool]:
    return lambda config: not all(config.get(name) is True for name in guilty)


def run(search: Isolation, works: Callable[[Config], bool | None], limit: int = 60) -> Isolated:
    launched: list[str] = []
    while (probe := search.next_probe()) is not None:
        assert search.next_probe() == probe
        key = config_key(probe)
        assert key not in launched, "launched twice"
        launched.append(key)
        assert len(launched) <= limit
        search.tell(works(probe))
    assert search.result is not None and search.result.launches == len(launched)
    return search.result


@pytest.mark.parametrize("guilty", [*itertools.combinations(FLAGS, 1), *itertools.combinations(FLAGS, 2)])
def test_each_guilty_choice_of_eight_costs_at_most_four_launches(guilty: tuple[str, ...]) -> None:
    found = run(Isolation(EIGHT, ALL, NONE), crashes_with(*guilty))
    assert found.choices == dict.fromkeys(guilty, True) and found.instead == dict.fromkeys(guilty, False)
    assert found.exact and found.launches <= 4 * len(guilty) and found.worked == 0 and found.crashed >= 1
    assert crashes_with(*guilty)({**NONE, **found.choices}) is False


def test_parameters_that_the_log_names_are_suspects() -> None:
    names = ["tp", "nvls", "spec", "page"]
    bind = classify("Failed to bind NVLink SHARP (NVLS) Multicast memory: CUDA error 401")
    assert suspects(bind, names) == ["nvls"]
    assert suspects(classify("ValueError: heads (4) must be divisible by --tp-size (3)"), names) == ["tp"]
    assert suspects(classify("ValueError: tpx and homepage"), names) == []


def test_known_outcomes_save_launches() -> None:
    search = Isolation(EIGHT, {**NONE, "flag1": True}, NONE, {config_key({**NONE, "flag1": True}): False,
                                                              config_key(NONE): True})
    found = run(search, crashes_with("flag1"))
    assert (found.crashed, found.worked, found.launches) == (1, 0, 0), "the known crash counts once"
    works = crashes_with("flag5")
    known = {config_key(c): works(c) for c in ({**ALL, "flag5": False}, {**NONE, "flag5": True, "flag6": True})}
    assert run(Isolation(EIGHT, ALL, NONE, known), works).launches <= 1
    more = {**known, config_key({**NONE, "flag5": True}): False}
    assert run(Isolation(EIGHT, ALL, NONE, more), works).launches == 0


def test_suspects_and_parameters_that_crashed_more_often_are_tried_first() -> None:
    found = run(Isolation(EIGHT, ALL, NONE, suspects=["flag6"]), crashes_with("flag6"))
    assert set(found.choices) == {"flag6"} and found.launches <= 2
    known = {config_key({**NONE, "flag3": True, f"flag{i}": True}): False for i in (0, 1, 7)}
    assert run(Isolation(EIGHT, ALL, NONE, known), crashes_with("flag3")).launches <= 2


@given(st.sets(st.sampled_from(FLAGS), min_size=1, max_size=4), st.sets(st.sampled_from(FLAGS)),
       st.lists(st.sets(st.sampled_from(FLAGS)), max_size=6))
@settings(deadline=None)
def test_any_set_of_guilty_choices_is_found_exactly(guilty: set[str], suspects: set[str], seen: list[set[str]]) -> None:
    works = crashes_with(*guilty)
    configs = [{name: name in names for name in FLAGS} for names in seen]
    search = Isolation(EIGHT, ALL, NONE, {config_key(c): works(c) for c in configs}, sorted(suspects))
    found = run(search, works)
    assert set(found.choices) == guilty and found.exact
    assert found.launches <= len(guilty) * (math.log2(8) + 2) + len(guilty)


@given(st.lists(st.sets(st.sampled_from(FLAGS), min_size=1, max_size=3), min_size=1, max_size=3))
@settings(deadline=None)
def test_of_several_causes_a_minimal_one_is_found(causes: list[set[str]]) -> None:
    def works(config: Config) -> bool:
        return all(crashes_with(*cause)(config) for cause in causes)
    found = run(Isolation(EIGHT, ALL, NONE), works)
    assert not works({**NONE, **found.choices}) and set(found.choices) in causes


def test_unknown_outcomes_leave_an_inexact_group() -> None:
    def works(config: Config) -> bool | None:
        both = config["flag2"], config["flag3"]
        return None if both in ((True, False), (False, True)) else both == (False, False)
    found = run(Isolation(EIGHT, ALL, NONE), works)
    assert set(found.choices) == {"flag2", "flag3"} and not found.exact
    assert works({**NONE, **found.choices}) is False


CONDITIONAL = space(
    {"tp": {"choices": [1, 2, 8]}, "nvls": {"choices": [False, True], "when": {"tp": [2, 8]}},
     "spec": {"choices": ["none", "tree"]}, "budget": {"choices": [4, 8, 64], "when": {"spec": ["tree"]}},
     "page": {"choices": [1, 64]}, "fraction": {"choices": [0.8, 0.9]}},
    {"tp": 1, "spec": "none", "page": 1, "fraction": 0.8},
    [{"spec": "tree", "page": 64, "because": "trees need pages of one token"}])
WORKING: Config = {"tp": 1, "spec": "none", "page": 1, "fraction": 0.8}
CRASHING: Config = {"tp": 8, "nvls": True, "spec": "tree", "budget": 64, "page": 1, "fraction": 0.9}


def test_probes_are_configurations_of_the_space() -> None:
    def works(config: Config) -> bool:
        CONDITIONAL.check(config)
        assert CONDITIONAL.forbidden(config) is None
        return config.get("nvls") is not True
    found = run(Isolation(CONDITIONAL, CRASHING, WORKING), works)
    assert found.choices == {"tp": 8, "nvls": True} and found.instead == {"tp": 1}
    found = run(Isolation(CONDITIONAL, CRASHING, WORKING), lambda c: c.get("budget") != 64)
    assert found.choices == {"spec": "tree", "budget": 64}, "a guilty conditional choice comes with its parent"


def test_forbidden_mixes_cost_no_launch() -> None:
    working: Config = {"tp": 1, "spec": "none", "page": 64, "fraction": 0.8}
    launched: list[Config] = []

    def works(config: Config) -> bool:
        launched.append(config)
        return config["spec"] != "tree"
    found = run(Isolation(CONDITIONAL, CRASHING, working), works)
    assert all(CONDITIONAL.forbidden(config) is None for config in launched)
    assert set(found.choices) == {"spec", "page"} and not found.exact


def test_equal_configurations_are_refused_and_one_difference_needs_no_launch() -> None:
    with pytest.raises(UsageError, match="differ"):
        Isolation(EIGHT, ALL, ALL)
    search = Isolation(EIGHT, {**NONE, "flag0": True}, NONE)
    assert search.next_probe() is None and search.result is not None and search.result.choices == {"flag0": True}
