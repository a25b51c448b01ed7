"""Errors of percentiles, coverage of intervals, steadiness, and studies with an optimum at a limit, simulated.

    python -m tests.benchmarks.limits --json [--runs N] [--studies N]

One JSON object a line: case, value, asked ([least, most]), ok. Exit code 1 if a case fails. The cases call the
product's functions; windows are simulated.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from autotune.measure.statistics import halves_differ, percentiles, relative_half_width
from autotune.records import Config
from autotune.search.launch_aware import LaunchAware
from autotune.search.strategy import Limits, Measured, Observation, Stop
from autotune.space.space import Space

Floats = npt.NDArray[np.float64]
Case = tuple[str, float, float, float]
BLOCKS = (30, 60, 90)
LEVEL = 0.95


def blocks(rng: np.random.Generator, n: int, correlation: float, spread: float = 0.05) -> Floats:
    """(n,) tokens of blocks around 1000, stationary, first-order autoregressive."""
    noise = rng.normal(size=n)
    for i in range(1, n):
        noise[i] = correlation * noise[i - 1] + math.sqrt(1 - correlation ** 2) * noise[i]
    return np.asarray(1000 * (1 + spread * noise))


def coverage(runs: int) -> Iterator[Case]:
    """Share of windows whose 95 % interval holds the true speed."""
    for correlation in (0.0, 0.3, 0.5, 0.8):
        for n in BLOCKS:
            rng, held = np.random.default_rng(1), 0
            for _ in range(runs):
                found = blocks(rng, n, correlation)
                half = relative_half_width(found.tolist(), [1.0] * n)
                held += half is not None and abs(found.mean() - 1000) <= half * found.mean()
            yield f"coverage: {n} blocks, AR {correlation:g}", held / runs, LEVEL - 0.02, LEVEL + 0.02


def steadiness(runs: int) -> Iterator[Case]:
    """Share of windows called drifted: a climb from 85 % with a time constant of 30 s, begun 7 s before; none."""
    rng = np.random.default_rng(2)
    climb = 1 - 0.15 * np.exp(-(7 + np.arange(30)) / 30)
    for spread in (0.01, 0.02):
        found = sum(halves_differ((climb * blocks(rng, 30, 0.0, spread)).tolist(), [1.0] * 30, 0.025)
                    for _ in range(runs))
        yield f"drifted: climb at {spread:.0%} noise", found / runs, 0.9, 1.0
    for correlation in (0.0, 0.3, 0.5, 0.8):
        found = sum(halves_differ(blocks(rng, 60, correlation, 0.02).tolist(), [1.0] * 60, 0.025) for _ in range(runs))
        yield f"drifted: steady, AR {correlation:g}", found / runs, 0.0, 0.03


def errors(runs: int) -> Iterator[Case]:
    """Mean stated error of a percentile over its true spread between windows."""
    for n in (60, 300, 1000):
        rng = np.random.default_rng(3)
        found = [w for _ in range(min(runs, 400)) if (w := percentiles(rng.lognormal(0, 0.1, n))) is not None]
        for name in ("p50", "p95", "p99"):
            values = np.array([getattr(w, name) for w in found])
            stated = float(np.mean([w.errors[name] for w in found]))
            yield f"error of {name}: {n} requests", stated / float(values.std() / values.mean()), 0.75, 1.25


SERVERS = {"a": [0, 1, 2, 3], "b": [0, 1, 2]}
CONCURRENCY = {1: (0.3, 0.3), 8: (0.7, 0.5), 32: (1.0, 1.0), 64: (1.2, 1.6)}  # factors of the objective, p99 / limit
OPTIMUM, RIVAL = 0.97, 1.03  # p99 / limit


def truth(config: Config) -> tuple[float, float]:
    """(objective, p99 / limit): the optimum is a=2, the rival a=3 with 5 % more, both with b=2 at concurrency 32."""
    gain, ratio = CONCURRENCY[int(config["concurrency"])]
    a, b = int(config["a"]), int(config["b"])
    return (10 * gain * 1.05 ** a * 1.04 ** b,
            ratio * (RIVAL if a == 3 else OPTIMUM) * (1 if a in (2, 3) else 0.9) * (1 if b == 2 else 0.9))


def study(seed: int, error: float) -> tuple[Config | None, int]:
    """(reported best, windows) of a search of 20 launches whose p99 has this standard error."""
    space = Space.parse({"name": "limit", "engine": "table", "params": {
        **{name: {"choices": choices} for name, choices in SERVERS.items()},
        "concurrency": {"choices": list(CONCURRENCY), "load": True}},
        "baseline": {"a": 0, "b": 0, "concurrency": 8}}, where="limit")
    strategy, rng, windows = LaunchAware(space, Limits(20, None, 0.01), seed), np.random.default_rng(seed), 0
    while not isinstance(step := strategy.propose(), Stop):
        first = True
        while (load := strategy.next_load(step.server)) is not None:
            value, ratio = truth({**step.server, **load})
            seen, windows = ratio * math.exp(rng.normal(0, error)), windows + 1
            strategy.tell(Observation(step.server, load, Measured(
                value * math.exp(rng.normal(0, 0.01)), seen <= 1, {"ttft_p99_ms": seen}, 0.01,
                {"ttft_p99_ms": error * seen}), 400.0 if first else 40.0, 360.0 if first else 0.0))
            first = False
    best = strategy.best()
    return None if best is None else {**best.server, **best.load}, windows


def studies(runs: int) -> Iterator[Case]:
    """Studies whose best configuration keeps its limit by 3 %, with a rival that breaks it by 3 %."""
    every = [{"a": a, "b": b, "concurrency": c} for a in SERVERS["a"] for b in SERVERS["b"] for c in CONCURRENCY]
    top = max(value for value, ratio in map(truth, every) if ratio <= 1)
    for error in (0.035, 0.07):
        found = [study(seed, error) for seed in range(runs)]
        broken = sum(best is not None and truth(best)[1] > 1 for best, _ in found)
        good = sum(best is not None and truth(best)[1] <= 1 and truth(best)[0] >= 0.95 * top for best, _ in found)
        case = f"p99 error of {error:.1%}, {runs} studies"
        yield f"{case}: best that breaks its limit", broken, 0, 0.025 * runs
        yield f"{case}: share that reached 95 %", good / runs, 0.9, 1.0
        yield f"{case}: windows (median)", float(np.median([windows for _, windows in found])), 1, math.inf


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line (the only format)")
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--studies", type=int, default=200)
    args = parser.parse_args(argv)
    failed = False
    for case, value, least, most in (case for cases in (coverage(args.runs), steadiness(args.runs), errors(args.runs),
                                                        studies(args.studies)) for case in cases):
        ok = least <= value <= most
        failed |= not ok
        print(json.dumps({"case": case, "value": round(value, 4), "asked": [least, min(most, 1e9)], "ok": bool(ok)}),
              flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
