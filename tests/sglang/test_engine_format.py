"""The parts of an engine file's format that SGLang's files need (docs/engines.md)."""

from typing import Any

import pytest

from autotune.engine.command import build
from autotune.engine.spec import EngineSpec, matches
from autotune.records import UsageError
from autotune.space.space import Space


def engine(**more: Any) -> EngineSpec:
    return EngineSpec.parse({"name": "e", "command": ["serve"], **more}, "engine e")


def space(params: dict[str, Any], baseline: dict[str, Any]) -> Space:
    return Space.parse({"name": "s", "engine": "e", "params": params, "baseline": baseline}, "space s")


TREE: dict[str, Any] = {"spec": {"choices": {"tree": {"args": ["--tree"]}, "chain": {}}, "default": "tree"},
        "width": {"flag": "--width"}, "batch": {"flag": "--batch", "default": "{max_concurrency}"}}


def test_a_default_holds_where_the_space_has_no_such_parameter() -> None:
    small = space({"width": {"choices": [2]}, "concurrency": {"choices": [1, 96], "load": True}},
                  {"width": 2, "concurrency": 1})
    assert build(engine(params=TREE), small, {"width": 2}).argv == ("serve", "--tree", "--batch", "96", "--width", "2")
    chosen = space({"spec": {"choices": ["chain"]}, "batch": {"choices": [7]}}, {"spec": "chain", "batch": 7})
    assert build(engine(params=TREE), chosen, chosen.baseline).argv == ("serve", "--batch", "7")


@pytest.mark.parametrize(("spec", "words"), [
    ({"choices": {"tree": {}}, "default": "forest"}, "default forest is none of its choices"),
    ({"choices": {"tree": ["--tree"]}}, "alternatives by version; write")])
def test_a_wrong_choice_is_refused_with_the_right_form(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        engine(params={"spec": spec})


RULES = {"wide": {"spec": "tree", "width": [4, 8], "because": "too wide"},
         "old": {"width": 2, "versions": "<2", "because": "came with 2"}}


def test_a_rule_on_a_parameter_the_space_lacks_is_decided_by_its_default() -> None:
    widths = space({"width": {"choices": [2, 4]}}, {"width": 2})
    (rule,) = engine(params=TREE, rules=RULES).rules_for(widths, "2.0")
    assert (rule.when, rule.because) == ({"width": (4,)}, "too wide")  # 8 is no choice there
    chain = {**TREE, "spec": {**TREE["spec"], "default": "chain"}}
    assert engine(params=chain, rules=RULES).rules_for(widths, "2.0") == ()


def test_a_rule_holds_only_in_its_versions_and_on_values_that_the_space_offers() -> None:
    widths = space({"width": {"choices": [2]}}, {"width": 2})
    made = engine(params=TREE, rules=RULES)
    assert [rule.because for rule in made.rules_for(widths, "1.9")] == ["came with 2"]
    assert made.rules_for(widths, "2.0") == () and made.rules_for(widths, None) == ()
    for built_on_the_way in ("2.0rc1", "2.0.dev12+gabc"):
        assert made.rules_for(widths, built_on_the_way) == ()
    assert matches(">=2.0", "2.0rc1") and not matches("<2.0", "2.0.dev1") and matches("<2", "1.9.post1")


def test_named_entries_can_be_dropped_by_null_and_lists_still_work() -> None:
    made = engine(params={"a": None, "b": {"flag": None, "env": {"B": "{value}"}}}, rules={"gone": None},
                  args={"gone": None, "kept": ["--kept"]})
    small = space({"b": {"choices": [3]}}, {"b": 3})
    assert "a" not in made.params and made.rules == ()
    assert build(made, small, {"b": 3}).argv == ("serve", "--kept") and build(made, small, {"b": 3}).env == {"B": "3"}
    assert [written.because for written, _ in engine(rules=[{"x": 1, "because": "no"}]).rules] == ["no"]


def test_every_resolved_value_counts_for_identity_unless_it_is_ignored() -> None:
    info = engine(info={"path": "/info", "ignore": ["port", "*_port", "seed"]}).info
    assert info.same({"tp": 2, "port": 1, "nccl_port": 2, "seed": 3, "unheard_of": "x"}) == {"tp": 2, "unheard_of": "x"}
    chosen = engine(info={"path": "/info", "identity": ["tp", "port"], "ignore": ["port"]}).info
    assert chosen.same({"tp": 2, "port": 1, "other": 3}) == {"tp": 2}
