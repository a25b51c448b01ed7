"""The one retry policy: one retry a crash signature.

    retries.started(key, None)          # a server came up
    retries.started(key, signature)     # a server crashed
    retries.left(signature)             # a retry can still tell something
"""

from __future__ import annotations

from collections.abc import Hashable

MOST_STARTS = 3  # crashed starts of one configuration, whatever their signatures


class Retries:
    """Outcomes of repeated starts of configurations, by signature."""

    def __init__(self) -> None:
        self.by_chance: set[str] = set()  # signatures of configurations that came up another time
        self.again: set[str] = set()  # signatures of configurations whose retry crashed too
        self._came_up: set[Hashable] = set()
        self._crashes: dict[Hashable, list[str]] = {}

    def started(self, key: Hashable, signature: str | None) -> None:
        """Count one start of the configuration `key`; signature: of its crash, None if it came up."""
        crashes = self._crashes.setdefault(key, [])
        if signature is None:
            self._came_up.add(key)
            self.by_chance.update(crashes)
            return
        self.again.update(crashes)
        crashes.append(signature)
        if key in self._came_up:
            self.by_chance.add(signature)

    def left(self, signature: str) -> bool:
        """True while no configuration with this signature was started again."""
        return signature not in self.by_chance | self.again

    def worthwhile(self, key: Hashable) -> bool:
        """True if a crashed configuration may be started again because its signatures strike by chance."""
        crashes = self._crashes.get(key, [])
        return len(crashes) < MOST_STARTS and all(signature in self.by_chance for signature in crashes)
