"""Failures without words: what exit status, time limits and the kernel say when the log does not."""

from __future__ import annotations

import signal

from autotune.crash.host_evidence import HostEvidence
from autotune.records import Stage

BY_SIGNAL: dict[int, str] = {signal.SIGKILL: "killed", signal.SIGSEGV: "segfault", signal.SIGBUS: "segfault",
                             signal.SIGABRT: "aborted", signal.SIGILL: "aborted", signal.SIGFPE: "aborted",
                             signal.SIGTERM: "terminated", signal.SIGINT: "terminated", signal.SIGHUP: "terminated"}


def signal_of(exit_status: int | None) -> int | None:
    """The signal that ended a process: negative status, or a shell's 128 + signal; None for other endings."""
    if exit_status is None:
        return None
    if exit_status < 0:
        return -exit_status
    return exit_status - 128 if 128 < exit_status <= 128 + signal.NSIG else None


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def category_of(exit_status: int | None, stage: Stage | None, evidence: HostEvidence | None, empty: bool,
                detail: str = "") -> str:
    """The category of a failure whose log names no cause and that was not a time limit's."""
    number = signal_of(exit_status)
    if number == signal.SIGKILL and evidence is not None and (evidence.oom_killed or evidence.memory_pressure):
        return "host_oom_killed"
    if number is not None:
        return BY_SIGNAL.get(number, "killed_by_signal")
    if exit_status is None:
        if detail:
            return "server_errors"
        return "no_output" if empty else "no_failure_found"
    if exit_status == 0:
        return "silent_exit"
    return "died_under_load" if stage is Stage.SERVING else "exited_without_words"


def hang_category(stage: Stage) -> str:
    """hang_load, hang_graph_capture, ...: a hang is told by where it is."""
    return "hang_" + stage.value.replace("-", "_")


def told(exit_status: int | None, after_s: float | None, timed_out: bool, stage: Stage,
         evidence: HostEvidence | None) -> str:
    """One line for the excerpt of a failure without words."""
    parts = []
    number = signal_of(exit_status)
    if timed_out:
        parts.append(f"no end of stage {stage}")
    if number is not None:
        parts.append(f"ended by {signal_name(number)}")
    elif exit_status is not None:
        parts.append(f"ended with status {exit_status}")
    if after_s is not None:
        parts.append(f"after {after_s:.0f} s")
    if evidence is not None:
        parts += [f"kernel: {line}" for line in evidence.kernel_lines]
        if evidence.oom_killed and not evidence.kernel_lines:
            parts.append("the kernel counted an out-of-memory kill meanwhile")
        if evidence.available_share is not None and evidence.memory_pressure:
            parts.append(f"{evidence.available_share:.0%} of the host's memory was available")
    return ", ".join(parts) or "nothing is known about the end"
