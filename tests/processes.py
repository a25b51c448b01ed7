"""Processes under test: their state, and waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def eventually(condition: Callable[[], object], limit_s: float = 30) -> None:
    """Wait for a condition; fail after the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"condition not met after {limit_s} s"
        time.sleep(0.02)
