"""The front's side of one replica: requests go in by pipe, each step's tokens come back to the request's queue."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autotune.ddtree.arguments import Arguments
from autotune.ddtree.processes import Rank, start_replica

log = logging.getLogger("ddtree")
Step = tuple[list[int], str | None, int]  # tokens, why it ended, verify steps so far


@dataclass(slots=True)
class Counters:
    """Since the start: tokens and steps; now: requests."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    verify_steps: int = 0
    accepted_tokens: int = 0
    running: int = 0
    waiting: int = 0


class Replica:
    """One data-parallel replica. `on_death` is called once with the name of a rank whose process has ended."""

    numbers = itertools.count(1)

    def __init__(self, arguments: Arguments, dp_rank: int, on_death: Callable[[str], None]) -> None:
        self.ranks = start_replica(arguments, dp_rank)
        self.leader = self.ranks[0].pipe
        self.counters = Counters()
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.queues: dict[int, asyncio.Queue[Step]] = {}
        self.on_death = on_death
        for rank in self.ranks:
            asyncio.get_running_loop().add_reader(rank.pipe.fileno(), self._read, rank)

    def submit(self, number: int, prompt: list[int], *settings: Any) -> "asyncio.Queue[Step]":
        """Sends a request; settings are the other fields of `engine.Request` in order."""
        queue = self.queues[number] = asyncio.Queue()
        self.counters.prompt_tokens += len(prompt)
        self.leader.send(("add", number, prompt, *settings))
        return queue

    def forget(self, number: int, *, finished: bool) -> None:
        """Drops a request's queue; one that is not finished is aborted, which frees its slot."""
        del self.queues[number]
        if not finished and not self.leader.closed:
            self.leader.send(("abort", number))

    def close(self) -> None:
        """Stops reading; the processes are stopped by whoever has them all."""
        for rank in self.ranks:
            if not rank.pipe.closed:
                asyncio.get_running_loop().remove_reader(rank.pipe.fileno())
                rank.pipe.close()

    def _read(self, rank: Rank) -> None:
        try:
            while rank.pipe.poll():
                self._take(*rank.pipe.recv())
        except (EOFError, OSError):
            self.close()
            self.on_death(rank.name)

    def _take(self, kind: str, content: Any, gauges: tuple[int, int, int, int] = (0, 0, 0, 0)) -> None:
        if kind == "ready":
            self.ready.set_result(content)
            return
        counters = self.counters
        counters.running, counters.waiting, counters.verify_steps, counters.accepted_tokens = gauges
        for number, tokens, finish, verify_steps in content:
            counters.generation_tokens += len(tokens)
            if queue := self.queues.get(number):
                queue.put_nowait((tokens, finish, verify_steps))
