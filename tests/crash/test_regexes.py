"""Patterns of the table against lines that were written to hold them up."""

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
from autotune.crash.log import MAX_CHARS
from autotune.crash.rules import forward

SLOW_S = 0.2
"""Of processor time for one line. A log has 400 lines of this length: more would hold the tuner for minutes."""
FAR = 40
"""A repeat of so much stands for any text of the line."""
REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def patterns() -> dict[str, re.Pattern[str]]:
    table = rules.load()
    found = [p for rule in table.rules for kind in (rule.patterns, rule.within, rule.near, rule.unless) for p in kind]
    found += [*table.advice, table.aside, *(p for _, p in (*table.markers, *table.frames))]
    return {p.pattern: p for p in found}


def steps(parts: Any) -> Iterator[Any]:
    """The parts of a pattern, those within groups among them."""
    for name, argument in parts:
        inner = argument[3] if str(name) == "SUBPATTERN" else argument if str(name) == "ATOMIC_GROUP" else None
        yield from [(name, argument)] if inner is None else steps(inner)


def pieces(pattern: str) -> Iterator[list[Any]]:
    """For each alternative, what it asks for between any texts of the line."""
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
    """Some text that these parts match, more or less."""
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
    """Lines that repeat what a pattern asks for, up to one thing that is missing."""
    for found in pieces(pattern):
        for count in range(1, len(found) + 1):
            words = [sample(piece, rng).replace("\n", " ") or "a" for piece in found[:count]]
            yield "".join(word * (MAX_CHARS // count // len(word)) for word in words)[:-1]


def test_no_pattern_is_held_up_by_a_line() -> None:
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
def test_the_nearest_of_each_finds_the_same_lines(pattern: str, text: str) -> None:
    assert (re.search(forward(pattern), text) is None) == (re.search(pattern, text) is None)
