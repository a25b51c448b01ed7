"""Studies with known outcomes, written through the real Study and Optuna. All figures here are made up."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from autotune.config.settings import Settings
from autotune.engine.command import build
from autotune.records import Blame, Config, Crash, Energy, Measurement, Percentiles, Score, Stage
from autotune.storage.study import Study
from autotune.storage.trial import LaunchFacts
from tests.space.configurations import sample

LIMITS = {"ttft_p99_ms": 400.0, "tpot_p99_ms": 40.0}


@dataclasses.dataclass
class Made:
    """A study being written; `crash` and `measure` add one trial each."""

    settings: Settings
    study: Study
    launches: int = 0
    rng: random.Random = dataclasses.field(default_factory=lambda: random.Random(1))

    def facts(self, config: Config) -> LaunchFacts:
        server = self.settings.space.split(config)[0]
        made = build(self.settings.engine, self.settings.space, server, port=30001, device=self.settings.device)
        return LaunchFacts(made.argv, dict(made.env))

    def measure(self, config: Config, value: float, *, tpot_ms: float = 20.0, reasons: tuple[str, ...] = (),
                same_launch: bool = False, assumed: bool = True, watts: float = 40.0, energy: str = "cpu_time",
                accept_length: float = 2.5, same_as: int | None = None, **attrs: Any) -> int:
        """A measurement of `value` tok/J; with energy "none" the value is told, but no joules are."""
        self.launches += 0 if same_launch else 1
        window_s = 10.0
        read = Energy(energy, None if energy == "none" else watts * window_s, window_s,
                      assumed=assumed and energy == "cpu_time", scope="server processes")
        outcome = Measurement(
            output_tokens=round(value * watts * window_s), window_s=window_s, requests=50, errors=0,
            concurrency=int(config.get("concurrency", 1)), energy=read, relative_error=0.01,
            accept_length=accept_length if config.get("tree_budget") else None,
            ttft_ms=Percentiles(80.0, 120.0, 200.0, 90.0, 50),
            tpot_ms=Percentiles(tpot_ms / 2, tpot_ms, tpot_ms, 11.0, 50), reasons=reasons)
        ratios = {"ttft_p99_ms": 200 / LIMITS["ttft_p99_ms"], "tpot_p99_ms": tpot_ms / LIMITS["tpot_p99_ms"]}
        trial = self.study.ask(config, self.launches, **attrs)
        launch_s = 0.0 if same_launch else 4.0
        source = None if same_as is None else self.study.record(same_as)
        score = source.score if source else Score(None if reasons else value, ratios, reasons)
        self.study.tell(trial, source and source.outcome or outcome, score, self.facts(config), cost_s=15.0,
                        launch_s=launch_s, same_as=same_as)
        return int(trial.number)

    def crash(self, config: Config, signature: str = "nvls0001", *, category: str = "nvls_unsupported",
              stage: Stage = Stage.NCCL_INIT, blame: Blame = Blame.CONFIG, excerpt: str = "RuntimeError: no NVLink",
              explanation: str = "NVLS needs NVLink switches, which are not here.", next_step: str = "Leave nvls off.",
              **attrs: Any) -> int:
        self.launches += 1
        outcome = Crash(category, stage, blame, signature, excerpt, explanation, next_step, 1, 6.5)
        trial = self.study.ask(config, self.launches, **attrs)
        self.study.tell(trial, outcome, None, self.facts(config), cost_s=7.0, launch_s=7.0)
        return int(trial.number)


BUDGETS = {0: 1.0, 4: 1.16, 8: 1.32, 16: 1.41, 32: 1.22}
LOADS = {1: 0.35, 4: 1.0, 8: 1.55, 16: 1.9}
LOG = """[2026-01-01 10:00:00 TP1] Init torch distributed begin
Traceback (most recent call last):
  File "/srv/engine/tp_worker.py", line 88, in init
    self.comm = Communicator(rank)
  File "/srv/engine/comm.py", line 41, in __init__
    raise RuntimeError("NVLS multicast needs NVLink switches, none found")
RuntimeError: NVLS multicast needs NVLink switches, none found
"""


def search(made: Made, launches: int, seed: int = 1) -> None:
    """Random launches with a plausible landscape: interactions, limits, four kinds of crashes, invalid windows."""
    rng = random.Random(seed)
    made.measure(baseline(made), 2.0)
    for level in (1, 8, 16):
        made.measure(baseline(made, concurrency=level), 2.0 * LOADS[level], same_launch=True)
    while made.launches < launches:
        config = sample(made.settings.space, rng)
        if config["nvls"]:
            made.crash(config, excerpt=LOG)
        elif config["allreduce_fusion"] and config["tp"] == 1:
            made.crash(config, "f05e77aa", category="bad_flag_combination", stage=Stage.ARG_PARSE,
                       excerpt="error: --enable-allreduce-fusion needs --tp-size above 1", next_step="Set tp=2.")
        elif config["tp"] == 2 and config["dp"] == 2 and rng.random() < 0.6:
            made.crash(config, "0ec4d2b1", category="out_of_memory", stage=Stage.KV_ALLOC, blame=Blame.CONFIG,
                       excerpt="RuntimeError: not enough memory for the KV cache", next_step="Lower tp or dp.")
        elif rng.random() < 0.04:
            made.crash(config, "7a11c0de", category="port_in_use", stage=Stage.WARMUP, blame=Blame.TRANSIENT,
                       excerpt="OSError: [Errno 98] address already in use", next_step="Nothing: it is tried again.")
        else:
            first = True
            for level in rng.sample([1, 4, 8, 16], rng.randint(1, 3)):
                value = 2.0 * BUDGETS[int(config["tree_budget"])] * LOADS[level] * (0.93 if config["tp"] == 2 else 1.0)
                value *= (1 + 0.03 * int(config.get("tree_topk", 1))) * rng.gauss(1, 0.01)
                made.measure({**config, "concurrency": level}, value, tpot_ms=9 + 2 * level + rng.random(),
                             same_launch=not first, reasons=("unsteady",) if rng.random() < 0.05 else (),
                             watts=34 + 0.4 * level + rng.random())
                first = False


def baseline(made: Made, **changes: Any) -> dict[str, Any]:
    """The baseline's configuration with some choices changed; speculation's own parameters appear with it."""
    config = {**made.settings.space.baseline, **changes}
    if config["tree_budget"]:
        config = {"tree_topk": 2, "draft_depth": 5, **config}
    return {p.name: config[p.name] for p in made.settings.space.params if p.name in config}


def reporting(settings: Settings, **report: Any) -> Settings:
    """Settings with some settings of the verb report changed."""
    return dataclasses.replace(settings, report=dataclasses.replace(settings.report, **report))
