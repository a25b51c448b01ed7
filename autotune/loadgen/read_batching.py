"""Which streams are read as soon as bytes arrive, and how many bytes the others may gather before they are read.

Reading a stream whenever it brings a token costs a system call and some Python per token, most of what a load client
does. Where the server counts tokens itself and the length of every answer is known beforehand, only some streams need
that, for the inter-token latencies: as many as bring about `GAPS_PER_S`. The kernel reports the others when their first
token is there, and then when about as many bytes are there as the rest of the answer must have; besides there is a look
now and then. First token, last token and number of tokens stay exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.loadgen.slot import Slot
from autotune.loadgen.sse import TokenStream

GAPS_PER_S = 50.0  # between arrivals of the streams that are watched, together
FEWEST_WATCHED, MOST_WATCHED, WATCHED_FIRST = 1, 8, 4  # streams that are watched; the last before gaps are known
MEMORY = 0.1  # weight of what came last in the mean gap
LONGEST_S = 1.0  # that a stream isn't read: those that weren't are looked at by the next tick
LEAST_TIMEOUT_S = 1.5  # for the next token: under a shorter limit every stream is read at once
OWN_PACE_S = 0.3  # between two looks at a stream: no less tells its own pace
SOON_S, LATE_S = 0.3, 0.2  # but for an answer that ends so soon after that; it is looked at so long after its end
SHARE, LESS_TOKENS = 0.97, 0.5  # wait for the bytes of this share of the tokens that are left, and some less
RELAX = 0.005  # weight of a token that took more bytes in the fewest that a token took
FULL_BYTES = 32768  # more is never waited for, to keep the server's socket from filling
UNSURE = 0.15  # of the bytes a token, where only the stream itself tells of them: others may bring many tokens
GATHER_S = (0.0005, 0.003)  # after a wait that brought little, so that one step of the server is read together:
MANY = 16  # ... the second time from this concurrency on, where steps take longer
GATHER_SHARE = 0.15  # ... but no more than this of the time from step to step
UNSEEN = (8, 0.02)  # answers whose end nothing told of: more than this many, and this share, end all waiting
UNSEEN_S = 0.05  # since an end arrived that the kernel should have told of


class Pacing:
    """What streams of a load wait for; for nothing any more (not `enabled`) when answers end in it unseen, which costs
    the load requests."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.ended = self.unseen = 0
        self.head_bytes = 0  # of an answer whose head came alone
        self.token_bytes = 0.0  # the fewest that one token took of late; 0: none seen
        self.gap_s = 0.0  # between arrivals of a watched stream, mean of late; 0: none seen
        self.tokens, self.took_s = 0.0, 0.0  # means of late of what watched streams brought, and how long it took
        self.watch = WATCHED_FIRST

    def before_first(self) -> int:
        """How many bytes an answer that begins may gather before it is read: its head is of no interest alone."""
        return self.head_bytes + 1 if self.enabled else 1

    def wait_bytes(self, slot: Slot) -> int:
        """How many bytes this stream may gather before it is read next; 1: as soon as any arrive."""
        counts = slot.stream.counts
        if slot.watched or slot.reply is None or not slot.stream.counting or not (counts and counts[-1]):
            return 1
        return self.rest_bytes(slot.reply.wanted_tokens - counts[-1], slot.size / counts[-1])

    def rest_bytes(self, tokens: int, each: float | None = None) -> int:
        """The same for an answer of which so many tokens are left; `each` took so many bytes so far, if known."""
        if not self.enabled:
            return 1
        least = self.token_bytes if each is None else min(self.token_bytes or UNSURE * each, each)
        return max(1, min(int(least * (SHARE * tokens - LESS_TOKENS)), FULL_BYTES))

    def look_at(self, slot: Slot, now: float) -> float:
        """When to read a stream that was just read, at the latest."""
        counts, reply = slot.stream.counts, slot.reply
        if self.gap_s and counts and counts[-1] and reply is not None:
            ends_s = (reply.wanted_tokens - counts[-1]) * self.gap_s
            if ends_s < LONGEST_S + SOON_S:
                return now + ends_s + LATE_S
        return now + LONGEST_S

    def gather_s(self, concurrency: int) -> float:
        """How long to wait after little came, for more of the same step of the server."""
        most = GATHER_S[concurrency >= MANY]
        return min(most, GATHER_SHARE * self.gap_s) if self.gap_s else most

    @property
    def tokens_per_s(self) -> float:
        """Of a watched stream between its first token and its last; 0: not known yet."""
        return self.tokens / self.took_s if self.took_s else 0.0

    def unread_tokens(self, streams: Sequence[TokenStream], now: float) -> float:
        """Tokens that have arrived on running streams since they were last read, by the pace that each had before; of
        those that were not looked at before, by that of the watched ones."""
        if not self.enabled:
            return 0.0
        usual, tokens = self.tokens_per_s, 0.0
        for stream in streams:
            counts, times = stream.counts, stream.times
            if counts and counts[0]:
                since_s = min(max(now - times[-1], 0.0), LONGEST_S)
                took_s = times[-1] - times[-2] if len(times) > 1 else 0.0
                pace = (counts[-1] - counts[-2]) / took_s if took_s > OWN_PACE_S else usual
                tokens += min(pace * since_s, stream.most - counts[-1])
        return tokens

    def saw_parts(self, parts: Sequence[bytes], counts: Sequence[int], times: Sequence[float]) -> None:
        """Learn from a stream that is read at once: `counts` and `times` before its `parts`, and of each of them."""
        if not parts or len(counts) != len(parts) + 1:
            return  # some brought no token
        weight, took_s = MEMORY if self.gap_s else 1.0, times[-1] - times[0]
        self.gap_s += weight * (took_s / len(parts) - self.gap_s)
        self.tokens += weight * (counts[-1] - counts[0] - self.tokens)
        self.took_s += weight * (took_s - self.took_s)
        self.watch = min(max(FEWEST_WATCHED, math.ceil(GAPS_PER_S * self.gap_s)), MOST_WATCHED)
        before = counts[0]
        for part, count in zip(parts, counts[1:], strict=True):
            if count <= before:
                return
            each = len(part) / (count - before)
            if not each >= self.token_bytes > 0:
                self.token_bytes = each
            else:
                self.token_bytes += RELAX * (each - self.token_bytes)
            before = count

    def saw_late_end(self) -> None:
        """An answer had ended, and nothing had told of it, before it was looked at."""
        self.unseen += 1
        if self.unseen > max(UNSEEN[0], UNSEEN[1] * self.ended):
            self.enabled = False
