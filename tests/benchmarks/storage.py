"""What a study's storage takes: trials a second of several workers, and the time of one ask in a large study.

    python tests/benchmarks/storage.py workers [--storage URL] [--workers 1,4,16] [--trials 20]
    python tests/benchmarks/storage.py ask [--storage URL] [--trials 10000] [--asks 10]

Without --storage a SQLite file in a temporary folder. Outcomes are made up, of random configurations of a space of 12
parameters (about 4 million server parts, three load parts); some are crashes, of eight signatures.

`workers`: processes that ask and tell as workers do, and nothing else. Each trial is one turn of the study lock (read,
ask) and one tell of an outcome. `ask`: read new trials, propose, choose a load part, create the trial, in a study that
is filled with outcomes; another worker's come in between asks.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import multiprocessing
import os
import pathlib
import random
import statistics
import sys
import tempfile
import threading
import time

import msgspec

for threads in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(threads, "1")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from autotune.records import Blame, Config, Crash, Energy, Measurement, Score, Stage, Value  # noqa: E402
from autotune.search.launch_aware import LaunchAware  # noqa: E402
from autotune.search.strategy import Launch, Limits  # noqa: E402
from autotune.space.space import Space  # noqa: E402
from autotune.storage.database import sqlite_url  # noqa: E402
from autotune.storage.study import Study  # noqa: E402
from autotune.storage.trial import OUTCOME, LaunchFacts, Result, distribution  # noqa: E402
from autotune.tuning.worker import observation_of  # noqa: E402

START_S = 120.0
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


def work(url: str, name: str, trials: int, seed: int, ready: threading.Barrier) -> tuple[float, float]:
    """Ask and tell `trials` trials once all are ready; the seconds that turns and tells took."""
    study, rng = Study.open(url, name, space(), {}), random.Random(seed)
    ready.wait(START_S)
    turns_s = tells_s = 0.0
    for n in range(trials):
        config: dict[str, Value] = {key: f"c{rng.randrange(size)}" for key, size in PARAMS.items()}
        config["concurrency"] = 16
        began = time.monotonic()
        with study.locked():
            study.records()
            trial = study.ask(config, seed * trials + n)
        turns_s += time.monotonic() - began
        found, score = outcome(config, rng)
        facts = LaunchFacts(("python",) * 40, {}, dict(config), str(n))
        began = time.monotonic()
        study.tell(trial, found, score, facts, cost_s=330, launch_s=300)
        tells_s += time.monotonic() - began
    return turns_s, tells_s


def load(url: str, workers: int, trials: int) -> str:
    """One line: trials a second of `workers` processes side by side."""
    name = f"load-{workers}-{time.time_ns()}"
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager, concurrent.futures.ProcessPoolExecutor(workers, spawn) as pool:
        ready = manager.Barrier(workers + 1)
        working = [pool.submit(work, url, name, trials, seed, ready) for seed in range(workers)]
        ready.wait(START_S)
        began = time.monotonic()
        spent = [worker.result() for worker in working]
        taken_s = time.monotonic() - began
    turn_ms, tell_ms = (1000 * sum(each) / workers / trials for each in zip(*spent, strict=True))
    return f"{url.partition(':')[0]:12} {workers:7} {workers * trials / taken_s:9.1f} {turn_ms:10.0f} {tell_ms:10.0f}"


def ask(url: str, trials: int, asks: int) -> None:
    """Fill a study, time `asks` asks, and print a line."""
    known, rng = space(), random.Random(0)
    study = Study.open(url, "large", known, {})
    began = time.process_time()
    fill(study, trials, rng)
    filled_s = time.process_time() - began
    strategy = LaunchAware(known, Limits(gain=0.0), 0)
    seen = 0
    began = time.process_time()
    for record in study.records():
        strategy.tell(observation_of(study, record))
        seen += 1
    first_s = time.process_time() - began
    parts: list[tuple[float, ...]] = []
    for n in range(asks + 1):
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
    print(f"{trials} trials (filled in {filled_s:.0f} s, read at the start in {first_s:.1f} s): ask takes a "
          f"median of {1000 * statistics.median(total):.0f} ms of CPU time, at most {1000 * total[-1]:.0f} ms "
          f"(read {read_ms:.0f} ms, propose {propose_ms:.0f} ms); {wall_ms:.0f} ms by the clock")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("workers", "ask"))
    parser.add_argument("--storage", help="default: SQLite in a temporary folder")
    parser.add_argument("--workers", default="1,4,16")
    parser.add_argument("--trials", type=int, help="of each worker (20), or in the study (10000)")
    parser.add_argument("--asks", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = args.storage or sqlite_url(pathlib.Path(folder))
        if args.what == "ask":
            ask(url, args.trials or 10_000, args.asks)
            return
        print(f"{'storage':12} {'workers':>7} {'trials/s':>9} {'ms a turn':>10} {'ms a tell':>10}")
        for workers in map(int, args.workers.split(",")):
            print(load(url, workers, args.trials or 20), flush=True)


if __name__ == "__main__":
    main()
