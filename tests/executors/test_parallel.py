"""Launches side by side on one host: GPUs and cores of their own, for screening; what neighbours do is measured."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import yaml

from autotune.config.compose import load
from autotune.config.settings import ParallelSettings, Settings
from autotune.engine.gpus import Gpu, Gpus
from autotune.executors import open_executor, parallel, topology
from autotune.executors.base import LaunchCancelled
from autotune.executors.local import LocalExecutor
from autotune.executors.parallel import LaunchPool, ParallelExecutor, side_by_side
from autotune.executors.topology import Layout, Unit, cores, listed, of_cores, pinned, split
from autotune.records import HostCannotRun, UsageError, Value
from autotune.storage.database import sqlite_url
from autotune.storage.study import Study
from autotune.storage.trial import TrialRecord
from autotune.tuning.confirm import check_interference, interference, interference_text
from tests.executors.test_conformance import two_groups, wait_for
from tests.power.test_nvml import library, run_with
from tests.tuning.test_loop import ROOT, make_settings, tuner

__all__ = ["library"]

SHARED = [  # two NUMA nodes of four GPUs; NVLink joins neighbours in twos
    *(f"{i}.{key}" for i in range(8) for key in (
        f"uuid GPU-{os.getpid()}-{i}", "name H200", "memory_mib 144384", f"node {i // 4}",
        f"cpus {0x0f if i < 4 else 0xf0}", f"links {i ^ 1}")), "count 8", "driver 580"]
LOOK = ("import json, os\nfrom autotune.engine.gpus import visible_gpus\nfrom autotune.executors import topology\n"
        "os.sched_getaffinity = lambda pid: set(range(8))\n"
        "found = topology.of_gpus(visible_gpus().gpus)\n"
        "print(json.dumps([found.apart, [[u.index, u.cpus] for u in found.units]]))")
GPUS = tuple(Gpu(f"GPU-{i}", "H200", 141.0) for i in range(8))


def layout() -> Layout:
    """Eight GPUs in two groups of four, and NVLink in twos."""
    def far(a: int, b: int) -> float:
        return 0.0 if a == b else (30.0 if a // 4 == b // 4 else 50.0) + (0.0 if a // 2 == b // 2 else 100.0)

    rows = tuple(tuple(far(a, b) for b in range(8)) for a in range(8))
    return Layout(tuple(Unit((i,), gpu, i) for i, gpu in enumerate(GPUS)), rows)


def test_a_launch_gets_gpus_that_lie_together_and_leaves_others_together() -> None:
    host = layout()
    assert host.choose(range(8), 2) == (0, 1) and host.choose({1, 2, 3, 4}, 2) == (2, 3)
    assert host.choose(range(8), 4) == (0, 1, 2, 3) and host.choose({1, 4, 5, 6, 7}, 4) == (4, 5, 6, 7)
    assert host.choose({0, 1, 2, 4, 5}, 1) == (2,)  # the odd one out
    with pytest.raises(ValueError, match="3 units of 2"):
        host.choose({0, 1}, 3)


@pytest.mark.parametrize("known", [True, False])
def test_topology_and_cores_come_from_nvml_else_gpus_are_alike(library: pathlib.Path, known: bool) -> None:
    lines = [line for line in SHARED if known or not re.search(r"\.(node|cpus|links) ", line)]
    done = run_with(library, "\n".join(lines) + "\n", "-c", LOOK)
    assert done.returncode == 0, done.stderr
    apart, units = json.loads(done.stdout)
    assert apart == [list(row) for row in layout().apart] if known else \
        {d for i, row in enumerate(apart) for j, d in enumerate(row) if i != j} == {150.0}
    assert [index for index, _ in units] == list(range(8))
    assert not known or sorted(cpu for _, cpus in units[:4] for cpu in cpus) == [0, 1, 2, 3]
    assert sorted(cpu for _, cpus in units for cpu in cpus) == list(range(8))


def test_cores_are_shared_out_whole_and_by_numa_node(tmp_path: pathlib.Path) -> None:
    files = {f"cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)}
    files |= {"node/node0/cpulist": "0,2,4,6\n", "node/node1/cpulist": "1,3,5,7\n"}  # even and odd cores
    for name, text in files.items():
        file = tmp_path / "sys/devices/system" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    assert split(cores(range(8), tmp_path), 2) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert split(cores({0, 1, 4}, tmp_path), 2) == [(0, 4), (1,)]
    assert split([(0,), (1,)], 3) == [(0, 1)] * 3  # fewer cores than launches: all share them
    (tmp_path / "list").write_text("0-2,7\n")
    assert listed(tmp_path / "list") == {0, 1, 2, 7} and listed(tmp_path / "none") == set()
    with pytest.raises(HostCannotRun, match="parallel.slots=4096"):
        of_cores(4096)


def test_processes_of_a_pinned_thread_stay_on_its_cores() -> None:
    before = os.sched_getaffinity(0)
    with pinned({min(before)}), concurrent.futures.ThreadPoolExecutor(1) as pool:
        said = subprocess.check_output([sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"])
        assert said.split() == [str(min(before)).encode()]
        assert pool.submit(os.sched_getaffinity, 0).result() == {min(before)}
    assert os.sched_getaffinity(0) == before


def host_of(settings: Settings, count: int = 8) -> LocalExecutor:
    return LocalExecutor(settings, "1", Gpus(GPUS[:count]), settings.power)


def sized(folder: pathlib.Path, *overrides: str, **params: Any) -> Settings:
    """A space whose parameter `flags` says how many GPUs a launch takes."""
    make_settings(folder)
    engine, space = folder / "spaces" / "engine" / "standin.yaml", folder / "spaces" / "t.yaml"
    plain = yaml.safe_load(engine.read_text())
    plain["params"]["flags"]["gpus"] = "value"
    engine.write_text(yaml.safe_dump(plain))
    plain = yaml.safe_load(space.read_text())
    choices = {"flags": [1, 2, 4], "fault": ["none"], "at": ["serving"], **params}
    for name, values in choices.items():
        plain["params"][name]["choices"] = values
        plain["baseline"][name] = values[0]
    space.write_text(yaml.safe_dump(plain))
    return load(["+space=t", f"outputs={folder / 'outputs'}", "power=none", "objective=tokens_per_s", *overrides],
                [str(folder / "spaces")])


def test_slots_are_as_many_as_the_smallest_configuration_fits(tmp_path: pathlib.Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "of_gpus", lambda gpus: layout())
    some, large, whole = (sized(tmp_path, flags=flags) for flags in ([1, 2, 4], [4, 2], [8]))

    def of(settings: Settings, asked: str, gpus: int = 8) -> Any:
        return side_by_side(host_of(dataclasses.replace(settings, parallel=ParallelSettings(asked, True)), gpus))

    made = [of(some, "auto"), of(large, "auto"), of(large, "3")]
    assert [(m.capacity, m.fewest) for m in made] == [(8, 1), (4, 2), (3, 2)]
    with pytest.raises(UsageError, match="at most 4 launches of 2"):
        of(large, "5")
    assert all(isinstance(one, LocalExecutor) for one in (of(whole, "auto"), of(some, "auto", 0), of(some, "1")))


def test_an_open_executor_has_the_report_of_its_host(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "cores", lambda usable: [tuple(usable)] * 2)
    with open_executor(sized(tmp_path, "parallel.slots=2", "device=cpu")) as executor:
        assert isinstance(executor, ParallelExecutor) and executor.report.problems == ()


def test_impossible_slots_are_refused_in_one_line(tmp_path: pathlib.Path) -> None:
    for overrides, says in ((["parallel.slots=0"], "parallel.slots must be auto or a number"),
                            (["parallel.slots=2", "executor=ray"], "with executor=ray, Ray places them")):
        with pytest.raises(UsageError, match=says):
            sized(tmp_path, *overrides)


def test_the_longest_waiting_launch_is_placed_first_however_large(tmp_path: pathlib.Path) -> None:
    host = ParallelExecutor(host_of(sized(tmp_path)), layout(), 8)
    placed: list[tuple[str, tuple[int, ...]]] = []
    free, gone = threading.Event(), threading.Event()

    def work(name: str, count: int, until: threading.Event) -> None:
        slot = host._wait(count, lambda stage, after_s: None)
        placed.append((name, slot.units))
        until.wait(30)
        host._free_slot(slot)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        pool.submit(work, "small", 2, free)
        wait_for(lambda: len(placed) == 1)
        pool.submit(work, "large", 8, gone)
        wait_for(lambda: len(host._waiting) == 1)
        assert not host.has_room()  # or small ones would keep it waiting for ever
        pool.submit(work, "late", 1, gone)
        wait_for(lambda: len(host._waiting) == 2)
        free.set()
        wait_for(lambda: len(placed) == 2)
        assert placed == [("small", (0, 1)), ("large", tuple(range(8)))]
        gone.set()
    assert placed[2][0] == "late" and host.has_room() and host._free == set(range(8))


def test_a_launch_sees_its_gpus_and_a_port_apart_from_the_others(tmp_path: pathlib.Path) -> None:
    host = ParallelExecutor(host_of(sized(tmp_path)), layout(), 8)
    ports = []
    for count in (2, 4, 1):
        taken = host._wait(count, lambda stage, after_s: None)
        made = host._host(taken)
        assert made.env == {"CUDA_VISIBLE_DEVICES": ",".join(map(str, taken.units)),
                            "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        assert made.uuids(count) == tuple(GPUS[i].uuid for i in taken.units)
        ports.append(made.port())
    assert all(abs(a - b) >= parallel.PORTS_APART for i, a in enumerate(ports) for b in ports[:i])
    assert [taken.units for taken in host._taken] == [(0, 1), (4, 5, 6, 7), (2,)]
    assert [taken.neighbours for taken in host._taken] == [2, 2, 2]


def test_the_first_error_of_a_pool_cancels_the_launches_that_wait_and_that_run(tmp_path: pathlib.Path) -> None:
    host, ended = slotted(tmp_path, [])[1], list[str]()
    host.capacity = 4

    def work(number: int) -> None:
        if number == 3:
            wait_for(lambda: len(list(tmp_path.glob("*/owner.json"))) == 2 and host._waiting)
            raise ValueError("a fault of ours")
        config: dict[str, Value] = {"speed": 100, "fault": "hang", "at": "load", "flags": "a"}
        try:
            with host.launch(config, tmp_path / str(number), lambda stage, after_s: None):
                ended.append("served")
        except LaunchCancelled:
            ended.append("cancelled")

    with pytest.raises(ValueError, match="a fault of ours"), LaunchPool(host) as pool:
        for number in range(4):
            pool.submit(work, number)
        while pool.running:
            pool.wait(30)
    assert ended == ["cancelled"] * 3 and host._free == {0, 1}


def slotted(folder: pathlib.Path, servers: list[dict[str, Any]]) -> tuple[Any, ParallelExecutor]:
    """A tuner on two groups of this machine's cores."""
    made = tuner(make_settings(folder), servers)
    assert isinstance(made.executor, LocalExecutor)
    host = two_groups(made.executor)
    return dataclasses.replace(made, executor=host), host


