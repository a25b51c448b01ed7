"""The load client against a real server whose truth is known."""

from __future__ import annotations

import itertools
import os
import pathlib
import statistics
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
import pytest

from autotune.loadgen.read_batching import MOST_WATCHED
from autotune.loadgen.result import Reply, packed, unpacked
from autotune.loadgen.wire_formats import Api
from autotune.loadgen.workload import LoadOrder, Metrics, Target
from tests.fakes.stub import Stub
from tests.loadgen.harness import OPENAI, SGLANG, load, run_load, target_of


@pytest.fixture(scope="module")
def plain_stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    with Stub(tmp_path_factory.mktemp("stub"), "--ttft-ms", "2", "--itl-ms", "2") as stub:
        yield stub


def test_orders_and_replies_come_through_the_pipe_as_they_were(tmp_path: pathlib.Path) -> None:
    target = Target("http://h:1", SGLANG, "m \u00e4\n", True, Metrics("/metrics", running="r", accept_bonus=1.0))
    order = LoadOrder(target, load(rate_per_s=2.5, prompts=f"{tmp_path}/p\udcff.jsonl"), 3.25, watch_all=True)
    assert LoadOrder.from_json(order.to_json()) == order and b"\n" not in order.to_json()
    replies = [Reply(1, 8, 0.5, 0.25, ended=2.0, kind="ok", status=200, detail="\ufffd \n", completion_tokens=3,
                     prompt_tokens=4, verify_steps=2, attempts=2, watched=False,
                     times=array("d", [1 / 3, 1.5]), counts=array("q", [1, 2**40])), Reply(2, 8, 0.5, 0.25)]
    assert unpacked(packed(replies)) == replies
    with pytest.raises(msgspec.DecodeError):
        unpacked(packed(replies)[:-8])


def kinds(replies: Iterable[Reply]) -> Counter[str]:
    return Counter(r.kind for r in replies)


@pytest.mark.parametrize(("api", "arguments"), [
    (OPENAI, ()), (OPENAI, ("--usage", "final")), (OPENAI, ("--framing", "close")),
    (OPENAI, ("--eol", "crlf", "--ping")), (OPENAI, ("--chunk-tokens", "3,1,2")),
    (SGLANG, ("--split", "7")), (SGLANG, ("--chunk-tokens", "3,1,2"))])
def test_no_token_is_lost_whatever_the_form_of_the_stream(tmp_path: pathlib.Path, api: Api,
                                                           arguments: tuple[str, ...]) -> None:
    with Stub(tmp_path, "--ttft-ms", "5", "--itl-ms", "1", *arguments) as stub:
        replies, _ = run_load(stub, 12, target_of(stub, api))
    ok = [r for r in replies if r.ok]
    assert len(ok) >= 8 and all(r.kind in ("ok", "open") for r in replies)
    assert all(r.tokens == r.wanted_tokens and r.prompt_tokens == 40 for r in ok)
    finished = Counter(t["tokens"] for t in stub.truth if t["tokens"] == t["wanted"])
    unseen = finished - Counter(r.tokens for r in ok)
    assert not Counter(r.tokens for r in ok) - finished and unseen.total() <= 4  # ended as the load was stopped


def test_at_1024_connections_no_token_is_lost(tmp_path: pathlib.Path) -> None:
    with Stub(tmp_path, "--ttft-ms", "200", "--itl-ms", "150") as stub:
        replies, ticks = run_load(stub, 1500, concurrency=1024, output_tokens=8)
    assert max(t.in_flight for t in ticks) == 1024 and ticks[-1].errors == 0
    ok = [r for r in replies if r.ok]
    assert len(ok) >= 1500 and all(r.tokens == r.wanted_tokens for r in ok)
    assert not Counter(r.tokens for r in ok) - Counter(t["tokens"] for t in stub.truth)


def test_exactly_the_wanted_number_of_requests_is_in_flight(plain_stub: Stub) -> None:
    replies, ticks = run_load(plain_stub, 15, concurrency=7)
    assert {t.in_flight for t in ticks[:-1]} == {7}  # the last one follows the end of the load
    steps = sorted([(r.sent, 1) for r in replies] + [(r.ended, -1) for r in replies if r.ended is not None])
    assert max(itertools.accumulate(step for _, step in steps)) <= 8  # successors are sent at once
    assert len(replies) > 14


def test_times_agree_with_the_servers_own(tmp_path: pathlib.Path) -> None:
    with Stub(tmp_path, "--ttft-ms", "30", "--itl-ms", "10") as stub:
        replies, _ = run_load(stub, 15)
    errors = []
    for r in (r for r in replies if r.ok):
        near = [t for t in stub.truth if t["wanted"] == r.wanted_tokens and abs(t["received"] - r.sent) < 0.05]
        if len(near) == 1:
            when = dict(zip(near[0]["counts"], near[0]["sent"], strict=True))
            errors += [abs(time - when[count]) for time, count in zip(r.times, r.counts, strict=True)]
    assert len(errors) > 50
    assert statistics.median(errors) < 0.02  # one clock for both: what is left is how busy this machine is


def test_requests_do_not_march_in_step_and_are_the_same_for_everyone(plain_stub: Stub) -> None:
    first, second = (run_load(plain_stub, 20)[0] for _ in range(2))
    lengths = [{r.index: r.wanted_tokens for r in replies} for replies in (first, second)]
    common = lengths[0].keys() & lengths[1].keys()
    assert len(common) > 12 and all(lengths[0][i] == lengths[1][i] for i in common)
    assert len(set(lengths[0].values())) > 5
    later = [n for i, n in lengths[0].items() if i >= 4]
    assert min(later) >= 18 and max(later) <= 30 and min(lengths[0][i] for i in range(4)) < 18


