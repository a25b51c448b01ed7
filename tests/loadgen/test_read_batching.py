"""Streams that gather bytes before they are read: what stays exact, and what ends the waiting."""

from __future__ import annotations

import bisect
import itertools
import pathlib
import select
import socket
import statistics
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from autotune.loadgen.connections import Connections
from autotune.loadgen.read_batching import FEWEST_WATCHED, FULL_BYTES, LEAST_TIMEOUT_S, LONGEST_S, MOST_WATCHED, Pacing
from autotune.loadgen.result import Reply
from autotune.loadgen.wire_formats import Api, TokenStream
from autotune.loadgen.workload import LoadOrder, Target
from autotune.measure.limits import Limits
from autotune.measure.statistics import gaps, token_arrivals, tokens_between
from autotune.records import Measurement
from tests.fakes.stub import Stub
from tests.loadgen.harness import OPENAI, SGLANG, load, measure_stub, run_load, target_of
from tests.loadgen.test_process import kinds

MANY = MOST_WATCHED + 12


@pytest.mark.parametrize(("api", "arguments"), [
    (OPENAI, ()), (OPENAI, ("--chunk-tokens", "1,8,1,3")), (SGLANG, ("--chunk-tokens", "1,5")),
    (OPENAI, ("--eol", "crlf")), (OPENAI, ("--framing", "close"))])
def test_streams_that_wait_lose_no_token_and_keep_the_servers_times(tmp_path: pathlib.Path, api: Api,
                                                                    arguments: tuple[str, ...]) -> None:
    """Also where many tokens come at once, or an answer ends earlier than expected."""
    with Stub(tmp_path, "--ttft-ms", "5", "--itl-ms", "15", *arguments) as stub:
        replies, ticks = run_load(stub, 3 * MANY, target_of(stub, api), concurrency=MANY, output_tokens=50)
    ok = [r for r in replies if r.ok]
    assert set(kinds(replies)) <= {"ok", "open"} and all(r.tokens == r.wanted_tokens for r in ok)
    assert not Counter(r.tokens for r in ok) - Counter(t["tokens"] for t in stub.truth)
    assert {t.in_flight for t in ticks[:-1]} == {MANY}
    assert len(gaps(replies, 0.0, float("inf"))) == sum(len(r.times) - 1 for r in replies if r.watched and r.times)
    assert arguments or any(len(r.times) < r.tokens * 0.7 for r in ok if not r.watched)
    whole = [(t["received"], t["sent"][0], t["sent"][-1]) for t in stub.truth if t["tokens"] == t["wanted"]]
    for r in (r for r in ok if not r.watched):  # first and last arrival are those of the server, not those of a read
        received, first, last = min(whole, key=lambda t: abs(t[0] - r.sent) + abs(t[2] - r.times[-1]))
        assert abs(r.times[0] - first) < 0.15 and abs(r.times[-1] - last) < 0.15 and received >= r.sent - 0.001
    starts = sorted(r.sent for r in replies)[MANY:]
    ends = sorted(r.ended for r in ok if r.ended is not None)[:len(starts)]
    assert (sum(starts) - sum(ends)) / len(starts) < 0.05  # waits that are too long would end by a look


def test_tokens_that_nobody_has_read_yet_count_while_it_runs_and_at_its_end(tmp_path: pathlib.Path) -> None:
    """A window must not lack the last half second of every stream that waits."""
    with Stub(tmp_path, "--ttft-ms", "5", "--itl-ms", "20") as stub:
        replies, ticks = run_load(stub, 0, seconds=2.5, concurrency=MANY, output_tokens=400, spread=0.0)

    def sent_by(t: float) -> int:
        return sum(bisect.bisect(request["sent"], t) for request in stub.truth)

    before, end = ticks[-2].t, ticks[-1].t  # the counters of the end are written after everything was read
    assert sent_by(before - 0.05) <= sum(r.tokens for r in replies) <= sent_by(end)
    unread = MANY * LONGEST_S / 0.020 / 2  # what looks alone would lack on average
    apart = [abs(t.tokens - sent_by(t.t)) for t in ticks if t.t > ticks[0].t + 1]
    assert statistics.median(apart) < unread / 3  # but for moments in which the machine has no time for the stub


