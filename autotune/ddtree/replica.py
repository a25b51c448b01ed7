"""The front's side of one replica: requests go in by pipe, each step's tokens come back to the request's queue."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from autotune.ddtree.arguments import Arguments

log = logging.getLogger("ddtree")
Step = tuple[list[int], str | None, int]  # tokens, why it ended, verify steps so far


# Metrics of a replica and their help texts; a name in `_total` counts since the start. A worker reports the last four.
METRICS = {"prompt_tokens_total": "Prompt tokens taken.", "generation_tokens_total": "Output tokens made.",
           "spec_verify_steps_total": "Trees verified, one a running request and step.",
           "spec_accepted_tokens_total": "Draft tokens accepted.",
           "num_running_reqs": "Requests in the batch.", "num_queue_reqs": "Requests that wait for a slot."}


class Replica:
    """One data-parallel replica. `on_death` is called once with the name of a rank whose process has ended."""

    numbers = itertools.count(1)

    def __init__(self, arguments: Arguments, dp_rank: int, on_death: Callable[[str], None]) -> None:
        self.ranks = start_replica(arguments, dp_rank)
        self.leader = self.ranks[0].pipe
        self.metrics = dict.fromkeys(METRICS, 0)
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.queues: dict[int, asyncio.Queue[Step]] = {}
        self.on_death = on_death
        for rank in self.ranks:
            asyncio.get_running_loop().add_reader(rank.pipe.fileno(), self._read, rank)

    def submit(self, number: int, prompt: list[int], *settings: Any) -> asyncio.Queue[Step]:
        """Sends a request; settings are the other fields of `engine.Request` in order."""
        queue = self.queues[number] = asyncio.Queue()
        self.metrics["prompt_tokens_total"] += len(prompt)
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

    def _take(self, kind: str, content: Any, reported: tuple[int, ...] = ()) -> None:
        if kind == "ready":
            self.ready.set_result(content)
            return
        self.metrics |= zip([*METRICS][2:], reported, strict=True)
        for number, tokens, finish, verify_steps in content:
            self.metrics["generation_tokens_total"] += len(tokens)
            if queue := self.queues.get(number):
                queue.put_nowait((tokens, finish, verify_steps))


PR_SET_PDEATHSIG = 1


def set_logging(level: str, place: str = "") -> None:
    """Logs to stderr, each line with the time and the rank."""
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format=f"[%(asctime)s{place}] %(message)s",
                        datefmt="%Y-%m-%d %H:%M:%S")


def die_with(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


class Seat(NamedTuple):
    """A worker's place, and the descriptors that it was born with."""

    arguments: dict[str, Any]
    parent: int
    dp_rank: int
    tp_rank: int
    front: int
    leader: int | None  # a follower's connection
    followers: list[int]  # a leader's connections
    store_port: int
    store_listener: int


class Rank(NamedTuple):
    """A running worker and the front's end of its pipe."""

    name: str
    process: subprocess.Popen[bytes]
    pipe: Connection


def pipe() -> tuple[int, int]:
    """Two connected descriptors."""
    ends = socket.socketpair()
    return ends[0].detach(), ends[1].detach()


def start_replica(arguments: Arguments, dp_rank: int) -> list[Rank]:
    """Starts the ranks of one replica; the first is its leader."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    internal = [pipe() for _ in range(arguments.tp_size - 1)]
    ranks = []
    for tp_rank in range(arguments.tp_size):
        ours, theirs = pipe()
        leader = internal[tp_rank - 1][1] if tp_rank else None
        followers = [] if tp_rank else [ends[0] for ends in internal]
        seat = Seat(asdict(arguments), os.getpid(), dp_rank, tp_rank, theirs, leader, followers,
                    listener.getsockname()[1], listener.fileno())
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "autotune.ddtree.worker", json.dumps(seat)]
        kept = [theirs, *followers, listener.fileno() if leader is None else leader]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=kept,
                                   env={**os.environ, "PYTHONPATH": path})
        os.close(theirs)
        ranks.append(Rank(f"DP{dp_rank} TP{tp_rank}", process, Connection(ours)))
    for end in itertools.chain(*internal):
        os.close(end)
    listener.close()
    return ranks


def stop(ranks: list[Rank]) -> None:
    """Ends workers, which hold nothing worth saving, and waits for them."""
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.wait()
