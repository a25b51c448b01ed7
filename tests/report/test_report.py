"""The report on page, in Markdown and on the terminal: the verdict first, no text that turns into markup."""

from __future__ import annotations

import dataclasses
import html.parser
import io
import json
import pathlib
import re
from collections.abc import Callable

import pytest

from autotune.records import Stage, UsageError
from autotune.report.charts import progress, tradeoff
from autotune.report.render import print_summary, report
from autotune.report.story import read
from autotune.report.verdict import headline
from tests.conftest import Maker
from tests.report.studies import Made, baseline, reporting

HOSTILE = '</pre></title><script>alert(1)</script><img src=x onerror=alert(2)> `` ``` | [a](http://evil) \x1b[31m &lt;'


class Page(html.parser.HTMLParser):
    """Tags in balance, and what a page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def written(made: Made) -> tuple[str, str]:
    """(html, markdown) of a study."""
    assert report(made.settings, made.study) == 0
    return ((made.settings.folder / "report.html").read_text(), (made.settings.folder / "report.md").read_text())


@pytest.mark.parametrize("out", ["new folder/told.html", "new folder/told.md", "new folder/"])
def test_a_report_goes_where_it_is_told_to(out: str, small: Made, tmp_path: pathlib.Path) -> None:
    there = dataclasses.replace(small.settings, out=f"{tmp_path}/{out}")
    for left in small.settings.folder.glob("report.*"):
        left.unlink()
    assert report(there, small.study) == 0
    stem = "report" if out.endswith("/") else "told"
    assert {path.name for path in (tmp_path / "new folder").iterdir()} == {f"{stem}.html", f"{stem}.md"}
    assert (tmp_path / "new folder" / f"{stem}.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "new folder" / f"{stem}.md").read_text().startswith("# ")
    assert not list(small.settings.folder.glob("report.*"))


@pytest.mark.parametrize("out", ["told.pdf", "no such folder"])
def test_a_report_is_not_written_as_another_kind_of_file(out: str, small: Made, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="a report is FILE.html with FILE.md beside it"):
        report(dataclasses.replace(small.settings, out=str(tmp_path / out)), small.study)
    assert not list(tmp_path.iterdir())


def test_the_acceptance_length_of_every_speculation_is_told_also_of_those_that_lost(make: Maker) -> None:
    made = make()
    made.measure(baseline(made, concurrency=8), 2.4)
    made.measure(baseline(made, concurrency=4), 2.0, same_launch=True)
    made.measure(baseline(made, tree_budget=8, concurrency=8), 3.0, accept_length=3.14)
    made.measure(baseline(made, tree_budget=8, concurrency=4), 1.5, accept_length=3.27, same_launch=True)
    made.measure(baseline(made, tree_budget=16, tree_topk=4, concurrency=8), 1.2, accept_length=4.56)
    html, markdown = written(made)
    section = markdown.split("## Acceptance length of speculation")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0][2:4] == ["Load", "Tokens per verify step"]
    assert [(row[2], row[3], row[-1]) for row in rows[2:]] == [
        ("concurrency=4", "3.27", "-25.0 %"), ("concurrency=8", "3.14", "+25.0 %"),
        ("concurrency=8", "4.56", "-50.0 %")]
    assert "tree_budget=16" in rows[4][1] and "tree_topk=4" in rows[4][1]
    assert 'id="acceptance"' in html and "4.56" in html
    best = markdown.split("configurations</summary>")[1].split("</details>")[0]
    assert "Acceptance length" in best and "| 4.560 |" in best


def test_a_baseline_without_a_good_token_is_reported_and_compared_with_nothing(make: Maker) -> None:
    """Of goodput: where no request keeps the limits the objective is 0, which is a measurement."""
    made = make()
    made.measure(baseline(made), 0.0, tpot_ms=90.0)
    made.measure(baseline(made, tree_budget=8), 2.0)
    made.measure(baseline(made, tree_budget=16), 0.0, tpot_ms=90.0)
    assert "Acceptance length of speculation" in written(made)[1]


def test_the_page_starts_with_the_verdict_and_stands_alone(rich: Made) -> None:
    text, _ = written(rich)
    page = Page(text)
    assert page.texts["h1"] == [headline(read(rich.settings, rich.study))]
    assert not any(tag in ("script", "link", "iframe", "img", "object") for tag, _ in page.tags)
    references = [v for _, attrs in page.tags for k, v in attrs.items() if k in ("src", "href", "data", "action")]
    assert references and all(v is not None and v.startswith("#") for v in references)
    assert "url(" not in text and "@import" not in text
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {v[1:] for v in references if v} <= set(ids)


def test_every_section_of_the_issue_is_there(rich: Made) -> None:
    text, markdown = written(rich)
    for said in ("Gain +50.0 %, 95 % interval +40.0 % to +60.0 %", "Tightest limit", "Baseline and winner under load",
                 "What each lever is worth", "nvls_unsupported", "one fault in three launches",
                 "a launch with it serves", "no launch left is expected to add more than 2 %", "How to reproduce"):
        assert said in text, said
        assert said.replace("_", "") in markdown.replace("\\", "").replace("_", ""), said
    assert re.search(r"\+50.0 %</td>", text)  # the matrix' change from the baseline


def test_charts_have_accessible_names(rich: Made) -> None:
    charts = [attrs for tag, attrs in Page(written(rich)[0]).tags if tag == "svg" and attrs.get("role") == "img"]
    assert len(charts) == 3
    text = (rich.settings.folder / "report.html").read_text()
    for attrs in charts:
        for name in str(attrs["aria-labelledby"]).split():
            assert re.search(f'<(title|desc) id="{name}">[^<]+</', text)


def test_page_and_dashboard_draw_the_same_points(rich: Made) -> None:
    story = read(rich.settings, rich.study)
    text = written(rich)[0]
    for figure in (tradeoff(story), progress(story)):
        assert figure is not None
        drawn = text.split(f'id="{figure.name}-d"')[1].split("</svg>")[0]
        traces = figure.plotly()["data"]
        marks = sum(len(trace["x"]) for trace in traces if trace["mode"] == "markers")
        assert len(re.findall("<title>(?:winner, |baseline, )?trial", drawn)) == marks > 20
        assert sum(trace["mode"] == "lines" for trace in traces) == drawn.count("<polyline") == 1


def test_hostile_text_stays_text(rich: Made) -> None:
    rich.crash(baseline(rich, tp=2, dp=2), "<b>sig</b>", category=HOSTILE, stage=Stage.LOAD, excerpt=HOSTILE * 3,
               explanation=HOSTILE, next_step=HOSTILE)
    rich.study.set_attr("stop", {"kind": HOSTILE, "reason": HOSTILE})
    rich.study.set_attr("provenance", {"gpu": [HOSTILE], "command": HOSTILE, "packages": {HOSTILE: HOSTILE}})
    text, markdown = written(rich)
    page = Page(text)
    assert not any(tag in ("script", "img") for tag, _ in page.tags)
    assert not any(k.startswith("on") for _, attrs in page.tags for k in attrs)
    assert "\x1b" not in text + markdown
    outside = re.sub(r"(?ms)^(`{3,})text\n.*?^\1$", "", markdown)
    assert re.findall(r"(?<!\\)<(?!/?(?:details|summary)>).{0,60}", outside) == []
    assert re.findall(r"(?<!\\)\[a.{0,60}", outside) == []


def test_a_study_with_nothing_to_show_is_still_reported(make: Callable[..., Made]) -> None:
    text, markdown = written(make())
    assert "No configuration could be measured." in text and "No trial was run." in markdown
    Page(text)


def test_a_study_without_energy_and_speculation_shows_neither(make: Callable[..., Made]) -> None:
    made = make()
    for tp in (1, 2):
        made.measure(baseline(made, tp=tp), 2.0 + tp / 20, tpot_ms=20 - tp, energy="none")
    text, markdown = written(made)
    assert "Throughput against speed of one request" in text and "cceptance length" not in text + markdown


def test_the_markdown_has_even_tables(rich: Made) -> None:
    block: list[str] = []
    for line in [*written(rich)[1].splitlines(), ""]:
        if line.startswith("|"):
            block.append(line)
        elif block:
            cells = {len(re.findall(r"(?<!\\)\|", row)) for row in block}
            assert len(cells) == 1, block[:3]
            block = []


def shown(made: Made) -> str:
    out = io.StringIO()
    print_summary(read(made.settings, made.study), out)
    return out.getvalue()


def test_the_verdict_comes_first_and_the_tables_follow(small: Made) -> None:
    lines = shown(small).splitlines()
    assert lines[0] == "Study local"
    assert " ".join(lines[1:3]).startswith("The server of trial 4 gives 25.0 % more output tokens per joule than")
    for heading in ("What each choice is worth", "Crashes by signature", "Never served"):
        assert any(line.startswith(heading) for line in lines)
    assert any(line.startswith("Energy") and "ASSUMED" in line for line in lines)
    assert all(c == "\n" or c.isprintable() for c in shown(small))


def test_log_text_is_never_taken_for_markup(small: Made) -> None:
    small.crash(baseline(small, tp=2, dp=2), "odd00001", category="[/bold] [link=x]", stage=Stage.LOAD,
                excerpt="[/red] \x1b[31m :smile:")
    assert "[/bold] [link=x]" in shown(small).replace("\n", "")
    assert "\x1b" not in shown(small)


def test_json_for_scripts_goes_alone_to_standard_output(small: Made, capsys: pytest.CaptureFixture[str]) -> None:
    report(reporting(small.settings, format="json"), small.study)
    out = capsys.readouterr()
    data = json.loads(out.out)
    assert "report.html" in out.err
    assert (data["study"], data["conclusion"], data["winner"]["trial"]) == ("local", "not_confirmed", 4)
    assert data["gain"]["share"] == data["shares"]["server"]["share"] == pytest.approx(0.25)
    assert data["shares"]["both"]["share"] == pytest.approx(0.5)
    assert data["crashes"][0]["signature"] == "nvls0001"
    assert data["counts"]["trials"] == 12
    assert report(small.settings, small.study) == 0
    assert capsys.readouterr().out.startswith("Study local")
