"""A real SGLang 0.5.23 on a plain CPU, started from the space's own command lines: readiness, identity, real failures.

The logs that these failures leave are in logs/, for tests that have no SGLang.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

import httpx
import pytest

from autotune.config.settings import Settings
from autotune.crash.classify import classify
from autotune.engine.random_model import write_model
from autotune.engine.server import Failure, Server
from autotune.records import Crash, Stage, Value
from tests.sglang.support import HERE, environment, metrics, real_server, settings

VERSION = "0.5.23"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    model = tmp_path_factory.mktemp("model")
    write_model(model, "moe-tiny")
    return settings("sglang_cpu", f"engine.python={environment('sglang', VERSION)}", f"space.model.target={model}",
                    f"+engine.env.PYTHONPATH={HERE / 'standin'}")


def server(loaded: Settings, folder: pathlib.Path, **choices: Value) -> Server:
    return real_server(loaded, folder, VERSION, **choices)


def crash(failed: Server, failure: Failure) -> Crash:
    return classify(failed.log, stage=failure.stage, exit_status=failure.exit_status, after_s=failure.after_s,
                    detail=failure.detail)


@pytest.fixture(scope="module")
def live(loaded: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    stages: list[Stage] = []
    started = server(loaded, tmp_path_factory.mktemp("live"))
    with started:
        failure = started.wait_ready(lambda stage, after_s: stages.append(stage))
        assert failure is None, f"{failure}\n{started.log.read_text()[-3000:]}"
        passed = list(dict.fromkeys(stages))
        assert passed == sorted(passed, key=list(Stage).index)
        assert {Stage.DEVICE_INIT, Stage.WARMUP, Stage.SERVING} <= set(passed)
        yield started
    assert not started.alive and started.exit_status is not None


def test_the_baseline_becomes_ready_and_generates(live: Server) -> None:
    assert live.first_completion() is None
    answer = httpx.post(f"{live.url}/generate", timeout=60, json={
        "text": "def main():", "sampling_params": {"max_new_tokens": 9, "temperature": 0, "ignore_eos": True}}).json()
    assert answer["meta_info"]["completion_tokens"] == 9


def test_every_mark_of_the_engine_file_is_in_the_real_log(loaded: Settings, live: Server) -> None:
    log = live.log.read_text()
    unseen = [mark.stage for mark in loaded.engine.stages if not re.search(mark.log, log)]
    assert unseen == [Stage.GRAPH_CAPTURE]  # there are no CUDA graphs on a CPU


def test_the_metrics_of_the_engine_file_exist(live: Server) -> None:
    live.first_completion()
    metrics(live, "running", "queued", "retracted", "accept_tokens")


def test_a_prompt_that_is_too_long_is_answered_200_with_an_error_event(live: Server) -> None:
    answer = httpx.post(f"{live.url}/generate", json={"text": "too long " * 3000, "stream": True}, timeout=60)
    assert answer.status_code == 200
    assert '"error"' in answer.text and "longer than the model's context length" in answer.text


def test_the_same_server_started_twice_has_one_identity_and_another_has_not(loaded: Settings, live: Server,
                                                                            tmp_path: pathlib.Path) -> None:
    info = loaded.engine.info
    assert info.path is not None
    first = live.get_json(info.path)
    assert first["max_running_requests"] == 8
    with server(loaded, tmp_path / "again") as again:
        assert again.wait_ready() is None
        second = again.get_json(info.path)
    assert first["port"] != second["port"]
    assert info.same(first) == info.same(second)
    assert info.same({**first, "page_size": 16}) != info.same(first)


def test_expert_parallelism_breaks_after_its_port_is_open(loaded: Settings, tmp_path: pathlib.Path) -> None:
    with server(loaded, tmp_path, parallel="ep2_bound") as broken:
        failure = broken.wait_ready()
    assert failure is not None and failure.stage is Stage.WARMUP
    log = broken.log.read_text()
    assert "Uvicorn running on" in log and "index -1 is out of bounds" in log
    found = crash(broken, failure)
    assert found.stage is Stage.WARMUP and "index -1 is out of bounds" in found.excerpt
    assert found.category != "host_oom_killed"  # SGLang kills its own tree with SIGKILL


def test_tensor_parallelism_without_assigned_cores_fails_at_its_start(loaded: Settings, tmp_path: pathlib.Path) -> None:
    with server(loaded, tmp_path, parallel="tp2") as broken:
        failure = broken.wait_ready()
    assert failure is not None and failure.stage < Stage.SERVING
    assert "Uvicorn running on" not in broken.log.read_text()
    assert "SGLANG_CPU_OMP_THREADS_BIND" in crash(broken, failure).excerpt
