"""Notes and artifacts as the dashboard reads them."""

from __future__ import annotations

import pathlib

from optuna_dashboard import get_note  # type: ignore[import-untyped]

from autotune.records import Stage
from autotune.report.dashboard import LARGEST, annotate, attach, note
from tests.report.studies import Made, baseline


def test_the_first_line_tells_a_trials_standing(small: Made) -> None:
    first = {r.number: note(r, "tok/J", small.settings.limits).splitlines()[0] for r in small.study.records()}
    assert first[0] == "### Feasible"
    assert first[2].startswith("### CRASHED at nccl-init")
    assert first[5].startswith("### INFEASIBLE: breaks tpot")
    assert first[9].startswith("### INVALID: unsteady")
    assert first[11].startswith("### FAILED (not the configuration's fault)")


def test_notes_are_stored_where_the_dashboard_reads_them(small: Made) -> None:
    import optuna

    for record in small.study.records():
        annotate(small.study, record)
    frozen = small.study.inner.trials[2]
    text = get_note(optuna.Trial(small.study.inner, frozen._trial_id))
    assert "nvls0001" in text and "Leave nvls off" in text and "--enable-nccl-nvls" in text


def test_a_log_cannot_leave_its_code_block(small: Made) -> None:
    number = small.crash(baseline(small, tp=2, dp=2), "odd00001", category="x|y*z", stage=Stage.LOAD,
                         excerpt="```\n# Heading <script>alert(1)</script>\n````")
    text = note(small.study.record(number), "tok/J", {})
    fence = next(line for line in text.splitlines() if line.startswith("`````"))
    assert fence == "`````text"
    assert text.splitlines().count("`````") >= 1
    assert "x\\|y\\*z" in text


def test_files_are_attached_before_a_trial_is_told(small: Made, tmp_path: pathlib.Path) -> None:
    log, power, big = tmp_path / "server.log", tmp_path / "power.csv", tmp_path / "big.log"
    log.write_text("started\n")
    power.write_text("t_s,watts\n0,40\n")
    big.write_bytes(b"x" * LARGEST + b"the end\n")
    trial = small.study.ask(baseline(small, tp=2, dp=2), 50)
    ids = attach(trial, tmp_path / "artifacts", [log, power, big, tmp_path / "absent"])
    assert len(ids) == 3
    assert (tmp_path / "artifacts" / ids[0]).read_text() == "started\n"
    kept = (tmp_path / "artifacts" / ids[2]).read_bytes()
    assert len(kept) == LARGEST and kept.endswith(b"the end\n")
