"""What vLLM's own parser makes of our command lines: every parameter of the engine file, every pair of the spaces."""

from __future__ import annotations

import json
import pathlib
import subprocess

import pytest

from autotune.engine.argv import build
from autotune.records import Value
from tests.envs import ensure
from tests.sglang.support import arguments, pairwise, ruled, settings, small

HERE = pathlib.Path(__file__).parent
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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_vllm_parses_every_parameter_and_every_pair_of_choices(tmp_path: pathlib.Path) -> None:
    engine = settings("vllm_gpu").engine
    jobs = []
    for name, spec in engine.params.items():
        for choice in spec.choices or [VALUES[name]]:
            jobs.append(arguments(small(engine, VERSION, **{name: choice})[1]))
    for space in SPACES:
        loaded = settings(space)
        allowed = ruled(loaded, VERSION)
        jobs += [arguments(build(loaded.engine, allowed, server, port=30000, version=VERSION))
                 for server in pairwise(allowed)]
    assert parse(tmp_path, [*jobs, ["--model", "m", "--no-such-flag"]]) == \
        [None] * len(jobs) + ["parse_worker.py: error: unrecognized arguments: --no-such-flag"]


def parse(folder: pathlib.Path, jobs: list[list[str]]) -> list[str | None]:
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([ensure(f"vllm-cpu-{VERSION}"), str(HERE / "parse_worker.py"), str(folder / "jobs.json"),
                           str(folder / "results.json")], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-3000:]
    results: list[str | None] = json.loads((folder / "results.json").read_text())["results"]
    return results
