"""Real and typical logs with labels: category, blame and stage of each."""

from __future__ import annotations

import functools
import pathlib
import re

import pytest

from autotune.crash import rules
from autotune.crash.classify import classify
from autotune.records import Blame, Crash, Stage
from tests.crash.scores import misses, read, score

FILE = pathlib.Path(__file__).with_name("cases.jsonl")
CASES = read(FILE)
JUDGED = [case for case in CASES if case["from"] == "judge"]


@functools.cache
def classified(log: str) -> Crash:
    return classify(log)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['id']}-{case['category']}")
def test_a_log_is_classified_as_labelled_and_shows_its_cause(case: dict[str, str]) -> None:
    crash = classified(case["log"])
    assert [wrong for wrong in misses(case) if case["from"] != "judge" or not wrong.startswith("stage")] == []
    assert crash.excerpt and crash.blame_why and crash.explanation and crash.next_step
    assert len(crash.excerpt.splitlines()) <= 30
    assert re.fullmatch(r"v2-\w{10}", crash.signature, re.ASCII)


def test_every_category_with_patterns_has_a_case() -> None:
    assert {rule.category for rule in rules.load().rules} <= {case["category"] for case in CASES}


def test_the_47_cases_are_42_faults() -> None:
    assert sum(classified(case["log"]).stage == case["stage"] for case in JUDGED) >= 42
    # In pairs: an assertion, an NVLS bind error, a refusal to prefill, a refusal of custom code, a watchdog line.
    names: dict[str, list[str]] = {}
    for case in JUDGED:
        names.setdefault(classified(case["log"]).signature, []).append(case["id"])
    assert sorted(ids for ids in names.values() if len(ids) > 1) == [
        ["c009", "c010"], ["c020", "c021"], ["c029", "c030"], ["c039", "c040"], ["c046", "c047"]]
    assert len(JUDGED) == 47 and len(names) == 42


def test_the_scores_of_a_file_of_cases_are_counted() -> None:
    wrong = {"log": "Killed", "category": "segfault", "blame": "unknown", "blame_also": ["environment"]}
    assert score([*JUDGED, wrong]) == {"category": (47, 48), "blame": (48, 48), "stage": (43, 47)}


def test_what_a_log_leaves_open_is_said() -> None:
    access = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert classify(access).blame_also == (Blame.CONFIG,), "the log does not tell the stage"
    assert classify(access, stage=Stage.SERVING).blame_also == ()
    choice = classify("x.py: error: argument --kv-cache-dtype: invalid choice: 'nvfp4' (choose from 'auto', 'fp8')")
    assert (choice.blame, choice.blame_also) == (Blame.ENVIRONMENT, (Blame.CONFIG,))


@pytest.mark.parametrize(("log", "engine", "shown"), [
    ("[07/08/2025-19:47:15] [TRT-LLM] [RANK 1] [E] The frobnicator is upside down\nbye", "tensorrt_llm", "upside down"),
    ("llama_model_load: loading\nsrv    load_model: failed to frobnicate the model\nggml_free: done", "llama.cpp",
     "failed to frobnicate"),
    ("main: error: the frobnicator is missing\nllama_perf: 1", "llama.cpp", "frobnicator is missing")])
def test_the_engines_own_error_line_is_shown_if_no_entry_knows_it(log: str, engine: str, shown: str) -> None:
    crash = classify(log)
    assert (crash.category, crash.engine) == ("unclassified_exception", engine) and shown in crash.excerpt


