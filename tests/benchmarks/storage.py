"""How many trials a second a study's storage takes: processes that ask and tell as workers do, and nothing else.

    python tests/benchmarks/storage.py [--storage URL] [--workers 1,4,16] [--trials 20]

Without --storage a SQLite file in a temporary folder. Each trial is one turn of the study lock (read, ask)
and one tell of an outcome.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from autotune.records import Value
from autotune.storage.database import sqlite_url
from autotune.storage.study import Study
from autotune.storage.trial import LaunchFacts
from tests.benchmarks.ask import PARAMS, outcome, space


def work(url: str, name: str, trials: int, seed: int) -> None:
    """Ask and tell `trials` trials; prints the seconds that turns and tells took."""
    study, rng = Study.open(url, name, space(), {}), random.Random(seed)
    print("ready", flush=True)
    sys.stdin.readline()
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
    print(f"{turns_s} {tells_s}", flush=True)


def load(url: str, workers: int, trials: int) -> str:
    """One line: trials a second of `workers` processes side by side."""
    name = f"load-{workers}-{time.time_ns()}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    started = [subprocess.Popen([sys.executable, __file__, "--work", url, name, str(trials), str(seed)], text=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) for seed in range(workers)]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    began = time.monotonic()
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [process.communicate()[0].split() for process in started]
    taken_s = time.monotonic() - began
    turn_ms, tell_ms = (1000 * sum(float(t[i]) for t in told) / workers / trials for i in (0, 1))
    return (f"{url.partition(':')[0]:12} {workers:7} {workers * trials / taken_s:9.1f} {turn_ms:10.0f} {tell_ms:10.0f}")


def main() -> int:
    """Run and print."""
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--storage")
    parser.add_argument("--workers", default="1,4,16")
    parser.add_argument("--trials", type=int, default=20, help="of each worker")
    args = parser.parse_args()
    print(f"{'storage':12} {'workers':>7} {'trials/s':>9} {'ms a turn':>10} {'ms a tell':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for workers in map(int, args.workers.split(",")):
            print(load(args.storage or sqlite_url(pathlib.Path(folder)), workers, args.trials), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
