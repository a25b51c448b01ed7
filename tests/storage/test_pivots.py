"""What a study's folder keeps of the decisions on regions."""

from __future__ import annotations

import pathlib

from autotune.storage.schema import PivotFile, read_pivots


def decision(action: str, region: str = "tp2_ep", trials: str = "10") -> dict[str, object]:
    return {"key": f"{action}:parallel={region}:{trials}", "action": action, "region": {"parallel": [region]}}


def test_a_region_that_is_closed_again_on_the_same_evidence_is_written_again(tmp_path: pathlib.Path) -> None:
    file = PivotFile(tmp_path)
    told = [file.add(decision(action)) for action in ("close", "reopen", "close")]
    assert told == [True, True, True]
    assert [p["action"] for p in read_pivots(tmp_path)] == ["close", "reopen", "close"]


def test_a_strategy_that_resumes_or_another_worker_adds_no_decision_twice(tmp_path: pathlib.Path) -> None:
    PivotFile(tmp_path).add(decision("close"))
    PivotFile(tmp_path).add(decision("close", "dp2"))
    assert not PivotFile(tmp_path).add(decision("close"))
    assert PivotFile(tmp_path).add(decision("close", trials="10,12"))  # there is new evidence
    assert len(read_pivots(tmp_path)) == 3
