"""Whole measurements of a stub server whose truth is known."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from autotune.loadgen.result import LoadFailure
from autotune.loadgen.wire_formats import Api
from autotune.measure.limits import Limits
from autotune.measure.window import Pulse, _Run, measure
from autotune.power.meter import Reading
from autotune.records import Measurement
from tests.fakes.stub import Stub
from tests.loadgen.harness import OPENAI, SGLANG, load, measure_stub, metered, target_of

TOKENS = "tokens:10-99"  # needs no calibration


def measured(found: Measurement | LoadFailure) -> Measurement:
    assert isinstance(found, Measurement), found
    return found


def test_the_windows_tokens_are_those_that_arrived_in_it(tmp_path: pathlib.Path) -> None:
    record = tmp_path / "requests.jsonl"
    with Stub(tmp_path, "--ttft-ms", "20", "--itl-ms", "8") as stub:
        found = measured(measure_stub(stub, target_of(stub, metrics=True), record=record))
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    sent = sorted(rows, key=lambda r: r["sent_s"])
    zero = min(t["received"] for t in stub.truth if t["wanted"] > 1) - sent[0]["sent_s"]  # the window's start
    truth = sum(zero <= moment < zero + found.window_s for t in stub.truth for moment in t["sent"])
    assert found.output_tokens == pytest.approx(truth, rel=0.05)
    assert found.requests >= 4 and found.errors == 0 and found.concurrency == 4
    assert found.tpot_ms and found.tpot_ms.p50 == pytest.approx(8, rel=0.25)
    assert found.ttft_ms and found.ttft_ms.p50 >= 20 and found.e2e_ms and found.itl_ms
    assert found.good_tokens == found.output_tokens  # no limit, so all are good
    assert found.prompt_tokens == 40 * found.requests and found.energy.joules is None and found.tokens_per_j is None
    assert found.relative_error is not None and found.client_cpu_share is not None
    assert {r["kind"] for r in rows} <= {"ok", "open"} and rows[0]["tokens"] >= rows[0]["events"] > 0


@pytest.mark.parametrize(("api", "usage"), [(SGLANG, "full"), (OPENAI, "final")])
def test_with_speculation_tpot_counts_tokens_and_acceptance_is_tokens_per_step(tmp_path: pathlib.Path, api: Api,
                                                                               usage: str) -> None:
    with Stub(tmp_path, "--itl-ms", "12", "--chunk-tokens", "2,4", "--speculative", "--usage", usage) as stub:
        found = measured(measure_stub(stub, target_of(stub, api)))
    assert found.tpot_ms and found.tpot_ms.p50 == pytest.approx(4, rel=0.3)  # 12 ms per step of 3 tokens
    assert found.itl_ms and found.itl_ms.p50 == pytest.approx(12, rel=0.3)
    ok = [t for t in stub.truth if t["tokens"] == t["wanted"]]
    assert found.accept_length == pytest.approx(sum(t["tokens"] for t in ok) / sum(t["steps"] for t in ok), rel=0.1)


def test_acceptance_comes_from_counters_when_answers_lack_it(tmp_path: pathlib.Path) -> None:
    with Stub(tmp_path, "--itl-ms", "12", "--chunk-tokens", "3") as stub:
        found = measured(measure_stub(stub, target_of(stub, metrics=True)))
    assert found.accept_length == pytest.approx(2.8, rel=0.1)  # each request's first step gives one token


def test_cpu_time_is_assumed_energy_and_a_window_ends_once_it_is_precise_enough(tmp_path: pathlib.Path) -> None:
    with Stub(tmp_path, "--itl-ms", "2") as stub:
        found = measured(measure_stub(stub, source="cpu_time", window_max_s=20.0, precision=0.5, concurrency=16))
    assert found.window_s < 20 and found.relative_error is not None and found.relative_error < 0.9
    assert found.energy.assumed and found.energy.source == "cpu_time" and found.energy.joules
    assert found.tokens_per_j and found.energy.watts and 0 < found.energy.watts < 20  # at most one core of 10 W, or so


def test_limits_decide_which_tokens_are_good_and_progress_is_told(tmp_path: pathlib.Path) -> None:
    told: list[str] = []
    with Stub(tmp_path, "--ttft-ms", "40", "--itl-ms", "4") as stub, metered(stub) as meter:
        found = measure(target_of(stub), load(), meter, limits=Limits({"ttft_p99_ms": 30.0}),
                        alive=lambda: stub.alive, progress=told.append)
        assert meter.read().t > 0  # it stays the caller's
    assert measured(found).good_tokens == 0
    assert any(line.startswith("warm-up") for line in told) and any("tok/s" in line for line in told)


@pytest.mark.parametrize(("arguments", "least", "reasons"), [
    (("--queued", "3", "--retracted", "1", "--ttft-ms", "5", "--itl-ms", "4"), 4,
     {"server_retracted"}),
    (("--usage", "none"), 10_000, {"too_few_requests", "no_usage"})])
def test_a_window_that_does_not_count_says_why(tmp_path: pathlib.Path, arguments: tuple[str, ...], least: int,
                                               reasons: set[str]) -> None:
    with Stub(tmp_path, *arguments) as stub:
        found = measured(measure_stub(stub, target_of(stub, metrics=True), min_requests=least))
    assert set(found.reasons) == reasons and not found.valid and found.output_tokens > 0


def test_a_few_errors_are_reported_and_do_not_end_the_load(tmp_path: pathlib.Path) -> None:
    with Stub(tmp_path, "--itl-ms", "2", "--fault", "cut:5") as stub:
        found = measured(measure_stub(stub, max_error_rate=0.5))
    assert found.errors == found.error_kinds["partial"] > 0 and found.requests > found.errors


@pytest.mark.parametrize(("arguments", "prompts", "kind", "detail", "excerpt"), [
    (("--fault", "error_event:2"), TOKENS, "error_rate", "stream_error", "prompt is too long"),
    (("--fault", "stall:1"), TOKENS, "hung", "timeout", "no further token"),
    (("--die-after-s", "2.5"), None, "server_died", "ended under load", ""),
    (("--fault", "http500:1"), None, "no_answer", "first request", "made to fail")])
def test_a_load_that_fails_says_how_and_why(
        tmp_path: pathlib.Path, arguments: tuple[str, ...], prompts: str | None, kind: str, detail: str,
        excerpt: str) -> None:
    with Stub(tmp_path, "--ttft-ms", "2", "--itl-ms", "1", *arguments) as stub:
        found = measure_stub(stub, window_s=60.0, window_max_s=60.0, prompts=prompts, token_timeout_s=0.4)
    assert isinstance(found, LoadFailure) and found.kind == kind and detail in found.detail and excerpt in found.excerpt


def test_text_prompts_get_the_wanted_length_in_the_servers_tokens(tmp_path: pathlib.Path) -> None:
    with Stub(tmp_path, "--chars", "2.5", "--ttft-ms", "2", "--itl-ms", "1") as stub:
        measured(measure_stub(stub, contexts=[300]))
    lengths = {t["prompt_tokens"] for t in stub.truth[8:]}
    assert lengths and all(abs(n - 300) <= 9 for n in lengths)


def test_an_interrupt_ends_the_load_process(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "tuner.py"
    script.write_text("import signal, sys, pathlib\nfrom tests.fakes.stub import Stub\n"
                      "signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored too\n"
                      "from tests.loadgen.harness import measure_stub\n"
                      f"with Stub(pathlib.Path({str(tmp_path)!r})) as stub:\n"
                      "    print('up', flush=True)\n"
                      "    try:\n        measure_stub(stub, window_s=60.0, window_max_s=60.0)\n"
                      "    except KeyboardInterrupt:\n        print('interrupted', flush=True)\n")
    root = pathlib.Path(__file__).parents[2]
    tuner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, cwd=root,
                             env=os.environ | {"PYTHONPATH": str(root)})
    assert tuner.stdout and tuner.stdout.readline() == "up\n"
    end = time.monotonic() + 20
    while not (children := [p for p in psutil.Process(tuner.pid).children(recursive=True)
                            if "autotune.loadgen.process" in p.cmdline()]):
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.3)
    tuner.send_signal(signal.SIGINT)
    assert tuner.communicate(timeout=20)[0] == "interrupted\n"
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in children)


def warming(rates: list[float]) -> tuple[bool, bool]:
    """(steady, climbs) of a warm-up with these tokens a second."""
    run = object.__new__(_Run)
    run.settings = dataclasses.replace(load().workload, block_s=1.0, settle_s=6.0, window_s=15.0, window_max_s=40.0,
                                       drift=0.05)
    totals = itertools.accumulate(rates, initial=0.0)
    pulses = [Pulse(float(t), tokens, Reading(float(t), {})) for t, tokens in enumerate(totals)]
    return run.steady(pulses), run.climbs(pulses)


def test_a_warm_up_goes_on_while_the_speed_moves_one_way_and_ends_when_it_has_arrived() -> None:
    climb = [1000 * (1 - 0.15 * math.exp(-t / 30)) for t in range(1, 120)]  # 85 % of its end, time constant 30 s
    assert warming(climb[:7]) == (True, True) and warming(climb[:30]) == (True, True)
    assert warming(climb) == (True, False)
    noise = random.Random(1)
    assert sum(warming([1000 * noise.gauss(1, 0.01) for _ in range(8)])[1] for _ in range(100)) <= 15
