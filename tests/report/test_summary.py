"""The terminal summary and its JSON."""

from __future__ import annotations

import io
import json

import pytest

from autotune.records import Stage
from autotune.report.render import report
from autotune.report.story import read
from autotune.report.terminal import as_data, print_summary
from tests.report.studies import Made, baseline


def shown(made: Made) -> str:
    out = io.StringIO()
    print_summary(read(made.settings, made.study), out)
    return out.getvalue()


def test_the_verdict_comes_first_and_the_tables_follow(small: Made) -> None:
    lines = shown(small).splitlines()
    assert lines[0] == "Study local"
    assert lines[1] == "Trial 4 gives 50.0 % more output tokens per joule than the baseline (not confirmed)."
    for heading in ("What each choice is worth", "Crashes by signature", "Never served"):
        assert any(line.startswith(heading) for line in lines)
    assert any(line.startswith("Energy") and "ASSUMED" in line for line in lines)
    assert all(c == "\n" or c.isprintable() for c in shown(small))


def test_log_text_is_never_taken_for_markup(small: Made) -> None:
    small.crash(baseline(small, tp=2, dp=2), "odd00001", category="[/bold] [link=x]", stage=Stage.LOAD,
                excerpt="[/red] \x1b[31m :smile:")
    assert "[/bold] [link=x]" in shown(small).replace("\n", "")
    assert "\x1b" not in shown(small)


def test_json_is_for_scripts(small: Made, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(json.dumps(as_data(read(small.settings, small.study)), default=str))
    assert data["conclusion"] == "not_confirmed"
    assert data["winner"]["trial"] == 4
    assert data["gain"]["share"] == pytest.approx(0.5)
    assert data["crashes"][0]["signature"] == "nvls0001"
    assert data["counts"]["trials"] == 12
    assert report(small.settings, small.study) == 0
    assert capsys.readouterr().out.startswith("Study local")
