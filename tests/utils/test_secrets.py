"""Canaries everywhere a secret may come from; none in anything that a study writes or prints."""

from __future__ import annotations

import html
import json
import os
import pathlib
import re
import shlex
import sqlite3
import subprocess
import sys
from urllib.parse import quote

import pytest

from autotune.config.settings import FORMATS
from autotune.engine.supervisor import BoundedLog
from autotune.utils.redact import Redactor
from tests.benchmarks.campaign import ROOT, SHORT, Site, standin

ENVIRONMENT = {  # variable: value with the canary, which is the part that must not show up anywhere
    "HF_TOKEN": "canary01environ", "OPENAI_API_KEY": "canary02environ", "AWS_SECRET_ACCESS_KEY": "canary03environ",
    "DB_PASSWORD": "canary04environ", "MY_PAT": "canary06environ", "HTTPS_PROXY": "http://me:canary05environ@127.0.0.1:9",
    "PGPASSWORD": "canary07environ", "DB_PASS": "canary08environ", "CACHE_TOKEN": "canary09environ",
    "clientSecret": "canary50environ it's \"é\" <&%/>", "API_KEYS": "canary51environ,canary52environ"}
ODD = ENVIRONMENT["clientSecret"]
SAID = rf"""loading with token hf_canary10canary10canary
Authorization: Bearer canary11canary11
connecting to postgresql://me:canary12pass@db.example/x
password=canary13pass api_key: "canary13bpass" {{'secret': 'canary13cpass'}}
OPENAI sk-canary14canary14canary ghp_canary15canary15canary15 AKIACANARY16CANARY16
-----BEGIN RSA PRIVATE KEY-----
canary17privatekeyline
-----END RSA PRIVATE KEY-----
environment: canary01environ canary02environ canary03environ canary04environ canary06environ canary21engine
more of it: canary07environ canary08environ canary09environ canary51environ canary52environ canary60override
odd ones: {ODD} {json.dumps(ODD)} {shlex.quote(ODD)} {quote(ODD)} {html.escape(ODD)}
git clone https://canary70token@git.example/x and mysql://me:canary71/a@canary72:canary73@db.example/y
-H 'Authorization: Basic canary74basic' pypi-canary75canary75canary
github_pat_11canary76canary76canary76 AIzacanary77canary77canary77canary77 ASIACANARY78CANARY78
npm_canary79canary79canary79canary79 ya29.canary80canary80canary80 xapp-1-canary81canary81canary81
server_args: {{"api_key": "canary82item", "argv": ["--admin-api-key", "canary84argv"]}}
escaped: "{{\"api_key\": \"canary85escaped\"}}" a URL%3Fapi_key%3Dcanary86percent
accessToken=canary87camel JWT: canary88jwt HF_TOKEN2=canary89two --api-key canary90flag --api-key=canary91flag
environ({{'SECRETS': 'canary92environ', 'DB_PASSWORD': 8765432}}) https://h/m?X-Amz-Signature=canary93signature
<script>alert(1)</script>
"""
OVERRIDES = (
    "+engine.env.HF_HUB_TOKEN=canary60override", "+engine.env.JWT='canary61 \"override\"'",
    "+engine.env.ODD_SECRET='canary62;|&x'",
    "+engine.args.more=[--flags,a]", "+engine.args.door={args:[--admin-api-key,canary63override]}",
    "+engine.args.gate={args:['--hf-token=canary64override'],env:{DB_PASS:canary65override,API_KEYS:canary66override}}",
    "+engine.vars.access_token=canary67override", "+engine.args.spoken=[--flags,'{access_token}']")
"""Secrets on the command line, as variables, arguments and nested values."""


