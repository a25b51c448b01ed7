"""The replay's engine: continuous batching at the table's speed, with tree drafts accepted a few tokens at a time.

All requests in flight together get the table's tokens per second; a step gives each decoding request as many tokens as
its draft had accepted. Time is the replay's; a late step is caught up with, so that the mean speed is the table's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Mapping

from tests.replay.clock import Clock
from tests.replay.table import at

BACKLOG_S = 0.5  # lateness that is caught up with
PAUSE_S = 0.3  # so is a client's between the end of one request and the next
HASTE = 0.3  # share of a step's time that passes at least
REST_S = 0.01


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
        self._woken = asyncio.Event()

    @property
    def running(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self._woken.set()

    async def run(self) -> None:
        """Generate until cancelled."""
        credit, last, stepped = 0.0, self.clock.now(), 0.0
        most, seen = 0, 0.0  # requests in flight at once of late, and when that was
        draft = self._draft(1)
        while True:
            if not self.requests:
                self._woken.clear()
                await self._woken.wait()
                if self.clock.now() - last > PAUSE_S:
                    credit, last, stepped = 0.0, self.clock.now(), 0.0
            now = self.clock.now()
            if self.running >= most or now - seen > PAUSE_S:
                most, seen = self.running, now
            rate = at(self.rates, most) * self.noise
            credit = min(credit + rate * (now - last), rate * BACKLOG_S)
            last = now
            self.requests = [r for r in self.requests if not r.gone]
            for request in [r for r in self.requests if not r.tokens and r.begins <= now]:
                credit -= 1
                self._give(request, 1)
            decoding = [r for r in self.requests if r.tokens and not r.done]
            if not decoding:
                await self._sleep(REST_S)
                continue
            if len(draft) != len(decoding):
                draft = self._draft(len(decoding))
            need = sum(draft)
            due = max((need - credit) / rate, stepped + HASTE * need / rate - now)
            if due > 0:
                await self._sleep(min(due, self._next_prefill(now)))
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

    def _draft(self, count: int) -> list[int]:
        """Accepted tokens, the bonus token included, of one verification of `count` requests."""
        mean = self.accept_length - 1
        return [1 + sum(self.random.random() < mean / 6 for _ in range(6)) for _ in range(count)]

    def _next_prefill(self, now: float) -> float:
        waiting = [r.begins - now for r in self.requests if not r.tokens]
        return max(0.0005, min(waiting, default=1.0))

    async def _sleep(self, told_s: float) -> None:
        await asyncio.sleep(told_s / self.clock.pace)
