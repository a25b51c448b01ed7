"""Prometheus text and what is read from it."""

from __future__ import annotations

from autotune.loadgen.workload import Metrics, Target
from autotune.measure.metrics import MetricsReader, parse
from tests.loadgen.harness import OPENAI
from tests.utils.test_http import said, serving

TEXT = """# HELP sglang:num_queue_reqs waiting
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",tp_rank="0"} 2.0
sglang:num_queue_reqs{engine_type="unified",tp_rank="1"} 3.0 1395066363000
a_total 1e3
histogram_bucket{le="+Inf"} 7
ratio NaN
broken{ 1
huge 1e999
large_total -1e308
"""


def watcher(names: Metrics, *samples: dict[str, float]) -> MetricsReader:
    made = MetricsReader(Target("http://x:1", OPENAI, "m", False, names))
    made.samples = [(float(i), sample) for i, sample in enumerate(samples)]
    return made


def test_samples_of_all_ranks_are_added_and_odd_lines_skipped() -> None:
    assert parse(TEXT) == {"sglang:num_queue_reqs": 5.0, "a_total": 1000.0, "histogram_bucket": 7.0}


def test_acceptance_is_the_growth_of_counters_with_their_bonus() -> None:
    names = Metrics(accept_tokens="t", accept_steps="s", accept_bonus=1.0)
    assert watcher(names, {"t": 10, "s": 10}, {"t": 20, "s": 12}, {"t": 40, "s": 20}).accept_length(0, 2) == 4.0
    assert watcher(names, {"t": 10, "s": 10}, {"t": 40, "s": 10}).accept_length(0, 2) is None
    assert watcher(names, {"t": 10}, {"t": 40}).accept_length(0, 2) is None
    assert watcher(Metrics(), {"t": 10}, {"t": 40}).accept_length(0, 2) is None


def test_retracted_requests_count_only_in_the_window_and_a_queue_is_no_disturbance() -> None:
    names = Metrics(queued="q", retracted="r_total")
    queued = watcher(names, {"q": 1, "r_total": 4}, {"q": 0, "r_total": 4}, {"q": 2, "r_total": 4},
                     {"q": 0, "r_total": 5})
    assert queued.reasons(0, 2) == ()
    assert queued.reasons(1, 3) == ("server_retracted",)
    assert queued.reasons(1, 1) == ()
    assert queued.short(0, 2) == {"queue": 2 / 3}
    assert queued.short(1, 3) == {"queue": 1 / 3, "kv_memory": 1.0}
    assert queued.short(1, 1) == watcher(Metrics(), {"q": 1}).short(0, 2) == {}


def test_metrics_that_nobody_asked_for_are_not_kept() -> None:
    text = b"".join(b"name_%d 1\n" % number for number in range(50_000)) + b"waiting 3\nwaiting 4\n"
    with serving(said(text)) as url:
        reader = MetricsReader(Target(url, OPENAI, "m", False, Metrics("/metrics", queued="waiting")))
        reader.mark()
    assert reader.samples[0][1] == {"waiting": 7.0}
