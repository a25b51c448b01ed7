"""Which streams are read as soon as bytes arrive, and when the others are read next.

Reading a stream whenever it brings a token costs a system call and some Python per token, most of what a load client
does. Where the server counts tokens itself and the length of every answer is known beforehand, only some streams need
that (`WATCHED` of them, for the inter-token latencies); the others are left alone between their first token and
shortly before their last, but for a look now and then. First token, last token and number of tokens stay exact.
"""

from __future__ import annotations

import heapq

from autotune.measure.slot import Slot
from autotune.measure.sse import TokenStream

WATCHED = 4  # streams always read at once
LONGEST_S = 0.5  # between two looks
SHORTEST_S = 0.03  # a pause shorter than this isn't worth it
GRID_S = 0.05  # looks are made together, since most of a look's cost is waking up for it
LATE_S = 0.02  # that a look waits for a stream that is watched to wake the client
SHARE = 0.7  # of the time that the rest of the answer should take, at the stream's own mean rate
TOKENS_BEFORE = 2  # before the rate of a stream is believed; until then it is that of answers that ended
MEMORY = 0.2  # weight of the answer that ended last in the rate of those that ended
FULL_BYTES = 32768  # a look that finds so much came too late to keep the server's socket from filling
UNSEEN = (8, 0.02)  # answers that ended between two looks: more than this many, and this share, end all pauses


class Pacing:
    """Pauses of a load's streams; none any more (`enabled`) when answers end in them, which costs the load requests."""

    def __init__(self) -> None:
        self.enabled = True
        self.ended = self.unseen = 0
        self.pace_s = 0.0  # a token, in answers that ended; 0 before any
        self._looks: list[tuple[float, int, Slot]] = []
        self._number = 0

    def pause_s(self, slot: Slot, now: float) -> float:
        """How long this stream can be left alone; 0: not at all."""
        counts, times = slot.stream.counts, slot.stream.times
        if not self.enabled or slot.watched or slot.reply is None or not slot.stream.counting or not counts:
            return 0.0
        come, passed = counts[-1] - counts[0], times[-1] - times[0]
        pace_s = passed / come if come >= TOKENS_BEFORE else self.pace_s
        pause = min(LONGEST_S, times[-1] + SHARE * (slot.reply.wanted_tokens - counts[-1]) * pace_s - now)
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
        """When the next one has to be made; infinite without any."""
        return self._looks[0][0] + LATE_S if self._looks else float("inf")

    def saw_end(self, stream: TokenStream) -> None:
        """An answer ended; what is known of its rate helps with those that begin."""
        self.ended += 1
        counts, times = stream.counts, stream.times
        if counts and (come := counts[-1] - counts[0]) > 0:
            pace_s = (times[-1] - times[0]) / come
            self.pace_s += (MEMORY if self.pace_s else 1.0) * (pace_s - self.pace_s)

    def missed_end(self) -> None:
        """It had ended before it was looked at."""
        self.unseen += 1
        if self.unseen > max(UNSEEN[0], UNSEEN[1] * self.ended):
            self.enabled = False
