"""Which streams are read as soon as bytes arrive, and when the others are read next.

Reading a stream whenever it brings a token costs a system call and some Python per token, most of what a load client
does. Where the server counts tokens itself and the length of every answer is known beforehand, only some streams need
that (`WATCHED` of them, for the inter-token latencies); the others are left alone between their first token and
shortly before their last, but for a look now and then. First token, last token and number of tokens stay exact.
"""

from __future__ import annotations

import heapq

from autotune.measure.slot import Slot

WATCHED = 8  # streams always read at once
LONGEST_S = 0.25  # between two looks
SHORTEST_S = 0.04  # a pause shorter than this isn't worth it
GRID_S = 0.05  # looks are made together, since most of a look's cost is waking up for it
SHARE = 0.6  # of the time that the rest of the answer should take, at the stream's own mean rate
TOKENS_BEFORE = 2  # before the rate of a stream is believed
FULL_BYTES = 32768  # a look that finds so much came too late to keep the server's socket from filling
UNSEEN = (8, 0.02)  # answers that ended between two looks: more than this many, and this share, end all pauses


class Pacing:
    """Pauses of a load's streams; none any more (`enabled`) when answers end in them, which costs the load requests."""

    def __init__(self) -> None:
        self.enabled = True
        self.ended = self.unseen = 0
        self._looks: list[tuple[float, int, Slot]] = []
        self._number = 0

    def pause_s(self, slot: Slot, now: float) -> float:
        """How long this stream can be left alone; 0: not at all."""
        counts, times = slot.stream.counts, slot.stream.times
        if not self.enabled or slot.watched or slot.reply is None or not slot.stream.counting or not counts:
            return 0.0
        come = counts[-1] - counts[0]
        passed = now - times[0]
        if come < TOKENS_BEFORE or passed <= 0:
            return 0.0
        pause = min(LONGEST_S, SHARE * (slot.reply.wanted_tokens - counts[-1]) * passed / come)
        return pause if pause >= SHORTEST_S else 0.0

    def rest(self, slot: Slot, now: float, until: float) -> None:
        """Look at this stream again at `until`, or a bit earlier."""
        together = until - until % GRID_S
        if together - now >= SHORTEST_S:
            until = together
        slot.resting = True
        self._number += 1
        slot.look = self._number
        heapq.heappush(self._looks, (until, self._number, slot))

    def due(self, now: float) -> Slot | None:
        """A resting stream whose time has come, taken off the list; None when there is none."""
        while self._looks and self._looks[0][0] <= now:
            _, number, slot = heapq.heappop(self._looks)
            if slot.resting and slot.look == number:
                return slot
        return None

    @property
    def next_look(self) -> float:
        """When the next one is due; infinite without any."""
        return self._looks[0][0] if self._looks else float("inf")

    def saw_end(self) -> None:
        """An answer ended."""
        self.ended += 1

    def missed_end(self) -> None:
        """It had ended before it was looked at."""
        self.unseen += 1
        if self.unseen > max(UNSEEN[0], UNSEEN[1] * self.ended):
            self.enabled = False
