"""Find and end the processes that a dead tuner left running, by our own records and never by name.

A launch's folder holds owner.json (pids with start times, session, marker, boot) from its start and
exit.json from its end. A record of another boot, or a pid with another start time, is ignored.
Only the standard library is used: the supervisor must start fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import time
from collections.abc import Iterator

from autotune.utils.files import read_plain

WAIT_S = 15.0
DAMAGED = (OSError, ValueError, KeyError, TypeError, RecursionError)  # raised by a missing or malformed record


@dataclasses.dataclass(frozen=True)
class Ended:
    """The processes ended for one launch folder."""

    launch: str
    processes: int


def end_orphans(study_folder: pathlib.Path) -> list[Ended]:
    """End whatever dead tuners of this study left running; returns the launches that had live processes."""
    found = []
    for folder in sorted((study_folder / "launches").glob("*")):
        if not (folder / "exit.json").exists() and not tuner_lives(folder) and (count := end_launch(folder)):
            found.append(Ended(folder.name, count))
    return found


def tuner_lives(folder: pathlib.Path) -> bool:
    """True while the tuner that started this launch runs (on this boot)."""
    try:
        owner = json.loads(read_plain(folder / "owner.json"))
        return start_time(int(owner["tuner"])) == str(owner["tuner_started"]) and bool(owner["boot"] == boot_id())
    except DAMAGED:
        return False


def end_launch(folder: pathlib.Path) -> int:
    """End every process of one launch; returns how many were alive. The supervisor gets WAIT_S to do it first."""
    try:
        owner = json.loads(read_plain(folder / "owner.json"))
        if owner["boot"] != boot_id():
            return 0
        supervisor, supervisor_started = int(owner["supervisor"]), str(owner["supervisor_started"])
        launch = int(owner["session"]), str(owner["marker"]), int(owner["server_started"])
    except DAMAGED:
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