@contextmanager
def connected(api: Api) -> Iterator[tuple[Connections, socket.socket]]:
    """A closed load of one request, and the server's end of its connection, where the answer's head was sent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = Target(f"http://127.0.0.1:{listener.getsockname()[1]}", api, "stub", True)
        work = Connections(LoadOrder(target, load(1, output_tokens=400), 4.0))
        work.closed_loop = False
        work.start(work.slots[0], time.monotonic())
        server, _ = listener.accept()
        with server:
            work.ready(work.slots[0], select.POLLOUT, time.monotonic())
            server.recv(65536)
            server.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            yield work, server


def test_what_a_server_sends_faster_than_one_read_takes_is_all_read_at_the_end() -> None:
    """An event of SGLang's /generate repeats the text so far: more than 64 KiB may wait."""
    with connected(SGLANG) as (work, server):
        receiving = work.slots[0].sock
        assert receiving is not None
        receiving.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        for count in range(1, 7):
            event = b'data: {"text": "%s", "meta_info": {"completion_tokens": %d}}\n\n' % (b"x" * 20000, count)
            server.sendall(b"%x\r\n%b\r\n" % (len(event), event))
        time.sleep(0.1)
        work.close(time.monotonic())
    assert list(work.slots[0].stream.counts)[-1] == 6


