"""What vLLM's own parser makes of our command lines: every parameter of the engine file, every pair of the spaces."""

from __future__ import annotations

import json
import pathlib
import subprocess

import pytest

from autotune.engine.command import build, needed
from autotune.engine.host import lacking
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
GONE = ("--num-scheduler-steps", "--use-v2-block-manager", "--swap-space", "--cuda-graph-sizes", "--speculative-model",
        "--num-speculative-tokens", "--enable-such", "--no-such")
"""Flags that releases before this one had, or none."""

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
    results, _ = parse(tmp_path, [*jobs, ["--model", "m", "--no-such-flag"]])
    assert results == [None] * len(jobs) + ["parse_worker.py: error: unrecognized arguments: --no-such-flag"]


def test_what_vllm_has_is_found_in_its_source_and_what_it_lacks_is_not(tmp_path: pathlib.Path) -> None:
    """As `check` looks it up, without importing vLLM: no flag of it may be said to be missing by mistake."""
    _, options = parse(tmp_path, [])
    assert len(options) > 200
    for space in ("vllm_cpu_moe", "vllm_gpu"):
        engine = settings(space, f"engine.python={ensure(f'vllm-cpu-{VERSION}')}").engine
        actions = [a for p in engine.params.values() for found in (p.any_value, *p.choices.values()) for a in found]
        wanted = [word for action in (*engine.args, *actions) for word in needed(action, engine.vars)]
        assert len(wanted) > 50 and set(lacking(engine, wanted)) == {w for w in wanted if w.startswith("--")} - options
        assert lacking(engine, sorted(options - {"--help"})) == ()
        assert set(lacking(engine, GONE)) == set(GONE) - options


def parse(folder: pathlib.Path, jobs: list[list[str]]) -> tuple[list[str | None], frozenset[str]]:
    """(what vLLM's parser said of each, every option that it has)"""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([ensure(f"vllm-cpu-{VERSION}"), str(HERE / "parse_worker.py"), str(folder / "jobs.json"),
                           str(folder / "results.json")], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-3000:]
    answer = json.loads((folder / "results.json").read_text())
    return answer["results"], frozenset(answer["options"])
