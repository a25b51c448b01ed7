"""What a load counts: answers by their end, tokens by the server's count."""

from __future__ import annotations

import pytest

from autotune.loadgen.result import OK, Reply, Tally, packed, unpacked
from autotune.loadgen.wire_formats import GENERATE, TokenStream
from tests.loadgen.test_wire_formats import DONE, USAGE, completion, event, read

ABORT = {"type": "abort", "message": "out"}
ABORTED = event({"text": "", "meta_info": {"completion_tokens": 2, "finish_reason": ABORT}})


def told(stream: TokenStream, status: int = 200) -> tuple[Reply, Tally]:
    """An answer of this status and stream, counted 1 s after its request was sent."""
    reply, tally = Reply(0, 5, due=0.0, sent=0.0, times=stream.times, counts=stream.counts), Tally()
    tally.complete(reply, status, stream, 1.0)
    return reply, tally


@pytest.mark.parametrize(("stream", "status", "kind", "detail"), [
    (read(completion("a", 1), completion("b", 5, "length"), USAGE, DONE), 200, OK, ""),
    (read(completion("a")), 200, "partial", "the stream ended without [DONE], usage or a finish reason"),
    (read(DONE), 200, "empty", "no output token"),
    (read(completion("a", 1), event({"error": {"message": "no memory"}}), DONE), 200, "stream_error", "no memory"),
    (read(ABORTED, wire_format=GENERATE), 200, "aborted", "out"),
    (TokenStream(), 503, "http_503", "")])
def test_an_answer_counts_as_a_success_or_as_its_own_kind_of_failure(stream: TokenStream, status: int, kind: str,
                                                                     detail: str) -> None:
    reply, tally = told(stream, status)
    assert (reply.kind, reply.detail, reply.status, reply.ended) == (kind, detail, status, 1.0)
    failed = kind != OK
    assert reply.failed is failed and tally.kinds == ({kind: 1} if failed else {}) and tally.errors_in_row == failed
    assert tally.details.get(kind, "") == detail


def test_events_without_counts_stand_for_as_many_tokens_as_those_of_finished_requests() -> None:
    reply, tally = told(read(completion("a b"), completion("c d"), USAGE, DONE))
    assert (reply.tokens, reply.counted, reply.verify_steps) == (5, False, 3)
    tick = tally.tick(2.0, [read(completion("x"), completion("y"))], unread=0.0, cpu_s=0.5, wait_s=None)
    assert (tick.events, tick.ratio, tick.in_flight, tick.finished, tick.tokens) == (4, 2.5, 1, 1, 10.0)


def test_replies_are_the_same_after_their_way_from_the_clients_process() -> None:
    reply, _ = told(read(completion("a", 1), completion("b", 5, "length"), USAGE, DONE))
    (again,) = unpacked(packed([reply]))
    assert again == reply and again.tokens == 5 and again.ttft_s == 0.0 and again.tpot_s == 0.25
