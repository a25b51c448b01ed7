"""Limits and objectives of a measurement."""

from __future__ import annotations

import msgspec
import pytest

from autotune.loadgen.result import Reply
from autotune.measure.limits import Limits, few_requests
from autotune.measure.objective import Objective
from autotune.records import Energy, Measurement, Percentiles, UsageError

LATENCY = Percentiles(p50=10.0, p90=20.0, p99=40.0, mean=12.0, n=100)
MEASUREMENT = Measurement(output_tokens=6000, window_s=30.0, requests=98, errors=2, concurrency=8,
                          energy=Energy("nvml", 3000.0, 30.0), ttft_ms=LATENCY, tpot_ms=LATENCY, good_tokens=3000)
BLIND = msgspec.structs.replace(MEASUREMENT, energy=Energy("none", None, 30.0))


def test_ratios_are_shares_of_limits_in_a_fixed_order() -> None:
    limits = Limits({"ttft_p99_ms": 20.0, "max_watts": 200.0, "error_rate": 0.01, "min_tokens_per_s": 400.0,
                     "tpot_mean_ms": 12.0})
    found = limits.ratios(MEASUREMENT)
    assert list(found) == sorted(found)
    assert found == pytest.approx({"error_rate": 2.0, "max_watts": 0.5, "min_tokens_per_s": 1.5, "tpot_mean_ms": 1.0,
                                   "ttft_p99_ms": 2.0})
    kept = Limits({"tpot_mean_ms": 12.0, "min_request_tokens_per_s": 25.0}).ratios(MEASUREMENT)
    assert max(kept.values()) <= 1


def test_a_limit_that_could_not_be_checked_is_broken_and_no_error_at_all_is_a_limit() -> None:
    assert Limits({"e2e_p99_ms": 1.0, "max_watts": 9.0}).ratios(BLIND) == {"e2e_p99_ms": 2.0, "max_watts": 2.0}
    assert Limits({"error_rate": 0}).ratios(MEASUREMENT) == {"error_rate": 1.02}


@pytest.mark.parametrize("limits", [{"ttft": 1.0}, {"ttft_p96_ms": 1.0}, {"max_watts": 0}, {"max_watts": -1.0},
                                    {"max_watts": True}, {"ttft_p99_ms": float("nan")}, {"ttft_p99_ms": "fast"}])
def test_unknown_names_and_impossible_values_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="limits: "):
        Limits(limits)


def test_a_request_is_good_when_it_keeps_every_latency_limit_by_itself() -> None:
    reply = Reply(0, 3, due=0.0, sent=0.0, ended=1.0, kind="ok", completion_tokens=3)
    reply.times.extend([0.5, 0.6, 0.9])
    reply.counts.extend([1, 2, 3])
    assert Limits({"ttft_p99_ms": 500.0, "tpot_p50_ms": 200.1, "itl_p99_ms": 301.0, "e2e_p90_ms": 1000.0}).good(reply)
    for limits in ({"ttft_p99_ms": 499.0}, {"tpot_p50_ms": 199.0}, {"itl_p99_ms": 299.0}, {"e2e_mean_ms": 999.0},
                   {"min_request_tokens_per_s": 6.0}):
        assert not Limits(limits).good(reply), limits
    reply.kind = "reset"
    assert not Limits({}).good(reply)


def test_objectives_are_tokens_per_joule_per_second_per_good_joule_and_per_money_and_none_if_unmeasured() -> None:
    assert Objective("tokens_per_joule").value(MEASUREMENT) == 2.0
    assert Objective("tokens_per_s").value(MEASUREMENT) == 200.0
    assert Objective("goodput_per_joule").value(MEASUREMENT) == 1.0
    assert Objective("cost", price_per_device_hour=2.0, devices=4).value(MEASUREMENT) == 90_000.0
    assert Objective("tokens_per_joule").value(BLIND) is None
    assert Objective("tokens_per_joule").without_energy().value(BLIND) == 200.0


@pytest.mark.parametrize("arguments", [{"name": "speed"}, {"name": "cost"},
                                       {"name": "cost", "price_per_device_hour": 0}])
def test_a_bad_objective_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="objective="):
        Objective(**arguments)  # type: ignore[arg-type]


def test_a_limit_on_a_percentile_says_how_many_requests_it_needs_and_how_far_its_ratio_may_be_off() -> None:
    wanted = {"ttft_p50_ms": 5, "ttft_p90_ms": 29, "ttft_p95_ms": 59, "ttft_p99_ms": 299, "ttft_mean_ms": 0}
    assert {name: Limits({name: 1.0}).requests for name in wanted} == wanted
    latency = Percentiles(p50=10.0, p90=20.0, p99=40.0, mean=12.0, n=100, p95=30.0, errors={"p95": 0.05})
    known = msgspec.structs.replace(MEASUREMENT, ttft_ms=latency)
    limits = Limits({"ttft_p95_ms": 60.0, "ttft_p99_ms": 40.0})
    assert limits.ratios(known) == pytest.approx({"ttft_p95_ms": 0.5, "ttft_p99_ms": 1.0})
    assert few_requests(limits.ratios(known), known) == ["ttft_p99_ms of 98 requests, of 299 that it needs"]
    assert limits.errors(known) == pytest.approx({"ttft_p95_ms": 0.025})
    assert Limits({"ttft_p95_ms": 60.0}).ratios(MEASUREMENT) == {"ttft_p95_ms": 2.0}  # stored before p95 was
