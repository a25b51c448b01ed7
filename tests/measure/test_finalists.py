"""Confirmation by interleaved blocks: simulated studies with known truth."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter

import pytest
import yaml

from autotune.config.compose import data_folder
from autotune.measure.finalists import Confirmation, ConfirmSettings, Decision
from autotune.records import UsageError

SETTINGS = ConfirmSettings(**yaml.safe_load((data_folder("conf") / "study" / "default.yaml").read_text())["confirm"])


def study(seed: int, gains: list[float], noise: float = 0.01, drift: float = 0.0) -> Decision:
    rng = random.Random(seed)
    truth = {"base": 0.0} | {f"f{i}": gain for i, gain in enumerate(gains)}
    confirmation, blocks = Confirmation("base", list(truth)[1:], SETTINGS), 0
    while (key := confirmation.next()) is not None:
        blocks += 1
        confirmation.add(key, 40 * (1 + truth[key]) * math.exp(rng.gauss(0, noise) + drift * blocks))
    return confirmation.decision()


@pytest.mark.parametrize("finalists", [1, 3, 5])
@pytest.mark.parametrize("drift", [0.0, 0.001])
def test_when_all_are_equal_at_most_5_of_100_studies_report_a_winner(finalists: int, drift: float) -> None:
    winners = sum(study(seed, [0.0] * finalists, drift=drift).winner is not None for seed in range(100))
    assert winners <= 5


@pytest.mark.parametrize("gains", [[0.03], [0.0, 0.03], [-0.02, 0.03, 0.0]])
def test_a_gain_of_3_percent_at_1_percent_noise_is_confirmed_in_95_of_100_studies(gains: list[float]) -> None:
    best = f"f{gains.index(0.03)}"
    decisions = [study(1000 + seed, gains) for seed in range(100)]
    assert sum(d.state == "confirmed" and d.winner == best for d in decisions) >= 95
    found = [d.gains[best].gain or 0.0 for d in decisions]
    assert sum(found) / 100 == pytest.approx(0.03, abs=0.005)
    covered = sum((d.gains[best].low or 0.0) <= 0.03 <= (d.gains[best].high or 0.0) for d in decisions)
    assert covered >= 95


def test_a_worse_finalist_never_wins_and_ends_early() -> None:
    decisions = [study(seed, [-0.05]) for seed in range(100)]
    assert Counter(d.state for d in decisions) == {"no_improvement": 100}
    assert sum(d.rounds for d in decisions) < 500


def test_blocks_are_interleaved_forwards_and_backwards() -> None:
    confirmation, order = Confirmation("A", ["B", "C"], SETTINGS), []
    for value in range(9):
        key = confirmation.next()
        assert key is not None
        order.append(key)
        confirmation.add(key, 10.0 + 0.1 * (value % 3))
    assert "".join(order) == "ABCCBAABC"


def test_a_study_can_be_taken_up_again_from_its_blocks() -> None:
    rng = random.Random(3)
    first, blocks = Confirmation("A", ["B"], SETTINGS), []
    for _ in range(5):
        key = first.next()
        assert key is not None
        blocks.append((key, 10 + rng.random()))
        first.add(*blocks[-1])
    second = Confirmation("A", ["B"], SETTINGS)
    for block in blocks:
        second.add(*block)
    assert second.next() == first.next() and second.decision() == first.decision()


def test_a_finalist_that_fails_is_out_and_a_baseline_that_fails_twice_ends_it() -> None:
    confirmation = Confirmation("A", ["B", "C"], SETTINGS)
    confirmation.add("A", 1.0)
    confirmation.add("B", None)
    assert confirmation.next() == "C" and confirmation.live == ("C",)
    assert confirmation.decision().gains["B"].verdict == "failed"
    confirmation.add("C", None)
    assert confirmation.next() is None and confirmation.decision().state == "no_improvement"
    other = Confirmation("A", ["B"], SETTINGS)
    other.add("A", None)
    assert other.next() == "A"
    other.add("A", None)
    assert other.next() is None and other.decision().state == "failed" and "baseline" in other.decision().reason
    none = Confirmation("A", [], SETTINGS)
    assert none.next() is None and none.decision().state == "no_improvement"


def test_the_wrong_block_and_impossible_values_are_refused() -> None:
    confirmation = Confirmation("A", ["B"], SETTINGS)
    for key, value in (("B", 1.0), ("A", 0.0), ("A", math.nan)):
        with pytest.raises(UsageError):
            confirmation.add(key, value)
    with pytest.raises(UsageError):
        Confirmation("A", ["A"], SETTINGS)
    with pytest.raises(UsageError, match="min_rounds=9 is above"):
        dataclasses.replace(SETTINGS, min_rounds=9, max_rounds=8)
