"""Find and end the processes that a dead tuner left running, by our own records and never by name.

A launch's folder holds owner.json (pids with start times, session, marker, boot) from its start and
exit.json from its end. A record of another boot, or a pid with another start time, is ignored.
Only the standard library is used: the supervisor must start fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

from autotune.utils.files import read_plain

WAIT_S = 15.0


def end_orphans(study_folder: pathlib.Path) -> dict[str, int]:
    """End the servers of this study's dead tuners; returns the number of live processes of each launch that had any."""
    found = {}
    for folder in sorted((study_folder / "launches").glob("*")):
        if (folder / "exit.json").exists():
            continue
        owner = record(folder / "owner.json")
        tuner_lives = owner.get("boot") == boot_id() and \
            start_time(owner.get("tuner", 0)) == str(owner.get("tuner_started"))
        if not tuner_lives and (count := end_launch(folder)):
            found[folder.name] = count
    return found


def record(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file of a launch's folder; {} when missing or damaged."""
    try:
        found = json.loads(read_plain(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def end_launch(folder: pathlib.Path) -> int:
    """End every process of one launch; returns how many were alive. The supervisor gets WAIT_S to do it first."""
    owner = record(folder / "owner.json")
    try:
        supervisor, supervisor_started = int(owner["supervisor"]), str(owner["supervisor_started"])
        launch = int(owner["session"]), str(owner["marker"]), int(owner["server_started"])
    except (KeyError, TypeError, ValueError):
        return 0
    if owner.get("boot") != boot_id():
        return 0
    first = members(*launch)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and start_time(supervisor) == supervisor_started:
        time.sleep(0.05)  # its control pipe is closed, so it is ending the server
    if start_time(supervisor) == supervisor_started:
        kill(supervisor)
    while alive := members(*launch):
        for pid in alive:
            kill(pid)
        time.sleep(0.02)
    return len(first)


def members(session: int, marker: str, oldest: int) -> set[int]:
    """Live processes of a launch: in the server's session, or carrying its marker in their environment.

    `oldest` is the server's start time in clock ticks; an older process is never a member.
    """
    found = set()
    wanted = f"AUTOTUNE_LAUNCH={marker}".encode()
    for pid, fields in processes():
        if fields[0] != b"Z" and int(fields[19]) >= oldest:
            with contextlib.suppress(OSError):
                environ = pathlib.Path("/proc", str(pid), "environ")
                if int(fields[3]) == session or wanted in environ.read_bytes().split(b"\0"):
                    found.add(pid)
    return found


def processes() -> Iterator[tuple[int, list[bytes]]]:
    """(pid, `stat_fields`) of every process, zombies included."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                yield int(name), stat_fields(int(name))


def stat_fields(pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat: 0 state, 1 parent, 3 session, 19 start in ticks. Raises OSError, ValueError."""
    stat = pathlib.Path("/proc", str(pid), "stat").read_bytes()
    return stat[stat.rindex(b")") + 2:].split()


def start_time(pid: int) -> str | None:
    """A process's start time in clock ticks, with the pid its identity until reboot; None when it does not run."""
    try:
        fields = stat_fields(pid)
    except (OSError, ValueError):
        return None
    return None if fields[0] == b"Z" else fields[19].decode()


def boot_id() -> str:
    """Identity of this boot; pids of another boot mean nothing."""
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal; a process that is gone is no error."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)
