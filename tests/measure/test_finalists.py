"""Confirmation by interleaved blocks. Error rates and power over many studies: `python -m tests.benchmarks.confirm`."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable

import pytest

from autotune.measure.finalists import BASELINE, Block, Confirmation, Finalist
from autotune.records import UsageError
from tests.benchmarks.confirm import AA, LOAD, LOAD_ONLY, OTHER, POWER, SETTINGS, Study

FEW = dataclasses.replace(SETTINGS, min_rounds=2)
NOISE = (1.0, 1.002, 0.998, 1.001)


def started(*finalists: str | Finalist, rounds: int = 4) -> Confirmation:
    return Confirmation([f if isinstance(f, Finalist) else Finalist(f, LOAD) for f in finalists], LOAD, FEW, rounds)


def fed(test: Confirmation, **blocks: Block | Iterable[Block]) -> list[str]:
    """Feed a server's blocks (one: always the same) until the decision; the servers launched, in order."""
    sources = {key: (iter(block) if not isinstance(block, Block) else None) for key, block in blocks.items()}
    order = []
    while (slot := test.next()) is not None:
        source, same = sources[slot[1]], blocks[slot[1]]
        test.add(same if source is None else next(source))  # type: ignore[arg-type]
        order.append(slot[1])
    return order


def values(value: float, factor: float = 1.0, other: float | None = None) -> list[Block]:
    """Blocks of a server with a little noise, also under another load."""
    return [Block({LOAD: value * n**factor, **({} if other is None else {OTHER: other * n**factor})}) for n in NOISE]


@pytest.mark.parametrize("case", ["two finalists", "one of two has four times the noise", "drift of 5 %",
                                  "another load gives nothing"])
def test_when_all_are_equal_at_most_5_of_100_studies_report_a_winner(case: str) -> None:
    assert sum(AA[case].run(seed).winner is not None for seed in range(100)) <= 5


@pytest.mark.parametrize("case", POWER)
def test_a_gain_of_3_percent_at_1_percent_noise_is_confirmed_in_94_of_100_studies(case: str) -> None:
    best = str(len(POWER[case].gains) - 1)
    decisions = [POWER[case].run(1000 + seed) for seed in range(100)]
    assert sum(d.state == "confirmed" and d.winner == best for d in decisions) >= 94
    found = [d.gains[best].server for d in decisions]
    assert sum(g.gain or 0.0 for g in found) / 100 == pytest.approx(0.03, abs=0.005)
    assert sum((g.low or 0.0) <= 0.03 <= (g.high or 0.0) for g in found) >= 94


def test_a_worse_finalist_never_wins_and_ends_early() -> None:
    decisions = [Study([math.log(0.95)]).run(seed) for seed in range(100)]
    assert Counter(d.state for d in decisions) == {"no_improvement": 100}
    assert sum(d.rounds for d in decisions) < 500


def test_blocks_are_interleaved_forwards_and_backwards() -> None:
    test, order = started("1", "2"), []
    for value in range(9):
        slot = test.next()
        assert slot is not None
        order.append(slot[1])
        test.add(Block({LOAD: 10.0 + 0.1 * (value % 3)}))
    assert order == [BASELINE, "1", "2", "2", "1", BASELINE, BASELINE, "1", "2"]


@pytest.mark.parametrize("seed", range(20))
def test_a_study_interrupted_at_any_block_ends_as_it_would_have(seed: int) -> None:
    whole, resumed = Study([0.0, math.log(1.02)], bad=0.2).interrupted(seed)
    assert whole == resumed


def test_server_and_load_are_told_apart() -> None:
    test = started(Finalist("3", OTHER), Finalist(LOAD_ONLY, OTHER, own_server=False))
    fed(test, baseline=values(10.0, other=20.0), **{"3": values(9.0, -1, other=22.0)})
    gains = test.decision().gains["3"]
    assert test.decision().winner == "3" and "under the same load" in test.decision().reason
    assert gains.server.gain == pytest.approx(0.1, abs=0.01)
    assert gains.server_before.gain == pytest.approx(-0.1, abs=0.01)
    assert gains.load.gain == pytest.approx(1.0, abs=0.01) and gains.both.gain == pytest.approx(1.2, abs=0.01)


def test_a_gain_that_is_all_of_the_load_keeps_the_baselines_server() -> None:
    test = started(Finalist("3", OTHER), Finalist(LOAD_ONLY, OTHER, own_server=False))
    fed(test, baseline=values(10.0, other=20.0), **{"3": values(10.0, -1, other=20.02)})
    assert test.decision().winner == LOAD_ONLY and "the load gives" in test.decision().reason


def test_a_load_under_which_the_baseline_breaks_a_limit_does_not_win() -> None:
    test = started(Finalist(LOAD_ONLY, OTHER, own_server=False))
    fed(test, baseline=[block._replace(over={OTHER}) for block in values(10.0, other=20.0)])
    assert test.decision().winner is None and test.decision().gains[LOAD_ONLY].verdict == "failed"


