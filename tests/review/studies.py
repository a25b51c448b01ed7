"""Studies with known outcomes, written through the real Study and Optuna. All figures here are made up."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from autotune.config import Settings
from autotune.engine.argv import build
from autotune.history import Verdict
from autotune.records import Blame, Config, Crash, Energy, Measurement, Percentiles, Stage
from autotune.study import Study

LIMITS = {"ttft_p99_ms": 400.0, "tpot_p99_ms": 40.0}


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
        """A measurement of `value` tok/J at 40 W."""
        self.launches += 0 if same_launch else 1
        window_s, watts = 10.0, 40.0
        energy = Energy("cpu_time", watts * window_s, window_s, assumed=assumed, scope="server processes")
        outcome = Measurement(
            output_tokens=round(value * watts * window_s), window_s=window_s, requests=50, errors=0,
            concurrency=int(config.get("concurrency", 1)), energy=energy, relative_error=0.01,
            accept_length=2.5 if config.get("tree_budget") else None,
            ttft_ms=Percentiles(80.0, 120.0, 200.0, 90.0, 50),
            tpot_ms=Percentiles(tpot_ms / 2, tpot_ms, tpot_ms, 11.0, 50), reasons=reasons)
        ratios = {"ttft_p99_ms": 200 / LIMITS["ttft_p99_ms"], "tpot_p99_ms": tpot_ms / LIMITS["tpot_p99_ms"]}
        trial = self.study.ask(config, self.launches)
        self.study.tell(trial, outcome, Verdict(None if reasons else value, ratios, reasons), cost_s=15.0,
                        launch_s=0.0 if same_launch else 4.0, **self.command(config), **attrs)
        return int(trial.number)

    def crash(self, config: Config, signature: str = "nvls0001", *, category: str = "nvls_unsupported",
              stage: Stage = Stage.NCCL_INIT, blame: Blame = Blame.CONFIG, excerpt: str = "RuntimeError: no NVLink",
              explanation: str = "NVLS needs NVLink switches, which are not here.", next_step: str = "Leave nvls off.",
              **attrs: Any) -> int:
        self.launches += 1
        outcome = Crash(category, stage, blame, signature, excerpt, explanation, next_step, 1, 6.5)
        trial = self.study.ask(config, self.launches)
        self.study.tell(trial, outcome, None, cost_s=7.0, launch_s=7.0, **self.command(config), **attrs)
        return int(trial.number)


def baseline(made: Made, **changes: Any) -> dict[str, Any]:
    """The baseline's configuration with some choices changed; speculation's own parameters appear with it."""
    config = {**made.settings.space.baseline, **changes}
    if config["tree_budget"]:
        config = {"tree_topk": 2, "draft_depth": 5, **config}
    return {p.name: config[p.name] for p in made.settings.space.params if p.name in config}
