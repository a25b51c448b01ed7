"""Launches that a crash requires before the search goes on, and reasons to stop. Budgets are in `protocol.Limits`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from autotune.records import Blame
from autotune.search.acquisition import Floats, Forecast
from autotune.search.crash_model import CrashModel
from autotune.search.grid import Codes
from autotune.search.observations import Key, Observations
from autotune.search.protocol import Launch, Stop, StopKind

HOPELESS = 0.1  # chance of the best launch below which a study without any running server ends
DEAD_LAUNCHES = 20  # crashed launches without a success that end the search


@dataclasses.dataclass(frozen=True)
class Standing:
    """State of the search: best configuration, closed regions, whether other workers are busy."""

    best: tuple[Key, int] | None
    closed: Sequence[str]
    busy: bool


def why(memory: Observations, forecast: Forecast, worth: Floats, standing: Standing, least: float) -> Stop | None:
    """The reason to stop; None while a launch is expected to gain at least `least`."""
    came_up = any(s.came_up for s in memory.servers.values())
    told = summary(memory, standing.best)
    if not forecast.gain.size or forecast.gain.max() <= 0:
        if standing.busy:
            return Stop(StopKind.EXHAUSTED, "other workers are measuring every remaining configuration")
        if not came_up:
            return Stop(StopKind.CRASHES, f"all {memory.launches} launches crashed, and no configuration is left")
        return Stop(StopKind.EXHAUSTED, f"no configuration is left to try: {told}")
    if not came_up and (memory.launches >= DEAD_LAUNCHES or forecast.chance.max() < HOPELESS):
        return Stop(StopKind.CRASHES, f"all {memory.launches} launches crashed; the best remaining one has a chance of "
                    f"{forecast.chance.max():.0%}")
    if came_up and standing.best is not None and worth.max() < least:
        gave_up = f"; closed: {', '.join(sorted(standing.closed))}" if standing.closed else ""
        return Stop(StopKind.GAIN, f"{told}: no remaining launch is expected to gain {least:.2%} "
                    f"(the best one {worth.max():.2%}){gave_up}")
    if worth.max() <= 0:
        return Stop(StopKind.CRASHES, "every remaining region is closed: see the pivots")
    return None


def summary(memory: Observations, best: tuple[Key, int] | None) -> str:
    """Comparison of the best configuration with the baseline, in words."""
    if best is None:
        return "nothing feasible was measured"
    server, load = memory.grid.space.split(memory.grid.space.baseline)
    if best == (memory.key(server), memory.grid.load_index(load)):
        return "the baseline is already the best"
    if best[0] == memory.key(server):
        return "the baseline's server is already the best, under another load"
    return "the best so far stands"


BASELINE_CHANCE = 0.95
RETRY_CHANCE = 0.5


def after_crashes(memory: Observations, crashes: CrashModel, busy: AbstractSet[Key],
         candidates: Callable[[], Codes]) -> Launch | Stop | None:
    """A retry after a transient crash, a check of the host after an environment crash, or None."""
    for key, server in memory.servers.items():
        crashes_here = server.launch_crashes
        if (not server.came_up and len(crashes_here) == 1 and crashes_here[0].blame is Blame.TRANSIENT
                and key not in busy):
            return Launch(memory.grid.server(server.row), f"its crash ({crashes_here[0].category}) looked transient: "
                          "one retry, then it counts against the configuration", 0.0, RETRY_CHANCE, intent="retry")
    return _confirmation(memory, crashes, busy, candidates)


def _confirmation(memory: Observations, crashes: CrashModel, busy: AbstractSet[Key],
                  candidates: Callable[[], Codes]) -> Launch | Stop | None:
    """One launch of the last good configuration if an environment crash may mean that the host is broken.

    A crashed configuration with a choice that never came up needs no check: the host lacks that feature.
    """
    confirmed = {crash.signature for passes, _, crash in memory.environment if memory.passes > passes}
    doubted = [e for e in memory.environment if e[0] == memory.passes and e[2].signature not in confirmed]
    if memory.last_good is not None:
        doubted = [e for e in doubted if all(seen[code] for seen, code in zip(crashes.seen, e[1], strict=True))]
    if not doubted:
        return None
    crash = doubted[0][2]
    if memory.last_good is not None:
        good = memory.servers[memory.last_good]
        if good.launch_crashes:
            return Stop(StopKind.HOST, f"{crash.category} was blamed on the environment, and the last good "
                        "configuration does not start any more: repair this host")
        if memory.last_good in busy:
            return None
        return Launch(memory.grid.server(good.row), f"{crash.category} was blamed on the environment: the last good "
                      "configuration shows whether this host still works", 0.0, BASELINE_CHANCE, intent="confirm")
    if len(doubted) > 1:
        return Stop(StopKind.HOST, f"{crash.category} was blamed on the environment, and so was a configuration "
                    "that shares as little as possible with it: nothing can run here")
    rows = candidates()
    shared = (rows == np.array(doubted[0][1], dtype=np.int16)).sum(axis=1)
    far = rows[shared == shared.min()]
    pick = far[int(np.argmax(crashes.chance(far)))]
    return Launch(memory.grid.server(pick), f"{crash.category} was blamed on the environment: a configuration that "
                  "shares as little as possible with it shows whether anything can run here", 0.0, RETRY_CHANCE)
