"""Logs that a real SGLang 0.5.23 left on a CPU (long lines cut at 500 characters, paths replaced): what they tell."""

import pathlib

from autotune.crash.classify import classify
from autotune.engine.stages import StageReader
from autotune.records import Blame, Stage
from tests.sglang.support import settings

LOGS = pathlib.Path(__file__).parent / "logs"


def reached(name: str) -> Stage:
    return StageReader(LOGS / name, settings("sglang_cpu").engine.stages).update()


def test_stages_are_read_from_the_log() -> None:
    assert reached("served.log") is Stage.SERVING
    assert reached("ep2_bound.log") is Stage.WARMUP
    assert reached("tp2.log") is Stage.NCCL_INIT


def test_broken_expert_parallelism_is_told_by_its_own_error_and_not_by_the_kill_that_follows() -> None:
    crash = classify(LOGS / "ep2_bound.log", stage=reached("ep2_bound.log"), exit_status=-9, after_s=36.0)
    assert crash.stage is Stage.WARMUP
    assert "index -1 is out of bounds for dimension 1 with size 8" in crash.excerpt
    assert crash.category not in ("host_oom_killed", "watchdog_hang") and crash.blame is not Blame.TRANSIENT


def test_ranks_without_cores_are_told_by_the_assertion() -> None:
    crash = classify(LOGS / "tp2.log", stage=reached("tp2.log"), exit_status=-9, after_s=10.0)
    assert "SGLANG_CPU_OMP_THREADS_BIND is not set" in crash.excerpt
    assert crash.blame is not Blame.TRANSIENT