def test_two_launches_run_side_by_side_and_record_their_neighbours(tmp_path: pathlib.Path) -> None:
    made, host = slotted(tmp_path, [{}, {"speed": 200}, {"flags": "b"}])
    made.run()
    found = made.study.records()
    assert [r.state for r in found] == ["COMPLETE"] * 6 and len({r.launch_id for r in found}) == 3
    assert max(r.launch.neighbours for r in found) == 1
    ports = {json.loads((made.folder / "launches" / f"{n:04d}" / "command.json").read_text())["port"]
             for n in (1, 2, 3)}
    assert len(ports) > 1 and host._free == {0, 1}
    alone = host.alone
    assert isinstance(alone, ParallelExecutor) and alone.capacity == 1 and alone.layout.units == host.layout.units[:1]


def test_waiting_for_free_units_is_not_charged_to_the_configuration(tmp_path: pathlib.Path) -> None:
    made, host = slotted(tmp_path, [{}])
    taken = [host._wait(1, lambda stage, after_s: None) for _ in range(2)]
    plan, began = made._reserve(), time.monotonic()
    threading.Timer(0.3, host._free_slot, taken[:1]).start()
    with made._server(plan):
        assert plan.began >= began + 0.3


def test_interference_is_measured_once(tmp_path: pathlib.Path) -> None:
    made, host = slotted(tmp_path, [{}])
    told = check_interference(made, host)
    assert told is not None and told["count"] == 1 and len(told["alone"]) == len(told["beside"]) == 2
    assert told["change"] is not None and "1 neighbour of its kind" in interference_text(told)
    found = made.study.records()
    assert [r.confirm for r in found] == ["alone", "beside", "beside", "alone"]
    assert [r.launch.neighbours for r in found] == [0, 1, 1, 0]
    assert made.study.attrs()["neighbours"] == told and check_interference(made, host) == told
    assert len(made.study.records()) == 4 and made.strategy.told == []  # no search learns from them


