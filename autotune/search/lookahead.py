"""What a launch is worth with the launch after it: the second one is chosen knowing how the first went.

One step alone cannot tell a launch that would teach much from one that only might win: a crash that separates two
suspects makes the next launch better, and so does a success that clears them. So each of a short list of first
launches is valued by its own worth, plus the best expected gain of a second launch given that the first came up (and
given what was measured), plus the same given that it crashed, each with its probability.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autotune.search.crashes import CrashModel
from autotune.search.outlook import Outlook
from autotune.search.value import Posterior, expected_improvement

Floats = NDArray[np.float64]

FIRST = 24  # launches considered
SECOND = 60  # launches that may follow
DRAWS = (-1.8, -1.0, -0.5, -0.15, 0.15, 0.5, 1.0, 1.8)  # what the first one may measure, in sds, equally likely
NOISE = 0.015  # relative sd of that measurement


def best_first(outlook: Outlook, worth: Floats, least: float, posterior: Posterior | None, crashes: CrashModel,
               best: float | None) -> int:
    """Row of the outlook to launch first.

    worth: (n,) what each launch is worth by itself, 0 where it is not to be made; least: the least that a first
    launch must be worth, at most the greatest worth; best: log objective of the best so far.
    """
    order = np.argsort(-worth / outlook.cost_s, kind="stable")
    first = np.unique(np.concatenate([order[:FIRST], _probes(outlook, worth, crashes)]))
    first = first[worth[first] >= least]
    second = order[:SECOND]
    second = second[worth[second] > 0]
    if len(second) < 2 or len(first) < 2:
        return int(order[0])
    both = crashes.chance_both(outlook.rows[first], outlook.rows[second])
    both = np.minimum(both, np.minimum(outlook.chance[first][:, None], outlook.chance[second]))
    both_gain = both * _gains_after(outlook, first, second, posterior, best)
    crash_gain = (outlook.chance[second] - both) * outlook.gain[second]
    other = first[:, None] != second
    value = worth[first] + (both_gain * other).max(axis=2).mean(axis=0) + (crash_gain * other).max(axis=1)
    return int(first[np.argmax(value)])


def _gains_after(outlook: Outlook, first: NDArray[np.intp], second: NDArray[np.intp], posterior: Posterior | None,
                 best: float | None) -> Floats:
    """(draws, first, second) expected gain of the second launch for each thing that the first may measure."""
    if posterior is None or best is None:
        return np.broadcast_to(outlook.gain[second], (1, len(first), len(second)))
    loads = outlook.gains.argmax(axis=1)
    a, b = posterior.predict(outlook.rows[first]), posterior.predict(outlook.rows[second])
    rows_a, rows_b = np.arange(len(first)), np.arange(len(second))
    mean_a, sd_a = a.mean[rows_a, loads[first]], a.sd[rows_a, loads[first]]
    mean_b, sd_b = b.mean[rows_b, loads[second]], b.sd[rows_b, loads[second]]
    shared = posterior.covariance(outlook.rows[first], loads[first], outlook.rows[second], loads[second])
    slope = shared / np.sqrt(sd_a ** 2 + NOISE ** 2)[:, None]
    rest = np.sqrt(np.maximum(sd_b ** 2 - slope ** 2, 1e-8))
    alone = expected_improvement(mean_b, sd_b, best)
    usable = np.where(alone > 0, outlook.gain[second] / np.maximum(alone, 1e-12), 0.0)  # feasible, and served
    return np.stack([expected_improvement(mean_b + slope * z, rest, np.maximum(best, mean_a + sd_a * z)[:, None])
                     for z in DRAWS]) * usable


def _probes(outlook: Outlook, worth: Floats, crashes: CrashModel) -> NDArray[np.intp]:
    """For each choice that never came up: the launch with it that is likeliest to, and could gain something."""
    out = []
    for column, seen in enumerate(crashes.seen):
        for code in np.flatnonzero(~seen):
            rows = np.flatnonzero((outlook.rows[:, column] == code) & (worth > 0))
            if rows.size:
                likely = rows[outlook.chance[rows] > outlook.chance[rows].max() - 0.02]
                out.append(int(likely[np.argmax(outlook.gain[likely])]))
    return np.array(out, dtype=np.intp)
