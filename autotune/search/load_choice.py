"""Which load part to measure next on a live server, or again.

The loop pays little for a further measurement and much for a launch, so the question is only whether the best
measurement left is worth more per second than the best launch elsewhere. Nothing is taken to be monotone: every load
part keeps its own mean and spread, and further ones are also judged by the sceptic who takes interactions with the load
to be large, since they are cheap. Measuring the same again is worth what a surer choice of the winner is worth.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from autotune.search.acquisition import Costs
from autotune.search.crash_model import CrashModel
from autotune.search.observations import MOST_REPEATS, NOISE, Key, Memory
from autotune.search.value_model import Posterior, expected_improvement

Floats = NDArray[np.float64]

LEAST = 1e-4
"""Gains below this are not worth a measurement."""
CHEAP = 0.25
"""Share of a launch's time that a measurement takes at most, to be made for a choice's sake alone."""
SAFE = 0.9
"""Chance that a server survives such a measurement."""


def next_load(gains: Floats, repeats: Floats, measure_s: float, bar: float, fresh: bool, fallback: int) -> int | None:
    """Index of the load part, None to stop the server.

    gains: (L,) expected gain of measuring under each that was not measured yet; repeats: (L,) the worth of measuring
    again; bar: gain per second of the best launch elsewhere. A fresh server is always measured once: under
    `fallback` when nothing promises a gain.
    """
    worth = np.maximum(gains, repeats)
    index = int(np.argmax(worth))
    if fresh:
        return int(np.argmax(gains)) if gains.max() > LEAST else fallback
    if worth[index] < LEAST or worth[index] / measure_s < bar:
        return None
    return index


def repeats(memory: Memory, posterior: Posterior, key: Key) -> Floats:
    """(L,) what measuring each load part of a live server again is worth for the choice of the winner."""
    out = np.zeros(len(memory.grid.load_rows))
    feasible = memory.leading()
    if len(feasible) < 2 or not any(k == key for k, _ in feasible):
        return out
    rows = np.array([k for k, _ in feasible], dtype=np.int16)
    loads = np.array([load for _, load in feasible], dtype=np.intp)
    seen = posterior.predict(rows)
    mean, sd = seen.mean[np.arange(len(rows)), loads], seen.sd[np.arange(len(rows)), loads]
    for i, (k, load) in enumerate(feasible):
        again = memory.servers[k].values[load]
        if k == key and len(again) < MOST_REPEATS:
            noise = again[-1].relative_noise or NOISE
            out[load] = worth_of_repeat(mean[i], sd[i], noise, np.delete(mean, i).max())
    return out


def worth_of_repeat(mean: float, sd: float, noise: float, rival: float) -> float:
    """Expected gain of one more measurement (noise sd) of something believed to be mean +- sd, against a rival's mean.

    The knowledge gradient of Frazier, Powell and Dayanik (2009) for one normal among known others.
    """
    shift = sd * sd / math.hypot(sd, noise)
    return float(expected_improvement(np.array(-abs(mean - rival)), np.array(max(shift, 1e-9)), 0.0))


def unfamiliar(memory: Memory, crashes: CrashModel, posterior: Posterior, key: Key) -> int | None:
    """The most promising load part thought to break a limit, for a server with a choice seen under one load part only.

    Limits that other choices break there this one may keep, and nothing seen so far can tell. It is asked once for
    each choice without an order, where a measurement is cheap beside a launch. None: there is nothing to ask.
    """
    costs, here, grid = Costs.of(memory), memory.servers[key], memory.grid
    if costs.measure_s > CHEAP * costs.launch_s or not here.values:
        return None
    under: dict[tuple[int, int], set[int]] = {}
    for server in memory.servers.values():
        for column, code in enumerate(server.row.tolist()):
            under.setdefault((column, code), set()).update(server.values)
    if all(len(under[i, key[i]]) > 1 for i, param in enumerate(grid.server_params) if not param.numeric):
        return None
    row = here.row[None]
    seen = posterior.predict(row)
    open_ = grid.allowed(row)[0] & (crashes.chance_serving(row)[0] >= SAFE) & (seen.ratios[:, 0] > 0).any(axis=0)
    open_[[*here.values, *here.load_crashes]] = False
    return int(np.argmax(np.where(open_, seen.mean[0], -np.inf))) if open_.any() else None
