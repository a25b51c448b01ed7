"""What the kernel says about memory: whether it killed something while a server ran, and how short memory was.

    before = HostSnapshot.take()
    ...                              # the launch
    evidence = before.since(pids=[server.pid])

All sources are optional: counters of the control group and of the whole host, the kernel log where it is readable.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import time
from collections.abc import Collection

PRESSURE_SHARE = 0.05
"""Less available memory than this share of all counts as pressure."""
KILLED = re.compile(r"Out of memory: Kill(?:ed)? process (\d+)|Memory cgroup out of memory: Kill(?:ed)? process (\d+)"
                    r"|oom-kill:.*pid=(\d+)")


@dataclasses.dataclass(frozen=True)
class HostEvidence:
    """Facts about the host during a launch. None or empty: not known.

    `oom_kills_group` and `oom_kills_host` count the kernel's out-of-memory kills in the server's control group and
    on the whole host; `kernel_lines` are its log lines about the server's processes (or any, without pids);
    `available_share` is the available part of memory at the end, `memory_limit_share` the used part of the
    control group's limit.
    """

    oom_kills_group: int | None = None
    oom_kills_host: int | None = None
    kernel_lines: tuple[str, ...] = ()
    available_share: float | None = None
    memory_limit_share: float | None = None

    @property
    def oom_killed(self) -> bool:
        """Whether the kernel killed a process here for want of memory."""
        return bool(self.kernel_lines or self.oom_kills_group or self.oom_kills_host)

    @property
    def memory_pressure(self) -> bool:
        """Whether memory was nearly gone."""
        short = self.available_share is not None and self.available_share < PRESSURE_SHARE
        full = self.memory_limit_share is not None and self.memory_limit_share > 1 - PRESSURE_SHARE
        return short or full


@dataclasses.dataclass(frozen=True)
class HostSnapshot:
    """Counters at one moment; `root` is where /proc and /sys lie."""

    at: float
    group: int | None
    host: int | None
    root: pathlib.Path

    @classmethod
    def take(cls, root: pathlib.Path = pathlib.Path("/")) -> HostSnapshot:
        """Read the counters now. Unreadable ones are None; never raises."""
        return cls(time.time(), _group_kills(root), _number(root / "proc/vmstat", "oom_kill"), root)

    def since(self, pids: Collection[int] = ()) -> HostEvidence:
        """What happened since this snapshot. `pids` are the server's processes, as far as they were known."""
        now = HostSnapshot.take(self.root)
        return HostEvidence(_grown(self.group, now.group), _grown(self.host, now.host),
                            _kernel_lines(self.root / "dev/kmsg", self.root, self.at, pids),
                            _available_share(self.root), _limit_share(self.root))


def _grown(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None else max(0, now - before)


def _number(path: pathlib.Path, key: str) -> int | None:
    for line in _read(path).splitlines():
        name, _, value = line.replace(":", " ").partition(" ")
        if name == key and value.split() and value.split()[0].isdigit():
            return int(value.split()[0])
    return None


def _group(root: pathlib.Path) -> pathlib.Path | None:
    """The folder of this process's control group (version 2)."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            folder = root / "sys/fs/cgroup" / line[3:].strip().lstrip("/")
            return folder if folder.is_dir() else root / "sys/fs/cgroup"
    return None


def _group_kills(root: pathlib.Path) -> int | None:
    folder = _group(root)
    return None if folder is None else _number(folder / "memory.events", "oom_kill")


def _limit_share(root: pathlib.Path) -> float | None:
    folder = _group(root)
    limit, used = (_read(folder / f"memory.{name}").strip() for name in ("max", "current")) if folder else ("", "")
    return int(used) / int(limit) if limit.isdigit() and used.isdigit() and int(limit) else None


def _available_share(root: pathlib.Path) -> float | None:
    total = _number(root / "proc/meminfo", "MemTotal")
    available = _number(root / "proc/meminfo", "MemAvailable")
    return available / total if total and available is not None else None


def _kernel_lines(kmsg: pathlib.Path, root: pathlib.Path, since: float, pids: Collection[int]) -> tuple[str, ...]:
    """Out-of-memory kills in the kernel log after `since` (Unix time); () where it is not readable."""
    try:
        booted = time.time() - float(_read(root / "proc/uptime").split()[0])
        handle = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, IndexError, ValueError):
        return ()
    lines: list[str] = []
    try:
        while record := os.read(handle, 8192):
            for entry in record.decode("utf-8", "replace").splitlines():
                head, _, text = entry.partition(";")
                found, stamp = KILLED.search(text), head.split(",")
                if not found or len(stamp) < 3 or booted + int(stamp[2]) / 1e6 < since:
                    continue
                pid = int(next(group for group in found.groups() if group))
                if not pids or pid in pids:
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
