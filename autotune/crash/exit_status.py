"""Failures without an error in the log: exit status, time limits, and the kernel's out-of-memory evidence.

All sources of evidence are optional: counters of the control group and the host, and the kernel log.
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import time
from typing import NamedTuple

from autotune.records import Stage

BY_SIGNAL: dict[int, str] = {signal.SIGKILL: "killed", signal.SIGSEGV: "segfault", signal.SIGBUS: "segfault",
                             signal.SIGABRT: "aborted", signal.SIGILL: "aborted", signal.SIGFPE: "aborted",
                             signal.SIGTERM: "terminated", signal.SIGINT: "terminated", signal.SIGHUP: "terminated"}


def signal_of(exit_status: int | None) -> int | None:
    """Signal that ended a process (negative status, or a shell's 128 + signal); None otherwise."""
    if exit_status is None or 0 <= exit_status <= 128 or exit_status > 128 + signal.NSIG:
        return None
    return -exit_status if exit_status < 0 else exit_status - 128


def signal_name(number: int) -> str:
    """Name of a signal: SIGKILL for 9."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def silent_category(exit_status: int | None, stage: Stage | None, evidence: HostEvidence | None, empty: bool,
                    detail: str = "") -> str:
    """Category of a failure without a cause in the log and without a time limit."""
    number = signal_of(exit_status)
    if number == signal.SIGKILL and evidence is not None and (evidence.oom_killed or evidence.memory_pressure):
        return "host_oom_killed"
    if number is not None:
        return BY_SIGNAL.get(number, "killed_by_signal")
    if exit_status is None:
        return "server_errors" if detail else "no_output" if empty else "no_failure_found"
    if exit_status == 0:
        return "silent_exit"
    return "died_under_load" if stage is Stage.SERVING else "exited_without_words"


def describe(exit_status: int | None, after_s: float | None, timed_out: bool, stage: Stage,
             evidence: HostEvidence | None) -> str:
    """One line for the excerpt of a failure without an error in the log."""
    parts, number = [f"stage {stage} exceeded its time limit"] if timed_out else [], signal_of(exit_status)
    if number is not None:
        parts.append(f"ended by {signal_name(number)}")
    elif exit_status is not None:
        parts.append(f"ended with status {exit_status}")
    if after_s is not None:
        parts.append(f"after {after_s:.0f} s")
    if evidence is not None:
        counted = ["the kernel counted an out-of-memory kill"] if evidence.oom_killed else []
        parts += [f"kernel: {line}" for line in evidence.kernel_lines] or counted
        if evidence.available_share is not None and evidence.memory_pressure:
            parts.append(f"{evidence.available_share:.0%} of the host's memory was available")
    return ", ".join(parts) or "nothing is known about the end"


PRESSURE_SHARE = 0.05  # a smaller share of available memory counts as pressure
KILLED = re.compile(r"(?:Out of memory|Memory cgroup out of memory): Kill(?:ed)? process \d+|oom-kill:.*pid=\d+")


class HostEvidence(NamedTuple):
    """Memory facts of the host during a launch; None, 0 or empty if unknown.

    `oom_kills`: out-of-memory kills in the server's control group or on the host. `kernel_lines`: kernel log lines
    about such kills. `available_share`: available memory at the end. `memory_limit_share`: used part of the control
    group's limit.
    """

    oom_kills: int = 0
    kernel_lines: tuple[str, ...] = ()
    available_share: float | None = None
    memory_limit_share: float | None = None

    @property
    def oom_killed(self) -> bool:
        """True if the kernel killed a process for memory."""
        return bool(self.kernel_lines or self.oom_kills)

    @property
    def memory_pressure(self) -> bool:
        """True if memory was nearly exhausted."""
        free = [self.available_share, None if self.memory_limit_share is None else 1 - self.memory_limit_share]
        return any(share is not None and share < PRESSURE_SHARE for share in free)


class HostSnapshot(NamedTuple):
    """Kills in the control group and on the host up to one moment; `root` holds /proc and /sys."""

    at: float
    kills: tuple[int | None, int | None]
    root: pathlib.Path

    @classmethod
    def take(cls, root: pathlib.Path = pathlib.Path("/")) -> HostSnapshot:
        """Read the counters; unreadable ones are None. Never raises."""
        return cls(time.time(), (_number(_group(root) / "memory.events", "oom_kill"),
                                 _number(root / "proc/vmstat", "oom_kill")), root)

    def since(self) -> HostEvidence:
        """Evidence since this snapshot."""
        kills = [after - before for before, after in zip(self.kills, HostSnapshot.take(self.root).kills, strict=True)
                 if before is not None and after is not None]
        total, available = (_number(self.root / "proc/meminfo", name) for name in ("MemTotal", "MemAvailable"))
        limit, used = (_read(_group(self.root) / f"memory.{name}").strip() for name in ("max", "current"))
        return HostEvidence(
            max([0, *kills]), _kernel_lines(self.root, self.at),
            available / total if total and available is not None else None,
            int(used) / int(limit) if limit.isdigit() and used.isdigit() and int(limit) else None)


def _number(path: pathlib.Path, key: str) -> int | None:
    for line in _read(path).splitlines():
        name, _, value = line.replace(":", " ").partition(" ")
        if name == key and value.split() and value.split()[0].isdigit():
            return int(value.split()[0])
    return None


def _group(root: pathlib.Path) -> pathlib.Path:
    """Folder of this process's control group (version 2); one that does not exist without any."""
    top = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            folder = top / line[3:].strip().lstrip("/")
            return folder if folder.is_dir() else top
    return top / "none"


def _kernel_lines(root: pathlib.Path, since: float) -> tuple[str, ...]:
    """Out-of-memory kills in the kernel log after `since` (Unix time); () if unreadable."""
    try:
        booted = time.time() - float(_read(root / "proc/uptime").split()[0])
        handle = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, IndexError, ValueError):
        return ()
    lines: list[str] = []
    try:
        while record := os.read(handle, 8192):
            for entry in record.decode("utf-8", "replace").splitlines():
                head, _, text = entry.partition(";")
                stamp = head.split(",")
                if KILLED.search(text) and len(stamp) > 2 and booted + int(stamp[2]) / 1e6 >= since:
                    lines.append(text.strip()[:300])
    except (OSError, ValueError):
        pass  # no more records, or overwritten while we read
    finally:
        os.close(handle)
    return tuple(lines)


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
