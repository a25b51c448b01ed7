"""Canaries everywhere a secret may come from; none in anything that a study writes or prints."""

from __future__ import annotations

import json
import os
import pathlib
import sqlite3
import subprocess
import sys

import pytest

from autotune.engine.keeper import BoundedLog
from autotune.redact import Redactor
from tests.benchmarks.campaign import ROOT, SHORT, Site, standin

FORMATS = ("sh", "systemd", "compose", "k8s", "yaml")
ENVIRONMENT = {  # variable: value with the canary, which is the part that must not show up anywhere
    "HF_TOKEN": "canary01environ", "OPENAI_API_KEY": "canary02environ", "AWS_SECRET_ACCESS_KEY": "canary03environ",
    "DB_PASSWORD": "canary04environ", "MY_PAT": "canary06environ", "HTTPS_PROXY": "http://me:canary05environ@127.0.0.1:9"}
SAID = """loading with token hf_canary10canary10canary
Authorization: Bearer canary11canary11
connecting to postgresql://me:canary12pass@db.example/x
password=canary13pass api_key: "canary13bpass" {'secret': 'canary13cpass'}
OPENAI sk-canary14canary14canary ghp_canary15canary15canary15 AKIACANARY16CANARY16
-----BEGIN RSA PRIVATE KEY-----
canary17privatekeyline
-----END RSA PRIVATE KEY-----
environment: canary01environ canary02environ canary03environ canary04environ canary06environ canary21engine
<script>alert(1)</script>
"""


def site(folder: pathlib.Path) -> Site:
    (folder / "said").write_text(SAID)
    space = {"engine": "standin", "describe": "serves with hf_canary30canary30canary",
             "params": {"speed": {"choices": [200]}, "fault": {"choices": ["none", "exit"]},
                        "at": {"choices": ["load"]}, "concurrency": {"choices": [2], "load": True}},
             "baseline": {"speed": 200, "fault": "none", "at": "load", "concurrency": 2},
             "workload": SHORT, "server": {"ready_poll_s": 0.1}, "study": {"confirm": {"finalists": 0}},
             "agreement": {"prompts": 1, "output_tokens": 2, "context_tokens": 4}}
    args = ["--host", "{host}", "--port", "{port}", "--api-key", "canary20engine", "--say", str(folder / "said"),
            "--message", "no access with canary20engine and hf_canary22canary22canary"]
    return Site.make(folder / "site", space, standin({}, args=[args], env={"SERVER_SECRET": "canary21engine"}),
                     ENVIRONMENT)


def run(place: Site, *overrides: str, verb: str = "tune") -> subprocess.CompletedProcess[str]:
    return subprocess.run(place.command(*overrides, verb=verb), cwd=place.folder, capture_output=True, text=True,
                          timeout=900, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "COLUMNS": "200"})


@pytest.mark.slow
def test_no_secret_reaches_anything_that_is_written_or_printed(tmp_path: pathlib.Path) -> None:
    place = site(tmp_path)
    printed = {"tune": run(place, "power=none", "objective=tokens_per_s", "-v")}
    assert printed["tune"].returncode in (0, 3), printed["tune"].stderr
    for kind in ("text", "json"):
        printed[f"report {kind}"] = run(place, f"report.format={kind}", "objective=tokens_per_s", verb="report")
    for kind in FORMATS:
        printed[f"export {kind}"] = run(place, f"format={kind}", "objective=tokens_per_s", verb="export")
    printed["check"] = run(place, verb="check")
    printed["storage"] = run(place, "study.storage='postgresql://me:canary40url@127.0.0.1:1/db'", "study.name=other")
    assert printed["storage"].returncode != 0
    log = next(place.study.glob("launches/*/server.log"))
    printed["classify"] = subprocess.run([sys.executable, "-m", "autotune", "classify", str(tmp_path / "said")],
                                         capture_output=True, text=True, cwd=ROOT, timeout=600,
                                         env={**os.environ, **ENVIRONMENT, "SERVER_SECRET": "canary21engine"})
    found = {name: secrets(text) for name, done in printed.items()
             if (text := done.stdout + done.stderr) and secrets(text)}
    files = [p for p in (place.folder / "outputs").rglob("*") if p.is_file()]
    found |= {str(p.relative_to(place.folder)): secrets(p.read_bytes().decode(errors="replace")) for p in files
              if secrets(p.read_bytes().decode(errors="replace"))}
    assert found == {}
    kinds = {p.suffix for p in files}
    assert {".log", ".json", ".jsonl", ".html", ".md", ".db", ".sh", ".service", ".yaml"} <= kinds
    assert "[redacted]" in log.read_text() and "db.example" in log.read_text()
    with sqlite3.connect(place.study / "study.db") as db:
        notes = [row[0] for row in db.execute("select value_json from study_system_attributes where key like '%note%'")]
    assert notes and any("[redacted]" in note for note in notes)
    assert json.loads((log.parent / "command.json").read_text())["env"]["SERVER_SECRET"] == "[redacted]"


def secrets(text: str) -> list[str]:
    """The canaries in a text, whatever their case."""
    lower = text.lower()
    at = [i for i in range(len(lower)) if lower.startswith("canary", i)]
    return sorted({lower[i:i + 15] for i in at if lower[i + 6:i + 8].isdigit()})


def test_a_private_key_that_comes_line_by_line_is_hidden(tmp_path: pathlib.Path) -> None:
    log = BoundedLog(tmp_path / "server.log", 1 << 20, Redactor())
    for line in ("before", "-----BEGIN RSA PRIVATE KEY-----", "canary17privatekeyline", "-----END RSA PRIVATE KEY-----",
                 "after"):
        log.write(f"[12:00:00] {line}\n".encode())
    log.close()
    text = (tmp_path / "server.log").read_text()
    assert "canary" not in text and "before" in text and "after" in text
