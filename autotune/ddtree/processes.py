"""Worker processes: started with their pipes, watched by those pipes, and never left behind."""

import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from autotune.ddtree.arguments import Arguments

PR_SET_PDEATHSIG = 1


def set_logging(level: str, place: str = "") -> None:
    """Logs to stderr, each line with the time and the rank."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"[%(asctime)s{place}] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )


def die_with(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


@dataclass(frozen=True)
class Rank:
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
    size = arguments.tp_size
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    internal = [pipe() for _ in range(size - 1)]
    ranks = []
    for tp_rank in range(size):
        ours, theirs = pipe()
        leader = internal[tp_rank - 1][1] if tp_rank else None
        followers = [] if tp_rank else [ends[0] for ends in internal]
        seat = {
            "arguments": arguments.to_json(),
            "parent": os.getpid(),
            "dp_rank": dp_rank,
            "tp_rank": tp_rank,
            "front": theirs,
            "leader": leader,
            "followers": followers,
            "store_port": listener.getsockname()[1],
            "store_listener": listener.fileno(),
        }
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "autotune.ddtree.worker", json.dumps(seat)]
        kept = [theirs, *followers, *([leader] if leader is not None else [listener.fileno()])]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=kept, env={**os.environ, "PYTHONPATH": path}
        )
        os.close(theirs)
        ranks.append(Rank(f"DP{dp_rank} TP{tp_rank}", process, Connection(ours)))
    for ends in internal:
        os.close(ends[0])
        os.close(ends[1])
    listener.close()
    return ranks


def stop(ranks: list[Rank]) -> None:
    """Ends workers, which hold nothing worth saving, and waits for them."""
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.wait()
