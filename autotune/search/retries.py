"""Launches that earlier crashes ask for, before any search: a retry, or a look whether this host works at all."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

import numpy as np

from autotune.records import Blame
from autotune.search.crash_model import CrashModel
from autotune.search.grid import Codes
from autotune.search.observations import Key, Memory
from autotune.search.protocol import Launch, Stop, StopKind

BASELINE_CHANCE = 0.95
RETRY_CHANCE = 0.5


def owed(memory: Memory, crashes: CrashModel, busy: AbstractSet[Key],
         candidates: Callable[[], Codes]) -> Launch | Stop | None:
    """A retry after a transient crash, or a confirmation after one blamed on the environment; None: nothing is owed."""
    for key, server in memory.servers.items():
        told = server.launch_crashes
        if not server.came_up and len(told) == 1 and told[0].blame is Blame.TRANSIENT and key not in busy:
            return Launch(memory.grid.server(server.row), f"its crash ({told[0].category}) looked transient: one "
                          "retry, then it counts against the configuration", 0.0, RETRY_CHANCE, intent="retry")
    return _confirmation(memory, crashes, busy, candidates)


def _confirmation(memory: Memory, crashes: CrashModel, busy: AbstractSet[Key],
                  candidates: Callable[[], Codes]) -> Launch | Stop | None:
    """One launch of the last good configuration when an environment crash may mean that this host is broken.

    A crashed configuration with a choice that never came up here needs none: that feature is what this host lacks.
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
                        "configuration does not start any more either: this host needs repair")
        if memory.last_good in busy:
            return None
        return Launch(memory.grid.server(good.row), f"{crash.category} was blamed on the environment: the last good "
                      "configuration tells whether this host still works", 0.0, BASELINE_CHANCE, intent="confirm")
    if len(doubted) > 1:
        return Stop(StopKind.HOST, f"{crash.category} was blamed on the environment, and so was a configuration "
                    "that shares as little as possible with it: nothing can run here")
    rows = candidates()
    shared = (rows == np.array(doubted[0][1], dtype=np.int16)).sum(axis=1)
    far = rows[shared == shared.min()]
    pick = far[int(np.argmax(crashes.chance(far)))]
    return Launch(memory.grid.server(pick), f"{crash.category} was blamed on the environment: a configuration that "
                  "shares as little as possible with it tells whether anything can run here", 0.0, RETRY_CHANCE)
