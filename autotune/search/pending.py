"""Effect of launches that are pending on other workers: neither successes nor failures.

The strategy avoids their server parts and the choices that they try for the first time. The value model keeps its mean
at their configurations and becomes more certain there (Desautels et al., "Parallelizing exploration-exploitation
tradeoffs with Gaussian process bandit optimization", 2014), so parallel launches explore different configurations and
loads. Their expected result is the mark for new launches. Before the first measurement the prior takes the model's
place, and a pending baseline is assumed to come up.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from autotune.search.crash_model import CrashModel
from autotune.search.grid import Codes
from autotune.search.observations import NOISE, Key
from autotune.search.value_model import Data, Floats, Posterior, Prior, normal_cdf


def assuming_baseline_starts(crashes: CrashModel, baseline: Key, busy: Collection[Key]) -> CrashModel:
    """The crash model under the assumption that a pending baseline comes up."""
    if baseline not in busy:
        return crashes
    passed = np.concatenate([crashes.passed, np.array([baseline], dtype=np.int16)])
    return CrashModel(crashes.grid, passed, crashes.served, crashes.failures)


def without_choices_under_test(crashes: CrashModel, rows: Codes, worth: Floats, busy: Sequence[Key],
                               least: float) -> Floats:
    """(n,) worth with 0 for choices that pending launches try first; unchanged if nothing else is worth `least`.

    A choice that exists only together with another new choice does not count.
    """
    tested = np.zeros(len(rows), dtype=bool)
    for column, (param, seen) in enumerate(zip(crashes.grid.server_params, crashes.seen, strict=True)):
        if param.when and not seen[:-1].any():
            continue
        first = [key[column] for key in busy if key[column] < len(param.choices) and not seen[key[column]]]
        tested |= np.isin(rows[:, column], first)
    return np.where(tested, 0.0, worth) if (worth[~tested] >= least).any() else worth


def expected(data: Data, belief: Posterior, rows: Codes, loads: Sequence[int]) -> Data:
    """Measurements plus the pending ones at their expected values: means stay, uncertainty shrinks."""
    seen = belief.predict(rows)
    at = np.arange(len(rows)), np.array(loads, dtype=np.intp)
    y = np.stack([seen.mean[at], *(ratio[at] for ratio in seen.ratios)], axis=1)
    return Data(np.concatenate([data.rows, rows]), np.concatenate([data.loads, at[1]]),
                np.concatenate([data.y, y.reshape(len(rows), data.y.shape[1])]),
                np.concatenate([data.noise, np.full(len(rows), NOISE)]))


def expected_from_prior(prior: Prior, rows: Codes, loads: Sequence[int]) -> Data:
    """Pending measurements at their prior means, before the first real measurement."""
    at = np.array(loads, dtype=np.intp)
    y = prior.mean(rows)[np.arange(len(rows)), at]
    return Data(rows, at, y[:, None], np.full(len(rows), NOISE))


def standing(best: float, belief: Posterior, rows: Codes, chance: Floats) -> float:
    """Expected log objective of the best configuration after the pending launches.

    rows: (n, P) pending server parts; chance: (n, L) probability of a measurement under each load part.
    """
    seen = belief.predict(rows)
    kept = np.all([ratio <= 0 for ratio in seen.ratios], axis=0)
    return best + float((chance * kept * np.maximum(seen.mean - best, 0.0)).max(initial=0.0))


def chance_to_stay_best(best: float, belief: Posterior, rows: Codes, chance: Floats) -> float:
    """Probability that no pending launch beats the best; arguments as in `standing`."""
    seen = belief.predict(rows)
    better = chance * normal_cdf((seen.mean - best) / seen.sd)
    for ratio in seen.ratios:
        better = better * normal_cdf(-ratio / seen.sd)
    return float(np.prod(1 - better.max(axis=1)))
