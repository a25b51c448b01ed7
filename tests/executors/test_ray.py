"""A study over a Ray cluster of two local nodes: separate raylets, made-up GPU resources, the embedded engine."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import tenacity

from autotune.config.compose import load
from autotune.records import AutotuneError
from autotune.storage.database import sqlite_url
from autotune.storage.study import Study
from tests.tuning.test_loop import ROOT
from tests.tuning.test_worker import nothing_twice

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SPACE = ["+space=local", "executor=ray", "executor.at_once=2", "executor.gpu_type=FAKE", "power=none",
         "objective=tokens_per_s", "study.launches=5", "study.confirm.finalists=0", "space.params.dp.choices=[1]",
         "space.params.concurrency.choices=[1,4]", "study.min_gain=0.05"]

SLOW_HOST = {"RAY_agent_register_timeout_ms": "600000", "RAY_worker_register_timeout_seconds": "600",
             "RAY_health_check_timeout_ms": "60000", "RAY_USAGE_STATS_ENABLED": "0"}
START_S = 300.0
MARK = "AUTOTUNE_TEST_CLUSTER"  # variable by which everything that this cluster starts is known


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="needs pip install 'autotune-llm[ray]'")
    from ray.cluster_utils import Cluster

    for name, value in SLOW_HOST.items():
        os.environ.setdefault(name, value)
    os.environ["PYTHONPATH"] = ROOT
    os.environ[MARK] = str(os.getpid())
    made = Cluster()
    try:
        for attempt in tenacity.Retrying(stop=tenacity.stop_after_attempt(3), reraise=True):
            with attempt:  # on a busy machine Ray's own 30 s may not do
                made.add_node(num_cpus=0, include_dashboard=False)
        yield made
    finally:
        made.shutdown()
        for process in raylets():
            process.kill()


def raylets() -> set[psutil.Process]:
    return {child for child in psutil.Process().children() if child.name() == "raylet"}


def node(cluster: Any) -> psutil.Process:
    """A host with one made-up GPU: its raylet. Comes up in its own time, whatever Ray thinks of that."""
    before, alive = raylets(), living(cluster)
    with contextlib.suppress(Exception):
        cluster.add_node(num_cpus=1, num_gpus=1, resources={"accelerator_type:FAKE": 1})
    deadline = time.monotonic() + START_S
    while living(cluster) <= alive:
        assert time.monotonic() < deadline, "the raylet did not come up"
        time.sleep(0.5)
    made, = raylets() - before
    return made


def servers() -> list[str]:
    """Command lines of the engines that hosts of this cluster still run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(os.getpid()) and "autotune.ddtree" in process.cmdline():
                found.append(" ".join(process.cmdline()))
    return found


def living(cluster: Any) -> int:
    return sum(bool(one["Alive"]) for one in cluster.global_state.node_table())


def tune(cluster: Any, folder: pathlib.Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "autotune", "tune", *SPACE, f"executor.address={cluster.address}",
               f"outputs={folder}"]
    return subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env={**os.environ, "PYTHONPATH": ROOT, "COLUMNS": "200"})


def records(folder: pathlib.Path) -> list[Any]:
    settings = load([*SPACE, f"outputs={folder}"], [])
    return Study.open(sqlite_url(settings.folder), "local", settings.space, {}, create=False).records()


def test_a_node_killed_mid_launch_loses_and_doubles_nothing(cluster: Any, tmp_path: pathlib.Path) -> None:
    first, _ = node(cluster), node(cluster)
    process = tune(cluster, tmp_path)
    deadline = time.monotonic() + 600
    running: list[Any] = []
    while time.monotonic() < deadline and process.poll() is None and len(running) < 2:
        time.sleep(0.5)
        with contextlib.suppress(Exception):  # the study may not be there yet
            running = [r for r in records(tmp_path) if r.state == "RUNNING"]
    time.sleep(1.0)
    first.kill()
    first.wait()  # its workers look whether it lives, and a zombie does
    node(cluster)  # and another one joins
    said = process.communicate(timeout=1200)[0]
    assert process.returncode == 0, said
    found = records(tmp_path)
    nothing_twice(found)
    assert {r.state for r in found} <= {"COMPLETE", "PRUNED", "FAIL"}
    failed = [r for r in found if r.state == "FAIL"]
    assert len(failed) == 1 and "its host is lost" in failed[0].start.fail_reason, said
    ended = [r for r in found if r.state != "FAIL"]
    assert any(r.config == failed[0].config for r in ended) or failed[0].config != ended[0].config
    assert any(r.feasible for r in ended) and "launch script" in said
    deadline = time.monotonic() + 60
    while (left := servers()) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == []  # also where Ray killed the process that had started one
    for record in ended:  # what the launches left came back
        assert (tmp_path / "local" / "launches" / f"{record.launch_id:04d}" / "server.log").stat().st_size > 0


def test_no_cluster_is_one_clear_line(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("ray", reason="needs pip install 'autotune-llm[ray]'")
    from autotune.executors.ray import connected

    settings = load([*SPACE, "executor.address=127.0.0.1:1", f"outputs={tmp_path}"], [])
    with pytest.raises(AutotuneError, match="no Ray cluster at executor.address"), connected(settings):
        pass
