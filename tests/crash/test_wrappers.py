"""Logs as containers, journals and collectors write them, and in which order."""

from __future__ import annotations

import pytest

from autotune.crash.classify import classify
from autotune.crash.log import containers
from autotune.crash.wrappers import unwrap
from tests.benchmarks.fuzz import classify_logs
from tests.crash.test_cases import CASES
from tests.crash.wrapped import FORMS, applies, changed

LOGS = [case["log"] for case in CASES if case["id"] in ("c017", "c024", "c034", "d015", "d023", "w001")]


@pytest.mark.parametrize("form", FORMS)
def test_a_wrapped_log_gives_the_same_answer(form: str) -> None:
    assert {log: why for log in LOGS if applies(form, log) and (why := changed(log, form))} == {}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_each_wrapped_case_gives_the_same_answer(form: str) -> None:
    cases = [case for case in CASES if applies(form, case["log"])]
    assert {case["id"]: why for case in cases if (why := changed(case["log"], form))} == {}


def test_containers_are_told_apart_and_share_the_kernels_lines() -> None:
    journal = """Nov 12 10:00:00 n1 one[7]: Killed
Nov 12 10:00:01 n1 kernel: NVRM: Xid (PCI:0000:b3:00): 79, GPU has fallen off the bus.
Nov 12 10:00:02 n1 two[8]: hello
"""
    found = containers(journal)
    assert list(found) == ["one", "two"] and "Xid" in found["one"] and "Xid" in found["two"]
    assert classify(found["two"]).category == "gpu_hardware_fault" and "Killed" not in found["two"]


def test_entries_with_several_lines_are_turned_round_as_a_whole() -> None:
    log = """2026-11-12 10:00:05 server ended
2026-11-12 10:00:03 Traceback (most recent call last):
  File "/x/vllm/a.py", line 1, in load_model
ValueError: x
2026-11-12 10:00:01 start
"""
    (text,) = unwrap(log).values()
    assert [line.split()[0] for line in text.split() if ":" in line][:1] == ["10:00:01"]
    assert text.index("Traceback") < text.index("ValueError") < text.index("ended")


def test_mangled_logs_raise_nothing() -> None:
    assert classify_logs(20, seed=1) == 0


def test_a_log_in_order_stays_as_it_is() -> None:
    for case in CASES:
        if case["log"].startswith("(Ray"):
            continue
        (text,) = unwrap(case["log"]).values()
        assert text == case["log"] + "\n", case["id"]