def site(folder: pathlib.Path) -> Site:
    (folder / "said").write_text(SAID)
    space = {"engine": "standin", "describe": "serves with hf_canary30canary30canary",
             "params": {"speed": {"choices": [200]}, "fault": {"choices": ["none", "exit"]},
                        "at": {"choices": ["load"]}, "concurrency": {"choices": [8], "load": True}},
             "baseline": {"speed": 200, "fault": "none", "at": "load", "concurrency": 8},
             # An open loop: where requests fail, a closed one pauses, and then does not hold its concurrency.
             "workload": {**SHORT, "min_errors": 500, "max_error_rate": 0.9, "rate_per_s": 20.0},
             "server": {"ready_poll_s": 0.1}, "study": {"confirm": {"finalists": 0}},
             "agreement": {"prompts": 1, "output_tokens": 2, "context_tokens": 4}}
    args = {"all": ["--host", "{host}", "--port", "{port}", "--api-key", "canary20engine",
                    "--say", str(folder / "said"), "--echo", ",".join(ENVIRONMENT), "--message",
                    "no access with canary20engine and hf_canary22canary22canary"]}
    env = {"SERVER_SECRET": "canary21engine", "SERVICE_URL": "https://canary23engine@h/",
           "accessToken": "canary24engine"}
    return Site.make(folder / "site", space, standin({}, args=args, env=env), ENVIRONMENT)


def run(place: Site, *overrides: str, verb: str = "tune") -> subprocess.CompletedProcess[str]:
    return subprocess.run(place.command(*overrides, verb=verb), cwd=place.folder, capture_output=True, text=True,
                          timeout=900, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "COLUMNS": "200"})


@pytest.mark.slow
def test_no_secret_reaches_anything_that_is_written_or_printed(tmp_path: pathlib.Path) -> None:
    place = site(tmp_path)
    printed = {"tune": run(place, "power=none", "objective=tokens_per_s", "-v", *OVERRIDES)}
    assert printed["tune"].returncode in (0, 3), printed["tune"].stderr
    for kind in ("text", "json"):
        printed[f"report {kind}"] = run(place, f"report.format={kind}", "objective=tokens_per_s", *OVERRIDES,
                                        verb="report")
    for kind in FORMATS:
        printed[f"export {kind}"] = run(place, f"format={kind}", "objective=tokens_per_s", *OVERRIDES, verb="export")
    printed["check"] = run(place, *OVERRIDES, verb="check")
    printed["settings"] = run(place, *OVERRIDES, "--cfg")
    assert printed["check"].returncode == printed["settings"].returncode == 0, printed["check"].stderr
    for number, password in enumerate(("canary40url", "canary41a/b:c@d", "canary42%2Fe")):
        printed[f"storage {number}"] = run(place, f"study.storage='postgresql://me:{password}@127.0.0.1:1/db'",
                                           f"study.name=other{number}")
        assert printed[f"storage {number}"].returncode != 0
    for number, wrong in enumerate(("engine.args=[--api-key,canary43wrong]", "engine.env.HF_TOKEN=canary44wrong' \"",
                                    "+nonsense={api_key:canary45wrong}", "engine.args={a:{api_key:canary46wrong}}")):
        printed[f"wrong {number}"] = run(place, wrong)
        assert printed[f"wrong {number}"].returncode == 2, printed[f"wrong {number}"].stderr
    log = next(place.study.glob("launches/*/server.log"))
    printed["classify"] = subprocess.run([sys.executable, "-m", "autotune", "classify", str(tmp_path / "said")],
                                         capture_output=True, text=True, cwd=ROOT, timeout=600,
                                         env={**os.environ, **ENVIRONMENT, "SERVER_SECRET": "canary21engine"})
    files = [p for p in (place.folder / "outputs").rglob("*") if p.is_file()]
    texts = {name: done.stdout + done.stderr for name, done in printed.items()}
    texts |= {str(p.relative_to(place.folder)): p.read_bytes().decode(errors="replace") for p in files}
    assert {name: found for name, text in texts.items() if (found := secrets(text))} == {}
    kinds = {p.suffix for p in files}
    assert {".log", ".json", ".jsonl", ".html", ".md", ".db", ".sh", ".service", ".yaml"} <= kinds
    assert "[redacted]" in (place.study / "agreement.json").read_text()
    assert any("no access [redacted]" in p.read_text() for p in place.study.glob("launches/*/requests-*.jsonl"))
    assert "[redacted]" in log.read_text() and "db.example" in log.read_text()
    with sqlite3.connect(place.study / "study.db") as db:
        notes = [row[0] for row in db.execute("select value_json from study_system_attributes where key like '%note%'")]
    assert notes and any("[redacted]" in note for note in notes)
    assert json.loads((log.parent / "command.json").read_text())["env"]["SERVER_SECRET"] == "[redacted]"
    for shown in ("report.md", "report.html", "launch.sh", "launch.json"):
        text = (place.study / shown).read_text().replace("\\", "")
        assert "engine.env.HF_HUB_TOKEN=[redacted]" in text and "+engine.args.more=[--flags,a]" in text, shown


