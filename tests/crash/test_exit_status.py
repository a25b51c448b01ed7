"""Failures without an error message: exit status, time limits, evidence of the kernel."""

from __future__ import annotations

import pathlib

import pytest

from autotune.crash.classify import classify
from autotune.crash.exit_status import HostEvidence, HostSnapshot
from autotune.records import Blame, Stage

LOADING = "[2026-01-01 00:00:00 TP0] Load weight begin. avail mem=79.00 GB\n"
SERVING = LOADING + "The server is fired up and ready to roll!\n"
SELF_KILL = LOADING + """[2026-01-01 00:00:00 TP1] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/sglang/srt/managers/tp_worker.py", line 84, in __init__
torch.AcceleratorError: CUDA error: invalid device ordinal
[2026-01-01 00:00:01] Received sigquit from a child process. It usually means the child failed.
"""


@pytest.mark.parametrize(("log", "status", "category", "blame"), [
    (LOADING, -9, "killed", Blame.UNKNOWN),
    (LOADING, 137, "killed", Blame.UNKNOWN),
    (LOADING, -11, "segfault", Blame.UNKNOWN),
    (LOADING, 134, "aborted", Blame.UNKNOWN),
    (LOADING, -15, "terminated", Blame.TRANSIENT),
    (LOADING, -2, "terminated", Blame.TRANSIENT),
    (LOADING, -31, "killed_by_signal", Blame.UNKNOWN),
    (LOADING, 0, "silent_exit", Blame.UNKNOWN),
    (LOADING, 3, "exited_without_words", Blame.UNKNOWN),
    ("", 1, "exited_without_words", Blame.CONFIG),
    (SERVING, 1, "died_under_load", Blame.TRANSIENT),
    (SERVING, 0, "silent_exit", Blame.UNKNOWN),
    ("", None, "no_output", Blame.UNKNOWN),
])
def test_the_exit_status_classifies_a_log_without_a_cause(log: str, status: int | None, category: str,
                                                      blame: Blame) -> None:
    crash = classify(log, exit_status=status, after_s=46.2)
    assert (crash.category, crash.blame) == (category, blame)
    assert crash.exit_status == status and crash.after_s == 46.2
    assert crash.excerpt.endswith("after 46 s]")


def test_sigkill_is_an_out_of_memory_kill_if_the_kernel_reports_one() -> None:
    line = "Out of memory: Killed process 4242 (python) total-vm:87033376kB"
    for evidence in (HostEvidence(kernel_lines=(line,)), HostEvidence(oom_kills=1),
                     HostEvidence(available_share=0.01)):
        crash = classify(LOADING, exit_status=-9, evidence=evidence)
        assert (crash.category, crash.blame, crash.stage) == ("host_oom_killed", Blame.ENVIRONMENT, Stage.LOAD)
    assert line in classify(LOADING, exit_status=-9, evidence=HostEvidence(kernel_lines=(line,))).excerpt
    assert classify(LOADING, exit_status=-9, evidence=HostEvidence(available_share=0.6)).category == "killed"


def test_a_kernel_kill_explains_the_end_of_a_rank_but_not_an_error_of_the_engine() -> None:
    killed, none = HostEvidence(oom_kills=1), HostEvidence()
    died = LOADING + SELF_KILL.splitlines()[-1]
    assert classify(died, exit_status=-9, evidence=killed).category == "host_oom_killed"
    for evidence in (killed, none):
        crash = classify(SELF_KILL, exit_status=-9, evidence=evidence)
        assert (crash.category, crash.blame) == ("not_enough_gpus", Blame.CONFIG)


@pytest.mark.parametrize("stage", list(Stage))
def test_a_hang_has_its_stage_in_category_and_excerpt(stage: Stage) -> None:
    crash = classify(LOADING, stage=stage, timed_out=True, after_s=600.0)
    assert crash.category == "hang_" + stage.value.replace("-", "_")
    assert crash.stage is stage and "exceeded its time limit" in crash.excerpt