def test_an_answer_ends_when_the_last_of_it_arrived_however_late_that_is_seen() -> None:
    """Answers that end early are found up to a second late, which must not add to e2e latencies."""
    with connected(OPENAI) as (work, server):
        event = b'data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}\n\n'
        server.sendall(b"%x\r\n%b\r\n" % (len(event), event) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        sent = time.monotonic()
        time.sleep(0.3)
        work.read(work.slots[0], time.monotonic())
        work.account()
    (reply,) = work.tally.replies
    assert reply.ok and reply.ended is not None and reply.times[-1] <= reply.ended < sent + 0.2


def test_a_limit_on_inter_token_latency_has_every_stream_watched(tmp_path: pathlib.Path) -> None:
    with Stub(tmp_path, "--ttft-ms", "5", "--itl-ms", "20") as stub:
        found = measure_stub(stub, limits=Limits({"itl_p99_ms": 500.0}), concurrency=MANY, output_tokens=30)
    assert isinstance(found, Measurement) and found.itl_ms and found.output_tokens
    assert (found.itl_ms.n or 0) > 0.8 * found.output_tokens


@pytest.mark.parametrize("change", [{"ignore_eos": False}, {"concurrency": FEWEST_WATCHED},
                                    {"token_timeout_s": LEAST_TIMEOUT_S - 0.01}])
def test_no_stream_waits_when_its_end_is_unknown_or_all_are_watched(
        tmp_path: pathlib.Path, change: dict[str, Any]) -> None:
    with Stub(tmp_path, "--ttft-ms", "5", "--itl-ms", "20") as stub:
        replies, _ = run_load(stub, FEWEST_WATCHED, **{"concurrency": MANY, "output_tokens": 60, **change})
    assert all(r.watched for r in replies)


def running(count: int, wanted: int = 100) -> TokenStream:
    """A stream that has brought `count` tokens."""
    stream = TokenStream(most=wanted)
    stream.take([b'data: {"usage": {"completion_tokens": %d}, "choices": [{"text": "a"}]}\n\n' % count], 1.0)
    return stream


def seen(pacing: Pacing, *events: tuple[int, int]) -> None:
    """A watched stream brings events of (bytes, tokens), 10 ms apart."""
    counts = list(itertools.accumulate((tokens for _, tokens in events), initial=1))
    pacing.saw_parts([b"x" * size for size, _ in events], counts, [i / 100 for i in range(len(counts))])


@pytest.mark.parametrize(("events", "count", "size", "wanted", "low", "high"), [
    *[([(200, 1)] * 10, 100 - left, 200 * (100 - left), 100, 200 * (0.96 * left - 1), 200 * left)
      for left in (99, 50, 10, 2, 1)],  # nearly all bytes that the answer still must have
    ([(200, 1)] * 10, 100, 20000, 100, 0, 2),  # all tokens are there: the answer's end is left
    ([(200, 1), (230, 8), (200, 1), (220, 4)], 1, 200, 100, 0, 99 * 32),  # speculation: the fewest bytes a token takes
    ([(200, 1)], 1, 200, 100_000, FULL_BYTES - 1, FULL_BYTES + 1),  # what the server's socket holds
    ([], 1, 200, 100, 1, 99 * 230 / 6),  # nothing known yet: others may bring many tokens
    ([(900, 1)] * 10, 1, 300, 100, 0, 99 * 300)])  # /generate repeats the text so far: events grow
def test_a_stream_waits_for_fewer_bytes_than_its_answer_still_must_have(
        events: list[tuple[int, int]], count: int, size: int, wanted: int, low: float, high: float) -> None:
    pacing = Pacing()
    seen(pacing, *events)
    assert low < pacing.wait_bytes(running(count, wanted), size) < high


def test_unread_tokens_are_estimated_by_a_streams_own_pace() -> None:
    """With speculation streams differ: by the pace of watched ones, counters would rise and fall with these."""
    pacing = Pacing()
    seen(pacing, (200, 1))
    assert pacing.tokens_per_s == pytest.approx(100)
    slow, new = running(10), running(1)
    slow.times.append(2.0)
    slow.counts.append(40)
    assert pacing.unread_tokens([slow], 2.5) == pytest.approx(15)
    assert pacing.unread_tokens([new], 1.5) == pytest.approx(50)
    slow.times.append(2.1)  # too short a time for a pace of its own
    slow.counts.append(41)
    assert pacing.unread_tokens([slow], 2.3) == pytest.approx(20)
    assert pacing.unread_tokens([new], 500.0) == pytest.approx(99)  # a stalled server: a second's tokens, no more
    assert pacing.unread_tokens([running(98)], 500.0) == 2
    for _ in range(50):  # tokens back to back do not make a stream look fast
        seen(pacing, (200, 1))
        pacing.saw_parts([b"x" * 200], [5, 6], [1.0, 1.00001])
    assert pacing.tokens_per_s == pytest.approx(200, rel=0.1)


def test_answers_whose_end_nothing_told_of_end_all_waiting() -> None:
    pacing = Pacing()
    seen(pacing, (200, 1))
    assert pacing.wait_bytes(running(1), 200) > 1 == pacing.before_first()
    pacing.head_bytes = 80
    assert pacing.before_first() == 81
    for _ in range(9):
        pacing.ended += 1
        pacing.saw_late_end()
    assert not pacing.enabled and pacing.wait_bytes(running(1), 200) == pacing.before_first() == 1


@pytest.mark.parametrize(("gap_ms", "watched"), [(2, FEWEST_WATCHED), (20, 1), (45, 3), (500, MOST_WATCHED)])
def test_so_many_streams_are_watched_that_gaps_are_many_enough(gap_ms: int, watched: int) -> None:
    pacing = Pacing()
    pacing.saw_parts([b"x" * 200] * 4, range(1, 6), [i * gap_ms / 1000 for i in range(5)])
    assert pacing.watch == watched
    assert pacing.gather_s(64) == pytest.approx(min(0.003, 0.15 * gap_ms / 1000))


def test_tokens_found_at_a_look_are_spread_over_the_time_since_the_last() -> None:
    """A window must not gain or lose tokens of a read beside its edge."""
    for watched, tokens in ((True, [1, 4, 4]), (False, [3, 4, 2])):
        reply = Reply(0, 9, 0.0, 0.0, completion_tokens=9, watched=watched, times=array("d", (1.0, 2.0, 3.0)),
                      counts=array("q", (1, 5, 9)))
        assert tokens_between(token_arrivals([reply]), [0.0, 1.6, 2.6, 4.0]) == tokens
