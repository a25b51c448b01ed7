"""The replay's engine: continuous batching at the table's speed, with tree drafts accepted a few tokens at a time.

All requests in flight together get the table's tokens per second; a step gives each decoding request as many tokens as
its draft had accepted. Time is the replay's: under load it passes in slices that this engine grants, and stands still
while the machine is too busy for us, or for a client that has not yet replaced a request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections.abc import Callable, Mapping

from tests.replay.clock import REAL, Clock
from tests.replay.table import at

BACKLOG_S = 0.5  # lateness that is caught up with
SLICE_S = 0.03  # told time that passes at most before we must have come round again
SLACK_S = 0.002
PATIENCE_S = 0.5  # real seconds that a client may take to replace a streamed request
HASTE = 0.3  # share of a step's time that passes at least


@dataclasses.dataclass
class Request:
    """One completion: `emit(request)` is called whenever it has got tokens, the last time when `done`."""

    prompt_tokens: int
    wanted: int
    begins: float
    emit: Callable[[Request], None]
    tokens: int = 0
    steps: int = 0
    gone: bool = False
    replaced: bool = False  # whether another one is expected from its client when it is done

    @property
    def done(self) -> bool:
        return self.tokens >= self.wanted


class Engine:
    """`rates` are tokens per second by concurrency, `accept_length` the mean of a verification."""

    def __init__(self, clock: Clock, rates: Mapping[int, float], accept_length: float, seed: str) -> None:
        self.clock, self.rates, self.accept_length = clock, rates, accept_length
        self.random = random.Random(seed)
        self.requests: list[Request] = []
        self.noise = 1.0
        self.total_tokens = self.total_steps = 0
        self._awaited: list[float] = []  # when requests were done that their clients have not replaced (real time)
        self._woken = asyncio.Event()

    @property
    def running(self) -> int:
        return sum(not r.gone for r in self.requests)

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self._awaited[:1] = []
        self._woken.set()

    def abort(self, request: Request) -> None:
        """A client went away, as all do at the end of a load."""
        request.gone = True
        self._awaited.clear()
        self._woken.set()

    async def run(self) -> None:
        """Generate until cancelled."""
        credit, last, stepped = 0.0, self.clock.now(), 0.0
        draft = self._draft(1)
        while True:
            self.requests = [r for r in self.requests if not r.gone]
            self._awaited = [t for t in self._awaited if REAL() - t < PATIENCE_S]
            if not self.requests and not self._awaited:
                self.clock.allow(math.inf)
                self._woken.clear()
                await self._woken.wait()
                credit, last, stepped = 0.0, self.clock.now(), 0.0
                continue
            now = self.clock.now()
            rate = at(self.rates, self.running + len(self._awaited)) * self.noise
            credit = min(credit + rate * (now - last), rate * BACKLOG_S)
            last = now
            for request in [r for r in self.requests if not r.tokens and r.begins <= now]:
                credit -= 1
                self._give(request, 1)
            decoding = [r for r in self.requests if r.tokens and not r.done]
            if not decoding:
                await self._pass(min(SLICE_S, self._next_prefill(now)))
                continue
            if len(draft) != len(decoding):
                draft = self._draft(len(decoding))
            need = sum(draft)
            due = max((need - credit) / rate, stepped + HASTE * need / rate - now)
            if due > 0:
                await self._pass(min(due, self._next_prefill(now), SLICE_S))
                continue
            credit, stepped = credit - need, now
            for request, accepted in zip(decoding, draft, strict=True):
                request.steps += 1
                self.total_steps += 1
                surplus = accepted - (request.wanted - request.tokens)
                credit += max(0, surplus)
                self._give(request, accepted - max(0, surplus))
            draft = self._draft(len(decoding))
            await asyncio.sleep(0)

    def _give(self, request: Request, tokens: int) -> None:
        request.tokens += tokens
        self.total_tokens += tokens
        request.emit(request)
        if request.done:
            request.gone = True
            if request.replaced:
                self._awaited.append(REAL())

    def _draft(self, count: int) -> list[int]:
        """Accepted tokens, the bonus token included, of one verification of `count` requests."""
        mean = self.accept_length - 1
        return [1 + sum(self.random.random() < mean / 6 for _ in range(6)) for _ in range(count)]

    def _next_prefill(self, now: float) -> float:
        waiting = [r.begins - now for r in self.requests if not r.tokens]
        return max(0.0005, min(waiting, default=1.0))

    async def _pass(self, told_s: float) -> None:
        """Let that much told time pass, and hardly more; none while a client owes a request."""
        if not self._awaited:
            self.clock.allow(told_s + SLACK_S)
        await asyncio.sleep(told_s / self.clock.pace)
