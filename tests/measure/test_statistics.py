"""Intervals of a ratio from dependent blocks."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from autotune.measure.statistics import halves_differ, percentiles, relative_half_width, student_t, student_t_cdf
from tests.benchmarks import limits


@pytest.mark.parametrize(("p", "freedom", "t"), [
    (0.975, 1, 12.7062), (0.975, 2, 4.3027), (0.95, 3, 2.3534), (0.975, 5, 2.5706), (0.995, 10, 3.1693),
    (0.975, 30, 2.0423), (0.975, 120, 1.9799)])
def test_students_t_is_that_of_the_tables(p: float, freedom: int, t: float) -> None:
    assert student_t(p, freedom) == pytest.approx(t, abs=1e-4)
    assert student_t_cdf(t, freedom) == pytest.approx(p, abs=1e-4)
    assert student_t_cdf(-t, freedom) == pytest.approx(1 - p, abs=1e-4)


def coverage(correlation: float, blocks: int, studies: int = 400) -> float:
    hits = 0
    for seed in range(studies):
        rng = random.Random(seed)
        noise = rng.gauss(0, 1) / (1 - correlation ** 2) ** 0.5
        tokens, joules = [], []
        for _ in range(blocks):
            noise = correlation * noise + rng.gauss(0, 1)
            joules.append(100 + rng.gauss(0, 5))
            tokens.append(joules[-1] * 2 + noise)
        half = relative_half_width(tokens, joules)
        assert half is not None
        hits += abs(sum(tokens) / sum(joules) / 2 - 1) <= half
    return hits / studies


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6])
def test_the_interval_covers_the_truth_also_when_blocks_are_correlated(correlation: float) -> None:
    assert coverage(correlation, 60) >= 0.92


def test_the_interval_allows_for_correlation_and_does_not_waste_what_is_independent() -> None:
    rng = random.Random(1)
    noise = [rng.gauss(0, 1) for _ in range(64)]
    waves = [sum(noise[max(0, i - 7):i + 1]) for i in range(64)]
    apart = relative_half_width([100 + n for n in noise], [1.0] * 64)
    together = relative_half_width([100 + w for w in waves], [1.0] * 64)
    assert apart and together and together > 4 * apart and apart < 0.006


def test_nothing_is_claimed_from_too_little() -> None:
    assert relative_half_width([1.0] * 7, [1.0] * 7) is None
    assert relative_half_width([0.0] * 9, [1.0] * 9) is None
    assert relative_half_width([1.0] * 9, [0.0] * 9) is None
    assert relative_half_width([1.0] * 9, [1.0] * 9) == 0.0


def test_the_errors_of_percentiles_are_their_spread_from_window_to_window() -> None:
    rng = np.random.default_rng(3)
    windows = [percentiles(rng.lognormal(0, 0.2, 400)) for _ in range(150)]
    found = [w for w in windows if w is not None]
    for name in ("p50", "p90", "p95", "p99", "mean"):
        spread = float(np.std([getattr(w, name) for w in found]) / np.mean([getattr(w, name) for w in found]))
        assert float(np.mean([w.errors[name] for w in found])) == pytest.approx(spread, rel=0.3), name
    assert (alone := percentiles([1.0])) is not None and alone.errors == {}


def test_a_speed_that_climbs_through_the_window_is_told_from_noise() -> None:
    rng = np.random.default_rng(4)
    climb = [(1 - 0.15 * np.exp(-(7 + i) / 30)) * (1 + 0.01 * rng.normal()) for i in range(30)]
    level = [1 + 0.05 * rng.normal() for _ in range(30)]
    assert halves_differ(climb, [1.0] * 30, 0.025) and not halves_differ(level, [1.0] * 30, 0.025)
    assert not halves_differ(climb[:10], [1.0] * 10, 0.025)


def test_the_program_of_the_limits_prints_one_case_a_line_and_fails_with_a_case(
        capsys: pytest.CaptureFixture[str]) -> None:
    code = limits.main(["--json", "--runs", "20", "--studies", "1"])
    cases = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"case", "value", "asked", "ok"} == set(cases[0]) and code == int(not all(case["ok"] for case in cases))
