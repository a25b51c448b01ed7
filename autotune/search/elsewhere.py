"""What launches that are pending elsewhere mean for the next one: they count as neither success nor failure.

Their server parts are not launched again (`outlook.look`). What they will tell is not told twice: choices that one of
them tries for the first time are left alone meanwhile, and where they will be measured the value model expects what it
believes anyway, only surer (Desautels et al., "Parallelizing exploration-exploitation tradeoffs with Gaussian process
bandit optimization", 2014), so that launches side by side look at different things.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.search.crashes import CrashModel
from autotune.search.grid import Codes
from autotune.search.memory import NOISE, Key
from autotune.search.value import Data, Floats, Posterior


def apart(crashes: CrashModel, rows: Codes, worth: Floats, busy: Sequence[Key], baseline: Key,
          least: float) -> tuple[NDArray[np.intp], Floats]:
    """(n,) choices of each row that never came up, and (n,) worth without what pending launches try for the first time.

    A pending baseline is taken to come up. Where nothing else is worth `least`, nothing is left alone.
    """
    familiar = [column.copy() for column in crashes.seen]
    for column, (param, seen) in enumerate(zip(crashes.grid.server_params, familiar, strict=True)):
        if baseline in busy:
            seen[baseline[column]] = True
        seen[len(param.choices)] = True
        if param.when and not seen[:-1].any():
            seen[:] = True  # it only comes with another choice that is new
    new = np.stack([~seen[rows[:, column]] for column, seen in enumerate(familiar)], axis=1).sum(axis=1)
    tested = np.zeros(len(rows), dtype=bool)
    for key in busy:
        for column, code in enumerate(key):
            if not familiar[column][code]:
                tested |= rows[:, column] == code
    if (worth[~tested] >= least).any():
        worth = np.where(tested, 0.0, worth)
    return new, worth


def expected(data: Data, belief: Posterior, rows: Codes, loads: Sequence[int]) -> Data:
    """The measurements with those that are pending, at what is believed of them: means stay, spreads shrink."""
    seen = belief.predict(rows)
    at = np.arange(len(rows)), np.array(loads, dtype=np.intp)
    y = np.stack([seen.mean[at], *(ratio[at] for ratio in seen.ratios)], axis=1)
    return Data(np.concatenate([data.rows, rows]), np.concatenate([data.loads, at[1]]),
                np.concatenate([data.y, y.reshape(len(rows), data.y.shape[1])]),
                np.concatenate([data.noise, np.full(len(rows), NOISE)]))
