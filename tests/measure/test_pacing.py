"""Streams that are not read as they arrive: what stays exact, and what ends their pauses."""

from __future__ import annotations

import pathlib
from collections import Counter
from typing import Any

import pytest

from autotune.measure import latency
from autotune.measure.limits import Limits
from autotune.measure.pacing import LONGEST_S, WATCHED, Pacing
from autotune.measure.reply import Reply
from autotune.measure.slot import Slot
from tests.fakes.stub import Stub
from tests.measure.harness import measure_stub, run_load
from tests.measure.test_load import FAULTS, kinds

MANY = WATCHED + 12


def paused(replies: list[Reply]) -> list[Reply]:
    """Those that were looked at less often than tokens came."""
    return [r for r in replies if r.ok and len(r.times) < r.tokens * 0.7]


def test_beyond_the_watched_streams_a_look_now_and_then_finds_every_token(tmp_path: pathlib.Path) -> None:
    with Stub(tmp_path, "--ttft-ms", "5", "--itl-ms", "20") as stub:
        replies, ticks = run_load(stub, 2 * MANY, concurrency=MANY, output_tokens=60)
    ok = [r for r in replies if r.ok]
    assert set(kinds(replies)) <= {"ok", "open"} and all(r.tokens == r.wanted_tokens for r in ok)
    assert {t.in_flight for t in ticks} == {MANY}
    assert paused(replies) and not any(r.watched for r in paused(replies))
    assert not Counter(r.tokens for r in ok) - Counter(t["tokens"] for t in stub.truth)
    whole = [(t["received"], t["sent"][0], t["sent"][-1]) for t in stub.truth if t["tokens"] == t["wanted"]]
    for r in paused(replies):  # first and last arrival are those of the server, not those of a look
        received, first, last = min(whole, key=lambda t: abs(t[0] - r.sent) + abs(t[2] - r.times[-1]))
        assert abs(r.times[0] - first) < 0.15 and abs(r.times[-1] - last) < 0.15 and received >= r.sent - 0.001


def test_inter_token_latencies_are_those_of_watched_streams(tmp_path: pathlib.Path) -> None:
    with Stub(tmp_path, "--ttft-ms", "5", "--itl-ms", "20") as stub:
        replies, _ = run_load(stub, MANY, concurrency=MANY, output_tokens=60)
    found = latency.gaps(replies, 0.0, float("inf"))
    assert len(found) == sum(len(r.times) - 1 for r in replies if r.watched and r.times)


def test_a_limit_on_inter_token_latency_has_every_stream_watched(tmp_path: pathlib.Path) -> None:
    def gaps_of(limits: Limits, folder: pathlib.Path) -> int:
        folder.mkdir()
        with Stub(folder, "--ttft-ms", "5", "--itl-ms", "20") as stub:
            found = measure_stub(stub, limits=limits, concurrency=MANY, output_tokens=60)
        assert found.itl_ms is not None  # type: ignore[union-attr]
        return found.itl_ms.n  # type: ignore[union-attr]

    some, every = gaps_of(Limits({}), tmp_path / "some"), gaps_of(Limits({"itl_p99_ms": 500.0}), tmp_path / "every")
    assert some < 0.85 * every


def test_failures_of_streams_in_a_pause_are_counted_by_their_kind(tmp_path: pathlib.Path) -> None:
    faults = ["error_event:5", "cut:6", "malformed:7", "stall:9"]
    arguments = [word for fault in faults for word in ("--fault", fault)]
    with Stub(tmp_path, "--ttft-ms", "2", "--itl-ms", "15", *arguments) as stub:
        replies, ticks = run_load(stub, 6 * MANY, concurrency=MANY, output_tokens=40, token_timeout_s=1.5)
    assert set(kinds(replies)) - {"open"} == {FAULTS[f.split(":")[0]] for f in faults} | {"ok"}
    made = Counter(FAULTS[t["fault"]] for t in stub.truth)
    ended = Counter({kind: n for kind, n in kinds(replies).items() if kind != "open"})
    assert not ended - made and ticks[-1].errors == sum(n for kind, n in ended.items() if kind != "ok")


@pytest.mark.parametrize("change", [{"ignore_eos": False}, {"concurrency": WATCHED}])
def test_no_stream_is_left_alone_when_its_end_is_unknown_or_all_are_watched(
        tmp_path: pathlib.Path, change: dict[str, Any]) -> None:
    with Stub(tmp_path, "--ttft-ms", "5", "--itl-ms", "20") as stub:
        replies, _ = run_load(stub, WATCHED, **{"concurrency": MANY, "output_tokens": 60, **change})
    assert all(r.watched for r in replies)


def test_answers_that_end_in_pauses_end_all_pauses() -> None:
    pacing, slot = Pacing(), Slot(watched=False)
    slot.reply = Reply(0, 100, 0.0, 0.0)
    slot.stream.feed(b'data: {"usage": {"completion_tokens": 1}, "choices": [{"text": "a"}]}\n\n', 1.0)
    slot.stream.feed(b'data: {"usage": {"completion_tokens": 9}, "choices": [{"text": "b"}]}\n\n', 1.08)
    assert pacing.pause_s(slot, 1.08) == pytest.approx(LONGEST_S)
    for _ in range(9):
        pacing.saw_end(slot.stream)
        pacing.missed_end()
    assert not pacing.enabled and pacing.pause_s(slot, 1.08) == 0.0


def test_a_stream_is_looked_at_ever_sooner_as_its_end_comes_near() -> None:
    pacing, slot = Pacing(), Slot(watched=False)
    slot.reply = Reply(0, 100, 0.0, 0.0)
    pauses = []
    for count in (1, 50, 85, 92, 99):  # 10 ms a token
        slot.stream.feed(b'data: {"usage": {"completion_tokens": %d}, "choices": [{"text": "a"}]}\n\n' % count,
                         count / 100)
        pauses.append(pacing.pause_s(slot, count / 100))
    assert pauses == pytest.approx([0.0, 0.35, 0.105, 0.056, 0.0], abs=0.002)


def test_a_stream_that_begins_is_believed_to_be_as_fast_as_those_that_ended() -> None:
    pacing, ended, begun = Pacing(), Slot(watched=False), Slot(watched=False)
    begun.reply = Reply(1, 21, 0.0, 0.0)
    for count, at in ((1, 1.0), (11, 1.1)):  # 10 ms a token
        ended.stream.feed(b'data: {"usage": {"completion_tokens": %d}, "choices": [{"text": "a"}]}\n\n' % count, at)
    begun.stream.feed(b'data: {"usage": {"completion_tokens": 1}, "choices": [{"text": "b"}]}\n\n', 2.0)
    assert pacing.pause_s(begun, 2.0) == 0.0
    pacing.saw_end(ended.stream)
    assert pacing.pause_s(begun, 2.01) == pytest.approx(0.7 * 20 * 0.01 - 0.01)


def test_tokens_found_at_a_look_are_spread_over_the_time_since_the_last() -> None:
    """Else a window would gain or lose what a look beside its edge found."""
    def made(watched: bool) -> Reply:
        reply = Reply(0, 9, 0.0, 0.0, watched=watched)
        reply.times.extend((1.0, 2.0, 3.0))
        reply.counts.extend((1, 5, 9))
        reply.completion_tokens = 9
        return reply

    edges = [0.0, 1.6, 2.6, 4.0]
    assert latency.tokens_between(latency.token_arrivals([made(True)]), edges) == [1, 4, 4]
    assert latency.tokens_between(latency.token_arrivals([made(False)]), edges) == [3, 4, 2]
