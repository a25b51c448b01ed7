"""Token streams: arrivals and counts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.loadgen.http1 import Framing
from autotune.loadgen.sse import TokenStream
from autotune.utils.http import BadAnswer


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def completion(text: str, count: int | None = None, finish: str | None = None) -> bytes:
    usage = {"usage": {"prompt_tokens": 7, "completion_tokens": count}} if count is not None else {}
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **usage})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5, "spec_verify_ct": 3}})
DONE = event(b"[DONE]")


def read(*payloads: bytes) -> TokenStream:
    stream = TokenStream()
    for i, payload in enumerate(payloads):
        stream.feed(payload, float(i))
    return stream


def test_running_counts_say_how_many_tokens_each_event_brought() -> None:
    stream = read(completion("a", 1), completion("b c", 3), completion("d e", 5, "length"), USAGE, DONE)
    assert list(stream.times) == [0.0, 1.0, 2.0] and list(stream.counts) == [1, 3, 5] and stream.finished
    assert stream.close() == {"completion_tokens": 5, "prompt_tokens": 7, "verify_steps": 3}


def test_without_running_counts_events_are_stamped_and_the_final_count_is_kept() -> None:
    stream = read(completion("a"), completion("b"), completion("c") + completion("d", None, "length"), USAGE + DONE)
    assert list(stream.times) == [0.0, 1.0, 2.0, 2.0] and set(stream.counts) == {0}
    assert stream.close()["completion_tokens"] == 5


def test_sglang_generate_counts_and_verify_steps_come_from_meta_info() -> None:
    def meta(text: str, count: int, reason: Any = None) -> bytes:
        return event({"text": text, "meta_info": {"finish_reason": reason, "prompt_tokens": 4, "spec_verify_ct": 2,
                                                  "completion_tokens": count}})
    stream = read(meta("a", 1), meta("a b c", 3), meta("a b c", 3, {"type": "length"}), DONE)
    assert list(stream.counts) == [1, 3]
    assert stream.close() == {"completion_tokens": 3, "prompt_tokens": 4, "verify_steps": 2}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_tokens_are_the_same_however_the_bytes_arrive(sizes: list[int], counted: bool, crlf: bool) -> None:
    whole = b": ping\n\n" + b"".join(completion("tok \"completion_tokens\": 9 ", n if counted else None)
                                      for n in range(1, 6)) + USAGE + DONE
    if crlf:
        whole = whole.replace(b"\n", b"\r\n")
    stream, at, turn = TokenStream(), 0, 0
    while at < len(whole):
        size = sizes[turn % len(sizes)]
        stream.feed(whole[at:at + size], float(turn))
        at, turn = at + size, turn + 1
    assert len(stream.times) == 5 and stream.close()["completion_tokens"] == 5 and stream.finished


@given(st.lists(st.integers(1, 3), min_size=1, max_size=12), st.booleans(), st.integers(0, 12), st.booleans())
def test_many_reads_taken_at_once_give_the_same_as_one_by_one(groups: list[int], counted: bool, split: int,
                                                              error: bool) -> None:
    events = [completion("tok", n if counted else None) for n in range(1, sum(groups) + 1)]
    if error:
        events[len(events) // 2] = event({"error": {"message": "lost"}})
    chunks = [b"%x\r\n%b\r\n" % (len(e), e) for e in [*events, USAGE, DONE]] + [b"0\r\n\r\n"]
    parts, at = [], 0
    for size in [*groups, len(chunks)]:
        parts.append(b"".join(chunks[at:at + size]))
        at += size
    parts = [part for part in parts if part]
    if split < len(parts):
        middle = len(parts[split]) // 2
        parts[split:split + 1] = [parts[split][:middle], parts[split][middle:]]
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    stamps = [float(i) for i in range(len(parts))]
    streams, framings = (TokenStream(), TokenStream()), (Framing(), Framing())
    for stream, framing in zip(streams, framings, strict=True):
        framing.feed(head)
        stream.take(framing, parts[:1], stamps[:1])
    streams[0].take(framings[0], parts[1:], stamps[1:])
    for part, stamp in zip(parts[1:], stamps[1:], strict=True):
        streams[1].take(framings[1], [part], [stamp])
    assert framings[0].done and framings[1].done
    assert streams[0].times == streams[1].times and streams[0].counts == streams[1].counts
    assert streams[0].close() == streams[1].close()
    assert streams[0].error == streams[1].error == ("lost" if error else None)


def test_a_chats_role_is_not_its_first_token() -> None:
    def delta(**content: Any) -> bytes:
        return event({"choices": [{"delta": content}]})
    stream = read(delta(role="assistant", content=""), delta(content="Hi"), delta(content=" you"), DONE)
    assert list(stream.times) == [1.0, 2.0]


def test_a_token_whose_text_is_withheld_counts() -> None:
    stream = read(completion("", 1), completion("\u00e9", 2))
    assert list(stream.counts) == [1, 2] and list(stream.times) == [0.0, 1.0]


@pytest.mark.parametrize("payload", [
    event({"error": {"message": "too long", "code": 400}}) + USAGE, event({"error": "too long"}),
    event({"object": "error", "message": "too long", "code": 400})])
def test_an_error_inside_the_stream_is_found_at_the_start_and_later(payload: bytes) -> None:
    for stream in (read(payload), read(completion("a"), completion("b"), payload), read(completion("a", 1), payload)):
        assert stream.kind == "stream_error" and stream.error == "too long"


def test_a_text_that_speaks_of_errors_is_no_error() -> None:
    stream = read(completion("a"), completion('{"error": "x"}'), event({"choices": [{"text": "b"}], "error": None}))
    assert stream.error is None and len(stream.times) == 3


def test_an_abort_is_not_a_success() -> None:
    stream = read(event({"text": "a", "meta_info": {"completion_tokens": 1}}), event({"text": "a", "meta_info": {
        "completion_tokens": 1, "finish_reason": {"type": "abort", "message": "out of memory"}}}), DONE)
    stream.close()
    assert stream.kind == "aborted" and stream.error == "out of memory"


@pytest.mark.parametrize("bad", [event(b'{"choices": [{"te'), event(b"[1]"), event(b"hello")])
def test_what_is_not_a_json_object_is_refused(bad: bytes) -> None:
    for before in ((), (completion("a", 1), completion("b", 2))):
        with pytest.raises(BadAnswer):
            read(*before, bad)


def test_an_event_that_is_cut_off_among_whole_ones_is_noticed() -> None:
    framing, stream = Framing(), TokenStream()
    framing.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    events = [b'data: {"choices": [{"text": "word"}]}\n\n'] * 2 + [b"data: {this is not json\n\n"]
    parts = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
    with pytest.raises(BadAnswer):
        stream.take(framing, parts, [1.0, 2.0, 3.0])
    assert len(stream.times) == 2


ODD: list[dict[str, Any]] = [{"choices": [{"text": "a"}], "usage": odd} for odd in (
    [1], "x", 5, {"completion_tokens": "5"}, {"completion_tokens": float("inf")}, {"completion_tokens": 1.5},
    {"completion_tokens": 10**23}, {"completion_tokens": -5}, {"completion_tokens": True})]
ODD += [{"choices": ["a"]}, {"choices": 5}, {"choices": {"a": 1}}, {"choices": [{"delta": "x"}]},
        {"text": "a", "meta_info": "x"}]


@pytest.mark.parametrize("odd", ODD)
def test_an_event_of_other_types_than_expected_is_a_bad_answer(odd: dict[str, Any]) -> None:
    for before in ((), (completion("a", 1), completion("b", 2)), (completion("a"), completion("b"))):
        with pytest.raises(BadAnswer):
            read(*before, event(odd)).close()


@pytest.mark.parametrize("end", [{"prompt_tokens": "x"}, {"prompt_tokens": -3}, {"spec_verify_ct": [7]},
                                 {"prompt_tokens": float("inf")}, {"spec_verify_ct": 10**400}])
def test_an_end_whose_counts_are_none_is_a_bad_answer(end: dict[str, Any]) -> None:
    stream = read(completion("a"), event({"choices": [], "usage": {"completion_tokens": 8, **end}}), DONE)
    with pytest.raises(BadAnswer):
        stream.close()


@pytest.mark.parametrize("data", [b'{"a":' + b"[" * 60_000, b'{"error":' + b"[" * 900 + b"]" * 900 + b"}",
                                  b'{"usage":{"completion_tokens":' + b"9" * 5000 + b"}}"])
def test_an_event_that_is_too_deep_or_too_long_a_number_is_a_bad_answer(data: bytes) -> None:
    with pytest.raises(BadAnswer):
        read(event(data))


def test_tokens_beyond_what_was_asked_for_are_not_counted_and_many_more_are_a_bad_answer() -> None:
    for first in ((completion("a", 2),), (completion("a"),)):
        stream = TokenStream(8)
        for i, payload in enumerate((*first, completion("b", 8), completion("c", 24), completion("", 24, "length"))):
            stream.feed(payload, float(i))
        assert stream.close()["completion_tokens"] == 8 and max(stream.counts) == 8
        with pytest.raises(BadAnswer, match="counts 1000000000 tokens where 8 were asked for"):
            stream.feed(completion("d", 10**9), 9.0)


def test_the_fast_way_counts_no_token_beyond_what_was_asked_for_either() -> None:
    framing, stream = Framing(), TokenStream(8)
    framing.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    events = [completion("a", count) for count in (2, 5, 9, 20)]
    stream.take(framing, [b"%x\r\n%b\r\n" % (len(event), event) for event in events], [1.0, 2.0, 3.0, 4.0])
    assert list(stream.counts) == [2, 5, 8] and stream.close()["completion_tokens"] == 8
    with pytest.raises(BadAnswer):
        lie = completion("a", 10**9)
        stream.take(framing, [b"%x\r\n%b\r\n" % (len(lie), lie)], [5.0])


def test_an_event_without_end_is_a_bad_answer() -> None:
    stream = TokenStream()
    with pytest.raises(BadAnswer, match="an event of more than"):
        for _ in range(200):
            stream.feed(b"data: " + b"a" * 65536, 1.0)


def test_a_servers_message_holds_whole_characters_only() -> None:
    stream = read(event(b'{"error": {"message": "half \\ud800"}}'))
    assert stream.error == "half \ufffd"


def test_a_count_in_a_field_that_is_no_data_counts_for_nothing() -> None:
    framing, stream = Framing(), TokenStream()
    framing.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    events = [completion("a", 1), b'id: "completion_tokens": 7\n\n']
    stream.take(framing, [b"%x\r\n%b\r\n" % (len(event), event) for event in events], [1.0, 2.0])
    assert list(stream.counts) == [1] and stream.close()["completion_tokens"] == 1


SOME_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3) |
    st.dictionaries(st.sampled_from(("completion_tokens", "delta", "message", "text", "type")), inner), max_leaves=8)
EVENTS = st.lists(st.dictionaries(
    st.sampled_from(("choices", "usage", "meta_info", "error", "object", "text")), SOME_JSON), max_size=4)


@settings(deadline=None)
@given(EVENTS)
def test_events_of_any_json_are_read_or_are_a_bad_answer(events: list[dict[str, Any]]) -> None:
    try:
        stream = read(*(event(value) for value in events))
        end = stream.close()
    except BadAnswer:
        return
    assert all(value is None or type(value) is int for value in end.values())
    assert (stream.error or "").encode() is not None


def test_a_beginning_with_several_events_has_the_first_as_an_arrival_of_its_own() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    events = [b'data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": %d}}\n\n' % n for n in (1, 2, 4)]
    data = head + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
    stream, framing = TokenStream(), Framing()
    assert stream.begin(framing, data, 3.0) == len(data) and framing.between_chunks
    assert list(stream.counts) == [1, 4] and list(stream.times) == [3.0, 3.0]
    for other in (data.replace(b'"choices"', b'"error"'), data[:-1], data.replace(b"200 OK", b"404 No")):
        assert TokenStream().begin(Framing(), other, 3.0) == 0
