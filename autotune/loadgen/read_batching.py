"""Read batching: streams that are read as soon as bytes arrive, and streams that gather bytes before they are read.

Where the server counts tokens itself and the length of every answer is known beforehand, only a few watched streams
must be read at every token, for inter-token latencies. The kernel reports the others when their first token is there,
and again when they have about as many bytes as the rest of the answer must have; every stream is also read once a
second. First token, last token and number of tokens stay exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.loadgen.wire_formats import TokenStream

GAPS_PER_S = 50.0  # inter-token gaps wanted of all watched streams together
FEWEST_WATCHED, MOST_WATCHED, WATCHED_FIRST = 1, 8, 4  # watched streams; the last before gaps are known
MEMORY = 0.1  # weight of the latest value in the moving means
LONGEST_S = 1.0  # between two reads of a stream
LEAST_TIMEOUT_S = 1.5  # with a shorter limit for the next token every stream is read at once
OWN_PACE_S = 0.3  # least time between two reads from which a stream's own pace is taken
SOON_S, LATE_S = 0.3, 0.2  # an answer that should end SOON_S after LONGEST_S is read LATE_S after its expected end
SHARE, LESS_TOKENS = 0.97, 0.5  # wait for the bytes of this share of the remaining tokens, less half a token
RELAX = 0.005  # weight of a token with more bytes in the least bytes per token
FULL_BYTES = 32768  # longest wait, to keep the server's socket from filling
UNSURE = 0.15  # share of a stream's own bytes per token, where nothing else is known: others may bring many tokens
GATHER_S = (0.0005, 0.003)  # pause after a wait that brought little, to read one step of the server together:
MANY = 16  # ... the second value from this concurrency on, where steps take longer
GATHER_SHARE = 0.15  # ... but at most this share of the time between steps
UNSEEN = (8, 0.02)  # answers whose end the kernel did not report: above this number and share, no stream waits
UNSEEN_S = 0.05  # age of an end that the kernel should have reported


class Pacing:
    """The waits of a load's streams. Not `enabled`: no stream waits, since the kernel left ends unreported."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.ended = self.unseen = 0
        self.head_bytes = 0  # of an answer whose head came alone
        self.token_bytes = 0.0  # least recent bytes per token; 0: none seen
        self.gap_s = 0.0  # mean recent gap between arrivals of a watched stream; 0: none seen
        self.tokens, self.took_s = 0.0, 0.0  # mean recent tokens of watched streams, and the time they took
        self.watch = WATCHED_FIRST

    def before_first(self) -> int:
        """Bytes that a new answer may gather before it is read: a head alone is of no use."""
        return self.head_bytes + 1 if self.enabled else 1

    def wait_bytes(self, stream: TokenStream, size: int) -> int:
        """Bytes that a stream of `size` bytes so far may gather before its next read; 1: read at once."""
        counts = stream.counts
        if not stream.counting or not (counts and counts[-1]):
            return 1
        return self.rest_bytes(stream.most - counts[-1], size / counts[-1])

    def rest_bytes(self, tokens: int, each: float | None = None) -> int:
        """Bytes to wait for when so many tokens are left; `each` token took so many bytes so far, if known."""
        if not self.enabled:
            return 1
        least = self.token_bytes if each is None else min(self.token_bytes or UNSURE * each, each)
        return max(1, min(int(least * (SHARE * tokens - LESS_TOKENS)), FULL_BYTES))

    def look_at(self, stream: TokenStream, now: float) -> float:
        """The latest time for the next read of a stream that was just read."""
        counts = stream.counts
        if self.gap_s and counts and counts[-1]:
            ends_s = (stream.most - counts[-1]) * self.gap_s
            if ends_s < LONGEST_S + SOON_S:
                return now + ends_s + LATE_S
        return now + LONGEST_S

    def gather_s(self, concurrency: int) -> float:
        """Pause in seconds after a wait that brought little, for more of the same step of the server."""
        most = GATHER_S[concurrency >= MANY]
        return min(most, GATHER_SHARE * self.gap_s) if self.gap_s else most

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s of a watched stream between its first and last token; 0: not known yet."""
        return self.tokens / self.took_s if self.took_s else 0.0

    def unread_tokens(self, streams: Sequence[TokenStream], now: float) -> float:
        """Estimate of the tokens that running streams brought since their last read: by a stream's own pace, or by
        that of the watched streams while it is unknown."""
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
        """Learn from a watched stream: `counts` and `times` before its `parts`, and after each of them."""
        if not parts or len(counts) != len(parts) + 1:
            return  # some brought no token
        weight, took_s = MEMORY if self.gap_s else 1.0, times[-1] - times[0]
        self.gap_s += weight * (took_s / len(parts) - self.gap_s)
        self.tokens += weight * (counts[-1] - counts[0] - self.tokens)
        self.took_s += weight * (took_s - self.took_s)
        self.watch = min(max(FEWEST_WATCHED, math.ceil(GAPS_PER_S * self.gap_s)), MOST_WATCHED)
        for part, before, count in zip(parts, counts[:-1], counts[1:], strict=True):
            if count <= before:
                return
            each = len(part) / (count - before)
            known = each >= self.token_bytes > 0
            self.token_bytes = self.token_bytes + RELAX * (each - self.token_bytes) if known else each

    def saw_late_end(self) -> None:
        """Count an answer whose end the kernel did not report."""
        self.unseen += 1
        if self.unseen > max(UNSEEN[0], UNSEEN[1] * self.ended):
            self.enabled = False
