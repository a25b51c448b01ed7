"""Time of one ask in a large study: read new trials, propose, choose a load part, create the trial.

    python tests/benchmarks/ask.py [--trials 10000] [--asks 10] [--storage URL]

The study is filled with made-up outcomes of random configurations of a space with 12 parameters (about 4 million server
parts, three load parts), a fifth of them crashes of eight signatures. Another worker's outcomes come in between asks.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time

import msgspec

for threads in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(threads, "1")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from autotune.records import Blame, Config, Crash, Energy, Measurement, Score, Stage, Value  # noqa: E402
from autotune.search.launch_aware import LaunchAware  # noqa: E402
from autotune.search.strategy import Launch, Limits  # noqa: E402
from autotune.space.space import Space  # noqa: E402
from autotune.storage.database import Retries, open_storage, sqlite_url  # noqa: E402
from autotune.storage.study import Study  # noqa: E402
from autotune.storage.trial import OUTCOME, Result, distribution  # noqa: E402
from autotune.tuning.worker import observation_of  # noqa: E402

LOADS = (1, 16, 64)
PARAMS = {f"p{i}": (2, 3, 4, 5)[i % 4] for i in range(12)}


def space() -> Space:
    """A large space; the first choices are the baseline."""
    params: dict[str, object] = {name: {"choices": [f"c{j}" for j in range(n)]} for name, n in PARAMS.items()}
    params["concurrency"] = {"choices": list(LOADS), "load": True}
    return Space.parse({"name": "large", "engine": "none", "params": params,
                        "baseline": {**dict.fromkeys(PARAMS, "c0"), "concurrency": LOADS[0]}}, "ask.py")


def outcome(config: Config, rng: random.Random) -> tuple[Measurement | Crash, Score | None]:
    """A made-up outcome: a few choices crash, the others multiply."""
    bad = [name for name in PARAMS if config[name] == "c1" and int(name[1:]) < 8]
    if bad and rng.random() < 0.15:
        return Crash(f"fault_{bad[0]}", Stage.LOAD, Blame.CONFIG, f"v1-{bad[0]}", f"{bad[0]} is broken"), None
    value = math.exp(sum(0.03 * int(str(config[name])[1:]) * (-1) ** int(name[1:]) for name in PARAMS)
                     + 0.3 * math.log(float(config["concurrency"])) + rng.gauss(0, 0.01))
    return (Measurement(1000, 10.0, 5, 0, int(config["concurrency"]), Energy("nvml", 1000 / value, 10.0),
                        relative_error=0.02), Score(value))


def fill(study: Study, count: int, rng: random.Random) -> None:
    """`count` finished trials, each written at once."""
    import optuna

    known = study.space
    while count > 0:
        server: dict[str, Value] = {name: f"c{rng.randrange(n)}" for name, n in PARAMS.items()}
        for i, load in enumerate(rng.sample(LOADS, 2)):
            config = {**server, "concurrency": load}
            found, score = outcome(config, rng)
            result = Result(found, score, cost_s=330.0 - 300 * i, launch_s=300.0 if i == 0 else 0.0)
            study.inner.add_trial(optuna.trial.create_trial(
                state=optuna.trial.TrialState.PRUNED if score is None else optuna.trial.TrialState.COMPLETE,
                value=None if score is None else score.value, params=dict(config),
                distributions={p.name: distribution(p) for p in known.params},
                user_attrs={"owner": "other-host|b|1|1", "launch_id": count, OUTCOME: msgspec.to_builtins(result)}))
            count -= 1
            if score is None or not count:
                break


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--asks", type=int, default=10)
    parser.add_argument("--storage", help="default: SQLite in a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url, known, rng = args.storage or sqlite_url(pathlib.Path(folder)), space(), random.Random(0)
        open_storage(url, 120, Retries(0))
        study = Study.open(url, "large", known, {})
        began = time.process_time()
        fill(study, args.trials, rng)
        filled_s = time.process_time() - began
        strategy = LaunchAware(known, Limits(gain=0.0), 0)
        seen = 0
        began = time.process_time()
        for record in study.records():
            strategy.tell(observation_of(study, record))
            seen += 1
        first_s = time.process_time() - began
        parts: list[tuple[float, ...]] = []
        for n in range(args.asks + 1):
            fill(study, 2, rng)  # another worker's launch
            wall, began = time.monotonic(), time.process_time()
            with study.locked():
                study.fail_stale_trials()
                for record in study.records()[seen:]:
                    if record.state in ("COMPLETE", "PRUNED"):
                        strategy.tell(observation_of(study, record))
                    seen += 1
                read_s = time.process_time() - began
                step = strategy.propose()
                assert isinstance(step, Launch), step
                load = strategy.next_load(step.server)
                assert load is not None
                propose_s = time.process_time() - began - read_s
                trial = study.ask({**step.server, **load}, 10_000_000 + n)
            parts.append((time.process_time() - began, read_s, propose_s, time.monotonic() - wall))
            study.fail(trial, "only asked")
        parts = parts[1:]  # the first one fits every model from scratch
        total = sorted(p[0] for p in parts)
        read_ms, propose_ms, wall_ms = (1000 * statistics.median(p[i] for p in parts) for i in (1, 2, 3))
        print(f"{args.trials} trials (filled in {filled_s:.0f} s, read at the start in {first_s:.1f} s): ask takes a "
              f"median of {1000 * statistics.median(total):.0f} ms of CPU time, at most {1000 * total[-1]:.0f} ms "
              f"(read {read_ms:.0f} ms, propose {propose_ms:.0f} ms); {wall_ms:.0f} ms by the clock")
    return 0


if __name__ == "__main__":
    sys.exit(main())
