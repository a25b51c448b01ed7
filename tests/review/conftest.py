"""Studies with known outcomes, written through the real Study and Optuna. All figures here are made up."""

from __future__ import annotations

import dataclasses
import pathlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autotune.config import Settings, load
from autotune.engine.argv import build
from autotune.history import Verdict
from autotune.records import Blame, Config, Crash, Energy, Measurement, Percentiles, Stage
from autotune.study import Study, sqlite_url

LIMITS = {"ttft_p99_ms": 400.0, "tpot_p99_ms": 40.0}
FACTORS = {"tree_budget": {0: 1.0, 4: 1.12, 8: 1.3, 16: 1.35, 32: 1.2}, "tp": {1: 1.0, 2: 0.9}}


@dataclasses.dataclass
class Made:
    """A study being written; `crash` and `measure` add one trial each."""

    settings: Settings
    study: Study
    launches: int = 0
    rng: random.Random = dataclasses.field(default_factory=lambda: random.Random(1))

    def command(self, config: Config) -> dict[str, Any]:
        server = self.settings.space.split(config)[0]
        made = build(self.settings.engine, self.settings.space, server, port=30001, device=self.settings.device)
        return {"server_argv": list(made.argv), "server_env": dict(made.env)}

    def measure(self, config: Config, value: float, *, tpot_ms: float = 20.0, reasons: tuple[str, ...] = (),
                same_launch: bool = False, assumed: bool = True, **attrs: Any) -> int:
        """A measurement of `value` tokens/J at 40 W."""
        self.launches += 0 if same_launch else 1
        window_s, watts = 10.0, 40.0
        energy = Energy("cpu_time", watts * window_s, window_s, assumed=assumed, scope="server processes")
        outcome = Measurement(
            output_tokens=round(value * watts * window_s), window_s=window_s, requests=50, errors=0,
            concurrency=int(config.get("concurrency", 1)), energy=energy, relative_error=0.01,
            accept_length=2.5 if config.get("tree_budget") else None,
            ttft_ms=Percentiles(80.0, 120.0, 200.0, 90.0, 50), tpot_ms=Percentiles(tpot_ms / 2, tpot_ms, tpot_ms, 11.0, 50),
            reasons=reasons)
        ratios = {"ttft_p99_ms": 200 / LIMITS["ttft_p99_ms"], "tpot_p99_ms": tpot_ms / LIMITS["tpot_p99_ms"]}
        trial = self.study.ask(config, self.launches)
        self.study.tell(trial, outcome, Verdict(None if reasons else value, ratios, reasons), cost_s=15.0,
                        launch_s=0.0 if same_launch else 4.0, **self.command(config), **attrs)
        return int(trial.number)

    def crash(self, config: Config, signature: str = "nvls0001", *, category: str = "nvls_unsupported",
              stage: Stage = Stage.NCCL_INIT, blame: Blame = Blame.CONFIG, excerpt: str = "RuntimeError: no NVLink",
              **attrs: Any) -> int:
        self.launches += 1
        outcome = Crash(category, stage, blame, signature, excerpt, "NVLS needs NVLink switches, which this host lacks.",
                        "Leave nvls off.", 1, 6.5)
        trial = self.study.ask(config, self.launches)
        self.study.tell(trial, outcome, None, cost_s=7.0, launch_s=7.0, **self.command(config), **attrs)
        return int(trial.number)


Maker = Callable[..., Made]


@pytest.fixture
def make(tmp_path: pathlib.Path) -> Iterator[Maker]:
    """make("overrides", ...) opens an empty study of the space `local` under tmp_path."""

    def opened(*overrides: str) -> Made:
        settings = load(["+space=local", f"outputs='{tmp_path}'", "limits={ttft_p99_ms: 400, tpot_p99_ms: 40}",
                         *overrides])
        settings.folder.mkdir(parents=True, exist_ok=True)
        identity = {"space": "local", "space_digest": settings.space.digest, "engine": "ddtree", "engine_version": None,
                    "model": {}, "devices": [], "objective": "tokens_per_joule"}
        study = Study.open(sqlite_url(settings.folder), settings.study_name, settings.space, identity,
                           tuple(settings.limits))
        study.set_attr("provenance", {"autotune": "0.1", "python": "3.11", "host": "testhost", "driver": None, "gpu": None,
                                      "command": "python -m autotune tune +space=local", "created": "2026-01-01"})
        return Made(settings, study)

    yield opened


def baseline(made: Made, **changes: Any) -> dict[str, Any]:
    """The baseline's configuration with some choices changed; speculation's own parameters appear with it."""
    config = {**made.settings.space.baseline, **changes}
    if config["tree_budget"]:
        config = {"tree_topk": 2, "draft_depth": 5, **config}
    return {p.name: config[p.name] for p in made.settings.space.params if p.name in config}


@pytest.fixture
def small(make: Maker) -> Made:
    """Twelve trials: a baseline, gains, a broken limit, an invalid window, two crash signatures, a copy, a failure."""
    made = make()
    made.measure(baseline(made), 2.0)
    made.measure(baseline(made, concurrency=8), 2.4, same_launch=True)
    made.crash(baseline(made, nvls=True))
    made.measure(baseline(made, tree_budget=8), 2.6)
    made.measure(baseline(made, tree_budget=8, concurrency=8), 3.0, same_launch=True)
    made.measure(baseline(made, tree_budget=16, concurrency=16), 3.9, tpot_ms=60.0)
    made.crash(baseline(made, tree_budget=8, nvls=True))
    made.crash(baseline(made, allreduce_fusion=True), "fuse0001", category="bad_flag", stage=Stage.ARG_PARSE,
               excerpt="error: --enable-allreduce-fusion needs --tp-size 2")
    made.measure(baseline(made, tp=2), 1.8)
    made.measure(baseline(made, tp=2, concurrency=8), 2.2, same_launch=True, reasons=("unsteady",))
    made.measure(baseline(made, dp=2), 2.0, same_as=0)
    made.study.fail(made.study.ask(baseline(made, dp=2, tp=2), 99), "interrupted")
    return made
