"""Real crashes of the embedded engine, provoked at every stage that a CPU can reach, as the loop explains them."""

from __future__ import annotations

import dataclasses
import pathlib
import threading

import psutil
import pytest

from autotune.config.compose import load
from autotune.crash.exit_status import HostSnapshot
from autotune.engine.gpus import Gpus
from autotune.executors.local import LocalExecutor, explain
from autotune.records import Crash

pytestmark = pytest.mark.slow


def quiet(text: str, after_s: float) -> None: ...


def bench(folder: pathlib.Path) -> LocalExecutor:
    settings = load(["+space=local", f"outputs={folder}", "power=none", "objective=tokens_per_s", "workload.warmup_s=2",
                     "workload.warmup_max_s=4", "workload.window_s=6", "workload.window_max_s=8"], [])
    return LocalExecutor(settings, "0.1.0", Gpus(()), settings.power)


def crash_at_start(made: LocalExecutor, folder: pathlib.Path, *flags: str) -> Crash:
    """The baseline's command line with `flags` added (of a repeated flag, the last counts)."""
    before = HostSnapshot.take()
    server = made._server(made.settings.space.split(made.settings.space.baseline)[0], folder)
    server.command = dataclasses.replace(server.command, argv=(*server.command.argv, *flags))
    with server:
        failure = server.wait_ready(quiet)
        assert failure is not None
        return explain(server, failure, before)


@pytest.mark.parametrize(("flags", "category", "stage", "blame"), [
    (["--no-such-flag"], "unrecognized_flag", "arg-parse", "environment"),
    (["--tree-budget", "many"], "invalid_flag_value", "arg-parse", "config"),
    (["--enable-allreduce-fusion"], "parallel_layout_invalid", "arg-parse", "config"),
    (["--context-length", "99999"], "context_too_long", "arg-parse", "config"),
    (["--draft-depth", "70"], "speculative_arg_validation", "arg-parse", "config"),
    (["--model", "/nonexistent"], "model_path_missing", "arg-parse", "environment"),
    (["--device", "cuda"], "no_accelerator", "device-init", "environment"),
    (["--enable-nccl-nvls", "--tp-size", "2"], "nccl_nvls_multicast", "nccl-init", "environment"),
    (["--tp-size", "3"], "tp_divisibility", "load", "config"),
    (["--ep-size", "2"], "parallel_layout_invalid", "load", "config"),
    (["--kv-cache-tokens", "99"], "oom_kv_pool", "kv-alloc", "config"),
    (["--max-verify-tokens", "4", "--tree-budget", "8"], "oom_spec_verify", "kv-alloc", "config"),
])
def test_a_crash_at_start_has_its_category_stage_and_blame(tmp_path: pathlib.Path, flags: list[str], category: str,
                                                           stage: str, blame: str) -> None:
    crash = crash_at_start(bench(tmp_path), tmp_path / "launch", *flags)
    assert (crash.category, str(crash.stage), str(crash.blame)) == (category, stage, blame), crash.excerpt
    assert crash.signature and crash.explanation and crash.next_step


@pytest.mark.parametrize("rank", [True, False])
def test_a_server_that_is_killed_under_load_is_a_crash_at_serving(tmp_path: pathlib.Path, rank: bool) -> None:
    made = bench(tmp_path)
    made.settings.folder.mkdir()
    with made.launch(made.settings.space.split(made.settings.space.baseline)[0], tmp_path / "launch", quiet) as live:
        assert live.crash is None and live.server.pid is not None
        front = psutil.Process(live.server.pid)
        victim = front.children(recursive=True)[-1] if rank else front
        threading.Timer(3.0, victim.kill).start()
        crash = live.measure({"concurrency": 4}, 0)
    assert isinstance(crash, Crash)
    assert (str(crash.stage), crash.category) == ("serving", "died_under_load" if rank else "killed"), crash
    assert str(crash.blame) in ("transient", "unknown"), crash
