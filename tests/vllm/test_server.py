"""A real vLLM 0.32.0 on a CPU that speculates: its metrics are the engine file's, and acceptance is read from them."""

from __future__ import annotations

import pathlib

import httpx
import pytest
import torch
from tokenizers import Tokenizer

from autotune.ddtree.arguments import PACKAGED_MODEL, Shape
from autotune.ddtree.executor import continue_text
from autotune.ddtree.model import Target, load_weights
from autotune.engine.random_model import write_model
from tests.sglang.support import autotune, environment, metrics, real_server, settings

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
    autotune(tmp_path, "target", "draft", "--minutes", "0.5", module="autotune.ddtree.llama")
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
                      f"engine.python={environment('vllm', VERSION)}")
    with real_server(loaded, folder, VERSION) as live:
        failure = live.wait_ready()
        assert failure is None, f"{failure}\n{live.log.read_text()[-3000:]}"
        answer = httpx.post(f"{live.url}/v1/completions", timeout=60, json={
            "model": live.model_name(), "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True}).json()
        values = metrics(live, "running", "queued", "retracted", "accept_tokens", "accept_steps")
    assert answer["usage"]["completion_tokens"] == tokens and values["accept_steps"] > 0
    accepted = values["accept_tokens"] / values["accept_steps"]
    return answer["choices"][0]["text"], loaded.engine.metrics.accept_bonus + accepted
