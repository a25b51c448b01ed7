"""Parsing of HTTP answers, however the bytes arrive."""

from __future__ import annotations

import io
import itertools
import select
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.loadgen.http1 import NO_BODY_LIMIT, AnswerParser, can_wait_for_bytes, poller, request
from autotune.utils.http import BadAnswer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def feed(parser: AnswerParser, data: bytes, sizes: list[int]) -> bytes:
    payload, size = b"", itertools.cycle(sizes)
    stream = io.BytesIO(data)
    while piece := stream.read(next(size)):
        payload += b"".join(parser.feed(piece))
    return payload


def chunked(pieces: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces if p) + b"0\r\n\r\n"


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_a_chunked_answer_is_the_same_however_its_bytes_arrive(pieces: list[bytes], sizes: list[int]) -> None:
    parser = AnswerParser()
    assert feed(parser, HEAD + chunked(pieces), sizes) == b"".join(pieces)
    assert parser.done and parser.reusable and parser.status == 200


@given(st.binary(max_size=60), st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_an_answer_with_a_length_ends_after_that_many_bytes(body: bytes, sizes: list[int]) -> None:
    parser = AnswerParser()
    head = b"HTTP/1.1 500 Oops\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
    assert feed(parser, head + body, sizes) == body
    assert parser.done and not parser.reusable and parser.status == 500


def test_an_answer_without_length_ends_when_the_peer_closes() -> None:
    parser = AnswerParser()
    assert parser.feed(b"HTTP/1.0 200 OK\r\n\r\ndata: x\n\n") == [b"data: x\n\n"]
    assert not parser.done and parser.eof() and not parser.reusable


@pytest.mark.parametrize("data", [HEAD + b"5\r\nabc",
                                  b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", b"HTTP/1.1 2"])
def test_an_answer_that_the_peer_cuts_is_not_done(data: bytes) -> None:
    parser = AnswerParser()
    parser.feed(data)
    assert not parser.eof() and not parser.done and not parser.reusable


def test_a_connection_carries_one_answer_after_the_other() -> None:
    parser = AnswerParser()
    for number in range(3):
        parser.next_answer()
        assert (parser.status, parser.done) == (None, False)
        parser.feed(b"HTTP/1.1 50%d Oops\r\nContent-Length: 2\r\n\r\nno" % number)
        assert (parser.status, parser.done, parser.reusable) == (500 + number, True, True)


@pytest.mark.parametrize(("data", "between"), [
    (b"4\r\na\n\n\n\r\n", True), (b"3\r\na\n\n\r\n", True), (b"3\r\na\n\n", False),
    (b"5\r\na\n\n\r\n", False), (b"3\r\na\n\n\r\n5", False)])
def test_whole_chunks_of_events_leave_the_parser_between_chunks(data: bytes, between: bool) -> None:
    parser = AnswerParser()
    parser.feed(HEAD)
    parser.feed(data)
    assert parser.between_chunks is between


def test_a_head_without_end_is_refused_however_slowly_it_comes() -> None:
    parser = AnswerParser()
    parser.feed(b"HTTP/1.1 200 OK\r\nX: ")
    with pytest.raises(BadAnswer, match="64 KiB without any of the body"):
        for _ in range(NO_BODY_LIMIT // 1000 + 1):
            parser.feed(b"x" * 1000)


def test_an_interim_answer_and_a_trailer_are_passed_over() -> None:
    parser = AnswerParser()
    payload = parser.feed(b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"2;x=y\r\nok\r\n0\r\nTrailer: t\r\n\r\n")
    assert payload == [b"ok"] and parser.done and parser.status == 200


@pytest.mark.parametrize("data", [
    b"SSH-2.0-OpenSSH\r\n\r\n", HEAD + b"zz\r\n", HEAD + b"2\r\nabcd\r\n", HEAD + b"0\r\n\r\nmore",
    b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab", b"x" * 70000, HEAD + b"-5\r\nabc", HEAD + b"1\r\na\r\n1_0\r\n",
    HEAD + b"f" * 17 + b"\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 5000, HEAD + b"0\r\n" + b"T: x\r\n" * 40_000,
    *(b"HTTP/1.1 %b\r\n\r\nhello" % head for head in (
        b"1\xb90 OK", b"2000 OK", b"9" * 5000 + b" OK", b"200 OK\r\nContent-Length: -5",
        b"200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked", b"200 OK\r\nContent-Length: \xb9"))])
def test_what_is_not_http_is_refused(data: bytes) -> None:
    with pytest.raises(BadAnswer):
        AnswerParser().feed(data)


def test_a_request_carries_its_length() -> None:
    made = request("h:1", "/p", b"{}")
    assert made.startswith(b"POST /p HTTP/1.1\r\nHost: h:1\r\n") and made.endswith(b"\r\n\r\n{}")
    assert b"Content-Length: 2\r\n" in made


@pytest.mark.skipif(not can_wait_for_bytes(), reason="this system wakes a reader at every byte")
def test_a_reader_can_sleep_until_enough_bytes_are_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader, writer = socket.create_connection(listener.getsockname()), listener.accept()[0]
    with reader, writer:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 4)
        poll = poller()
        poll.register(reader.fileno(), select.POLLIN)
        writer.sendall(b"abc")
        assert poll.poll(0.05) == []
        writer.sendall(b"d")
        assert poll.poll(5.0) == [(reader.fileno(), select.POLLIN)]
