"""What vLLM's own parser makes of our command lines: every parameter of the engine file, every pair of the spaces."""

from __future__ import annotations

import pytest

from autotune.engine.command import build
from autotune.engine.host import lacking
from autotune.records import Value
from tests.sglang.support import (
    Job,
    arguments,
    assert_flags_found,
    environment,
    pairwise,
    parse,
    ruled,
    settings,
    small,
)

VERSION = "0.32.0"
SPACES = ("vllm_cpu_moe", "vllm_cpu_spec", "vllm_gpu")

VALUES: dict[str, Value] = {
    "all2all_backend": "deepep_low_latency", "moe_backend": "triton", "expert_placement": "round_robin",
    "redundant_experts": 8, "attention_backend": "FLASHINFER", "linear_backend": "auto", "cudagraph_mode": "PIECEWISE",
    "graph_max_bs": 64, "optimization_level": 2, "performance_mode": "throughput", "long_prefill_threshold": 512,
    "scheduling_policy": "priority", "kv_cache_memory_bytes": 1073741824, "dtype": "bfloat16", "quantization": "fp8",
    "draft_tokens": 3, "max_num_seqs": 8, "max_num_batched_tokens": 2048, "stream_interval": 4, "block_size": 16,
    "gpu_memory_utilization": 0.9, "max_model_len": 1024, "kv_cache_dtype": "fp8", "load_format": "dummy",
}
"""A value for each parameter that takes any."""
GONE = ("--num-scheduler-steps", "--use-v2-block-manager", "--swap-space", "--cuda-graph-sizes", "--speculative-model",
        "--num-speculative-tokens", "--enable-such", "--no-such")
"""Flags that releases before this one had, or none."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_vllm_parses_every_parameter_and_every_pair_of_choices() -> None:
    engine = settings("vllm_gpu").engine
    commands = [small(engine, VERSION, **{name: choice})[1] for name, spec in engine.params.items()
                for choice in spec.choices or [VALUES[name]]]
    for space in SPACES:
        loaded = settings(space)
        allowed = ruled(loaded, VERSION)
        commands += [build(loaded.engine, allowed, server, port=30000, version=VERSION) for server in pairwise(allowed)]
    jobs: list[Job] = [(arguments(command), {}) for command in commands]
    *outcomes, wrong = parse("vllm", VERSION, [*jobs, (["--model", "m", "--no-such-flag"], {})])[0]
    assert [o for o in outcomes if o.error] == []
    assert wrong.error == "parse_worker.py: error: unrecognized arguments: --no-such-flag"


def test_what_vllm_has_is_found_in_its_source_and_what_it_lacks_is_not() -> None:
    options = set(parse("vllm", VERSION, [])[1])
    assert len(options) > 200
    for space in ("vllm_cpu_moe", "vllm_gpu"):
        assert_flags_found(space, "vllm", VERSION, options, set())
    engine = settings("vllm_gpu", f"engine.python={environment('vllm', VERSION)}").engine
    assert set(lacking(engine, GONE)) == set(GONE) - options
