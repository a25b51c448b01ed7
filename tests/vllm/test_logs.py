"""Logs that a real vLLM 0.32.0 left on a CPU (paths replaced, requests and routes left out): what they tell."""

import pathlib
import re

from autotune.crash.classify import classify
from autotune.engine.stages import StageReader
from autotune.records import Blame, Stage
from tests.sglang.support import settings

LOGS = pathlib.Path(__file__).parent / "logs"


def reached(name: str) -> Stage:
    return StageReader(LOGS / name, settings("vllm_cpu_moe").engine.stages).update()


def test_stages_are_read_from_the_log() -> None:
    assert reached("served.log") is Stage.SERVING
    assert reached("block16.log") is Stage.KV_ALLOC
    assert reached("tp2_ep.log") is Stage.SERVING


def test_every_mark_of_the_engine_file_is_in_the_log_of_a_server_that_served() -> None:
    log = (LOGS / "served.log").read_text()
    unseen = [mark.stage for mark in settings("vllm_cpu_moe").engine.stages if not re.search(mark.log, log)]
    assert unseen == [Stage.GRAPH_CAPTURE]  # there are no CUDA graphs on a CPU


def test_a_block_size_that_no_kernel_takes_is_told_by_the_worker_and_not_by_the_processes_that_follow_it() -> None:
    crash = classify(LOGS / "block16.log", stage=reached("block16.log"), exit_status=1, after_s=30.0)
    assert (crash.category, crash.stage, crash.blame) == ("kv_layout_invalid", Stage.KV_ALLOC, Blame.CONFIG)
    assert "No common block size for 16" in crash.excerpt


def test_experts_over_two_ranks_are_told_by_the_segmentation_fault_and_not_by_the_status_500_that_follows() -> None:
    crash = classify(LOGS / "tp2_ep.log", stage=reached("tp2_ep.log"), exit_status=0, after_s=70.0,
                     detail="POST /v1/completions: HTTP 500: 'EngineCore encountered an issue.'")
    assert (crash.category, crash.stage, crash.blame) == ("segfault", Stage.SERVING, Blame.UNKNOWN)
    assert "cpu_fused_moe" in crash.excerpt


def test_a_collective_that_a_cpu_has_not_is_told_as_the_layouts_and_not_as_the_experts_around_it() -> None:
    crash = classify(LOGS / "dp2.log", stage=reached("dp2.log"), exit_status=0, after_s=58.0)
    assert (crash.category, crash.stage, crash.blame) == ("parallel_layout_invalid", Stage.SERVING, Blame.CONFIG)
    assert "all_gatherv" in crash.excerpt and "collective operation" in crash.explanation