def secrets(text: str) -> list[str]:
    """The canaries in a text, whatever their case."""
    return sorted(set(re.findall(r"canary\d\d\S{0,7}", text.lower())))


def written(folder: pathlib.Path, data: bytes, size: int, *secrets: str) -> bytes:
    """The bounded log of `data` that came in pieces of `size` bytes; what waits meanwhile is bounded, too."""
    log = BoundedLog(folder / "server.log", 1 << 20, Redactor(secrets))
    for at in range(0, len(data), size):
        log.write(data[at:at + size])
        assert len(log.rest) < 2 * 65536
    log.close()
    return (folder / "server.log").read_bytes()


SECRET = "canary18 with 'blanks' and a long tail that no part of may be seen"
VISIBLE = re.compile(rb"canary|blanks|tail|part of|yyy|key")


def test_a_private_key_that_comes_line_by_line_is_hidden(tmp_path: pathlib.Path) -> None:
    lines = (b"before", b"-----BEGIN RSA PRIVATE KEY-----", b"canary17privatekeyline",
             b"-----END RSA PRIVATE KEY-----", b"after")
    text = written(tmp_path, b"".join(b"[12:00:00] " + line + b"\n" for line in lines), 40)
    assert b"canary" not in text and b"before" in text and b"after" in text


@pytest.mark.parametrize("before", [65536 - 20, 65536 + 8192 - 12, 200_000])
def test_a_line_without_end_is_not_cut_within_a_secret(tmp_path: pathlib.Path, before: int) -> None:
    for said in (b"canary-secret value", b"password=canary-hunter2", "\u00e9\u00e9 canary-secret value".encode()):
        data = b"x" * before + b" " + said + b" " + b"y" * 100_000
        for size in (65536, 30_000):
            text = written(tmp_path, data, size, "canary-secret value")
            assert b"canary" not in text and text.count(b"[redacted]") == 1
            assert text.startswith(b"x" * before) and text.endswith(b"y" * 100_000)


@pytest.mark.parametrize("said", [
    SECRET, f"HF_TOKEN='canary18 {'y' * 300}'", "hf_canary18" + "y" * 300,
    "-----BEGIN RSA PRIVATE KEY-----\\n" + "canary18key" * 300 + "-----END RSA PRIVATE KEY-----"])
def test_a_secret_in_a_line_that_never_ends_is_hidden_wherever_the_line_is_cut(tmp_path: pathlib.Path,
                                                                               said: str) -> None:
    for offset in (0, 1234, 3702):
        line = ("x " * (32768 - 1500) + "x" * offset + f" {said} " + "z " * 40000).encode()
        text = written(tmp_path, line, 4096, SECRET)
        assert b"[redacted]" in text and not VISIBLE.search(text)
        assert text.count(b"z") == 40000 and text.count(b"x") == line.count(b"x")


def test_a_line_that_is_nothing_but_secrets_shows_no_part_of_one_and_the_next_line_is_whole(
        tmp_path: pathlib.Path) -> None:
    text = written(tmp_path, b"canary19" * 60000 + b" end of it\nafter\n", 5000, "canary19" * 20000)
    assert b"canary" not in text and text.endswith(b"bytes of a long line left out here]\nafter\n")
    line = f"{SECRET} and password=canary20canary20 ".encode() * 4000
    assert not VISIBLE.search(written(tmp_path, line, 4096, SECRET))
