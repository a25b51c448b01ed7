"""Static rules: conditions that list values, compare with numbers or with other parameters, or go by a pattern."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.records import UsageError, Value
from autotune.rules import COMPARISONS, parse_rules
from autotune.space import Space

CHOICES: dict[str, tuple[Value, ...]] = {"budget": (0, 4, 8, 17), "topk": (1, 4, 8, 99), "layout": ("tp8", "tp4_dp2"),
                                         "load": (8, 16, 32), "on": (True, False)}


def said(default: dict[str, Value] | None = None, **when: Any) -> list[dict[str, tuple[Value, ...]]]:
    """What one rule says of CHOICES."""
    (rule,) = parse_rules([{**when, "because": "no"}], "forbid")
    return [dict(found.when) for found in rule.among(CHOICES, (default or {}).get)]


def test_a_comparison_covers_choices_that_nobody_thought_of() -> None:
    assert said(topk={"above": 4}) == [{"topk": (8, 99)}]
    assert said(topk={"at_least": 4, "below": 99}) == [{"topk": (4, 8)}]
    assert said(topk={"at_most": 1}) == [{"topk": (1,)}]
    assert said(topk={"none_of": [4, 8]}) == [{"topk": (1, 99)}]
    assert said(topk={"above": 99}) == []


def test_a_pattern_goes_by_the_name_of_a_choice() -> None:
    assert said(layout={"like": "*_dp*"}) == [{"layout": ("tp4_dp2",)}]
    assert said(layout={"unlike": ["*_dp*", "ep*"]}) == [{"layout": ("tp8",)}]


def test_a_comparison_with_another_parameter_holds_for_each_of_its_choices() -> None:
    assert said(topk={"above": "budget"}, budget={"above": 0}) == [
        {"budget": (4,), "topk": (8, 99)}, {"budget": (8,), "topk": (99,)}, {"budget": (17,), "topk": (99,)}]
    assert said(load={"above": "budget", "times": 2}, layout="tp4_dp2", budget={"at_least": 4}) == [
        {"budget": (4,), "load": (16, 32), "layout": ("tp4_dp2",)}, {"budget": (8,), "load": (32,),
                                                                    "layout": ("tp4_dp2",)}]
    assert said(budget={"no_multiple_of": "topk"}, topk=4) == [{"topk": (4,), "budget": (17,)}]


def test_what_to_compare_with_where_there_is_no_such_parameter_can_be_said() -> None:
    assert said(budget={"at_least": "block", "otherwise": 16}) == [{"budget": (17,)}]
    assert said(budget={"at_least": "block"}) == []
    assert said({"block": 8}, budget={"at_least": "block", "otherwise": 16}) == [{"budget": (8, 17)}]
    assert said({"block": "{max_concurrency}"}, budget={"at_least": "block"}) == []


def test_a_default_decides_a_comparison_on_a_parameter_that_is_not_there() -> None:
    assert said({"depth": 3}, depth={"above": 2}, on=True) == [{"on": (True,)}]
    assert said({"depth": 2}, depth={"above": 2}, on=True) == [] == said(depth={"above": 2}, on=True)


def test_a_rule_may_ask_whether_a_parameter_is_there_at_all() -> None:
    assert said(depth={"given": False}, on=True) == [{"on": (True,)}]
    assert said({"depth": 3}, depth={"given": False}, on=True) == []
    assert said(topk={"given": False}, on=True) == []
    assert said(topk={"given": True}, on=True) == [{"topk": CHOICES["topk"], "on": (True,)}]


def test_booleans_and_texts_are_no_numbers_but_numbers_written_as_text_are() -> None:
    assert said(on={"above": -1}) == [] == said(layout={"below": 5})
    (rule,) = parse_rules([{"size": {"above": 1}, "because": "no"}], "forbid")
    assert [dict(r.when) for r in rule.among({"size": ("1", "16", "auto")})] == [{"size": ("16",)}]


@given(st.sampled_from(sorted(COMPARISONS)), st.lists(st.integers(-9, 9), min_size=1, max_size=5, unique=True),
       st.lists(st.integers(-9, 9), min_size=1, max_size=5, unique=True), st.sampled_from([0.5, 1, 2]))
def test_what_the_rules_match_is_what_the_comparison_says(how: str, left: list[int], right: list[int],
                                                          times: float) -> None:
    (written,) = parse_rules([{"a": {how: "b", "times": times}, "because": "no"}], "forbid")
    rules = written.among({"a": tuple(left), "b": tuple(right)})
    for a in left:
        for b in right:
            assert any(r.matches({"a": a, "b": b}) for r in rules) is COMPARISONS[how](a, b * times)
    assert not any(r.matches({"a": a}) for r in rules for a in left)  # b does not exist in that configuration


@pytest.mark.parametrize(("condition", "words"), [
    ({"over": 3}, "unknown key over"), ({}, "nothing to compare with"), ({"times": 2}, "nothing to compare with"),
    ({"above": True}, "takes a number or the name"), ({"above": [1]}, "takes a number or the name"),
    ({"above": "b", "times": "x"}, "are numbers"), ({"above": 3, "otherwise": 2}, "go with a comparison"),
    ({"given": 1}, "given is true, or false"), ({"given": False, "above": 3}, "given is true, or false")])
def test_a_condition_that_makes_no_sense_is_one_clear_line(condition: Any, words: str) -> None:
    with pytest.raises(UsageError, match=f"^here: a: .*{words}"):
        parse_rules([{"a": condition, "because": "no"}], "here")


def test_a_space_forbids_by_comparison_and_names_only_its_own_parameters() -> None:
    raw: dict[str, Any] = {"name": "s", "engine": "e", "params": {
        "batch": {"choices": [8, 32]}, "concurrency": {"choices": [1, 16, 64], "load": True}},
        "baseline": {"batch": 32, "concurrency": 16}}
    space = Space.parse({**raw, "forbid": [{"concurrency": {"above": "batch"}, "because": "they would wait"}]})
    assert [[load["concurrency"] for load in space.loads({"batch": b})] for b in (8, 32)] == [[1], [1, 16]]
    with pytest.raises(UsageError, match="forbid names the unknown parameter bach"):
        Space.parse({**raw, "forbid": [{"concurrency": {"above": "bach"}, "because": "typo"}]})
    with pytest.raises(UsageError, match="baseline is forbidden: too many"):
        Space.parse({**raw, "forbid": [{"concurrency": {"at_least": 16}, "because": "too many"}]})
