"""The requests of a load, made ahead of time: request number i is the same for every configuration."""

from __future__ import annotations

import time
from collections import deque

from autotune.loadgen import body
from autotune.loadgen.http1 import request
from autotune.loadgen.prompts import PromptSet, share
from autotune.loadgen.spec import LoadOrder

AHEAD = (64, 128)  # requests made ahead: at the least, and as many as there are time for
BATCH_S = 0.00025  # several are made at once, so long, for much less than one by one with cold caches

Request = tuple[int, int, bytes]
"""(index, output tokens wanted, bytes to send)."""


class RequestSource:
    """Gives requests in order, made ahead where there was time for it."""

    def __init__(self, order: LoadOrder, host: str) -> None:
        self._order, self._load, self._host = order, order.load, host
        self._prompts = PromptSet(order.load.prompts, order.load.context_tokens, order.chars_per_token)
        self._headers = body.auth(order.target)
        self._index = 0
        self._ready: deque[Request] = deque()

    def prepare(self, count: int) -> None:
        """Make `count` requests ahead."""
        while len(self._ready) < count:
            self._ready.append(self._build())

    @property
    def short(self) -> bool:
        """Whether fewer than 64 requests are ready."""
        return len(self._ready) < AHEAD[0]

    def refill(self, seconds: float = BATCH_S) -> None:
        """Make requests ahead for so long, unless enough are: for moments with nothing else to do."""
        end = time.monotonic() + seconds
        while len(self._ready) < AHEAD[1] and time.monotonic() < end:
            self._ready.append(self._build())

    def next(self) -> Request:
        return self._ready.popleft() if self._ready else self._build()

    def _build(self) -> Request:
        index, load = self._index, self._load
        self._index += 1
        wanted = load.output_tokens * (1 + load.output_spread * (2 * share(f"{load.seed}/length/{index}") - 1))
        if load.rate_per_s is None and index < load.concurrency:
            # the rest of a request already under way: finishes spread from the start
            wanted *= share(f"{load.seed}/begun/{index}")
        tokens = max(1, round(wanted))
        path, content = body.request_body(self._order.target, self._prompts.prompt(index), tokens, load.temperature,
                                          load.ignore_eos)
        return index, tokens, request(self._host, path, body.encode(content), self._headers)
