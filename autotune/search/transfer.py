"""Past studies of other hosts, models or versions as belief, discounted by how badly they predict.

    past = Past(grid, observations)
    past.effects(rows)             # predicted log objective, up to a constant
    past.chance(rows)              # predicted chance to come up

What a past study says of parameters and choices that this space does not have is left out; a parameter that it did not
have is taken to be the baseline's. `Prior.trust` and `trust_in_crashes` say how much of it counts here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from autotune.records import UsageError
from autotune.search.crash_model import CrashModel
from autotune.search.grid import Codes, Grid
from autotune.search.observations import Memory
from autotune.search.prior import Floats, Prior
from autotune.search.protocol import Observation
from autotune.search.value_model import Data, Posterior, ValueModel

WRONG = 3.0
"""A launch that a past study foretold wrongly counts as much against it as this many right ones for it."""


class Past:
    """Models fitted to past observations, on the grid of the present space."""

    def __init__(self, grid: Grid, observations: Sequence[Observation]) -> None:
        memory = Memory(grid)
        self.told, self.used = len(observations), 0
        for observation in observations:
            fitting = _fitting(grid, observation)
            if fitting is not None:
                memory.add(fitting)
                self.used += 1
        data = memory.measurements()
        self._posterior: Posterior | None = None
        if len(data.rows):
            model = ValueModel(grid, Prior(grid))
            self._posterior = model.fit(data, model.strengths(data)[0][1])
        self._crashes = CrashModel(grid, memory.passed(), memory.served(), memory.evidence())
        self._known = bool(memory.servers)
        self._shape = len(grid.load_rows)

    def effects(self, rows: Codes) -> Floats:
        """(n, L) log objective, up to a constant."""
        if self._posterior is None:
            return np.zeros((len(rows), self._shape))
        return self._posterior.predict(rows).mean

    def chance(self, rows: Codes) -> Floats:
        """(n,) chance that each server part came up there."""
        return self._crashes.chance(rows) if self._known else np.ones(len(rows))

    def trust_in_crashes(self, passed: Codes, crashed: Codes) -> float:
        """Share in 0..1 of its chances that counts here, by how it foretold what came up and what crashed."""
        if not self._known:
            return 0.0
        right = float((self.chance(passed) > 0.5).sum() + (self.chance(crashed) <= 0.5).sum())
        wrong = len(passed) + len(crashed) - right
        return (1 + right) / (2 + right + WRONG * wrong)

    def error(self, data: Data) -> float | None:
        """Root mean square of how far its effects were off, in logs; None below two measurements."""
        if self._posterior is None or len(data.rows) < 2:
            return None
        off = data.y[:, 0] - self.effects(data.rows)[np.arange(len(data.rows)), data.loads]
        return float(np.sqrt(np.mean((off - off.mean()) ** 2)))


def report(past: Past, prior: Prior, data: Data, trust_in_crashes: float) -> str:
    """One line on what past studies were worth."""
    error = past.error(data)
    told = f"warm start: {past.used} of {past.told} past observations fit this space"
    if error is None:
        return f"{told}; nothing was measured here to hold them against"
    return (f"{told}; their effects were off by {math.expm1(error):.0%} (root mean square of {len(data.rows)} "
            f"configurations measured here), so they count {prior.trust:.0%} in the value model and "
            f"{trust_in_crashes:.0%} in the crash model")


def _fitting(grid: Grid, observation: Observation) -> Observation | None:
    """The observation in terms of the present space; None when it has no place in it."""
    space = grid.space
    full = {**observation.server, **(observation.load or {})}
    known = {p.name for p in space.params}
    config = {k: v for k, v in full.items() if k in known}
    for param in space.params:
        if param.name not in config and param.name in space.baseline and space.active(param, config):
            config[param.name] = space.baseline[param.name]
    try:
        server, load = space.split(space.check(config))
        if observation.load is not None:
            grid.load_index(load)
    except (UsageError, KeyError):
        return None
    return dataclasses.replace(observation, server=server, load=load if observation.load is not None else None)
