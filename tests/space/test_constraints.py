"""Static rules: conditions that list values, compare with numbers or with other parameters, or go by a pattern."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.records import UsageError, Value
from autotune.space.constraints import COMPARISONS, RuleFile, WrittenRule, among
from autotune.space.space import Space
from autotune.utils.validation import convert

CHOICES: dict[str, tuple[Value, ...]] = {"budget": (0, 4, 8, 17), "topk": (1, 4, 8, 99), "layout": ("tp8", "tp4_dp2"),
                                         "load": (8, 16, 32), "on": (True, False)}


def rule(**when: Any) -> WrittenRule:
    return WrittenRule.parse(convert({**when, "because": "no"}, RuleFile, "here: "), "here")


def said(default: dict[str, Value] | None = None, **when: Any) -> list[dict[str, tuple[Value, ...]]]:
    """One rule in terms of CHOICES."""
    return [dict(found.when) for found in rule(**when).expand(CHOICES, (default or {}).get)]


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
    assert [dict(r.when) for r in rule(size={"above": 1}).expand({"size": ("1", "16", "auto")})] == [{"size": ("16",)}]


@given(st.sampled_from(sorted(COMPARISONS)), st.lists(st.integers(-9, 9), min_size=1, max_size=5, unique=True),
       st.lists(st.integers(-9, 9), min_size=1, max_size=5, unique=True), st.sampled_from([0.5, 1, 2]))
def test_what_the_rules_match_is_what_the_comparison_says(how: str, left: list[int], right: list[int],
                                                          times: float) -> None:
    rules = rule(a={how: "b", "times": times}).expand({"a": tuple(left), "b": tuple(right)})
    for a in left:
        for b in right:
            assert any(r.matches({"a": a, "b": b}) for r in rules) is COMPARISONS[how](a, b * times)
    assert not any(r.matches({"a": a}) for r in rules for a in left)  # b does not exist in that configuration


@pytest.mark.parametrize(("condition", "words"), [
    ({"over": 3}, "unknown key over"), ({}, "nothing to compare with"), ({"times": 2}, "nothing to compare with"),
    ({"above": True}, "must be a number or the name"), ({"above": [1]}, "must be a number or the name"),
    ({"above": "b", "times": "x"}, "times must be a number"), ({"above": 3, "otherwise": 2}, "go with a comparison"),
    ({"given": 1}, "given must be true or false"), ({"given": False, "above": 3}, "given is true, or false")])
def test_a_condition_that_makes_no_sense_is_one_clear_line(condition: Any, words: str) -> None:
    with pytest.raises(UsageError, match=f"^here: a.*{words}"):
        rule(a=condition)


def test_a_space_forbids_by_comparison_and_names_only_its_own_parameters() -> None:
    raw: dict[str, Any] = {"name": "s", "engine": "e", "params": {
        "batch": {"choices": [8, 32]}, "concurrency": {"choices": [1, 16, 64], "load": True}},
        "baseline": {"batch": 32, "concurrency": 16}}
    space = Space.parse({**raw, "forbid": [{"concurrency": {"above": "batch"}, "because": "they would wait"}]})
    assert [[c for c in (1, 16, 64) if not space.forbidden({"batch": b, "concurrency": c})] for b in (8, 32)] == [
        [1], [1, 16]]
    with pytest.raises(UsageError, match="forbid names the unknown parameter bach"):
        Space.parse({**raw, "forbid": [{"concurrency": {"above": "bach"}, "because": "typo"}]})
    with pytest.raises(UsageError, match="baseline is forbidden: too many"):
        Space.parse({**raw, "forbid": [{"concurrency": {"at_least": 16}, "because": "too many"}]})


FORMS: list[Any] = [
    *({how: 2} for how in COMPARISONS), *({how: "block"} for how in COMPARISONS),
    *({how: "block", "times": 2, "otherwise": 1} for how in COMPARISONS),
    {"none_of": [1, "tp1"]}, {"like": ["1*", "*_dp*"]}, {"unlike": ["1*", "*_dp*"]}, {"given": True}, {"given": False},
    {"above": 0, "unlike": "3"}, 1, [2, "tp1"]]
"""Every form that a condition may have."""


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("default", [None, 0, 1, 2, 3, "4", "tp1", "tp4_dp2", True])
def test_a_server_without_a_parameter_is_judged_by_its_default_whatever_the_form_of_the_condition(
        form: Any, default: Value | None) -> None:
    """Without it because the space lacks it, or because its condition is not fulfilled: as if it had been chosen."""
    written = rule(size=form, on=True)
    has: dict[str, tuple[Value, ...]] = {"on": (True, False), "block": (1, 2)}
    defaults = {} if default is None else {"size": default}
    mode: tuple[Value, ...] = ("a", "b")
    sizes: tuple[Value, ...] = (1, 2, 3)
    lacking = written.expand(has, defaults.get)
    optional = written.expand({**has, "mode": mode, "size": sizes}, defaults.get, {"size": {"mode": ("a",)}})
    chosen = written.expand({**has, "size": (*sizes, *(d for d in defaults.values() if not among(d, sizes)))})
    for block in (1, 2):
        for on in (True, False):
            config: dict[str, Value] = {"on": on, "block": block}
            wanted = (form == {"given": False} and on if default is None else
                      any(r.matches({**config, "size": default}) for r in chosen))
            assert any(r.matches(config) for r in lacking) is wanted
            assert any(r.matches({**config, "mode": "b"}) for r in optional) is wanted
            for size in sizes:
                there = {**config, "size": size}
                assert any(r.matches({**there, "mode": "a"}) for r in optional) is any(r.matches(there) for r in chosen)


@pytest.mark.parametrize("how", COMPARISONS)
@pytest.mark.parametrize("default", [None, 2, 3, "4", "auto"])
def test_a_comparison_goes_by_the_default_of_a_parameter_that_a_configuration_lacks(how: str,
                                                                                    default: Value | None) -> None:
    forms: list[dict[str, Any]] = [{how: "block"}, {how: "block", "otherwise": 5}]
    for form in forms:
        written = rule(size=form)
        defaults = {} if default is None else {"block": default}
        limit: Any = form.get("otherwise") if default in (None, "auto") else float(str(default))
        sizes: tuple[Value, ...] = (1, 2, 3, 4, 5, 6)
        lacking = written.expand({"size": sizes}, defaults.get)
        optional = written.expand({"mode": ("a", "b"), "size": sizes, "block": (3,)}, defaults.get,
                              {"block": {"mode": ("a",)}})
        for size in range(1, 7):
            wanted = limit is not None and COMPARISONS[how](size, limit)
            assert any(r.matches({"size": size}) for r in lacking) is wanted
            assert any(r.matches({"size": size, "mode": "b"}) for r in optional) is wanted
            there = any(r.matches({"size": size, "mode": "a", "block": 3}) for r in optional)
            assert there is COMPARISONS[how](size, 3)


def test_what_a_configuration_lacks_is_followed_through_conditions_of_conditions() -> None:
    rules = rule(depth={"given": False}, on=True).expand(
        {"kind": ("tree", "chain", "none"), "mode": ("a", "b"), "depth": (1, 2), "on": (True, False)},
        conditions={"mode": {"kind": ("tree", "chain")}, "depth": {"mode": ("a",), "kind": ("tree",)}})
    cases: list[tuple[dict[str, Value], bool]] = [
        ({"kind": "none"}, True), ({"kind": "tree", "mode": "b"}, True), ({"kind": "chain", "mode": "a"}, True),
        ({"kind": "tree", "mode": "a", "depth": 1}, False)]
    for config, wanted in cases:
        assert any(r.matches({**config, "on": True}) for r in rules) is wanted, config
        assert not any(r.matches({**config, "on": False}) for r in rules)


def test_a_space_may_forbid_a_configuration_for_what_it_lacks() -> None:
    space = Space.parse({
        "name": "s", "engine": "e", "params": {"mode": {"choices": ["a", "b"]}, "on": {"choices": [True, False]},
                                               "depth": {"choices": [1], "when": {"mode": ["a"]}}},
        "forbid": [{"depth": {"given": False}, "on": True, "because": "too deep"}],
        "baseline": {"mode": "a", "on": True, "depth": 1}})
    assert space.forbidden({"mode": "b", "on": True}) == "too deep"
    assert space.forbidden({"mode": "b", "on": False}) is None


@pytest.mark.parametrize("when", [{"mode": ["a"]}, {"later": ["a"]}, {"depth": [1]}])
def test_a_condition_on_what_is_not_there_before_is_one_line_also_where_a_rule_needs_it(when: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="not a parameter listed before it"):
        Space.parse({"name": "s", "engine": "e", "params": {"depth": {"choices": [1], "when": when},
                                                            "later": {"choices": ["a"], "when": {"depth": [1]}}},
                     "forbid": [{"depth": {"given": False}, "because": "x"}], "baseline": {"depth": 1, "later": "a"}})
