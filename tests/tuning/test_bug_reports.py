"""Bug reports as Markdown, ready to paste."""

from __future__ import annotations

import msgspec

from autotune.crash.classify import classify
from autotune.crash.isolate import Isolated
from autotune.records import Crash
from autotune.tuning.bug_reports import bug_report

CRASH = classify("Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401", exit_status=-9,
                 after_s=50.4)
FOUND = Isolated({"nvls": True, "tp": 8}, {"tp": 1}, True, 5, 3, 0)


def report(crash: Crash = CRASH, isolated: Isolated | None = FOUND) -> str:
    server = ["python", "-m", "sglang.launch_server", "--api-key", "s3cr3t-key", "--tp-size"]
    return bug_report(crash, command=[*server, "8"], working_command=[*server, "1"], isolated=isolated,
                      environment={"HF_TOKEN": "hf_abcdefghijklmnopqrst", "NCCL_DEBUG": "INFO x"},
                      versions={"sglang": "0.5.16", "GPU": "8 x B300"})


def test_a_report_has_everything_that_a_maintainer_needs() -> None:
    text = report()
    for part in ("# [nccl_nvls_multicast]", "Failed to bind NVLink SHARP", CRASH.signature, "nccl-init", "-9", "50 s",
                 "| nvls | true | (does not exist) |", "| tp | 8 | 1 |", "3 crashed, 0 worked", "5 launches",
                 "--tp-size 8", "--tp-size 1", "NCCL_DEBUG='INFO x'", "| sglang | 0.5.16 |", "| GPU | 8 x B300 |"):
        assert part in text, part
    assert "s3cr3t" not in text and "hf_abc" not in text and "[redacted]" in text


def test_an_inexact_isolation_is_marked_and_a_report_without_one_has_no_difference() -> None:
    assert "difference" not in report(isolated=None)
    inexact = Isolated({"a": 1}, {"a": 2}, False, 2, 1, 1)
    assert "may be innocent" in report(isolated=inexact) and "1 crashed, 1 worked" in report(isolated=inexact)


def test_backticks_in_a_log_do_not_end_its_block() -> None:
    crash = classify("ValueError: use ```python``` or ````x```` | not")
    lines = report(crash).splitlines()
    fences = [line for line in lines if set(line) == {"`"} and len(line) > 4]
    assert len(fences) == 1 and len(fences[0]) == 5
    assert all(line.count(" | ") <= 3 for line in lines if line.startswith("| "))


def test_a_title_has_no_markup_and_no_secret() -> None:
    shown = report(classify("RuntimeError: <img src=x onerror=alert(2)> with s3cr3t-key \x1b]0;x\x07", exit_status=1,
                            after_s=1.0)).splitlines()[0]
    assert "<img" not in shown.replace("\\<", "") and "s3cr3t" not in shown and "\x1b" not in shown


def test_control_characters_are_escaped_or_replaced() -> None:
    crash = msgspec.structs.replace(CRASH, excerpt="error \x1b]0;title\x07 in \x9b31m it")
    text = bug_report(crash, command=["serve", "--name", "a\x1b[2Jb\rc", "\x9bd"], isolated=FOUND,
                      environment={"WORDS": "x\x1b[31my\nz"}, versions={"GPU": "8\x1b[1m"})
    assert all(c.isprintable() or c == "\n" for c in text)
    assert r"WORDS='x\x1b[31my\nz'" in text and r"a\x1b[2Jb\rc" in text and r"8\x1b[1m" in text