FAULTS = {"http500": "http_500", "http429": "http_429", "error_event": "stream_error", "cut": "partial",
          "reset": "reset", "malformed": "malformed", "empty": "empty", "bad_http": "malformed", "abort": "aborted",
          "silent": "timeout_first_token", "stall": "timeout_token", None: "ok"}


@pytest.mark.parametrize(("api", "itl_ms", "concurrency", "faults"), [
    (OPENAI, 1, 8, ["http500:5", "http429:7", "error_event:8", "cut:9", "malformed:11"]),
    (OPENAI, 1, 8, ["reset:5", "empty:7", "bad_http:8", "silent:9", "stall:11"]), (SGLANG, 1, 8, ["abort:3"]),
    (OPENAI, 15, MOST_WATCHED + 12, ["error_event:5", "cut:6", "malformed:7", "stall:9"])])  # streams that wait
def test_every_failure_is_counted_by_its_kind(tmp_path: pathlib.Path, api: Api, itl_ms: int, concurrency: int,
                                              faults: list[str]) -> None:
    arguments = [word for fault in faults for word in ("--fault", fault)]
    with Stub(tmp_path, "--ttft-ms", "2", "--itl-ms", str(itl_ms), *arguments) as stub:
        replies, ticks = run_load(stub, 6 * concurrency, target_of(stub, api), concurrency=concurrency,
                                  first_token_timeout_s=1.5 if "silent:9" in faults else 10.0, token_timeout_s=1.5,
                                  spread=0.0)
    ended = kinds(r for r in replies if r.kind != "open")
    made = Counter(FAULTS[t["fault"]] for t in stub.truth)
    assert not ended - made and (made - ended).total() <= concurrency + kinds(replies)["open"]  # in flight at the end
    assert set(ended) == {FAULTS[fault.split(":")[0]] for fault in faults} | {"ok"}
    failures = kinds(r for r in replies if r.failed)
    assert ticks[-1].kinds == failures and ticks[-1].errors == failures.total()
    assert set(ticks[-1].details) == set(failures) and all(ticks[-1].details.values())


def test_a_request_that_lasts_too_long_is_given_up(tmp_path: pathlib.Path) -> None:
    with Stub(tmp_path, "--itl-ms", "40") as stub:
        replies, _ = run_load(stub, 5, request_timeout_s=0.5, spread=0.0)
    late = [r for r in replies if r.kind == "timeout_request"]
    assert late and all(r.times and r.completion_tokens is None for r in late)


@pytest.mark.parametrize("retries", [0, 2])
def test_a_kept_alive_connection_that_went_stale_is_tried_again_and_counted(tmp_path: pathlib.Path,
                                                                            retries: int) -> None:
    with Stub(tmp_path, "--ttft-ms", "2", "--itl-ms", "1", "--fault", "close_idle:2") as stub:
        replies, ticks = run_load(stub, 15, retries=retries)
    assert ticks[-1].kinds.get("retry", 0) == sum(r.attempts - 1 for r in replies)
    assert (kinds(replies)["reset"] > 0) == (retries == 0) == (ticks[-1].errors > 0)
    assert set(kinds(replies)) <= {"ok", "open", "reset"} and ("retry" in ticks[-1].kinds) == (retries > 0)


def test_a_dead_server_is_counted_without_flooding(tmp_path: pathlib.Path) -> None:
    with Stub(tmp_path) as stub:
        target = target_of(stub)
    replies, ticks = run_load(stub, 4, target, seconds=0.5)
    assert set(kinds(replies)) == {"connect"} and 4 <= len(replies) < 80
    assert "refused" in ticks[-1].details["connect"]


def test_an_open_loop_sends_at_its_rate_and_counts_from_when_a_request_was_due(tmp_path: pathlib.Path) -> None:
    with Stub(tmp_path, "--ttft-ms", "20", "--itl-ms", "1") as stub:
        replies, ticks = run_load(stub, 40, seconds=1.5, concurrency=64, rate_per_s=60.0)
        slow, slow_ticks = run_load(stub, 10, seconds=1.0, concurrency=1, rate_per_s=60.0)
    lasted = ticks[-1].t - ticks[0].t
    assert 30 * lasted < len(replies) < 100 * lasted and "late" not in ticks[-1].kinds
    assert slow_ticks[-1].kinds["late"] > 10
    waits = [r.ttft_s for r in slow if r.ttft_s is not None]
    assert max(waits) > 0.3  # the wait for the only connection is part of the latency


def test_the_load_ends_when_the_tuner_is_gone(plain_stub: Stub) -> None:
    child = subprocess.Popen([sys.executable, "-m", "autotune.loadgen.process"], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert child.stdin and child.stdout
    child.stdin.write(LoadOrder(target_of(plain_stub), load(), 4.0).to_json() + b"\n")
    child.stdin.flush()
    assert child.stdout.readline()
    child.stdin.close()
    assert child.wait(10) == 1
    child.stdout.close()


@pytest.mark.parametrize("api", [OPENAI, SGLANG])
def test_random_token_ids_have_exactly_the_wanted_length(plain_stub: Stub, api: Api) -> None:
    replies, _ = run_load(plain_stub, 6, target_of(plain_stub, api), prompts="tokens:10-99", contexts=[57])
    assert {r.prompt_tokens for r in replies if r.ok} == {57}


def test_requests_still_in_flight_are_reported_as_open(tmp_path: pathlib.Path) -> None:
    with Stub(tmp_path, "--ttft-ms", "60000") as stub:
        assert kinds(run_load(stub, 0, seconds=0.3)[0]) == {"open": 4}
