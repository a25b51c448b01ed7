"""What is believed of the objective before anything is measured here: the space's beliefs, and past studies.

    prior = Prior(grid, past)
    prior.mean(rows)                # (n, L) log of the factor against the baseline's choices

`belief` of a space gives a choice a range of factors: its middle (of the logs) is the prior mean of the choice's
effect, a third of its width the standard deviation. A choice without one is expected a little below the baseline's,
since baselines are chosen with sense. Past studies predict effects too; how far they are trusted is `trust`, which
`ValueModel.strengths` sets by the marginal likelihood of what was measured here.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autotune.records import Value
from autotune.search.grid import Codes, Grid
from autotune.space.space import Param

Floats = NDArray[np.float64]

DOWN = 0.03  # how far (in logs) a choice without a belief is expected below the baseline's
SIGMAS = 3.29  # a range is taken to be 90 % of a normal distribution
USUAL_SD = 0.15  # sd of an effect without a belief (the root mean square of value.STRENGTHS)
NARROW = 0.2  # the least sd of a believed effect, as a share of the usual one
TRUST = (0.0, 0.25, 0.5, 0.75, 1.0)


class PastValues(Protocol):
    """Effects predicted by past studies."""

    def effects(self, rows: Codes) -> Floats:
        """(n, L) log objective, up to a constant."""


class Prior:
    """Prior mean of the log objective, and how sure it is of each choice."""

    def __init__(self, grid: Grid, past: PastValues | None = None) -> None:
        self.grid, self.past = grid, past
        self.trust = 0.5 if past is not None else 0.0
        """Share of the past studies' prediction in the mean."""
        believed = [_believed(grid, p, DOWN) for p in grid.server_params]
        self.means = [mean for mean, _ in believed]
        self.scales = [scale for _, scale in believed]
        """Per server parameter (choices + 1,): sd of a believed effect over the usual one, 1 without a belief."""
        tables = [_believed(grid, p, 0.0)[0] for p in grid.load_params]
        self.loads = np.sum([t[grid.load_rows[:, i]] for i, t in enumerate(tables)], axis=0) + np.zeros(
            len(grid.load_rows))

    def mean(self, rows: Codes) -> Floats:
        """(n, L) log factor against the baseline."""
        return self.mixed(rows, self.trust)

    def mixed(self, rows: Codes, trust: float) -> Floats:
        """The same when past studies are trusted by `trust` in 0..1."""
        own = np.sum([means[rows[:, i]] for i, means in enumerate(self.means)], axis=0) + np.zeros(len(rows))
        believed: Floats = own[:, None] + self.loads[None, :]
        if self.past is None or trust == 0:
            return believed
        return trust * self.past.effects(rows) + (1 - trust) * believed


def _believed(grid: Grid, param: Param, down: float) -> tuple[Floats, Floats]:
    """(choices + 1,) mean and scale of the log factor of each choice against the baseline's; the last is `absent`."""
    belief = grid.space.belief.get(param.name, {})
    usual = grid.space.baseline.get(param.name)
    mean, scale = np.full(len(param.choices) + 1, -down), np.ones(len(param.choices) + 1)
    for i, choice in enumerate((*param.choices, None)):
        if _same(choice, usual):
            mean[i] = 0.0
        for other, (low, high) in belief.items():
            if choice is not None and _same(choice, other):
                mean[i] = (math.log(low) + math.log(high)) / 2
                scale[i] = max(NARROW, math.log(high / low) / SIGMAS / USUAL_SD)
    return mean, scale


def _same(a: Value | None, b: Value | None) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)
