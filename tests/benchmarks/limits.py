"""Errors of percentiles, coverage of a window's interval, and steadiness, on simulated windows of known truth.

    python -m tests.benchmarks.limits --json [--runs N]

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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line (the only format)")
    parser.add_argument("--runs", type=int, default=2000)
    args = parser.parse_args(argv)
    failed = False
    for cases in (coverage, steadiness, errors):
        for case, value, least, most in cases(args.runs):
            ok = least <= value <= most
            failed |= not ok
            print(json.dumps({"case": case, "value": round(value, 4), "asked": [least, most], "ok": bool(ok)}),
                  flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
