"""Why to stop, said in a sentence. Budgets are in `protocol.Limits`; this is about what is left to win."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autotune.search.acquisition import Floats, Outlook
from autotune.search.observations import Key, Memory
from autotune.search.protocol import Stop, StopKind

HOPELESS = 0.1  # chance below which, when nothing ever served, no further launch is made
DEAD_LAUNCHES = 20  # crashed launches without a single success after which the search ends in any case


@dataclasses.dataclass(frozen=True)
class Standing:
    """Where the search stands: the best so far, regions given up, whether other workers are busy."""

    best: tuple[Key, int] | None
    closed: Sequence[str]
    busy: bool


def why(memory: Memory, outlook: Outlook, worth: Floats, standing: Standing, least: float) -> Stop | None:
    """None while a launch is worth it. least: the expected gain that makes one worth it."""
    came_up = any(s.came_up for s in memory.servers.values())
    told = summary(memory, standing.best)
    if not outlook.gain.size or outlook.gain.max() <= 0:
        if standing.busy:
            return Stop(StopKind.EXHAUSTED, "every configuration left is being measured elsewhere")
        if not came_up:
            return Stop(StopKind.CRASHES, f"all {memory.launches} launches crashed, and none is left to try")
        return Stop(StopKind.EXHAUSTED, f"no configuration is left to try: {told}")
    if not came_up and (memory.launches >= DEAD_LAUNCHES or outlook.chance.max() < HOPELESS):
        return Stop(StopKind.CRASHES, f"all {memory.launches} launches crashed; the best one left has a chance of "
                    f"{outlook.chance.max():.0%}")
    if came_up and standing.best is not None and worth.max() < least:
        gave_up = f"; given up: {', '.join(sorted(standing.closed))}" if standing.closed else ""
        return Stop(StopKind.GAIN, f"{told}: no launch left is expected to add {least:.2%} "
                    f"(the best one {worth.max():.2%}){gave_up}")
    if worth.max() <= 0:
        return Stop(StopKind.CRASHES, "every region left is closed: see the pivots")
    return None


def summary(memory: Memory, best: tuple[Key, int] | None) -> str:
    """How the best so far compares with the baseline."""
    if best is None:
        return "nothing feasible was measured"
    server, load = memory.grid.space.split(memory.grid.space.baseline)
    if best == (memory.key(server), memory.grid.load_index(load)):
        return "the baseline is already the best"
    if best[0] == memory.key(server):
        return "the baseline's server is already the best, under another load"
    return "the best so far stands"
