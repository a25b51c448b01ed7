"""The shape of a model and its roofline: against published sizes, and in the directions that matter."""

from __future__ import annotations

import json
import math
import pathlib

import pytest

from autotune.engine.model import ModelShape
from autotune.engine.roofline import LIMIT, limits_of, tokens_per_s
from autotune.records import UsageError
from tests.benchmarks import roofline

SHAPES, ROWS = roofline.read()
# Billions of parameters, all and of one token, as their makers publish them.
SIZES = {"Qwen/Qwen3-8B": (8.2, 7.6), "Qwen/Qwen3-32B": (32.8, 32.0), "Qwen/Qwen3-30B-A3B-Instruct-2507": (30.5, 3.0),
         "Qwen/Qwen3-235B-A22B-Instruct-2507": (235, 22), "Qwen/Qwen3-Coder-480B-A35B-Instruct": (480, 35),
         "deepseek-ai/DeepSeek-V3.1": (671, 37), "meta-llama/Llama-3.1-405B-Instruct": (405, 404),
         "meta-llama/Llama-4-Scout-17B-16E-Instruct": (109, 17),
         "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8": (400, 17), "openai/gpt-oss-120b": (117, 5.1),
         "openai/gpt-oss-20b": (21, 3.6)}
DENSE, MOE = SHAPES["Qwen/Qwen3-32B"], SHAPES["Qwen/Qwen3-30B-A3B-Instruct-2507"]


@pytest.mark.parametrize("name", SIZES)
def test_the_number_of_weights_is_the_published_one(name: str) -> None:
    shape, (whole, active) = SHAPES[name], SIZES[name]
    used = shape.dense_weights + (shape.weights_of_experts * shape.experts_of_a_token / shape.experts
                                  if shape.experts else 0)
    assert shape.weights / 1e9 == pytest.approx(whole, rel=0.02)
    assert used / 1e9 == pytest.approx(active, rel=0.06)


def test_latent_attention_keeps_one_latent_a_token_and_formats_have_their_width() -> None:
    deepseek = SHAPES["deepseek-ai/DeepSeek-V3.1"]
    assert deepseek.kv_values() == 61 * (512 + 64) and deepseek.weight_bytes == 1.0
    assert DENSE.kv_values() == 64 * 2 * 8 * 128 and DENSE.weight_bytes == 2.0
    four = ModelShape.of({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 10,
                          "quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert four.weight_bytes == pytest.approx(0.56)


@pytest.mark.parametrize(("text", "said"), [
    ("{", "cannot be read"), ("[]", "is not a JSON object"), ("{}", "num_hidden_layers must be a whole number above 0"),
    ('{"num_hidden_layers": 2, "hidden_size": "x", "num_attention_heads": 1}', "hidden_size must be"),
    (None, "is .* the folder")])
def test_a_config_that_tells_no_shape_is_one_clear_line(tmp_path: pathlib.Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        ModelShape.read(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_roofline_knows_what_more_gpus_more_requests_and_narrow_weights_do() -> None:
    h100 = limits_of("NVIDIA H100 80GB HBM3")
    assert h100 is not None and limits_of("Some CPU") is None
    one, two = (tokens_per_s(DENSE, h100, gpus, 1, 500) for gpus in (1, 2))
    assert one < two < 2 * one  # all-reduces and the fixed time do not shrink
    assert tokens_per_s(DENSE, h100, 2, 64, 500) > 20 * two
    narrow = SHAPES["Qwen/Qwen3-235B-A22B-Instruct-2507-FP8"], SHAPES["Qwen/Qwen3-235B-A22B-Instruct-2507"]
    assert tokens_per_s(narrow[0], h100, 8, 1, 500) > tokens_per_s(narrow[1], h100, 8, 1, 500)
    assert tokens_per_s(DENSE, h100, 2, 64, 16000) < tokens_per_s(DENSE, h100, 2, 64, 500)
    of_one = tokens_per_s(MOE, h100, 1, 1, 500, constants=LIMIT)
    assert of_one == pytest.approx(3350e9 / (2 * 3.0e9), rel=0.1)  # only the active experts' bytes are read


def test_no_published_rate_with_a_16_bit_kv_cache_is_above_the_limit() -> None:
    for row in (row for row in ROWS if row.source == "ml_energy"):
        assert row.tokens_per_s < 1.05 * roofline.expected(SHAPES[row.model], row, LIMIT), row


@pytest.mark.slow
def test_the_roofline_ranks_published_rates_and_the_program_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert roofline.main(["--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 35 + 16 + 2 and all({"case", "value", "asked", "ok"} <= set(line) for line in lines)
    assert all(line["value"] >= 0.9 for line in lines[-2:]) and roofline.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert math.isclose(roofline.spearman([1, 2, 2, 3], [1, 2, 2, 9]), 1)
