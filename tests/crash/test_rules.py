"""The table of known failures as data, and the time that its patterns take."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.crash import rules
from autotune.crash.classify import classify
from autotune.crash.log import MAX_CHARS
from autotune.crash.rules import forward

SLOW_S = 0.2  # processor time for one line of the longest length; a log has up to 400 of them
ENTRY: dict[str, object] = {"category": "a", "any": ["foo"], "blame": "config", "explanation": "e", "next_step": "n"}
EMPTY: dict[str, object] = {"advice": [], "aside": ["nothing like this"], "markers": [], "frames": []}


@pytest.mark.parametrize(("change", "says"), [
    ({"any": ["("]}, "entry 2"), ({"blame": "nobody"}, "nobody"), ({"colour": 1}, "colour"),
    ({"tier": "first"}, "entry 2"), ({"explanation": ""}, "explanation")])
def test_a_malformed_entry_is_named(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rules.parse({**EMPTY, "rules": [ENTRY, {**ENTRY, "category": "b", **change}]})


def test_a_later_entry_of_a_category_inherits_its_texts() -> None:
    table = rules.parse({**EMPTY, "rules": [ENTRY, {"category": "a", "any": ["bar"], "blame": "environment"}]})
    assert table.rules[1].explanation == "e"


def test_patterns_ignore_case_and_take_any_white_space() -> None:
    pattern = rules.compiled(r"Foo \S+ isn't (?P<Name>\w+)")
    assert pattern.search("foo   bar\nisn't done")
    assert not pattern.search("foobar isn't done")


def test_no_pattern_matches_ordinary_text_or_begins_with_an_endless_repetition() -> None:
    for rule in rules.load().rules:
        for pattern in (*rule.patterns, *rule.near, *rule.unless):
            for text in ("", "the quick brown fox\njumps over 13 lazy dogs"):
                assert not pattern.search(text), (rule.category, pattern.pattern)
        for pattern in (*rule.patterns, *rule.within, *rule.near, *rule.unless):  # quadratic on a long word or line
            assert not re.match(r"(?:\\[wS]|\.|\[[^\]]*\])[*+]", pattern.pattern), (rule.category, pattern.pattern)


def test_the_earlier_line_then_the_earlier_entry_wins_and_a_cause_wins_over_a_symptom() -> None:
    both = "CUDA error: an illegal memory access was encountered\nRuntimeError: CUBLAS_STATUS_INTERNAL_ERROR"
    assert classify(both).category == "illegal_memory_access"
    assert classify("\n".join(reversed(both.split("\n")))).category == "cublas_error"
    assert classify("ValueError: speculative decoding needs 8 heads divisible by tp").category == "tp_divisibility"
    log = "Scheduler watchdog timeout (self.watchdog_timeout=300)\nninja: build stopped: subcommand failed."
    assert classify(log).category == "jit_compile"


# What a pattern's syntax stands for in a text that nearly matches it.
SPELLED = ((r"\(\?(?:[>:!=]|<?[!=]|P<\w+>)|[()?^$]|\\b|\{[\d,]+\}|(?<!\\)[+*]", ""), (r"\\s\+?", " "), (r"\\d", "1"),
           (r"\\[wS]|(?<!\\)\.", "w"), (r"\[(?:\\.|[^\]\\])\S*?\]", "1"), (r"\\(.)", r"\1"))


def hostile(pattern: str) -> Iterator[str]:
    """Lines that repeat the fixed pieces of a pattern, between arbitrary texts, without completing a match."""
    words = []
    for piece in re.split(r"\[\^\\n\]\*\??|\.[*+]\??|\[\^[^\]]+\](?:[*+]|\{\d*,\d+\})|\.\{\d*,\d+\}", pattern):
        word = piece.split("|")[0]
        for syntax, text in SPELLED:
            word = re.sub(syntax, text, word)
        words.append(word or "a")
    for count in range(1, len(words) + 1):
        yield "".join(word * (MAX_CHARS // count // len(word)) for word in words[:count])[:-1]


def test_no_pattern_is_slow_on_a_hostile_line() -> None:
    table, slow = rules.load(), []
    found = [p for rule in table.rules for kind in (rule.patterns, rule.within, rule.near, rule.unless) for p in kind]
    found += [*table.advice, table.aside, *(p for _, p in (*table.markers, *table.frames))]
    for pattern in set(found):
        for line in hostile(pattern.pattern):
            began = time.process_time()
            pattern.search(line)
            if time.process_time() - began > SLOW_S:
                slow.append((pattern.pattern, line[:60]))
    assert slow == []


@pytest.mark.parametrize("pattern", [
    r"a[^\n]*b[^\n]*c", r"a[^\n]*(?:b|bc)[^\n]*a", r"(?:a|b)[^\n]*c?", r"ab[^\n]*[\]b][^\n]*a|c[^\n]*c", r"a[^\n]*",
    r"[^\n]*a[^\n]*?b"])
@given(text=st.text("abc ]\n", max_size=30))
def test_forward_matching_finds_the_same_lines(pattern: str, text: str) -> None:
    assert (re.search(forward(pattern), text) is None) == (re.search(pattern, text) is None)
