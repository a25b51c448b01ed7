"""What launches that are pending elsewhere mean for the next one: they count as neither success nor failure.

Their server parts are not launched again (`outlook.look`). What they will tell is not told twice: choices that one of
them tries for the first time are left alone meanwhile, and where they will be measured the value model expects what it
believes anyway, only surer (Desautels et al., "Parallelizing exploration-exploitation tradeoffs with Gaussian process
bandit optimization", 2014), so that launches side by side look at different things, under different loads. What they
are expected to reach is the mark for further ones. All this holds before anything was measured, too: then beliefs are
those of the prior, and a pending baseline is taken to come up.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from autotune.search.crash_model import CrashModel
from autotune.search.grid import Codes
from autotune.search.observations import NOISE, Key
from autotune.search.prior import Prior
from autotune.search.value_model import Data, Floats, Posterior, normal_cdf


def hoped(crashes: CrashModel, baseline: Key, busy: Collection[Key]) -> CrashModel:
    """The chances that launches have if a pending baseline comes up, as it nearly always does."""
    if baseline not in busy:
        return crashes
    passed = np.concatenate([crashes.passed, np.array([baseline], dtype=np.int16)])
    return CrashModel(crashes.grid, passed, crashes.served, crashes.failures)


def apart(crashes: CrashModel, rows: Codes, worth: Floats, busy: Sequence[Key], least: float) -> Floats:
    """(n,) worth without what pending launches try for the first time; where nothing else is worth `least`, unchanged.

    A choice that only comes with another one that is new does not count.
    """
    tested = np.zeros(len(rows), dtype=bool)
    for column, (param, seen) in enumerate(zip(crashes.grid.server_params, crashes.seen, strict=True)):
        if param.when and not seen[:-1].any():
            continue
        first = [key[column] for key in busy if key[column] < len(param.choices) and not seen[key[column]]]
        tested |= np.isin(rows[:, column], first)
    return np.where(tested, 0.0, worth) if (worth[~tested] >= least).any() else worth


def expected(data: Data, belief: Posterior, rows: Codes, loads: Sequence[int]) -> Data:
    """The measurements with those that are pending, at what is believed of them: means stay, spreads shrink."""
    seen = belief.predict(rows)
    at = np.arange(len(rows)), np.array(loads, dtype=np.intp)
    y = np.stack([seen.mean[at], *(ratio[at] for ratio in seen.ratios)], axis=1)
    return Data(np.concatenate([data.rows, rows]), np.concatenate([data.loads, at[1]]),
                np.concatenate([data.y, y.reshape(len(rows), data.y.shape[1])]),
                np.concatenate([data.noise, np.full(len(rows), NOISE)]))


def foreseen(prior: Prior, rows: Codes, loads: Sequence[int]) -> Data:
    """The same while nothing was measured: at what the prior says."""
    at = np.array(loads, dtype=np.intp)
    y = prior.mean(rows)[np.arange(len(rows)), at]
    return Data(rows, at, y[:, None], np.full(len(rows), NOISE))


def standing(best: float, belief: Posterior, rows: Codes, chance: Floats) -> float:
    """Log objective of the best that is to be expected once the pending launches have told.

    rows: (n, P) their server parts; chance: (n, L) that each is measured there.
    """
    seen = belief.predict(rows)
    kept = np.all([ratio <= 0 for ratio in seen.ratios], axis=0)
    return best + float((chance * kept * np.maximum(seen.mean - best, 0.0)).max(initial=0.0))


def stays(best: float, belief: Posterior, rows: Codes, chance: Floats) -> float:
    """The probability that no pending launch tells of anything better than the best; arguments as above."""
    seen = belief.predict(rows)
    better = chance * normal_cdf((seen.mean - best) / seen.sd)
    for ratio in seen.ratios:
        better = better * normal_cdf(-ratio / seen.sd)
    return float(np.prod(1 - better.max(axis=1)))