@pytest.mark.parametrize(("log", "says"), [
    ("vllm: ValueError: No available memory for the cache blocks.", "--gpu-memory-utilization"),
    ("sglang: RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "--mem-fraction-static"),
    ("sglang serve --cuda-graph-max-bs 512\nException: Capture CUDA graph failed: CUDA out of memory.",
     "--cuda-graph-max-bs)"),
    ("sglang serve\nException: Capture CUDA graph failed: CUDA out of memory.", "--cuda-graph-max-bs-decode)"),
    ("ValueError: No available memory for the cache blocks.",
     "--mem-fraction-static (SGLang) or --gpu-memory-utilization (vLLM)")])
def test_the_next_step_names_the_flag_of_the_logs_engine(log: str, says: str) -> None:
    assert says in classify(log).next_step


def test_every_next_step_names_known_flags_only() -> None:
    table = rules.load()
    for rule in (*table.rules, *table.silent.values()):
        for engine in ("", "sglang", "vllm", "tensorrt_llm", "llama.cpp"):
            assert "{" not in table.advice_for(rule.next_step, engine, "")


def test_the_first_cause_wins_over_reports_of_other_ranks() -> None:
    log = """[2026-01-01 00:00:00 TP2] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/sglang/srt/model_executor/model_runner.py", line 307, in load_model
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has a total capacity of 79.10 GiB
[2026-01-01 00:00:01] Received sigquit from a child process. It usually means the child failed.
[rank3]:[E101 00:00:01.1 ProcessGroupGloo.cpp:143] Rank 3 successfully reached monitoredBarrier, but received errors
[2026-01-01 00:00:01 TP3] Scheduler hit an exception: Traceback (most recent call last):
RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.3]:41234
Killed
"""
    crash = classify(log)
    assert (crash.category, crash.stage, crash.blame) == ("oom_weights", Stage.LOAD, Blame.CONFIG)
    assert "OutOfMemoryError" in crash.excerpt and crash.excerpt.startswith("[TP2]")


def test_advice_about_memory_is_not_the_cause() -> None:
    log = """Exception: Capture cuda graph failed: Triton Error [CUDA]: an illegal memory access was encountered
Possible solutions:
1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7), if you run out of memory
Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose
"""
    assert classify(log).category == "illegal_memory_access"
    other = log.replace("Triton Error [CUDA]: an illegal memory access was encountered", "'Foo' object is not ready")
    assert classify(other).category == "graph_capture_failed_other"


def test_the_category_of_the_same_words_depends_on_the_stage() -> None:
    words = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    found = [classify(words, stage=s) for s in (Stage.LOAD, Stage.KV_ALLOC, Stage.GRAPH_CAPTURE, Stage.SERVING)]
    assert [c.category for c in found] == ["oom_weights", "oom_kv_pool", "oom_graph_capture", "oom_kv_runtime"]
    assert found[-1].blame is Blame.TRANSIENT and found[0].blame is Blame.CONFIG
    access = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert classify(access, stage=Stage.GRAPH_CAPTURE).blame is Blame.CONFIG
    assert classify(access, stage=Stage.SERVING).blame is Blame.TRANSIENT


def test_an_unknown_exception_keeps_its_traceback_and_is_blamed_by_stage() -> None:
    log = """Traceback (most recent call last):
  File "/x/site-packages/sglang/srt/models/foo.py", line 12, in load_weights
    self.bar.frobnicate()
FrobnicationError: the frobnicator 17 is upside down
"""
    crash = classify(log)
    assert (crash.category, crash.stage, crash.blame) == ("unclassified_exception", Stage.LOAD, Blame.CONFIG)
    assert "upside down" in crash.excerpt and "load_weights" in crash.excerpt
    assert classify(log, stage=Stage.SERVING).blame is Blame.UNKNOWN
    assert classify(log, stage=Stage.IMPORT).blame is Blame.ENVIRONMENT


def test_a_healthy_log_shows_no_failure() -> None:
    log = """[2026-04-22 10:00:00] server_args=ServerArgs(trust_remote_code=False, watchdog_timeout=300)
/x/torch/cuda/__init__.py:63: FutureWarning: The pynvml package is deprecated. Please install nvidia-ml-py instead.
[2026-04-22 10:00:10] Ignore import error when loading sglang.srt.models.glm_ocr: No module named 'x.glm'
[2026-04-22 10:00:12 TP0] Load weight begin. avail mem=79.00 GB
[2026-04-22 10:00:18 TP0] max_total_tokens=131072 is larger than the profiled value 100000. Use the profiled value.
[2026-04-22 10:00:29] The server is fired up and ready to roll!
[2026-04-22 10:02:29 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 1
WARNING 04-22 10:02:30 [cuda.py:1] FlashAttention is not supported for head_dim 192, falling back to triton
"""
    crash = classify(log)
    assert (crash.category, crash.stage) == ("no_failure_found", Stage.SERVING)


def test_a_warning_explains_a_failure_only_if_nothing_else_does() -> None:
    warning = "WARNING 04-22 10:02:30 [cuda.py:1] FlashAttention is not supported for head_dim 192\n"
    assert classify(warning, exit_status=1).category == "unsupported_attention_backend"
    assert classify(warning + "x.py: error: unrecognized arguments: -x", exit_status=1).category == "unrecognized_flag"


def test_an_excerpt_has_no_secrets() -> None:
    crash = classify("HF_TOKEN=hf_abcdefghijklmnopqrstuvwx\nOSError: You are trying to access a gated repo.")
    assert crash.category == "hf_access" and "hf_abcdef" not in crash.excerpt
