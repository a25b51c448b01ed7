"""A whole study of the space vllm_cpu_moe on a real vLLM: crashes at the start and under load, regions that are given
up because of them, and what is exported."""

from __future__ import annotations

import json
import pathlib
import re
import shlex

import pytest

from autotune.engine.command import Command
from autotune.engine.server import Server, free_port
from autotune.records import Stage
from tests.sglang.support import Tuned, autotune, environment, settings

VERSION = "0.32.0"

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
    python, model = environment("vllm", VERSION), tmp_path / "moe"
    overrides = (f"outputs={tmp_path}", "device=cpu", f"space.model.target={model}", f"engine.python={python}", *STUDY)
    tuned = Tuned.of(tmp_path, "vllm_cpu_moe", overrides)
    folder = tuned.folder
    assert {(t["parallel"], t["block_size"]) for t in tuned.complete} == {("tp1", 128)}

    at_start = [t for t in tuned.crashed if t["block_size"] == 16]
    under_load = [t for t in tuned.crashed if t["block_size"] == 128]
    assert at_start and under_load
    for crash in at_start:
        assert "No common block size for 16" in crash["crash_excerpt"]
        assert (crash["crash_stage"], crash["crash_blame"]) == ("kv-alloc", "config")
    for crash in under_load:
        assert (crash["crash_stage"], crash["crash_category"]) == ("serving", "segfault"), crash["crash_excerpt"]
    assert {crash["parallel"] for crash in under_load} == {"tp2_ep"}
    signatures = {crash["crash_signature"] for crash in under_load}
    assert not {crash["crash_signature"] for crash in at_start} & signatures
    assert 1 <= sum("--enable-expert-parallel" in argv for argv in tuned.launched) <= 2
    pivots = {json.dumps(p["region"]): p for p in map(json.loads, (folder / "pivots.jsonl").read_text().splitlines())
              if p["action"] == "close"}
    experts = pivots['{"parallel": ["tp2_ep"]}']
    assert set(experts["signatures"]) >= signatures
    assert experts["belief"] > 0.5 and experts["trials"] and "comes up" in experts["reopens_when"]
    assert (folder / "report.html").exists()

    engine = settings("vllm_cpu_moe").engine
    first = (folder / "launches/0001/server.log").read_text()
    assert [m.stage for m in engine.stages if not re.search(m.log, first)] == [Stage.GRAPH_CAPTURE]  # on a CPU

    port = free_port()
    shipped = Command(("bash", str(folder / "launch.sh")), {"HOST": "127.0.0.1", "PORT": str(port)})
    assert answers(shipped, tmp_path / "sh", port) == str(model)
    autotune(tmp_path, "export", "+space=vllm_cpu_moe", *overrides, "format=yaml")
    file = folder / "launch.yaml"
    needed = dict(word.split("=", 1) for line in file.read_text().splitlines() if "environment variable" in line
                  for word in shlex.split(line, comments=False)[-1:])
    assert needed["VLLM_CPU_KVCACHE_SPACE"] == "1"
    port = free_port()
    argv = (python, "-m", "vllm.entrypoints.openai.api_server", "--config", str(file), "--port", str(port))
    assert answers(Command(argv, needed), tmp_path / "yaml", port) == str(model)


def answers(command: Command, folder: pathlib.Path, port: int) -> str | None:
    """Start a command, have it generate, end it; the name of the model that it serves."""
    loaded = settings("vllm_cpu_moe")
    with Server(command, loaded.engine, folder, loaded.server, port) as server:
        failure = server.wait_ready()
        assert failure is None, f"{failure}\n{server.log.read_text()[-3000:]}"
        return server.model_name()