def test_a_crash_is_made_again_once_a_signature() -> None:
    test = started("1")
    good = values(12.0, -1)
    order = fed(test, baseline=values(10.0), **{"1": [Block({}, crash="a"), *good]})
    assert order[:3] == [BASELINE, "1", "1"] and test.decision().winner == "1"
    assert test.decision().gains["1"].bad == 0


def test_one_bad_block_of_four_does_not_lose_a_finalist() -> None:
    blocks = values(13.0, -1)
    blocks[1] = blocks[1]._replace(over={LOAD})
    test = started("1")
    fed(test, baseline=values(10.0), **{"1": blocks})
    assert test.decision().winner == "1"


def test_a_finalist_goes_when_more_than_half_of_at_least_four_blocks_are_bad() -> None:
    test = started("1", rounds=10)
    order = fed(test, baseline=Block({LOAD: 10.0}), **{"1": [
        Block({LOAD: 13.0}, over={LOAD})] * 4})
    assert order.count("1") == 4 and test.decision().gains["1"].verdict == "failed"
    assert test.decision().state == "no_improvement"


def test_a_baseline_over_its_limit_is_still_compared() -> None:
    test = started("1")
    fed(test, baseline=[block._replace(over={LOAD}) for block in values(10.0)], **{"1": values(12.0, -1)})
    assert test.decision().winner == "1"


def test_a_baseline_that_fails_three_times_in_a_row_ends_it() -> None:
    crash, good = Block({}, crash="a"), values(10.0)
    test = started("1")
    fed(test, baseline=[crash, crash, *good], **{"1": values(12.0, -1)})
    assert test.decision().winner == "1"
    test = started("1")
    assert fed(test, baseline=crash) == [BASELINE] * 3
    assert test.decision().state == "failed" and "the baseline failed 3 times" in test.decision().reason


def test_a_disturbed_block_is_made_again_and_says_nothing_against_a_finalist() -> None:
    disturbed, blocks = Block({LOAD: 5.0}, disturbed=True), values(12.0, -1)
    test = started("1")
    order = fed(test, baseline=values(10.0), **{"1": [disturbed, disturbed, disturbed, *blocks]})
    assert order[:4] == [BASELINE, "1", "1", "1"]
    assert test.decision().winner == "1" and test.decision().gains["1"].bad == 0


def test_blocks_of_two_machines_are_never_paired() -> None:
    test = started("1")
    fed(test, baseline=[b._replace(machine="a") for b in values(10.0)],
        **{"1": [b._replace(machine="b") for b in values(12.0)]})
    assert test.decision().winner is None and test.decision().gains["1"].server.gain is None


def test_a_used_up_budget_decides_what_is_shown() -> None:
    for value, winner in ((12.0, "1"), (10.0, None)):
        test = started("1", "2", rounds=10)
        for block in (*zip(values(10.0), values(value, -1), values(9.9), strict=True),):
            if test.rounds < 3:
                for one in (block if test.rounds % 2 == 0 else block[::-1]):
                    if test.next() is not None:
                        test.add(one)
        test.stop("all 20 launches are used")
        assert test.decision().winner == winner
        assert winner or test.decision().reason == "all 20 launches are used"


def test_a_finalist_that_the_winner_does_not_beat_is_called_tied() -> None:
    test = started("1", "2")
    fed(test, baseline=values(10.0), **{"1": values(12.0, -1), "2": values(11.99, -2)})
    gains = test.decision().gains
    assert test.decision().winner == "1" and gains["2"].tied and not gains["1"].tied


def test_the_plan_follows_from_the_launches_that_are_left() -> None:
    assert SETTINGS.plan(5, 14) == (2, 4) and SETTINGS.plan(1, 14) == (1, 7)
    assert SETTINGS.plan(5, 8) == (1, 4) and SETTINGS.plan(5, 5) == (0, 5) and SETTINGS.plan(5, 2) == (0, 0)
    assert SETTINGS.plan(5, None) == (2, SETTINGS.max_rounds)
    assert (SETTINGS.reserve(40), SETTINGS.reserve(16), SETTINGS.reserve(10), SETTINGS.reserve(None)) == (14, 6, 0, 0)
    assert dataclasses.replace(SETTINGS, launches=4).reserve(10) == 4


def test_finalists_of_one_name_and_rounds_out_of_order_are_refused() -> None:
    with pytest.raises(UsageError, match="named once"):
        started("1", "1")
    with pytest.raises(UsageError, match="min_rounds=9 is above"):
        dataclasses.replace(SETTINGS, min_rounds=9, max_rounds=8)
    assert started().next() is None and started().decision().state == "no_improvement"
