"""The replay's engine: continuous batching at the table's speed, with tree drafts accepted a few tokens at a time.

All requests in flight together get the table's tokens per second; a step gives each decoding request as many tokens as
its draft had accepted. Time is the replay's: under load it passes in slices that this engine grants, and stands still
while the machine is too busy for us, or for a client that has not yet replaced a request.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping

from tests.fakes.standin import Stream
from tests.replay.clock import REAL, Clock
from tests.replay.table import at

BACKLOG_S = 0.5  # lateness that is caught up with
SLICE_S = 0.03  # told time that passes at most before we must have come round again
SLACK_S = 0.002
PATIENCE_S = 0.5  # real seconds that a client may take to replace a streamed request
HASTE = 0.3  # share of a step's time that passes at least


class Engine:
    """`rates` are tokens per second by concurrency, `accept_length` the mean of a verification.

    `give(request, tokens)` is called whenever a request has got tokens.
    """

    def __init__(self, clock: Clock, rates: Mapping[int, float], accept_length: float, seed: str,
                 give: Callable[[Stream, int], None]) -> None:
        self.clock, self.rates, self.accept_length, self.give = clock, rates, accept_length, give
        self.random = random.Random(seed)
        self.requests: list[Stream] = []
        self.noise = 1.0
        self.total_tokens = self.total_steps = 0
        self._awaited: list[float] = []  # when requests were done that their clients have not replaced (real time)

    @property
    def running(self) -> int:
        return sum(r.running for r in self.requests)

    def add(self, request: Stream) -> None:
        self.requests.append(request)
        self._awaited[:1] = []

    def abort(self) -> None:
        """A client went away, as all do at the end of a load."""
        self._awaited.clear()

    def run(self) -> Iterator[float]:
        """Generate for ever; yields the real seconds until it must go on (inf: until there is a request)."""
        credit, last, stepped = 0.0, self.clock.now(), 0.0
        draft = self._draft(1)
        while True:
            self.requests = [r for r in self.requests if r.running]
            self._awaited = [t for t in self._awaited if REAL() - t < PATIENCE_S]
            if not self.requests and not self._awaited:
                self.clock.allow(math.inf)
                yield math.inf
                credit, last, stepped = 0.0, self.clock.now(), 0.0
                continue
            now = self.clock.now()
            rate = at(self.rates, self.running + len(self._awaited)) * self.noise
            credit = min(credit + rate * (now - last), rate * BACKLOG_S)
            last = now
            for request in [r for r in self.requests if not r.tokens and r.begins <= now]:
                credit -= 1
                self._give(request, 1)
            decoding = [r for r in self.requests if r.tokens and r.running]
            if not decoding:
                yield self._pass(min(SLICE_S, self._next_prefill(now)))
                continue
            if len(draft) != len(decoding):
                draft = self._draft(len(decoding))
            need = sum(draft)
            due = max((need - credit) / rate, stepped + HASTE * need / rate - now)
            if due > 0:
                yield self._pass(min(due, self._next_prefill(now), SLICE_S))
                continue
            credit, stepped = credit - need, now
            for request, accepted in zip(decoding, draft, strict=True):
                request.steps += 1
                self.total_steps += 1
                surplus = accepted - (request.wanted - request.tokens)
                credit += max(0, surplus)
                self._give(request, accepted - max(0, surplus))
            draft = self._draft(len(decoding))
            yield 0.0

    def _give(self, request: Stream, tokens: int) -> None:
        self.total_tokens += tokens
        self.give(request, tokens)
        if request.tokens >= request.wanted and request.stream:
            self._awaited.append(REAL())

    def _draft(self, count: int) -> list[int]:
        """Accepted tokens, the bonus token included, of one verification of `count` requests."""
        mean = self.accept_length - 1
        return [1 + sum(self.random.random() < mean / 6 for _ in range(6)) for _ in range(count)]

    def _next_prefill(self, now: float) -> float:
        waiting = [r.begins - now for r in self.requests if not r.tokens]
        return max(0.0005, min(waiting, default=1.0))

    def _pass(self, told_s: float) -> float:
        """Let that much told time pass, and hardly more; none while a client owes a request. Returns real seconds."""
        if not self._awaited:
            self.clock.allow(told_s + SLACK_S)
        return told_s / self.clock.pace
