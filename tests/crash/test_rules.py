"""The table of known failures as data, and the time that its patterns take."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.crash import rules
from autotune.crash.classify import classify
from autotune.crash.log import MAX_CHARS
from autotune.crash.rules import forward

SLOW_S = 0.2  # processor time for one line of the longest length; a log has up to 400 of them
FAR = 40  # a repetition of at least this length counts as any text of the line
REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
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


def patterns() -> dict[str, re.Pattern[str]]:
    table = rules.load()
    found = [p for rule in table.rules for kind in (rule.patterns, rule.within, rule.near, rule.unless) for p in kind]
    found += [*table.advice, table.aside, *(p for _, p in (*table.markers, *table.frames))]
    return {p.pattern: p for p in found}


def steps(parts: Any) -> Iterator[Any]:
    """All parts of a pattern, including the parts of groups."""
    for name, argument in parts:
        inner = argument[3] if str(name) == "SUBPATTERN" else argument if str(name) == "ATOMIC_GROUP" else None
        yield from [(name, argument)] if inner is None else steps(inner)


def pieces(pattern: str) -> Iterator[list[Any]]:
    """The fixed pieces of each alternative, between arbitrary texts."""
    tree: Any = re._parser.parse(pattern)  # type: ignore[attr-defined]
    alone = len(tree) == 1 and str(tree[0][0]) == "BRANCH"
    for alternative in tree[0][1][1] if alone else [tree]:
        found: list[Any] = [[]]
        for name, argument in steps(alternative):
            far = str(name) in REPEATS and argument[1] >= FAR
            found += [[(name, argument)], []] if far and not anything(argument[2]) else [[]] if far else []
            if not far:
                found[-1].append((name, argument))
        yield [piece for piece in found if piece]


def anything(parts: Any) -> bool:
    return str(parts[0][0]) == "IN" and any(str(kind) == "NEGATE" for kind, _ in parts[0][1])


def sample(parts: Any, rng: random.Random) -> str:
    """Text that these parts match approximately."""
    text = ""
    for op, argument in parts:
        name = str(op)
        if name == "LITERAL":
            text += chr(argument)
        elif name == "IN":
            kind, value = argument[0]
            text += {"LITERAL": lambda v: chr(v), "RANGE": lambda v: chr(v[0])}.get(
                str(kind), lambda v: " " if "SPACE" in str(v) else "1" if "DIGIT" in str(v) else "w")(value)
        elif name == "BRANCH":
            text += sample(rng.choice(argument[1]), rng)
        elif name == "SUBPATTERN":
            text += sample(argument[3], rng)
        elif name in REPEATS:
            text += sample(argument[2], rng) * max(argument[0], 1)
        elif name == "ATOMIC_GROUP":
            text += sample(argument, rng)
        elif name == "ANY":
            text += "x"
    return text


def hostile(pattern: str, rng: random.Random) -> Iterator[str]:
    """Lines that repeat the pieces of a pattern without completing a match."""
    for found in pieces(pattern):
        for count in range(1, len(found) + 1):
            words = [sample(piece, rng).replace("\n", " ") or "a" for piece in found[:count]]
            yield "".join(word * (MAX_CHARS // count // len(word)) for word in words)[:-1]


def test_no_pattern_is_slow_on_a_hostile_line() -> None:
    rng = random.Random(7)
    slow = []
    for text, pattern in patterns().items():
        for line in hostile(text, rng):
            began = time.process_time()
            pattern.search(line)
            if time.process_time() - began > SLOW_S:
                slow.append((text, line[:60]))
    assert slow == []


@pytest.mark.parametrize("pattern", [
    r"a[^\n]*b[^\n]*c", r"a[^\n]*(?:b|bc)[^\n]*a", r"(?:a|b)[^\n]*c?", r"ab[^\n]*[\]b][^\n]*a|c[^\n]*c", r"a[^\n]*",
    r"[^\n]*a[^\n]*?b"])
@given(text=st.text("abc ]\n", max_size=30))
def test_forward_matching_finds_the_same_lines(pattern: str, text: str) -> None:
    assert (re.search(forward(pattern), text) is None) == (re.search(pattern, text) is None)
