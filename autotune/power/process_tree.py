"""The processes of a server: its descendants, and those whose parent died."""

from __future__ import annotations

import contextlib
import os

import psutil


class ProcessTree:
    """Follows the processes that started from `root`, which leads a session of its own.

    A child that left the session is found while its parent lives, and remembered.
    """

    def __init__(self, root: int) -> None:
        self.root = root
        self._seen: set[int] = set()

    def members(self) -> list[psutil.Process]:
        """The processes there are now; one pass over the process table, some milliseconds."""
        inside = {pid for pid in psutil.pids() if self._in_session(pid)}
        outside = ({self.root} | self._seen) - (inside - {self.root})
        members: dict[int, psutil.Process] = {}
        for pid in inside | outside:
            with contextlib.suppress(psutil.Error):
                members[pid] = psutil.Process(pid)
                if pid in outside:
                    members.update((child.pid, child) for child in members[pid].children(recursive=True))
        self._seen = set(members)
        return list(members.values())

    def _in_session(self, pid: int) -> bool:
        try:
            return os.getsid(pid) == self.root
        except OSError:
            return False
