"""The contract of executors, on every implementation: real processes of the stand-in engine, started and ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from autotune.config.settings import ExecutorSettings, Settings
from autotune.engine.gpus import Gpus
from autotune.engine.spec import Action
from autotune.executors.base import Executor, HostLost, LaunchCancelled, RunningServer
from autotune.executors.local import LocalExecutor
from autotune.executors.parallel import ParallelExecutor
from autotune.executors.ray import RayServer, _keep_sigterm
from autotune.executors.topology import Layout, Unit, split
from autotune.records import AutotuneError, Config, Crash, HostCannotRun, Measurement, Stage
from tests.executors.test_ray import cluster, living, node
from tests.tuning.test_loop import make_settings

__all__ = ["cluster"]
Opened = Callable[..., Executor]
BASE: dict[str, Any] = {"speed": 100, "fault": "none", "at": "serving", "flags": "a"}


def two_groups(host: LocalExecutor) -> ParallelExecutor:
    """Two groups of this machine's cores: all of them twice, where there is only one."""
    groups = split([(cpu,) for cpu in sorted(os.sched_getaffinity(0))], 2)
    return ParallelExecutor(host, Layout(tuple(Unit(group) for group in groups), ((0.0, 1.0), (1.0, 0.0))), 2)


@pytest.fixture(params=["local", "parallel", pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def opened(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Opened]:
    """opened(changes of the settings ...) is an executor of each kind."""
    with contextlib.ExitStack() as held:
        def make(**changes: Any) -> Executor:
            settings: Settings = dataclasses.replace(make_settings(tmp_path), **changes)
            settings.folder.mkdir(parents=True)
            if request.param == "ray":
                from autotune.executors.ray import connected

                hosts = request.getfixturevalue("cluster")
                if living(hosts) < 2:
                    node(hosts)
                at = ExecutorSettings("ray", hosts.address, 2, "FAKE")
                return held.enter_context(connected(dataclasses.replace(settings, executor=at)))
            host = LocalExecutor(settings, "1", Gpus(()), settings.power)
            return host if request.param == "local" else two_groups(host)

        yield make


def wait_for(true: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return True


def unique(**changes: Any) -> dict[str, Any]:
    """A server part whose processes `processes` finds."""
    return {**BASE, "speed": 10_000 + os.getpid() + time.monotonic_ns() % 10**6, **changes}


def processes(config: Config) -> list[int]:
    """Living servers of a server part, on this machine."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if str(config["speed"]) in words and any("standin.py" in word for word in words):
                found.append(process.pid)
    return found


def gone(config: Config) -> bool:
    """True once no server of a server part runs."""
    return wait_for(lambda: not processes(config))


def quiet(stage: str, after_s: float) -> None: ...


def test_preflight_reports_the_host_and_refuses_one_that_lacks_something(opened: Opened) -> None:
    executor = opened()
    report = executor.preflight()
    assert report is executor.report and report.problems == () and report.power.source == "none"
    assert "standin.py" in " ".join(report.command.argv) and executor.capacity in (1, 2)
    wait_for(executor.has_room)  # Ray frees the room of the preflight a moment later
    executor.settings = dataclasses.replace(executor.settings, space=dataclasses.replace(
        executor.settings.space, model={"target": "/nonexistent/model"}), server=dataclasses.replace(
            executor.settings.server, disk_free_mib=1e9))
    with pytest.raises(HostCannotRun, match="make room and run the same command"):
        executor.has_room()


def test_a_healthy_launch_measures_leaves_its_files_and_ends(opened: Opened, tmp_path: pathlib.Path) -> None:
    config, folder, stages = unique(), tmp_path / "launch", list[str]()
    with opened().launch(config, folder, lambda stage, after_s: stages.append(stage)) as server:
        assert server.crash is None and server.alive and server.launch_s > 0 and server.folder == folder
        assert str(config["speed"]) in server.argv and server.resolved["tokens_per_s"] == config["speed"]
        assert server.resolved_key and not server.neighbours and processes(config)
        outcome = server.measure({"concurrency": 2}, "a")
        assert isinstance(outcome, Measurement) and outcome.concurrency == 2 and outcome.output_tokens > 0
        assert (folder / "requests-a.jsonl").stat().st_size > 0
    assert gone(config) and "serving" in stages
    assert {"server.log", "command.json", "exit.json"} <= {path.name for path in folder.iterdir()}


def test_a_crash_at_start_is_a_value(opened: Opened, tmp_path: pathlib.Path) -> None:
    config = unique(fault="exit", at="load")
    with opened().launch(config, tmp_path / "launch", quiet) as server:
        crash = server.crash
        assert crash is not None and crash.stage is Stage.LOAD and crash.signature and "RuntimeError" in crash.excerpt
        assert not server.alive and server.resolved_key is None and server.launch_s > 0
        assert "RuntimeError" in (tmp_path / "launch" / "server.log").read_text()
    assert gone(config)


def test_a_crash_under_load_is_a_value(opened: Opened, tmp_path: pathlib.Path) -> None:
    with opened().launch(unique(fault="die-under-load"), tmp_path / "launch", quiet) as server:
        outcome = server.crash or server.measure({"concurrency": 1}, 0)
        assert isinstance(outcome, Crash) and outcome.stage is Stage.SERVING and outcome.signature
        assert not server.alive


def test_servers_that_differ_in_an_environment_variable_are_two_servers(opened: Opened, tmp_path: pathlib.Path) -> None:
    engine = make_settings(tmp_path).engine
    at = dataclasses.replace(engine.params["at"], any_value=(Action(env={"WHERE": "{value}"}),))
    executor = opened(engine=dataclasses.replace(engine, params={**engine.params, "at": at}))
    seen = []
    for number, place in enumerate(("load", "graph-capture", "load")):
        with executor.launch({**BASE, "at": place}, tmp_path / str(number), quiet) as server:
            assert server.env == {"WHERE": place}
            seen.append((server.resolved, server.resolved_key))
    assert seen[0][0] == seen[1][0] and seen[0][1] != seen[1][1] and seen[0] == seen[2]


def test_an_exception_in_the_block_ends_the_server(opened: Opened, tmp_path: pathlib.Path) -> None:
    config = unique()
    with pytest.raises(KeyboardInterrupt), opened().launch(config, tmp_path / "launch", quiet):
        assert processes(config)
        raise KeyboardInterrupt
    assert gone(config)


def test_cancel_ends_a_launch_that_another_thread_waits_for(opened: Opened, tmp_path: pathlib.Path) -> None:
    config, executor, ended = unique(fault="hang", at="load"), opened(), list[str]()

    def work() -> None:
        try:
            with executor.launch(config, tmp_path / "launch", quiet):
                ended.append("served")
        except (LaunchCancelled, HostLost) as error:
            ended.append(type(error).__name__)

    thread = threading.Thread(target=work)
    thread.start()
    wait_for(lambda: processes(config))
    executor.cancel()
    thread.join(30)
    assert ended in (["LaunchCancelled"], ["HostLost"]) and gone(config)


def test_losing_the_process_that_keeps_a_server_is_an_error_not_a_crash(opened: Opened, tmp_path: pathlib.Path) -> None:
    config, executor = unique(), opened()

    def lose(server: RunningServer) -> None:
        if isinstance(server, RayServer):
            server.executor.ray.kill(server.actor)
        else:
            for child in psutil.Process().children():
                if "autotune.engine.supervisor" in child.cmdline():
                    child.kill()
                    child.wait()

    with pytest.raises(AutotuneError) as caught, executor.launch(config, tmp_path / "launch", quiet) as server:
        lose(server)
        server.measure({"concurrency": 1}, 0)
    assert isinstance(server, RayServer) is isinstance(caught.value, HostLost) and gone(config)


def test_ray_does_not_keep_sigterm_to_itself() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with _keep_sigterm():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as ray.init does
    assert signal.getsignal(signal.SIGTERM) == before
