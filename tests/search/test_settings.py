"""study.strategy and study.warm_start of the settings, on a packaged space."""

from __future__ import annotations

import pathlib

import pytest

from autotune.cli.verbs import make_strategy
from autotune.config.compose import load
from autotune.records import UsageError, config_key
from autotune.search.launch_aware import LaunchAware
from autotune.search.optuna_samplers import OptunaStrategy
from autotune.search.strategy import Launch, Measured, Observation


@pytest.mark.parametrize("name", ["tpe", "random", "autotune"])
def test_study_strategy_names_the_strategy(name: str) -> None:
    strategy = make_strategy(load(["+space=b300", f"study.strategy={name}", "study.launches=3", "study.hours=null"]))
    assert isinstance(strategy, LaunchAware if name == "autotune" else OptunaStrategy)
    assert strategy.limits.launches == 3 and strategy.limits.hours is None


def test_a_missing_warm_start_is_refused_before_anything_runs(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="warm_start"):
        make_strategy(load(["+space=b300", f"study.warm_start=[{tmp_path}]"]))


def test_a_warm_start_of_a_sampler_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="study.strategy=tpe learns nothing from study.warm_start"):
        make_strategy(load(["+space=b300", "study.strategy=tpe", f"study.warm_start=[{tmp_path}]"]))


def test_proposals_obey_the_conditions_and_rules_of_a_large_space() -> None:
    settings = load(["+space=b300"])
    space, strategy, seen = settings.space, make_strategy(settings), set()
    for i in range(5):
        step = strategy.propose()
        assert isinstance(step, Launch)
        load_part = strategy.next_load(step.server)
        assert load_part is not None
        config = space.check({**step.server, **load_part})
        assert space.forbidden(config) is None
        assert config_key(config) not in seen
        seen.add(config_key(config))
        strategy.tell(Observation(step.server, load_part, Measured(1 + i / 10, relative_noise=0.01), 600.0, 540.0))