def test_a_hang_with_a_cause_in_the_log_is_classified_by_the_cause() -> None:
    log = "[2026-01-01 00:00:00 TP3] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    assert classify(log, stage=Stage.GRAPH_CAPTURE, timed_out=True).category == "oom_graph_capture"


def test_different_ends_have_different_signatures(tmp_path: pathlib.Path) -> None:
    names = {classify(LOADING, exit_status=status).signature for status in (-9, -11, -15, 0, 3)}
    names |= {classify(LOADING, stage=stage, timed_out=True).signature for stage in (Stage.LOAD, Stage.SERVING)}
    assert len(names) == 7
    crash = classify(tmp_path / "none.log", stage=Stage.IMPORT, exit_status=1)  # a missing log counts as empty
    assert (crash.category, crash.stage) == ("exited_without_words", Stage.IMPORT)


def test_the_observation_of_the_client_counts_as_the_last_line() -> None:
    for detail, category in [("POST /v1/completions: HTTP 500: 'boom'", "http_server_error"),
                             ("POST /v1/completions: no token generated", "http_server_error"),
                             ("POST /v1/completions: ReadTimeout: ", "watchdog_hang"),
                             ("the answers do not make sense", "server_errors")]:
        crash = classify(SERVING, stage=Stage.SERVING, detail=detail)
        assert crash.category == category and detail[:20] in crash.excerpt


def host(root: pathlib.Path, group: int, vmstat: int, available: int, kmsg: str = "") -> pathlib.Path:
    files = {"proc/self/cgroup": "0::/user.slice/job\n", "proc/vmstat": f"nr_free 1\noom_kill {vmstat}\n",
             "proc/meminfo": f"MemTotal: 1000 kB\nMemAvailable: {available} kB\n", "proc/uptime": "1000.0 1.0\n",
             "sys/fs/cgroup/user.slice/job/memory.events": f"low 0\noom 3\noom_kill {group}\n",
             "sys/fs/cgroup/user.slice/job/memory.max": "2000\n",
             "sys/fs/cgroup/user.slice/job/memory.current": "500\n",
             "dev/kmsg": kmsg}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_evidence_counts_the_kernels_kills_since_the_snapshot(tmp_path: pathlib.Path) -> None:
    before = HostSnapshot.take(host(tmp_path, 2, 7, 400))
    assert not before.since().oom_killed
    for group, vmstat in ((2, 8), (3, 7)):
        host(tmp_path, group, vmstat, 20)
        evidence = before.since()
        assert evidence.oom_kills == 1
    assert evidence.oom_killed and evidence.memory_pressure
    assert evidence.available_share == pytest.approx(0.02) and evidence.memory_limit_share == pytest.approx(0.25)


def test_evidence_reads_the_kernel_log_since_the_snapshot(tmp_path: pathlib.Path) -> None:
    before = HostSnapshot.take(host(tmp_path, 0, 0, 400))
    old, new = 10_000_000, int((1000.0 + 60) * 1e6)
    log = "".join(f"6,{n},{stamp},-;Out of memory: Killed process {pid} (python) total-vm:1kB\n"
                  for n, (stamp, pid) in enumerate([(old, 4242), (new, 9)]))
    host(tmp_path, 0, 0, 400, log + f"6,9,{new},-;usb 1-1: new device\n")
    assert before.since().kernel_lines == ("Out of memory: Killed process 9 (python) total-vm:1kB",)


def test_evidence_can_be_taken_on_any_host(tmp_path: pathlib.Path) -> None:
    here = HostSnapshot.take().since()
    assert here.available_share is None or 0 < here.available_share <= 1
    evidence = HostSnapshot.take(tmp_path).since()
    assert evidence == HostEvidence() and not evidence.oom_killed and not evidence.memory_pressure
