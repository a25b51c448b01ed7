"""The whole replay, as `make replay` runs it: what it must have shown in the end."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from autotune.records import Value
from tests.replay.__main__ import ROOT, STUDY
from tests.replay.table import Table
from tests.storage.flat import flat

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WINNERS = {"parallel": "tp8", "nvls": True, "tree_budget": 8, "tree_topk": 4, "concurrency": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    outputs = tmp_path_factory.mktemp("outputs")
    done = subprocess.run([sys.executable, "-m", "tests.replay", str(outputs)], cwd=ROOT, text=True,
                          capture_output=True)
    if "needs Linux and a C compiler" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    return outputs / STUDY


@pytest.fixture(scope="module")
def trials(folder: pathlib.Path) -> list[dict[str, Any]]:
    """(configuration and attributes) of every trial."""
    import optuna

    study = optuna.load_study(study_name=STUDY, storage=f"sqlite:///{folder / 'study.db'}")
    return [{**trial.params, **flat(trial.user_attrs), "number": trial.number}
            for trial in study.get_trials(deepcopy=False)]


def server_of(config: dict[str, Any]) -> dict[str, Value]:
    return {name: config[name] for name in ("parallel", "nvls", "allreduce_fusion", "tree_budget", "tree_topk")}


def test_every_ep8_launch_crashed_in_graph_capture_and_in_more_than_one_way(trials: list[dict[str, Any]]) -> None:
    tried = [trial for trial in trials if trial["parallel"] == "ep8"]
    assert len(tried) >= 2 and {trial["crash_stage"] for trial in tried} == {"graph-capture"}
    names: dict[str, set[str]] = {}
    for trial in tried:
        rule = Table.load().crash(server_of(trial))
        assert rule is not None
        names.setdefault(rule["log"], set()).add(trial["crash_signature"])
    assert all(len(signatures) == 1 for signatures in names.values()), names  # the same fault, the same signature
    assert len(set.union(*names.values())) == len(names) >= 2, names


def test_ep8_was_given_up_by_a_pivot_that_names_its_crashes(folder: pathlib.Path, trials: list[dict[str, Any]]) -> None:
    pivots = [json.loads(line) for line in (folder / "pivots.jsonl").read_text().splitlines()]
    about = [pivot for pivot in pivots if pivot["region"] == {"parallel": ["ep8"]}]
    assert about and about[0]["action"] == "close"
    known = {trial["crash_signature"] for trial in trials if trial["parallel"] == "ep8"}
    assert about[0]["signatures"] and set(about[0]["signatures"]) <= known
    assert about[0]["belief"] > 0.5 and about[0]["launches_saved"] > 0 and about[0]["reopens_when"]
    report = (folder / "report.md").read_text()
    assert "parallel=ep8" in report and all(signature in report for signature in about[0]["signatures"])
    assert about[0]["reason"] in (folder / "terminal.txt").read_text()


def test_tp8_with_nvls_was_found_and_confirmed(folder: pathlib.Path) -> None:
    origin = json.loads((folder / "launch.json").read_text())
    assert {name: origin["config"][name] for name in WINNERS} == WINNERS
    assert origin["feasible"] and origin["energy_source"] == "nvml" and origin["gain"]["confirmed"]
    table = Table.load()
    server = server_of(origin["config"])
    assert origin["figures"]["tokens_per_s"] == pytest.approx(table.curve("tokens_per_s", server)[128], rel=0.06)
    assert origin["figures"]["watts"] == pytest.approx(table.curve("watts", server)[128], rel=0.03)


def test_the_matrix_of_the_winner_follows_the_table(folder: pathlib.Path) -> None:
    rows = json.loads((folder / "matrix.json").read_text())
    assert [(row["ctx"], row["concurrency"]) for row in rows] == [(c, n) for c in (60, 1024) for n in (1, 32, 64, 128)]
    server = server_of(json.loads((folder / "launch.json").read_text())["config"])
    rates, watts = (Table.load().curve(figure, server) for figure in ("tokens_per_s", "watts"))
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(rates[row["concurrency"]], rel=0.12), row
        assert row["watts"] == pytest.approx(watts[row["concurrency"]], rel=0.04) and row["energy_source"] == "nvml"


def test_the_exported_script_starts_the_winner_and_says_that_it_is_a_replay(folder: pathlib.Path) -> None:
    script = (folder / "launch.sh").read_text()
    assert subprocess.run(["bash", "-n", str(folder / "launch.sh")]).returncode == 0
    for part in ("-m sglang.launch_server", "export NCCL_NVLS_ENABLE=1", "--enable-nccl-nvls", "--tp-size 8",
                 "--speculative-algorithm DDTREE", "--speculative-ddtree-budget 8", "--speculative-ddtree-topk 4"):
        assert part in script, part
    assert "--ep-size" not in script
    header = script.partition("set -euo pipefail")[0]
    assert all(word in header for word in ("b300_replay", "0.5.23+replay", "NVIDIA B300 (replay)"))


def test_everything_that_is_shown_is_labelled_a_replay(folder: pathlib.Path) -> None:
    assert (folder / "terminal.txt").read_text().startswith("REPLAY: no GPU and no model is involved.")
    assert "b300_replay" in (folder / "report.html").read_text()[:3000]
    for log in (folder / "launches").glob("*/server.log"):
        assert "[replay] This is a stand-in" in log.read_text()


def test_told_time_is_what_the_cluster_would_have_taken(trials: list[dict[str, Any]]) -> None:
    spec = Table.load().spec
    crashed = {"ep8": (165, 200), "tp4_dp2": (235, 250)}
    for trial in trials:
        if trial.get("crash_stage"):
            low, high = crashed.get(trial["parallel"], (spec["launch_s"], spec["launch_s"] + 200))
            assert low < trial["cost_s"] < high, trial
        elif trial["launch_s"]:
            assert trial["launch_s"] == pytest.approx(spec["launch_s"], rel=0.05)
