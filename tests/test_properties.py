"""Properties that hold for any input: the space language, quoting, redaction, foreign files, own files."""

from __future__ import annotations

import html
import json
import os
import pathlib
import random
import shlex
import subprocess
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, quote_plus

import markupsafe
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autotune.engine.command import Command, shown
from autotune.records import UsageError
from autotune.space.space import Space
from autotune.utils.files import append_line, write_json, write_lines
from autotune.utils.redact import HIDDEN, SHORTEST, WORDS, Redactor
from autotune.utils.text import KEPT, REPLACED, SPELLED, printable
from tests.space.configurations import sample, servers
from tests.space.test_space import RAW

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
PLAIN = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | TEXT,
                     lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8)
KEYS = st.sampled_from(["choices", "range", "step", "when", "load", "params", "forbid", "because", "baseline", "belief",
                        "budget", "parallel", "concurrency", "name", "engine", "model", "needs"])
VALUES = st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True)


@given(st.dictionaries(KEYS, PLAIN | st.dictionaries(KEYS, PLAIN, max_size=3), max_size=4))
def test_any_space_is_accepted_or_refused_with_one_line(changes: dict[str, Any]) -> None:
    try:
        Space.parse({**RAW, **changes}, "s.yaml")
    except UsageError as error:
        assert "\n" not in str(error) or "\\n" in repr(changes)


@given(st.dictionaries(st.sampled_from("abcde"), VALUES, min_size=1), VALUES, st.integers(0, 99))
def test_every_configuration_of_a_space_is_checked_split_and_put_together_again(
        params: dict[str, list[int]], levels: list[int], seed: int) -> None:
    levels = [n + 1 for n in levels]
    space = Space.parse({
        "name": "s", "engine": "e",
        "params": {**{k: {"choices": v} for k, v in params.items()}, "concurrency": {"choices": levels, "load": True}},
        "baseline": {**{k: v[0] for k, v in params.items()}, "concurrency": levels[0]}}, "s.yaml")
    config = sample(space, random.Random(seed))
    server, load_part = space.split(config)
    assert space.check(config) == {**server, **load_part} == config
    found = list(servers(space))
    assert server in found and len(found) == space.size()
    assert len({json.dumps(s, sort_keys=True) for s in found}) == len(found)


@given(st.lists(TEXT, min_size=1, max_size=5), st.dictionaries(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), TEXT,
                                                               max_size=2))
def test_a_shown_command_is_read_back_word_for_word(argv: list[str], env: dict[str, str]) -> None:
    words = shlex.split(shown(Command(tuple(argv), env)))
    assert words == [*(f"{k}={v}" for k, v in sorted(env.items())), *argv]


@settings(max_examples=15)
@given(st.lists(TEXT, min_size=1, max_size=5))
def test_a_real_shell_takes_a_shown_command_apart_as_it_was(argv: list[str]) -> None:
    line = shown(Command(("printf", r"%s\0", *argv), {}))
    done = subprocess.run(["sh", "-c", line], capture_output=True, check=True, env={**os.environ, "LC_ALL": "C.UTF-8"})
    assert done.stdout == "".join(a + "\0" for a in argv).encode()


SECRET = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.+/!$%", min_size=8, max_size=30)
NAMES = st.sampled_from(["--api-key", "--hf-token", "--admin-password", "--ssl-private-key", "--client-secret"])


@given(NAMES, SECRET, st.booleans(), st.lists(TEXT, max_size=3), TEXT, TEXT)
def test_the_value_of_a_secret_flag_is_nowhere(flag: str, secret: str, attached: bool, others: list[str], before: str,
                                               after: str) -> None:
    assume(secret not in flag)
    argv = ["serve", *others, *([f"{flag}={secret}"] if attached else [flag, secret])]
    clean = Redactor.from_command(argv)
    for kept in (" ".join(clean.argv(argv)), clean.text(before + secret + after),
                 json.dumps(clean.data({"a": [before + secret], flag: secret}))):
        assert secret not in kept.replace(HIDDEN, "\0")


@given(SECRET, st.sampled_from(["postgresql", "https", "redis"]), st.from_regex(r"[a-z]{1,8}", fullmatch=True))
def test_the_password_in_a_url_goes_and_its_host_stays(secret: str, scheme: str, host: str) -> None:
    before, after = f"see {scheme}://me:", f"@{host}.example/x"
    assume(secret not in before + after)
    text = Redactor().text(before + secret + after)
    assert secret not in text and after in text


KNOWN = TEXT.filter(lambda v: len(v) >= SHORTEST and v.lower() not in WORDS)
SPELLINGS: dict[str, Callable[[str], str]] = {
    "as it is": str, "JSON": json.dumps, "JSON in Unicode": lambda v: json.dumps(v, ensure_ascii=False),
    "Python": repr, "a shell": shlex.quote, "a URL": lambda v: quote(v, safe=""), "a path": quote,
    "a form": quote_plus, "HTML": html.escape, "Jinja": lambda v: str(markupsafe.escape(v))}


@pytest.mark.parametrize("spelling", SPELLINGS)
@given(KNOWN, TEXT, TEXT)
def test_a_known_value_goes_however_it_is_spelled(spelling: str, value: str, before: str, after: str) -> None:
    spelled = SPELLINGS[spelling](value)
    inner = spelled.strip("\"'") if spelling != "as it is" else spelled
    for text in (before + spelled + after, f"x {spelled} y"):
        left = Redactor([value]).text(text).replace(HIDDEN, "\0")
        assert value not in left and (len(inner) < SHORTEST or inner not in left)


PIECES = st.sampled_from([
    "token", "API_KEY", "password", "authorization", "=", ": ", "'", '"', "\\", "[", "]", "{", "}", "(", ")", ",", " ",
    "\n", "--api-key", "--x", "://", "@", "me", "/", "hf_abcdefghijklmnopqrst", "Bearer ", "None", "1234", "12345678",
    HIDDEN, "[redac", "ted]", "&quot;", "%22", "basic ", "s3cret", "abc["])


@settings(max_examples=600)
@given(st.lists(PIECES, max_size=14), st.lists(PIECES | TEXT, max_size=2))
def test_cleaning_twice_changes_nothing_more(pieces: list[str], values: list[str]) -> None:
    clean = Redactor(values)
    once = clean.text("".join(pieces))
    assert clean.text(once) == once
    argv = clean.argv(pieces)
    assert clean.argv(argv) == argv


@given(st.text())
def test_printable_text_is_printable_and_the_rest_is_unchanged(text: str) -> None:
    for instead in ("", REPLACED, SPELLED):
        shown = printable(text, keep=KEPT, instead=instead)
        assert all(c.isprintable() or c in KEPT or c == REPLACED for c in shown)
        assert printable(shown, keep=KEPT, instead=instead) == shown
    assert printable(text) == "".join(c for c in text if c.isprintable())


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"n": 1})

    def broken() -> Any:
        yield "half"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_lines(path, broken())
    assert json.loads(path.read_text()) == {"n": 1} and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_line_after_one_that_was_cut_off_stands_alone(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "lines"
    append_line(path, "one")
    with path.open("a") as file:
        file.write('{"half')
    append_line(path, "two")
    assert path.read_text() == 'one\n{"half\ntwo\n'
