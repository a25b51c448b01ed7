"""A whole study of the space sglang_cpu on a real SGLang: crashes become knowledge, and are not bought a third time."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import optuna
import pytest

from autotune.config.compose import data_folder
from tests.envs import ensure
from tests.storage.flat import flat

HERE = pathlib.Path(__file__).parent
LIMIT_S = 900  # six minutes on a quiet machine of two cores

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

# Nine servers out of the space, six of which really break, under one load level: a tuner that learned nothing would buy
# the crash of expert parallelism three times. Short answers give a window enough of them to be valid at once.
STUDY = (
    "study.launches=7", "study.seed=1", "study.confirm.finalists=0",
    "space.params.parallel.choices=[tp1_bound,tp2,ep2_bound]", "~space.belief",
    "space.params.page_size.choices=[1]", "space.params.dtype.choices=[auto]",
    "space.params.overlap_schedule.choices=[true]", "space.params.radix_cache.choices=[true]",
    "space.params.concurrency.choices=[8]", "space.params.max_running_requests.choices=[8,12,16]",
    "workload.output_tokens=16", "power.others=1",  # also beside other work
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
    assert {t.params["parallel"] for t in complete} == {"tp1_bound"}
    experts = [flat(t.user_attrs) for t in crashed if t.params["parallel"] == "ep2_bound"]
    unbound = [flat(t.user_attrs) for t in crashed if t.params["parallel"] == "tp2"]
    assert experts and unbound and len(experts) + len(unbound) == len(crashed)
    for attrs in experts:
        assert attrs["crash_stage"] == "warmup" and "index -1 is out of bounds" in attrs["crash_excerpt"]
    for attrs in unbound:
        assert "SGLANG_CPU_OMP_THREADS_BIND" in attrs["crash_excerpt"]
    assert len({attrs["crash_signature"] for attrs in experts}) == 1
    launched = [json.loads(file.read_text())["argv"] for file in folder.glob("launches/*/command.json")]
    assert 1 <= sum("--ep-size" in argv for argv in launched) <= 2
    assert (folder / "report.html").exists() and (folder / "launch.sh").exists()
