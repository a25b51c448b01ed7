"""The table of known failures as data."""

from __future__ import annotations

import re

import pytest

from autotune.crash import rules
from autotune.crash.classify import classify

ENTRY: dict[str, object] = {"category": "a", "any": ["foo"], "blame": "config", "explanation": "e", "next_step": "n"}
EMPTY: dict[str, object] = {"advice": [], "aside": ["nothing like this"], "markers": [], "frames": []}


def test_a_malformed_entry_is_named() -> None:
    changes: list[tuple[dict[str, object], str]] = [
        ({"any": ["("]}, "entry 2"), ({"blame": "nobody"}, "nobody"), ({"colour": 1}, "colour"),
        ({"tier": "first"}, "entry 2"), ({"explanation": ""}, "explanation")]
    for change, told in changes:
        broken = {**ENTRY, "category": "b", **change}
        with pytest.raises(ValueError, match=told):
            rules.parse({**EMPTY, "rules": [ENTRY, broken]})


def test_a_later_entry_of_a_category_inherits_its_texts() -> None:
    table = rules.parse({**EMPTY, "rules": [ENTRY, {"category": "a", "any": ["bar"], "blame": "environment"}]})
    assert table.rules[1].explanation == "e"


def test_patterns_ignore_case_and_take_any_white_space() -> None:
    pattern = rules.compiled(r"Foo \S+ isn't (?P<Name>\w+)")
    assert pattern.search("foo   bar\nisn't done")
    assert not pattern.search("foobar isn't done")


def test_no_pattern_matches_nothing_or_everything() -> None:
    table = rules.load()
    for rule in table.rules:
        for pattern in (*rule.patterns, *rule.near, *rule.unless):
            assert not pattern.search(""), (rule.category, pattern.pattern)
            assert not pattern.search("the quick brown fox\njumps over 13 lazy dogs"), (rule.category, pattern.pattern)


def test_no_pattern_begins_with_an_endless_repetition() -> None:
    """Such a pattern needs quadratic time on a long word or line."""
    for rule in rules.load().rules:
        for pattern in (*rule.patterns, *rule.within, *rule.near, *rule.unless):
            assert not re.match(r"(?:\\[wS]|\.|\[[^\]]*\])[*+]", pattern.pattern), (rule.category, pattern.pattern)


def test_among_equals_the_earlier_line_wins_and_on_one_line_the_earlier_entry() -> None:
    both = "CUDA error: an illegal memory access was encountered\nRuntimeError: CUBLAS_STATUS_INTERNAL_ERROR"
    assert classify(both).category == "illegal_memory_access"
    assert classify("\n".join(reversed(both.split("\n")))).category == "cublas_error"
    assert classify("ValueError: speculative decoding needs 8 heads divisible by tp").category == "tp_divisibility"


def test_a_cause_wins_over_an_earlier_symptom() -> None:
    log = "Scheduler watchdog timeout (self.watchdog_timeout=300)\nninja: build stopped: subcommand failed."
    assert classify(log).category == "jit_compile"
