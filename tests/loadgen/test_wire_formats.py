"""Token streams and request bodies of every wire format."""

from __future__ import annotations

import io
import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.loadgen.http1 import AnswerParser
from autotune.loadgen.wire_formats import COMPLETIONS, GENERATE, FinalCounts, TokenStream, WireFormat
from autotune.utils.http import BadAnswer


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def completion(text: str, count: int | None = None, finish: str | None = None) -> bytes:
    usage = {"usage": {"prompt_tokens": 7, "completion_tokens": count}} if count is not None else {}
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **usage})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5, "spec_verify_ct": 3}})
DONE = event(b"[DONE]")


def read(*payloads: bytes, wire_format: WireFormat = COMPLETIONS) -> TokenStream:
    stream = TokenStream(wire_format)
    for i, payload in enumerate(payloads):
        stream.take([payload], float(i))
    return stream


def chunks(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)


def running(stream: TokenStream, parts: list[bytes]) -> AnswerParser:
    """Parse parts of a running stream, each at a time of its own, as the load client does."""
    parser = AnswerParser()
    parser.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for i, part in enumerate(parts, 1):
        rest = part[stream.skip_chunks(part, float(i)):] if parser.between_chunks else part
        if rest and (pieces := parser.feed(rest)):
            stream.take(pieces, float(i))
    return parser


def test_running_counts_say_how_many_tokens_each_event_brought_also_without_text() -> None:
    stream = read(completion("", 1), completion("b c", 3), completion("d e", 5, "length"), USAGE, DONE)
    assert list(stream.times) == [0.0, 1.0, 2.0] and list(stream.counts) == [1, 3, 5] and stream.finished
    assert stream.close() == FinalCounts(5, 7, 3)


def test_without_running_counts_events_are_stamped_and_the_final_count_is_kept() -> None:
    stream = read(completion("a"), completion("b"), completion("c") + completion("d", None, "length"), USAGE + DONE)
    assert list(stream.times) == [0.0, 1.0, 2.0, 2.0] and set(stream.counts) == {0}
    assert stream.close().completion_tokens == 5


def test_sglang_generate_counts_and_verify_steps_come_from_meta_info() -> None:
    events = (("a", 1, None), ("a b c", 3, None), ("a b c", 3, {"type": "length"}))
    stream = read(*(event({"text": text, "meta_info": {"finish_reason": reason, "prompt_tokens": 4, "spec_verify_ct": 2,
                                                       "completion_tokens": count}}) for text, count, reason in events),
                  DONE, wire_format=GENERATE)
    assert list(stream.counts) == [1, 3]
    assert stream.close() == FinalCounts(3, 4, 2)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_tokens_are_the_same_however_the_bytes_arrive(sizes: list[int], counted: bool, crlf: bool) -> None:
    whole = b": ping\n\n" + b"".join(completion("tok \"completion_tokens\": 9 ", n if counted else None)
                                      for n in range(1, 6)) + USAGE + DONE
    if crlf:
        whole = whole.replace(b"\n", b"\r\n")
    stream, data, size = TokenStream(), io.BytesIO(whole), itertools.cycle(sizes)
    while piece := data.read(next(size)):
        stream.take([piece], 0.0)
    assert len(stream.times) == 5 and stream.close().completion_tokens == 5 and stream.finished


