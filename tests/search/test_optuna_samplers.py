"""Optuna's samplers behind the protocol, and the benchmark that compares the strategies."""

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from autotune.cli.verbs import make_strategy
from autotune.config.compose import load
from autotune.records import Blame, Crash, Stage, UsageError
from autotune.search.launch_aware import LaunchAware
from autotune.search.optuna_samplers import SAMPLERS, OptunaStrategy
from autotune.search.strategy import Launch, Limits, Measured, Observation, Stop, StopKind
from autotune.space.constraints import Rule
from tests.benchmarks import search as benchmark
from tests.search.opponents import OPPONENTS
from tests.search.simulate import simulate
from tests.search.tables import Table
from tests.search.test_launch_aware import PLAIN, table

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["tpe", "random", "autotune"])
def test_study_strategy_names_the_strategy(name: str) -> None:
    strategy = make_strategy(load(["+space=b300", f"study.strategy={name}", "study.launches=3", "study.hours=null"]))
    assert isinstance(strategy, LaunchAware if name == "autotune" else OptunaStrategy)
    assert strategy.limits.launches == 3 and strategy.limits.hours is None


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_begins_with_the_baseline_and_measures_one_configuration_a_launch(name: str) -> None:
    of = table([{"when": {"mode": "c"}}])
    strategy = OptunaStrategy(of.space, name, Limits(), 0)
    step = strategy.propose()
    assert isinstance(step, Launch) and {**step.server, **(strategy.next_load(step.server) or {})} == of.space.baseline
    found = simulate(of, OptunaStrategy(of.space, name, Limits(launches=12), 0), 0, 8.0)
    assert found.stop is not None and found.stop.kind is StopKind.LAUNCHES
    assert len(found.steps) == found.launches == 12
    assert found.final_share > 0.5


def test_forbidden_and_pending_configurations_are_not_launched() -> None:
    space = dataclasses.replace(table([]).space, rules=(Rule({"mode": ("b", "c")}, "because"),))
    strategy = OptunaStrategy(space, "random", Limits(), 0)
    for _ in range(8):
        step = strategy.propose()
        assert isinstance(step, Launch) and step.server["mode"] == "a"
        strategy.pending(step.server)
    assert len(strategy._busy) == 8


def test_crashes_steer_tpe_away() -> None:
    of = table([{"when": {"mode": ["b", "c"]}}])
    crashed = {name: simulate(of, OptunaStrategy(of.space, name, Limits(launches=40), 0), 0, 100.0).crashed
               for name in ("tpe", "random")}
    assert crashed["tpe"] < crashed["random"]


def test_a_sampler_resumes_from_its_observations() -> None:
    space = table([]).space
    strategy = OptunaStrategy(space, "tpe", Limits(launches=2), 0)
    server, load = space.split(space.baseline)
    strategy.tell(Observation(server, load, Measured(1.0), 340.0, 300.0))
    strategy.tell(Observation({**server, "mode": "b"}, None, Crash("oom", Stage.LOAD, Blame.CONFIG, "s", "x"),
                              100.0, 100.0))
    best = strategy.best()
    assert best is not None and best.server == server
    stop = strategy.propose()
    assert isinstance(stop, Stop) and stop.kind is StopKind.LAUNCHES
    assert len(strategy.study.trials) == 2


def test_a_grid_too_large_to_list_is_refused() -> None:
    huge = {f"p{i}": list(range(8)) for i in range(7)}
    of = table([], params={**huge, "concurrency": [8, 32]}, baseline={**dict.fromkeys(huge, 0), "concurrency": 8})
    with pytest.raises(UsageError, match="grid"):
        OptunaStrategy(of.space, "grid")


def test_the_benchmark_runs_any_table_of_the_format(tmp_path: pathlib.Path) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(PLAIN))
    done = subprocess.run([sys.executable, "-m", "tests.benchmarks.search", str(tmp_path / "own.yaml"), "--seeds", "2",
                           "--hours", "1", "--strategies", "launch_aware,random", "--shuffle", "--json"],
                          capture_output=True, text=True, check=True, cwd=ROOT)
    rows = json.loads(done.stdout)["rows"]
    assert [(r["table"], r["strategy"], r["seeds"]) for r in rows] == [
        ("plain", "launch_aware", 2), ("plain", "random", 2)]
    assert all(0 < r["share"] <= 1 for r in rows)


def test_the_benchmark_refuses_a_bad_table_in_one_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.yaml").write_text("name: x\n")
    monkeypatch.setattr(sys, "argv", ["search", str(tmp_path / "bad.yaml")])
    assert benchmark.main() == 2 and len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize(("change", "says"), [
    (lambda t: t.pop("watts"), "missing: watts"),
    (lambda t: t["baseline"].pop("mode"), "mode is missing"),
    (lambda t: t["baseline"].update(mode="z"), "is not a choice"),
    (lambda t: t["tokens_per_s"]["by_concurrency"].popitem(), "by_concurrency"),
    (lambda t: t.update(crashes=[{"when": {"mode": "c"}, "stage": "load", "log": "x"}]), "after_s is missing"),
    (lambda t: t.update(crashes=[{"when": {"mdoe": "c"}, "stage": "load", "log": "x"}]), "unknown parameter mdoe"),
    (lambda t: t.update(crashes=[{"when": {}, "stage": "lod", "log": "x", "after_s": 1}]), "stage lod is unknown"),
    (lambda t: t.update(launch_s="ten"), "launch_s must be a positive number"),
    (lambda t: t["params"].update(mode=[]), "list of choices"),
])
def test_a_bad_table_is_one_line(change: Callable[[dict[str, Any]], Any], says: str, tmp_path: pathlib.Path) -> None:
    spec = copy.deepcopy(PLAIN)
    change(spec)
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(spec))
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        Table.load(tmp_path / "bad.yaml")
    assert "\n" not in str(error.value)


def test_unknown_keys_and_rules_that_never_match_are_remarked(tmp_path: pathlib.Path) -> None:
    spec = copy.deepcopy(PLAIN) | {"speling": 1, "crashes": [
        {"when": {"mode": "z"}, "stage": "load", "log": "x", "after_s": 1}]}
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump(spec))
    remarks = Table.load(tmp_path / "odd.yaml").remarks
    assert len(remarks) == 2 and "speling" in remarks[0] and "mode='z'" in remarks[1]


def test_tpe_measures_every_load_part_of_a_launch_where_a_fair_comparison_asks_for_it() -> None:
    of = table([])
    found = simulate(of, OPPONENTS["tpe_loads"](of.space, Limits(), 0), 0, 8.0, launches=3)
    assert found.launches == 3 and len(found.told) == 9
    assert {tuple(o.load.values()) for o in found.told if o.load} == {(8,), (32,), (64,)}
