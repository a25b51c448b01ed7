"""Whatever a server answers ends in a value, or in one of the two exceptions callers expect: in time, and small."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.utils import http as answers
from autotune.utils.http import BadAnswer, NoAnswer, ask, plain

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
Say = Callable[[socket.socket], None]


@contextlib.contextmanager
def serving(*says: Say) -> Iterator[str]:
    """A server of so many connections, of which each reads a request and then does what its `say` does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def serve() -> None:
            for say in says:
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        _request(connection)
                        say(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def _request(connection: socket.socket) -> None:
    """Read a whole request: one that is left unread resets the connection when it is closed."""
    with connection.makefile("rb") as file:
        size = 0
        while (line := file.readline().strip().lower()):
            size = int(line.split(b":")[1]) if line.startswith(b"content-length:") else size
        file.read(size)


def said(body: bytes, head: bytes = HEAD) -> Say:
    return lambda connection: connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)


def endless(start: bytes, piece: bytes, every_s: float = 0.0) -> Say:
    def say(connection: socket.socket) -> None:
        connection.sendall(start)
        while True:
            connection.sendall(piece)
            time.sleep(every_s)

    return say


def dripping(start: bytes) -> Say:
    return endless(start, b" ", 0.02)


def test_a_good_answer_is_taken_whole() -> None:
    with serving(said(b'{"data": [{"id": "m\\u00e4"}]}')) as url:
        answer = ask(url + "/v1/models", within_s=5)
    assert (answer.status, answer.json()) == (200, {"data": [{"id": "m\u00e4"}]})
    with serving(lambda c: c.sendall(b"HTTP/1.0 500 X\r\n\r\noops")) as url:
        failed = ask(url, {"a": 1}, within_s=5)
    assert (failed.status, failed.text) == (500, "oops")


@pytest.mark.parametrize("say", [*map(dripping, (
    b"HTTP", b"HTTP/1.1 200 OK\r\nX-A: ", HEAD + b"\r\n", HEAD + b"Content-Length: 999\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n")), endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 500)])
def test_an_answer_that_drips_ends_at_the_limit_for_all_of_it(say: Say) -> None:
    began = time.monotonic()
    with serving(say) as url, pytest.raises(NoAnswer, match="no whole answer within 0.4 s") as caught:
        ask(url, within_s=0.4)
    assert caught.value.late and time.monotonic() - began < 3


@pytest.mark.parametrize(("start", "piece"), [
    (HEAD + b"\r\n", b"a" * 65536), (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1000\r\n" + b"a" * 4096 + b"\r\n"),
    (HEAD, b"X-A: b\r\n" * 1000),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"T: x\r\n" * 1000)])
def test_an_answer_without_end_is_bad_before_it_fills_the_memory(start: bytes, piece: bytes) -> None:
    with serving(endless(start, piece)) as url, pytest.raises(BadAnswer):
        ask(url, within_s=20, most_bytes=1 << 20)


def test_a_server_that_refuses_or_hangs_up_is_no_answer_and_not_late() -> None:
    with serving(lambda c: c.sendall(HEAD + b"Content-Length: 9\r\n\r\nabc")) as url, pytest.raises(NoAnswer) as cut:
        ask(url, within_s=5)
    with pytest.raises(NoAnswer) as refused:
        ask(url, within_s=5)
    assert not cut.value.late and not refused.value.late and "refused" in str(refused.value)


def test_a_redirection_is_not_followed_and_a_compressed_body_not_unpacked() -> None:
    with serving(said(b"", b"HTTP/1.1 302 X\r\nLocation: file:///etc/passwd\r\n")) as url:
        assert ask(url, within_s=5).status == 302
    with serving(said(b"\x1f\x8b\x08\x00" + b"x" * 50, HEAD + b"Content-Encoding: gzip\r\n")) as url, \
            pytest.raises(BadAnswer, match="not JSON"):
        ask(url, within_s=5).json()


def test_a_path_cannot_add_a_header_or_another_request() -> None:
    with pytest.raises(BadAnswer, match="no answer as HTTP has it: Invalid non-printable"):
        ask("http://127.0.0.1:9/a\r\nX-Evil: 1\r\n\r\nGET /b", within_s=5)


@pytest.mark.parametrize("body", [
    b"[" * 200_000, b'{"a":' * 200_000, b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", b'{"a":' + b"9" * 5000 + b"}",
    b"[1]", b'"x"', b"null", b"", b"<html>", b'{"a": "\xff\xfe"}', '{"a": 1}'.encode("utf-16"), b'{"a": 1'])
def test_what_is_no_plain_json_object_is_a_bad_answer(body: bytes) -> None:
    with pytest.raises(BadAnswer) as caught:
        answers.Answer(200, body).json()
    assert len(str(caught.value)) < 500


def test_what_json_allows_and_no_database_takes_becomes_text() -> None:
    odd = b'{"a": NaN, "b": [-Infinity, 1e999], "c": ' + b"9" * 400 + b', "\\ud800": "x\\udfffy", ' \
          b'"d": "\\ud83d\\ude00"}'
    assert answers.Answer(200, odd).json() == {"a": "nan", "b": ["-inf", "inf"], "c": "9" * 400, "\ufffd": "x\ufffdy",
                                               "d": "\U0001f600"}


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters()), inner, max_size=4),
    max_leaves=12)
KEYS = ("data", "usage", "meta_info", "choices", "text", "error", "object", "message", "delta", "completion_tokens",
        "prompt_tokens", "id")
ODD = st.dictionaries(st.sampled_from(KEYS), JSON | st.dictionaries(st.sampled_from(KEYS), JSON) |
                      st.lists(st.dictionaries(st.sampled_from(KEYS), JSON), max_size=2))


@settings(deadline=None)
@given(JSON)
def test_plain_json_can_be_written_whatever_it_was(value: Any) -> None:
    made = plain(value)
    assert json.loads(json.dumps(made, allow_nan=False).encode()) == made
    assert plain(made) == made


@settings(deadline=None, max_examples=60)
@given(ODD)
def test_readers_of_any_object_give_their_type_or_a_bad_answer(value: dict[str, Any]) -> None:
    readers: list[tuple[Callable[[dict[str, Any]], Any], type]] = [
        (answers.usage_of, dict), (answers.error_in, str), (answers.completion_text, str),
        (lambda v: answers.count(v, "completion_tokens") or 0, int), (lambda v: answers.text(v, "id"), str),
        (lambda v: answers.parts(v, "data"), list)]
    for read, kind in readers:
        try:
            found = read(value)
        except BadAnswer as error:
            str(error).encode()
            continue
        assert isinstance(found, kind)
        assert not isinstance(found, str) or found.encode() is not None


@pytest.mark.parametrize("count", ["5", 1.5, float("inf"), True, -5, 10**400, 10**13, [1], {"a": 1}])
def test_what_is_no_count_is_a_bad_answer(count: Any) -> None:
    with pytest.raises(BadAnswer, match="tokens is not a count"):
        answers.count({"tokens": count}, "tokens")
