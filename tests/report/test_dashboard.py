"""optuna-dashboard as a person sees it: feasibility put right, notes, artifacts, plots, loopback only."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from autotune.records import Stage
from autotune.report import dashboard
from autotune.report.dashboard import LARGEST, annotate, attach, note, open_server, publish
from autotune.report.render import report
from autotune.report.story import read
from tests.conftest import copied
from tests.report.studies import Made, baseline

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")


@pytest.fixture(scope="module")
def served(rich_folder: pathlib.Path, fast_folder: pathlib.Path) -> Iterator[tuple[str, Made]]:
    """(address, study) of a dashboard in a thread; every trial has its note, the last one a file."""
    outputs = fast_folder / "served"
    outputs.mkdir()
    rich = copied(rich_folder, outputs)
    launch = rich.settings.folder / "launches" / "0091"
    launch.mkdir(parents=True)
    (launch / "server.log").write_text("ready\n")
    trial = rich.study.ask(baseline(rich, dp=2), 91)
    attach(trial, launch)
    rich.study.fail(trial, "interrupted")
    for record in rich.study.records():
        annotate(rich.study, record)
    server = open_server(rich.settings, rich.study, port=0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", rich
    server.shutdown()
    server.server_close()


def test_what_cannot_be_read_for_a_while_is_said_once_and_published_later(
        small: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    published, ended, broken = threading.Event(), threading.Event(), small.settings.folder / "matrix.json"
    monkeypatch.setattr(dashboard, "REFRESH_S", 0.01)
    monkeypatch.setattr(dashboard, "publish", lambda study, story: published.set())
    follower = threading.Thread(target=dashboard._follow, args=(small.settings, small.study, ended), daemon=True)
    follower.start()
    broken.write_text("[5]")
    deadline, told = time.monotonic() + 60, ""
    while "not a list of rows" not in told and time.monotonic() < deadline:
        small.study.fail(small.study.ask(baseline(small, dp=2), 91), "interrupted")  # news, after it looked at first
        time.sleep(0.2)
        told += capsys.readouterr().err
    broken.unlink()
    assert published.wait(60)
    ended.set()
    follower.join(60)
    assert (told + capsys.readouterr().err).count("the plots are as they were") == 1


def detail(address: str) -> Any:
    return httpx.get(f"{address}/api/studies/1", trust_env=False, timeout=60).raise_for_status().json()


def test_the_best_trial_keeps_every_limit_and_the_others_are_known_to_be_infeasible(served: tuple[str, Made]) -> None:
    address, made = served
    shown = detail(address)
    best = shown["best_trials"][0]["number"]
    records = made.study.records()
    assert records[best].feasible
    value = records[best].value or 0
    assert any(r.state == "COMPLETE" and not r.feasible and (r.value or 0) > value for r in records)
    for trial in shown["trials"]:
        record = records[trial["number"]]
        if record.state == "COMPLETE":
            assert (max(trial["constraints"]) <= 0) == record.feasible


def test_study_and_trials_have_notes_plots_and_artifacts(served: tuple[str, Made]) -> None:
    address, made = served
    publish(made.study, read(made.settings, made.study))  # again: it replaces what was there
    shown = detail(address)
    assert "more output tokens per joule" in shown["note"]["body"]
    assert shown["objective_names"] == ["tok/J"]
    assert sorted(g["id"] for g in shown["plotly_graph_objects"]) == [
        "autotune-1-tradeoff", "autotune-2-load", "autotune-3-crash-map", "autotune-4-levers", "autotune-5-progress"]
    crashed = next(r.number for r in made.study.records() if r.crashed)
    assert shown["trials"][crashed]["note"]["body"].startswith("### CRASHED at nccl-init")
    artifact = shown["trials"][-1]["artifacts"][0]
    assert artifact["filename"] == "server.log"
    path = f"{address}/artifacts/1/{shown['trials'][-1]['trial_id']}/{artifact['artifact_id']}"
    assert httpx.get(path, trust_env=False).text == "ready\n"


def test_other_hosts_and_other_pages_are_refused(served: tuple[str, Made]) -> None:
    address, _ = served
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        answer = httpx.delete(f"{address}/api/studies/1", headers=headers, trust_env=False)
        assert answer.status_code == 403
    assert detail(address)["name"] == "local"


def test_a_port_in_use_is_stepped_around(served: tuple[str, Made]) -> None:
    address, made = served
    port = int(address.rsplit(":", 1)[1])
    second = open_server(made.settings, made.study, port=port)
    second.server_close()
    assert second.server_port != port


def test_the_first_line_tells_a_trials_standing(small: Made) -> None:
    first = {r.number: note(r, "tok/J", small.settings.limits).splitlines()[0] for r in small.study.records()}
    assert first[0] == "### Feasible"
    assert first[2].startswith("### CRASHED at nccl-init")
    assert first[5].startswith("### INFEASIBLE: breaks tpot")
    assert first[9].startswith("### INVALID: unsteady")
    assert first[11].startswith("### FAILED (not the configuration's fault)")
    crash = note(small.study.record(2), "tok/J", small.settings.limits)
    assert "nvls0001" in crash and "Leave nvls off" in crash and "--enable-nccl-nvls" in crash


def test_a_log_cannot_leave_its_code_block(small: Made) -> None:
    number = small.crash(baseline(small, tp=2, dp=2), "odd00001", category="x|y*z", stage=Stage.LOAD,
                         excerpt="```\n# Heading <script>alert(1)</script>\n````")
    text = note(small.study.record(number), "tok/J", {})
    fence = next(line for line in text.splitlines() if line.startswith("`````"))
    assert fence == "`````text"
    assert text.splitlines().count("`````") >= 1
    assert "x\\|y\\*z" in text


def test_files_are_attached_before_a_trial_is_told(small: Made, tmp_path: pathlib.Path) -> None:
    trial = small.study.ask(baseline(small, tp=2, dp=2), 50)
    launch = tmp_path / "launches" / "0050"
    launch.mkdir(parents=True)
    (launch / "server.log").write_bytes(b"x" * LARGEST + b"the end\n")
    (launch / f"power-{trial.number}.csv").write_text("t_s,watts\n0,40\n")
    ids = attach(trial, launch)
    assert len(ids) == 2, "there is no file of requests"
    assert (tmp_path / "artifacts" / ids[1]).read_text() == "t_s,watts\n0,40\n"
    kept = (tmp_path / "artifacts" / ids[0]).read_bytes()
    assert len(kept) == LARGEST and kept.endswith(b"the end\n")


def browse(address: str, *options: str, folder: pathlib.Path) -> str:
    """The output of headless Chromium for a page."""
    assert BROWSER is not None
    done = subprocess.run([BROWSER, *FLAGS, f"--user-data-dir={folder}", "--virtual-time-budget=20000", *options,
                           address], capture_output=True, text=True, timeout=180, check=True)
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_person_sees_the_truth_in_a_browser(served: tuple[str, Made], tmp_path: pathlib.Path) -> None:
    address, made = served
    best = read(made.settings, made.study).best
    crashed = next(r.number for r in made.study.records() if r.crashed)
    infeasible = next(r.number for r in made.study.records() if r.state == "COMPLETE" and r.score and r.score.violated)
    study = f"{address}/dashboard/studies/1"
    pages = {"study": (study, [f"Best Trial (number={best.trial if best else ''})"]),
             "crashed trial": (f"{study}/trials?numbers={crashed}", ["CRASHED at nccl-init", "NVLS multicast needs"]),
             "infeasible trial": (f"{study}/trials?numbers={infeasible}", ["INFEASIBLE: breaks"]),
             "note": (f"{study}/note", ["more output tokens per joule"])}
    for name, (page, words) in pages.items():
        text = browse(page, "--dump-dom", "--window-size=1400,1800", folder=tmp_path / "profile")
        for word in words:
            assert word in text, f"{name}: {word}"
        shot = tmp_path / f"{name}.png"
        browse(page, f"--screenshot={shot}", "--window-size=1400,2400", folder=tmp_path / "profile")
        assert shot.stat().st_size > 20_000


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
@pytest.mark.parametrize("width", [400, 1400])
def test_the_report_is_drawn_at_phone_and_desktop_width(rich: Made, tmp_path: pathlib.Path, width: int) -> None:
    report(rich.settings, rich.study)
    shot = tmp_path / f"report-{width}.png"
    browse((rich.settings.folder / "report.html").as_uri(), f"--screenshot={shot}", f"--window-size={width},5000",
           folder=tmp_path / "profile")
    assert shot.stat().st_size > 50_000