@given(st.lists(st.integers(1, 3), min_size=1, max_size=12), st.booleans(), st.integers(0, 12), st.booleans())
def test_skipped_chunks_give_the_same_end_as_chunks_taken_one_by_one(groups: list[int], counted: bool, split: int,
                                                                     error: bool) -> None:
    events = [completion("tok", n if counted else None) for n in range(1, sum(groups) + 1)]
    if error:
        events[len(events) // 2] = event({"error": {"message": "lost"}})
    whole = [*(chunks(e) for e in [*events, USAGE, DONE]), b"0\r\n\r\n"]
    parts, at = [], 0
    for size in [*groups, len(whole)]:
        parts.append(b"".join(whole[at:at + size]))
        at += size
    parts = [part for part in parts if part]
    if split < len(parts):
        middle = len(parts[split]) // 2
        parts[split:split + 1] = [parts[split][:middle], parts[split][middle:]]
    together, apart = TokenStream(), TokenStream()
    assert running(together, parts).done and running(apart, whole).done
    assert together.counts[-1:] == apart.counts[-1:] and (counted or together.counts == apart.counts)
    assert together.close() == apart.close() and together.finished
    assert together.error == apart.error == ("lost" if error else None)


def test_a_part_with_several_events_is_one_arrival() -> None:
    stream = TokenStream()
    parser = running(stream, [chunks(completion("a", 1)), chunks(completion("b", 2), completion("c", 4)),
                              chunks(completion("d", 5), USAGE, DONE) + b"0\r\n\r\n"])
    assert list(stream.counts) == [1, 4, 5] and list(stream.times) == [1.0, 2.0, 3.0]
    assert parser.done and stream.finished and stream.close() == FinalCounts(5, 7, 3)


@pytest.mark.parametrize(("payload", "message"), [
    (event({"error": {"message": "too long", "code": 400}}) + USAGE, "too long"),
    (event({"error": "too long"}), "too long"), (event({"object": "error", "message": "long", "code": 400}), "long"),
    (event(b'{"error": {"message": "half \\ud800"}}'), "half \ufffd")])
def test_an_error_inside_the_stream_is_found_at_the_start_and_later(payload: bytes, message: str) -> None:
    for stream in (read(payload), read(completion("a"), completion("b"), payload), read(completion("a", 1), payload)):
        assert stream.kind == "stream_error" and stream.error == message


def test_a_text_that_speaks_of_errors_is_no_error() -> None:
    stream = read(completion("a"), completion('{"error": "x"}'), event({"choices": [{"text": "b"}], "error": None}))
    assert stream.error is None and len(stream.times) == 3


def test_an_abort_is_not_a_success() -> None:
    stream = read(event({"text": "a", "meta_info": {"completion_tokens": 1}}), event({"text": "a", "meta_info": {
        "completion_tokens": 1, "finish_reason": {"type": "abort", "message": "out of memory"}}}), DONE,
        wire_format=GENERATE)
    stream.close()
    assert stream.kind == "aborted" and stream.error == "out of memory"


def test_an_event_that_is_cut_off_among_whole_ones_is_noticed() -> None:
    stream = TokenStream()
    with pytest.raises(BadAnswer):
        running(stream, [chunks(e) for e in (completion("a"), completion("b"), b"data: {this is not json\n\n")])
    assert len(stream.times) == 2


ODD: list[Any] = [{"choices": [{"text": "a"}], "usage": odd} for odd in (
    [1], "x", 5, {"completion_tokens": "5"}, {"completion_tokens": float("inf")}, {"completion_tokens": 1.5},
    {"completion_tokens": 10**23}, {"completion_tokens": -5}, {"completion_tokens": True})]
ODD += [{"choices": ["a"]}, {"choices": 5}, {"choices": {"a": 1}}, {"text": "a", "meta_info": "x"},
        b'{"choices": [{"te', [1], b"hello"]
ODD += [{"choices": [], "usage": {"completion_tokens": 8, **end}} for end in (
    {"prompt_tokens": "x"}, {"prompt_tokens": -3}, {"spec_verify_ct": [7]}, {"prompt_tokens": float("inf")},
    {"spec_verify_ct": 10**400})]
ODD += [b'{"a":' + b"[" * 60_000, b'{"error":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"usage":{"completion_tokens":' + b"9" * 5000 + b"}}"]


@pytest.mark.parametrize("odd", ODD)
def test_an_event_that_is_no_json_object_of_the_expected_types_is_a_bad_answer(odd: Any) -> None:
    for before in ((), (completion("a", 1), completion("b", 2)), (completion("a"), completion("b"))):
        with pytest.raises(BadAnswer):
            read(*before, event(odd)).close()


def test_tokens_beyond_what_was_asked_for_are_not_counted_and_many_more_are_a_bad_answer() -> None:
    for first in ((completion("a", 2),), (completion("a"),)):
        stream = TokenStream(most=8)
        for i, payload in enumerate((*first, completion("b", 8), completion("c", 24), completion("", 24, "length"))):
            stream.take([payload], float(i))
        assert stream.close().completion_tokens == 8 and max(stream.counts) == 8
        with pytest.raises(BadAnswer, match="counts 1000000000 tokens where 8 were asked for"):
            stream.take([completion("d", 10**9)], 9.0)
    stream = TokenStream(most=8)
    running(stream, [chunks(completion("a", count)) for count in (2, 5, 9, 20)])
    assert list(stream.counts) == [2, 5, 8] and stream.close().completion_tokens == 8
    with pytest.raises(BadAnswer):
        running(stream, [chunks(completion("a", 10**9))])


def test_an_event_without_end_is_a_bad_answer() -> None:
    stream = TokenStream()
    with pytest.raises(BadAnswer, match="an event of more than"):
        for _ in range(200):
            stream.take([b"data: " + b"a" * 65536], 1.0)


def test_a_count_in_a_field_that_is_no_data_counts_for_nothing() -> None:
    stream = TokenStream()
    running(stream, [chunks(completion("a", 1)), chunks(b'id: "completion_tokens": 7\n\n')])
    assert list(stream.counts) == [1] and stream.close().completion_tokens == 1


SOME_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3) |
    st.dictionaries(st.sampled_from(("completion_tokens", "delta", "message", "text", "type")), inner), max_leaves=8)
EVENTS = st.lists(st.dictionaries(
    st.sampled_from(("choices", "usage", "meta_info", "error", "object", "text")), SOME_JSON), max_size=4)


@settings(deadline=None)
@given(EVENTS, st.sampled_from((COMPLETIONS, GENERATE)))
def test_events_of_any_json_are_read_or_are_a_bad_answer(events: list[dict[str, Any]], wire_format: WireFormat) -> None:
    try:
        stream = read(*(event(value) for value in events), wire_format=wire_format)
        end = stream.close()
    except BadAnswer:
        return
    assert all(type(value) in (int, type(None)) for value in (end.completion_tokens, end.prompt_tokens,
                                                               end.verify_steps))
    assert (stream.error or "").encode() is not None