def test_the_effect_of_neighbours_in_words() -> None:
    crashed = TrialRecord(0, "PRUNED", {}, None)
    told = interference([crashed, crashed], [crashed], 3)
    assert told["change"] is None and "could not be measured" in interference_text(told)
    fine = [TrialRecord(i, "COMPLETE", {}, value) for i, value in enumerate((1.0, 1.02, 0.9))]
    told = interference(fine[:2], fine[2:], 1)
    assert told["change"] == pytest.approx(0.9 / 1.02 ** 0.5 - 1)
    assert "10.9% less than alone (two measurements alone are 2.0% apart)" in interference_text(told)


@pytest.mark.slow
def test_a_study_screens_side_by_side_and_confirms_alone(tmp_path: pathlib.Path, library: pathlib.Path) -> None:
    settings = sized(tmp_path, speed=[100, 200], flags=[1, 2])
    (library / "state").write_text("\n".join([*SHARED, "count 2"]) + "\n")
    command = [sys.executable, "-m", "autotune", "tune", "--spaces", str(tmp_path / "spaces"), *settings.overrides,
               "parallel.slots=auto", "study.launches=8", "study.confirm.launches=4", "study.confirm.finalists=1",
               "study.confirm.min_rounds=2", "study.confirm.max_rounds=2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, env={
        **os.environ, "PYTHONPATH": ROOT, "LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(library / "state")})
    assert done.returncode == 0, done.stdout + done.stderr
    study = Study.open(sqlite_url(settings.folder), "t", settings.space, {}, create=False)
    searched = [r for r in study.records() if r.confirm is None]
    confirmed = [r for r in study.records() if r.start.confirm_after]
    assert max(r.launch.neighbours or 0 for r in searched) > 0
    assert confirmed and all(r.launch.neighbours is None for r in confirmed)
    assert study.attrs()["neighbours"]["count"] == 1
    ran, gpus = dict[Any, tuple[float, float]](), dict[Any, set[str]]()
    for launch in {r.launch_id for r in searched}:
        folder = settings.folder / "launches" / f"{launch:04d}"
        ran[launch] = (folder / "owner.json").stat().st_mtime, (folder / "exit.json").stat().st_mtime
        placed = json.loads((folder / "command.json").read_text())["placed"]
        gpus[launch] = set(placed["CUDA_VISIBLE_DEVICES"].split(","))
    beside = [(a, b) for a in ran for b in ran if a != b and ran[a][0] < ran[b][1] and ran[b][0] < ran[a][1]]
    assert beside and not any(gpus[a] & gpus[b] for a, b in beside)
    report = (settings.folder / "report.md").read_text()
    assert "ran beside others, for screening only: with 1 neighbour of its kind" in report
