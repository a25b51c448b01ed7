"""Logs that a real SGLang 0.5.23 and vLLM 0.32.0 left on a CPU (lines cut, paths replaced): what they tell."""

import pathlib
import re

import pytest

from autotune.crash.classify import classify
from autotune.engine.stages import StageReader
from autotune.records import Blame, Stage
from tests.sglang.support import settings

TESTS = pathlib.Path(__file__).resolve().parents[1]
SPACES = {"sglang": "sglang_cpu", "vllm": "vllm_cpu_moe"}


def reached(engine: str, name: str) -> Stage:
    return StageReader(TESTS / engine / "logs" / name, settings(SPACES[engine]).engine.stages).update()


@pytest.mark.parametrize("engine", SPACES)
def test_the_log_of_a_server_that_served_shows_its_stages(engine: str) -> None:
    assert reached(engine, "served.log") is Stage.SERVING
    log = (TESTS / engine / "logs" / "served.log").read_text()
    unseen = [mark.stage for mark in settings(SPACES[engine]).engine.stages if not re.search(mark.log, log)]
    assert unseen == [Stage.GRAPH_CAPTURE]  # there are no CUDA graphs on a CPU


# (log, exit status, category, stage, blame, words of its excerpt)
@pytest.mark.parametrize(("engine", "name", "status", "category", "stage", "blame", "words"), [
    # by its own error, and not by the kill that follows
    ("sglang", "ep2_bound.log", -9, "parallel_layout_invalid", Stage.WARMUP, Blame.CONFIG,
     "index -1 is out of bounds for dimension 1 with size 8"),
    ("sglang", "tp2.log", -9, "cpu_thread_binding", Stage.NCCL_INIT, Blame.ENVIRONMENT,
     "SGLANG_CPU_OMP_THREADS_BIND is not set"),
    # by the worker, and not by the processes that follow it
    ("vllm", "block16.log", 1, "kv_layout_invalid", Stage.KV_ALLOC, Blame.CONFIG, "No common block size for 16"),
    # by the segmentation fault, and not by the status 500 that follows
    ("vllm", "tp2_ep.log", 0, "segfault", Stage.SERVING, Blame.UNKNOWN, "cpu_fused_moe"),
    # a collective that a CPU has not: by the layout, and not by the experts around it
    ("vllm", "dp2.log", 0, "parallel_layout_invalid", Stage.SERVING, Blame.CONFIG, "all_gatherv"),
])
def test_a_crash_is_told_by_its_cause(engine: str, name: str, status: int, category: str, stage: Stage, blame: Blame,
                                      words: str) -> None:
    detail = "POST /v1/completions: HTTP 500: 'EngineCore encountered an issue.'" if name == "tp2_ep.log" else ""
    crash = classify(TESTS / engine / "logs" / name, stage=reached(engine, name), exit_status=status, after_s=36.0,
                     detail=detail)
    assert (crash.category, crash.stage, crash.blame) == (category, stage, blame)
    assert words in crash.excerpt
    assert name != "dp2.log" or "collective operation" in crash.explanation
