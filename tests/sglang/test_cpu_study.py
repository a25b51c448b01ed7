"""A whole study of the space sglang_cpu on a real SGLang: crashes become knowledge, and are not bought a third time."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import subprocess
import sys

import optuna
import pytest

from autotune.config import data_folder
from tests.envs import ensure

HERE = pathlib.Path(__file__).parent
LIMIT_S = 600

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STUDY = (
    "study.launches=8", "study.seed=1", "study.confirm.finalists=0",
    "workload.warmup_s=1", "workload.warmup_max_s=4", "workload.window_s=4", "workload.window_max_s=8",
    # what is hoped for here is expert parallelism, which really breaks, and two ranks without cores, which cannot start
    "space.params.parallel.choices=[tp1_bound,tp2,ep2_bound]", "~space.belief.parallel.tp2_bound",
    "space.belief.parallel.ep2_bound=[1.0,3.0]", "space.belief.parallel.tp2=[1.0,2.0]",
    "space.params.page_size.choices=[1]", "~space.belief.page_size", "space.params.dtype.choices=[auto]",
    "~space.belief.dtype", "space.params.overlap_schedule.choices=[true]", "~space.belief.overlap_schedule",
)


def test_a_study_on_a_real_server_learns_from_its_crashes(tmp_path: pathlib.Path) -> None:
    python = ensure("sglang-0.5.23")
    root = data_folder("conf").parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-m", "autotune.engine.random_model", str(tmp_path / "moe"), "--shape", "moe-tiny"],
                   check=True, env=environment, cwd=tmp_path)
    command = [sys.executable, "-m", "autotune", "tune", "+space=sglang_cpu", f"outputs={tmp_path}", "device=cpu",
               f"space.model.target={tmp_path / 'moe'}", f"engine.python={python}",
               f"+engine.env.PYTHONPATH={HERE / 'standin'}", *STUDY]
    done = subprocess.run(command, env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-4000:]
    folder = tmp_path / "sglang_cpu"
    (name,) = optuna.get_all_study_names(f"sqlite:///{folder / 'study.db'}")
    study = optuna.load_study(study_name=name, storage=f"sqlite:///{folder / 'study.db'}")
    complete = [t for t in study.trials if t.state is optuna.trial.TrialState.COMPLETE]
    crashed = [t for t in study.trials if t.state is optuna.trial.TrialState.PRUNED]
    assert complete and all(t.user_attrs["tokens_per_s"] > 0 for t in complete)
    by_choice = collections.defaultdict(list)
    for trial in crashed:
        by_choice[trial.params["parallel"]].append(trial.user_attrs)
    assert set(by_choice) == {"tp2", "ep2_bound"}
    for attrs in by_choice["ep2_bound"]:
        assert attrs["crash_stage"] == "warmup" and "index -1 is out of bounds" in attrs["crash_excerpt"]
    for attrs in by_choice["tp2"]:
        assert "SGLANG_CPU_OMP_THREADS_BIND" in attrs["crash_excerpt"]
    assert len({attrs["crash_signature"] for attrs in by_choice["ep2_bound"]}) == 1
    launched = [json.loads(file.read_text())["argv"] for file in folder.glob("launches/*/command.json")]
    assert 1 <= sum("--ep-size" in argv for argv in launched) <= 2
    assert (folder / "report.html").exists() and (folder / "launch.sh").exists()
