"""The correctness gate on the embedded engine: silently corrupted output, and honest output of batches."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import optuna
import pytest
import yaml

from autotune.config.compose import data_folder
from autotune.storage.database import sqlite_url

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]

SPACE = {
    "name": "gate", "describe": "every server once", "engine": "ddtree",
    "params": {"tree_budget": {"choices": [0, 8, 16]},
               "corrupt_output": {"choices": [0.0, 0.2], "when": {"tree_budget": [8, 16]}},
               "max_running_requests": {"choices": [4, 16]}, "concurrency": {"choices": [8], "load": True}},
    "baseline": {"tree_budget": 0, "max_running_requests": 16, "concurrency": 8},
    "workload": {"contexts": [48], "output_tokens": 24, "warmup_s": 0.5, "warmup_max_s": 1.0, "settle_s": 0.5,
                 "drift": 0.5, "window_s": 1.0, "window_max_s": 1.0, "block_s": 0.1, "min_requests": 1},
    "study": {"strategy": "grid", "launches": 10, "confirm": {"finalists": 0}},
}


def test_the_gate_catches_corrupted_output_and_accepts_batched_output(tmp_path: pathlib.Path) -> None:
    (tmp_path / "gate.yaml").write_text(yaml.safe_dump(SPACE, sort_keys=False))
    root = data_folder("conf").parent
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "tune", "--spaces", str(tmp_path), "+space=gate", f"outputs={tmp_path}",
         "power=cpu_time", "power.others=1", "device=cpu"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    trials = optuna.load_study(study_name="gate", storage=sqlite_url(tmp_path / "gate")).trials
    wrong = [t for t in trials if t.params.get("corrupt_output") == 0.2]
    honest = [t for t in trials if t.params.get("corrupt_output") != 0.2]
    assert len(wrong) >= 4 and all(t.state is optuna.trial.TrialState.PRUNED for t in wrong)
    assert {t.user_attrs["crash_category"] for t in wrong} == {"wrong_output"}
    assert len(honest) >= 6 and all(t.user_attrs.get("crash_category") != "wrong_output" for t in honest)
    assert {t.params["tree_budget"] for t in honest if t.state is optuna.trial.TrialState.COMPLETE} == {0, 8, 16}
    assert "--corrupt-output 0.2" not in (tmp_path / "gate" / "launch.sh").read_text()
