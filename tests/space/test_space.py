"""The space language: what it accepts, and the one line that it answers to what it does not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autotune.records import UsageError, config_key
from autotune.space.space import Space
from tests.space.configurations import servers

RAW: dict[str, Any] = {
    "name": "s", "engine": "e",
    "params": {
        "parallel": {"choices": ["tp8", "ep8"]},
        "nvls": {"choices": [False, True]},
        "budget": {"choices": [0, 8, 16]},
        "topk": {"choices": [1, 2], "when": {"budget": [8, 16]}},
        "mem": {"range": [0.8, 0.9], "step": 0.05},
        "concurrency": {"choices": [1, 64], "load": True},
    },
    "forbid": [{"parallel": "ep8", "nvls": True, "because": "it breaks"}],
    "baseline": {"parallel": "tp8", "nvls": False, "budget": 8, "topk": 2, "mem": 0.85, "concurrency": 64},
}


def parse(**changes: Any) -> Space:
    return Space.parse({**RAW, **changes}, "s.yaml")


def test_a_range_becomes_ordered_choices() -> None:
    assert parse().param("mem").choices == (0.8, 0.85, 0.9)


def test_enumeration_honours_conditions_and_rules() -> None:
    found = list(servers(parse()))
    assert len({config_key(s) for s in found}) == len(found) == (2 * 2 - 1) * (1 + 2 * 2) * 3
    assert all(("topk" in s) == (s["budget"] != 0) for s in found)
    assert not any(s["parallel"] == "ep8" and s["nvls"] is True for s in found)


def test_splitting_separates_what_needs_a_launch_from_load() -> None:
    server, load = parse().split(RAW["baseline"])
    assert load == {"concurrency": 64} and "concurrency" not in server and len(server) == 5


def test_true_is_not_the_number_one() -> None:
    space = parse(params={**RAW["params"], "nvls": {"choices": [0, 1]}}, forbid=[],
                  baseline={**RAW["baseline"], "nvls": 0})
    with pytest.raises(UsageError, match="nvls=True is not a choice"):
        space.check({**RAW["baseline"], "nvls": True})


def test_the_digest_changes_with_what_is_searched_and_not_with_prose() -> None:
    assert parse().digest == parse(describe="other words", limits={"tpot_p99_ms": 3}).digest
    assert parse().digest != parse(params={**RAW["params"], "nvls": {"choices": [False]}}, forbid=[]).digest


@pytest.mark.parametrize(("change", "message"), [
    ({"params": {}}, "params is empty"),
    ({"params": {"a": {"choices": []}}, "baseline": {}}, "choices is empty"),
    ({"params": {"a": {}}, "baseline": {}}, "choices is empty"),
    ({"params": {"a": {"choices": 8}}, "baseline": {}}, r"choices must be a list such as \[1, 2\], not 8"),
    ({"params": {"a": {"choices": [1, 1]}}, "baseline": {"a": 1}}, "listed twice"),
    ({"params": {"a": {"choices": [0, 1, True]}}, "baseline": {"a": 1}}, "1 and True cannot be told apart"),
    ({"params": {"a": {"choices": [False, 0.0]}}, "baseline": {"a": False}}, "False and 0.0 cannot be told apart"),
    ({"params": {"a": {"choices": ["true", True]}}, "baseline": {"a": True}}, "'true' and True cannot be told apart"),
    ({"params": {"a": {"choices": [8, "8"]}}, "baseline": {"a": 8}}, "8 and '8' cannot be told apart"),
    ({"params": {"a": {"choices": [[1]]}}, "baseline": {}}, r"choices\[0\] must be a text, .*, not \[1\]"),
    ({"params": {"a": {"choice": [1]}}, "baseline": {}}, "unknown key choice"),
    ({"params": {"a": {"range": [3, 1], "step": 1}}, "baseline": {}}, "low <= high"),
    ({"params": {"a": {"range": [1, 3]}}, "baseline": {}}, "range takes"),
    ({"params": {"a": {"choices": [1], "range": [1, 3]}}, "baseline": {}}, "not both"),
    ({"params": {True: {"choices": [1]}}, "baseline": {}}, "quote it"),
    ({"params": {"a": {"choices": [1], "when": {"b": 1}}}, "baseline": {}}, "not a parameter listed before"),
    ({"params": {"concurrency": {"choices": [0], "load": True}}, "baseline": {}}, "positive whole numbers"),
    ({"params": {"concurrency": {"choices": [True], "load": True}}, "baseline": {}}, "positive whole numbers"),
    ({"params": {"context": {"choices": ["long"], "load": True}}, "baseline": {}}, "positive whole numbers"),
    ({"baseline": {}}, "parallel is missing"),
    ({"baseline": None}, "baseline must be a mapping"),
    ({"baseline": {**RAW["baseline"], "budget": 9}}, "budget=9 is not a choice"),
    ({"baseline": {**RAW["baseline"], "budget": 0}}, "topk does not exist there"),
    ({"baseline": {**RAW["baseline"], "spelling": 1}}, "unknown parameter spelling"),
    ({"baseline": {**RAW["baseline"], True: 1, "a": 2}}, "baseline: the name True must be a text .quote it"),
    ({"baseline": {**RAW["baseline"], "parallel": "ep8", "nvls": True}}, "baseline is forbidden: it breaks"),
    ({"forbid": [{"parallel": "ep8"}]}, "says because"),
    ({"forbid": [{"paralel": "ep8", "because": "x"}]}, "unknown parameter paralel"),
    ({"forbid": [{"parallel": "ep9", "because": "x"}]}, "no choice 'ep9'"),
    ({"belief": {"parallel": {"ep8": [2, 1]}}}, "0 < low <= high"),
    ({"belief": {"parallel": {"ep8": [1, math.inf]}}}, "0 < low <= high"),
    ({"belief": {"parallel": {"ep8": [True, True]}}}, r"belief.parallel.ep8\[0\] must be a number, not True"),
    ({"belief": {"parallel": {"xx": [1, 2], "tp8": [1, 2], "yy": [1, 2]}}},
     r"no choice 'xx' or 'yy' \(tp8, ep8\); '~space.belief.parallel' leaves it out"),
    ({"model": {"a\ntouch x #": "m"}}, r"model: the name 'a\\ntouch x #' must be small letters"),
    ({"model": {"A": "m"}}, "model: the name 'A' must be"), ({"model": {1: "m"}}, "model: the name 1 must be"),
    *(({"params": {"a": spec}, "forbid": [], "baseline": {"a": 1}}, "choices|finite") for spec in (
        {"range": [1, 10**9], "step": 1}, {"range": [0.0, 1e300], "step": 1e-300},
        {"range": [0.0, math.nan], "step": 1}, {"choices": list(range(20_000))})),
    *(({"name": name}, "name must be letters") for name in (
        None, "../../x", "/tmp/x", "a/b", "..", ".hidden", "a b", "a\n")),
    *((changes, "must be a") for changes in (
        {"model": True}, {"needs": 3}, {"model": {"target": {"a": 1}}}, {"needs": {"gpus": "many"}},
        {"needs": {"gpus": -1}}, {"needs": {"gpu_name": [1]}}, {"forbid": 3})),
    ({"needs": {"gpu": 8}}, "unknown key gpu .did you mean gpus"),
    ({"colour": 1}, "unknown key colour"),
])
def test_what_is_wrong_is_said_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse(**change)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("s.yaml")


@pytest.mark.parametrize("changes", [
    *({"params": {"a": {"choices": [secret]}}, "baseline": {"a": secret}} for secret in (
        "hf_canarycanarycanary1", "http://me:canarypass@h/", "--api-key=canarypass")),
    {"params": {"api_key": {"choices": ["canarypass"]}}, "baseline": {"api_key": "canarypass"}},
    {"model": {"target": "https://me:canarypass@h/m"}}])
def test_a_choice_or_model_that_holds_a_secret_is_refused_without_telling_it(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="looks like a secret") as told:
        parse(**{"forbid": [], **changes})
    assert "canary" not in str(told.value)


def test_a_model_may_be_left_out_and_a_description_neither_steers_a_terminal_nor_tells_a_secret() -> None:
    assert parse(model={"target": "/m", "draft": None}).model == {"target": "/m"}
    said = parse(describe="\x1b]0;title\x07a\x1b[31mb\nhf_canarycanarycanary1\x9b").describe
    assert said == "]0;titlea[31mb\n[redacted]"
