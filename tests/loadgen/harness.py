"""Short loads and windows against the stub server."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autotune.loadgen.client import LoadClient
from autotune.loadgen.result import LoadFailure, Reply, Tick
from autotune.loadgen.wire_formats import Api
from autotune.loadgen.workload import LoadOrder, LoadSpec, Metrics, Target, WorkloadSettings
from autotune.measure.limits import Limits
from autotune.measure.window import measure
from autotune.power import open_meter
from autotune.power.meter import Meter, Powered, PowerSettings
from autotune.records import Measurement
from tests.fakes.stub import Stub

WORKLOAD = WorkloadSettings(
    prompts=None, contexts=[40], output_tokens=24, spread=0.25, temperature=0.0, ignore_eos=True, shared_prefix=0.0,
    rate_per_s=None, seed=1, first_token_timeout_s=10.0, token_timeout_s=10.0, request_timeout_s=30.0, retries=2,
    warmup_s=0.1, warmup_max_s=3.0, settle_s=0.2, drift=0.25, window_s=0.7, window_max_s=0.7, block_s=0.06,
    precision=0.01, min_requests=4, max_error_rate=0.05, min_errors=5)
OPENAI: Api = "openai_completions"
SGLANG: Api = "sglang_generate"
BUILTIN = WORKLOAD.prompt_source()
PATIENCE_S = 30.0
POWER = PowerSettings(source="none", watts_per_core=10.0, sample_s=0.1, max_gap_s=1.0, tolerance=0.05, others=1.0,
                      wait_s=0.0)
METRICS = Metrics("/metrics", running="stub:num_running_reqs", queued="stub:num_queue_reqs",
                  retracted="stub:num_retracted_reqs_total", accept_tokens="stub:generation_tokens_total",
                  accept_steps="stub:verify_steps_total")


def load(concurrency: int = 4, **changes: Any) -> LoadSpec:
    return LoadSpec(concurrency, dataclasses.replace(WORKLOAD, **changes))


def target_of(stub: Stub, api: Api = OPENAI, continuous: bool = True, metrics: bool = False) -> Target:
    return Target(base_url=stub.url, api=api, model="stub", continuous_usage=continuous,
                  metrics=METRICS if metrics else Metrics())


def run_load(stub: Stub, requests: int, target: Target | None = None, seconds: float = 0.0,
             **changes: Any) -> tuple[list[Reply], list[Tick]]:
    """Load the stub until so many requests ended, and for `seconds` at least; the replies, and the counters."""
    order = LoadOrder(target or target_of(stub), load(**changes), chars_per_token=4.0)
    end = time.monotonic() + PATIENCE_S
    with LoadClient(order) as client:
        while (tick := client.wait(0.05)) is None or tick.finished + tick.errors < requests \
                or tick.t - client.ticks[0].t < seconds:
            assert time.monotonic() < end, f"only {tick} after {PATIENCE_S} s"
        return client.stop(), client.ticks


@contextmanager
def metered(stub: Stub, source: str = "none", trace: pathlib.Path | None = None) -> Iterator[Meter]:
    meter, _ = open_meter(dataclasses.replace(POWER, source=source), Powered(stub.process.pid), trace)
    with meter:
        yield meter


def measure_stub(stub: Stub, target: Target | None = None, source: str = "none", limits: Limits | None = None,
                 record: pathlib.Path | None = None, **changes: Any) -> Measurement | LoadFailure:
    with metered(stub, source) as meter:
        return measure(target or target_of(stub), load(**changes), meter,
                       limits=limits or Limits({}), alive=lambda: stub.alive, progress=lambda _: None, record=record)
