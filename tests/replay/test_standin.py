"""The replay's stand-in for SGLang: a real process that takes autotune's command, answers, and dies as told."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from autotune.config.compose import load
from autotune.config.settings import Settings
from autotune.crash.classify import classify
from autotune.engine.command import build
from autotune.engine.server import free_port
from autotune.records import Stage, Value
from tests.replay import arguments
from tests.replay.__main__ import HERE, ROOT, STUDY, environment
from tests.replay.clock import Clock
from tests.replay.table import Table, at
from tests.space.configurations import servers

READY_S = 20.0


@pytest.fixture(scope="module")
def settings() -> Settings:
    return load([f"+space={STUDY}"], [str(HERE / "spaces")])


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    try:
        return environment(tmp_path_factory.mktemp("replay"))
    except SystemExit as lacking:
        pytest.skip(str(lacking))


def command(settings: Settings, port: int, **changed: Value) -> list[str]:
    server = settings.space.split({**settings.space.baseline, **changed})[0]
    return list(build(settings.engine, settings.space, server, port=port, version="0.5.23+replay").argv)


@contextlib.contextmanager
def started(argv: list[str], env: dict[str, str], log: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=ROOT,
                                   start_new_session=True)
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    answer = httpx.get(url, timeout=READY_S) if body is None else httpx.post(url, json=body, timeout=READY_S)
    return answer.text if body is not None and body.get("stream") else answer.json()


def wait_for(text: str, log: pathlib.Path) -> None:
    deadline = time.monotonic() + READY_S
    while text not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert text in log.read_text()


def test_the_baseline_comes_up_answers_and_is_gone_after_sigterm(settings: Settings, env: dict[str, str],
                                                                 tmp_path: pathlib.Path) -> None:
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", tmp_path / "server.log"
    with started(command(settings, port), env, log) as process:
        wait_for("fired up and ready to roll", log)
        whole = ask(f"{url}/v1/completions", {"prompt": "Once upon a time", "max_tokens": 20})
        again = ask(f"{url}/v1/completions", {"prompt": "Once upon a time", "max_tokens": 20})
        assert whole["usage"]["completion_tokens"] == 20 and whole["choices"] == again["choices"]
        stream = ask(f"{url}/v1/completions", {"prompt": "x", "max_tokens": 9, "stream": True,
                                               "stream_options": {"include_usage": True}})
        events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
        assert events[-1]["usage"]["completion_tokens"] == 9 and stream.rstrip().endswith("data: [DONE]")
        native = ask(f"{url}/generate", {"text": "x", "sampling_params": {"max_new_tokens": 30}})
        assert native["meta_info"]["completion_tokens"] == 30 > native["meta_info"]["spec_verify_ct"] > 0
        info = ask(f"{url}/server_info")
        assert info["tp_size"] == 8 and info["enable_nccl_nvls"] is False and info["version"] == "0.5.23+replay"
        assert "2.used_mib 225000" in pathlib.Path(env["FAKE_NVML"]).read_text()
        process.terminate()
        assert process.wait(READY_S) == 0
    assert "2.used_mib 0" in pathlib.Path(env["FAKE_NVML"]).read_text()


def test_ep8_dies_in_graph_capture_with_its_whole_tree_and_in_three_ways(settings: Settings, env: dict[str, str],
                                                                         tmp_path: pathlib.Path) -> None:
    log, crashes = tmp_path / "server.log", []
    for changed in ({}, {"nvls": True}, {"nvls": True, "allreduce_fusion": True}):
        with started(command(settings, free_port(), parallel="ep8", **changed), env, log) as process:
            assert process.wait(READY_S) == -signal.SIGKILL
            crashes.append(classify(log, exit_status=process.returncode))
        assert ".pids" not in pathlib.Path(env["FAKE_NVML"]).read_text()
    assert {crash.stage for crash in crashes} == {Stage.GRAPH_CAPTURE}
    assert [crash.category for crash in crashes] == ["nonetype_attribute", "cublas_error", "cublas_error"]
    assert len({crash.signature for crash in crashes}) == 3


def test_large_trees_run_out_of_memory_under_the_largest_load_only(settings: Settings, env: dict[str, str],
                                                                  tmp_path: pathlib.Path) -> None:
    port, log = free_port(), tmp_path / "server.log"
    body = json.dumps({"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 2000}}).encode()
    request = b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with started(command(settings, port, tree_budget=32), env, log) as process, contextlib.ExitStack() as open_ones:
        wait_for("fired up and ready to roll", log)
        for half in range(2):
            for _ in range(128):
                client = open_ones.enter_context(socket.create_connection(("127.0.0.1", port)))
                client.sendall(request)
            if half == 0:
                time.sleep(0.5)
                assert process.poll() is None
        assert process.wait(READY_S) == -signal.SIGKILL
    crash = classify(log, stage=Stage.SERVING, exit_status=-9)
    assert (crash.category, crash.stage) == ("oom_kv_runtime", Stage.SERVING)


@pytest.mark.parametrize("space", [STUDY, "b300"])
def test_configurations_of_the_space_are_understood(space: str) -> None:
    loaded = load([f"+space={space}"], [str(HERE / "spaces")])
    seen = set()
    for server in random.Random(0).sample(list(servers(loaded.space)), 60):
        argv = build(loaded.engine, loaded.space, server, port=1, version="0.5.23").argv
        part = arguments.server_part(arguments.parse(argv[3:]))
        assert part["parallel"] == server["parallel"] and part["nvls"] == (server["nvls"] or "symm_mem" in server and
                                                                           server["symm_mem"])
        assert all(part[name] == server[name] for name in ("tree_budget", "tree_topk") if name in server)
        seen.add(part["parallel"])
    assert seen >= {"ep8", "tp8", "tp4_dp2"}


def test_an_unknown_flag_is_refused_as_sglang_does(env: dict[str, str], tmp_path: pathlib.Path) -> None:
    log = tmp_path / "server.log"
    with started([sys.executable, "-m", "sglang.launch_server", "--model-path", "m", "--no-such-flag"], env,
                 log) as process:
        assert process.wait(READY_S) == 2
    assert classify(log, exit_status=2).category == "unrecognized_flag"


def test_the_table_gives_the_measured_anchors() -> None:
    table = Table.load()
    server: dict[str, Value] = {
        "parallel": "tp8", "nvls": True, "allreduce_fusion": False, "tree_budget": 8, "tree_topk": 4}
    rates = table.curve("tokens_per_s", server)
    assert [round(rates[c] / measured, 2) for c, measured in {1: 303, 32: 2698, 64: 4007, 128: 4723}.items()] == \
        [0.99, 1.0, 1.0, 1.0]
    assert rates[32] < at(rates, 48) < rates[64] and at(rates, 1000) == pytest.approx(rates[256])
    assert table.crash(server) is None and table.crash({**server, "parallel": "ep8"}) is not None
    assert table.crash({**server, "tree_budget": 32}) is None
    assert table.crash({**server, "tree_budget": 32}, 256) is not None


def test_the_shared_clock_never_goes_back_while_it_is_put_forward(tmp_path: pathlib.Path) -> None:
    clock = Clock.create(tmp_path, 4.0)
    code = ("import pathlib, sys\nfrom tests.replay.clock import Clock\nclock = Clock(pathlib.Path(sys.argv[1]))\n"
            "for _ in range(300000): clock.put_forward(1)")
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT) as other:
        last, began = clock.now(), clock.now()
        while other.poll() is None:
            for _ in range(1000):
                now = clock.now()
                assert now >= last
                last = now
    assert other.returncode == 0 and clock.now() - began > 300000
