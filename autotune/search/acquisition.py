"""What each launch still open promises: chance, gain, cost, and their ratio.

Gains are natural logs of the objective's ratio to the best so far: for small ones the share by which it improves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autotune.search.crash_model import CrashModel
from autotune.search.grid import Codes, Grid
from autotune.search.observations import Key, Memory
from autotune.search.value_model import Posterior, expected_improvement, normal_cdf

Floats = NDArray[np.float64]
Belief = tuple[float, Posterior]
"""A value model and its weight."""

BLIND_GAIN = 0.1  # expected gain of a launch while nothing was measured
SURVIVED = 0.05  # chance to survive a load part up to which nothing is hoped of it
UPPER = 1.64  # sds above the mean that are still plausible (the 95 % quantile)
CRASH_WEIGHT = 0.5  # a crash costs at least this share of a whole launch: it may be over sooner, but it teaches less
UNTRIED = 0.99  # chance to meet no new cause below which a past study is asked
DEFAULT_LAUNCH_S = 300.0
DEFAULT_MEASURE_S = 30.0
USUAL_LOADS = 2  # load parts measured on a launch, for its cost


class PastChance(Protocol):
    """Chances foretold by past studies."""

    def chance(self, rows: Codes) -> Floats:
        """(n,) that each server part comes up."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """Expected seconds of a launch that comes up, of one that crashes, of a measurement."""

    launch_s: float
    crash_s: float
    measure_s: float

    @classmethod
    def of(cls, memory: Memory) -> Costs:
        launch_s = float(np.mean(memory.launch_s)) if memory.launch_s else DEFAULT_LAUNCH_S
        crash_s = (sum(memory.crash_s) + 0.5 * launch_s) / (len(memory.crash_s) + 1)
        measure_s = float(np.mean(memory.measure_s)) if memory.measure_s else DEFAULT_MEASURE_S
        return cls(launch_s, crash_s, measure_s)


@dataclasses.dataclass(frozen=True)
class Outlook:
    """Over n server parts and L load parts; what was measured or has crashed promises nothing."""

    rows: Codes  # (n, P)
    chance: Floats  # (n,) that the launch comes up
    serving: Floats  # (n,) that it then survives, under the kindest load part that may gain anything
    gains: Floats  # (n, L) expected gain of measuring there on the live server
    gain: Floats  # (n,) of the best load part
    upper: Floats  # (n,) plausible gain, at the 95 % quantile; none where hardly a load part would be survived
    upper_served: Floats  # (n,) the same if every load part were survived
    cost_s: Floats  # (n,)

    @property
    def expected(self) -> Floats:
        """(n,) expected gain of a launch, crashes counted."""
        return self.gain * self.chance


def look(grid: Grid, memory: Memory, beliefs: Sequence[Belief], crashes: CrashModel, rows: Codes,
         best: float | None, busy: AbstractSet[Key], past: tuple[PastChance, float] | None = None) -> Outlook:
    """`best` is the log objective of the best so far, None while nothing feasible was measured.

    beliefs: value models and their weights, none before the first measurement; past: the chances that past studies
    foretell, and how far they are trusted.
    """
    allowed = grid.allowed(rows)
    serving = crashes.chance_serving(rows) * allowed
    if not beliefs:
        gains = upper = np.full(serving.shape, BLIND_GAIN)
    else:
        level = best if best is not None else beliefs[0][1].level - 1.0
        gains, upper = np.zeros((2, *serving.shape))
        for weight, posterior in beliefs:
            seen = posterior.predict(rows)
            some = weight * expected_improvement(seen.mean, seen.sd, level)
            high = np.maximum(seen.mean + UPPER * seen.sd - level, 0.0)
            for ratio in seen.ratios:
                some = some * normal_cdf(-ratio / seen.sd)
                high = high * (ratio < UPPER * seen.sd)
            gains, upper = gains + some, np.maximum(upper, high)
    gains, upper = gains * serving, upper * allowed
    for i, key in enumerate(map(tuple, rows.tolist())):
        server = memory.servers.get(key)
        if key in busy or (server is not None and memory.dead(server)):
            gains[i] = upper[i] = 0.0
        elif server is not None:
            gone = sorted(memory.settled(server))
            gains[i, gone] = upper[i, gone] = 0.0
    costs = Costs.of(memory)
    chance = crashes.chance(rows)
    if past is not None:
        unseen = crashes.unseen(rows)
        told = np.where(unseen < UNTRIED, past[0].chance(rows), unseen)
        chance = chance * (told / unseen) ** past[1]
    crash_s = CRASH_WEIGHT * costs.launch_s + (1 - CRASH_WEIGHT) * costs.crash_s
    cost_s = chance * (costs.launch_s + USUAL_LOADS * costs.measure_s) + (1 - chance) * crash_s
    survived, hopeful = upper * (serving > SURVIVED), serving * (upper > 0)
    return Outlook(rows, chance, hopeful.max(axis=1), gains, gains.max(axis=1), survived.max(axis=1), upper.max(axis=1),
                   cost_s)
