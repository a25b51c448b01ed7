"""The roofline of a study: which choices it knows, how far the search trusts it, and what the report says of it."""

from __future__ import annotations

import json
import pathlib

import pytest

from autotune.config.compose import load
from autotune.config.settings import Settings
from autotune.records import Config
from autotune.search.launch_aware import LaunchAware
from autotune.search.strategy import Limits
from autotune.tuning.roofline import Roofline
from tests.search.simulate import simulate
from tests.search.tables import Table
from tests.search.test_launch_aware import table

MODEL = {"num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 12288, "vocab_size": 16000}


@pytest.fixture
def settings(tmp_path: pathlib.Path) -> Settings:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return load(overrides(tmp_path))


def overrides(model: pathlib.Path) -> list[str]:
    return ["+space=b300", f"space.model.target={model}", "~space.belief",
            "+space.params.quantization={choices:[bfloat16,fp8]}", "+space.baseline.quantization=bfloat16"]


def test_parallelism_number_formats_and_load_have_expected_factors_and_nothing_else(settings: Settings) -> None:
    made = Roofline.read(settings, "0.5.23", "8 x NVIDIA B300")
    assert made is not None
    server, load_part = settings.space.split(settings.space.baseline)
    value = made.objective(server, load_part)
    replicas = made.objective({**server, "parallel": "tp4_dp2"}, load_part)
    assert value and replicas and value != replicas
    assert (made.objective(server, {"concurrency": 1}) or 0) < value / 10
    assert (made.limit(settings.space.baseline) or 0) > (made.tokens_per_s(server, load_part) or 0)
    strategy = LaunchAware(settings.space, expected=made.objective)
    known = strategy._value.prior.analytic
    assert known is not None
    assert {strategy.grid.server_params[i].name for i in known.known} == {"parallel", "quantization"}


@pytest.mark.parametrize("change", ["space.model.target=/nowhere", "workload.rate_per_s=3", "gpu"])
def test_where_the_formula_does_not_apply_there_is_none(settings: Settings, tmp_path: pathlib.Path,
                                                         change: str) -> None:
    changed = settings if change == "gpu" else load([*overrides(tmp_path), change])
    assert Roofline.read(changed, "0.5.23", "Some GPU" if change == "gpu" else "NVIDIA B300") is None


def studied(of: Table, factor: float) -> tuple[int, float]:
    """(launches to 98 % of the optimum, trust at the end) with a formula that is right (1) or upside down (-1)."""
    def expected(server: Config, load: Config) -> float:
        value = of.rate({**server, **load}) / of.watts({**server, **load})
        return value if factor > 0 else 1 / value

    strategy = LaunchAware(of.space, Limits(), 0, (), expected)
    found = simulate(of, strategy, 0, 8.0)
    step = found.reached(0.98)
    assert step is not None
    return step.launches, strategy._value.prior.trust


def test_a_right_formula_leads_straight_to_the_optimum_and_a_wrong_one_loses_its_weight() -> None:
    of = table([], [{"when": {"mode": "c"}, "times": 1.3}, {"when": {"graphs": True}, "times": 1.2}])
    right, wrong = studied(of, 1.0), studied(of, -1.0)
    assert right[0] <= 2 and right[1] >= 0.75
    assert wrong[1] <= 0.25 and wrong[0] <= 12
