"""Studies side by side: which levers changed sign, which conditions differ."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable

import pytest

from autotune.records import UsageError
from autotune.report.compare import compare, load
from autotune.report.render import report
from autotune.report.story import Story, read
from tests.conftest import opened
from tests.report.studies import Made, baseline, reporting


def story(made: Made, name: str, tp: float, budget: float) -> Story:
    """A study in which tp=2 is worth `tp` and tree_budget=8 is worth `budget`."""
    for level, value in ((4, 2.0), (8, 3.0)):
        made.measure(baseline(made, concurrency=level), value)
        made.measure(baseline(made, concurrency=level, tp=2), value * tp * (1 + level / 10000))
        made.measure(baseline(made, concurrency=level, tree_budget=8), value * budget * (1 + level / 10000))
    return dataclasses.replace(read(made.settings, made.study), study=name)


@pytest.fixture(scope="module")
def template(fast_folder: pathlib.Path) -> tuple[pathlib.Path, list[Story]]:
    """(outputs folder, stories) of the studies one and two; tests copy the folder."""
    folder = fast_folder / "compared"
    one, two = opened(folder, "study.name=one"), opened(folder, "study.name=two")
    two.crash(baseline(two, nvls=True))
    return folder, [story(one, "one", 1.3, 1.2), story(two, "two", 0.8, 1.21)]


@pytest.fixture
def two(template: tuple[pathlib.Path, list[Story]], outputs: pathlib.Path) -> list[Story]:
    shutil.copytree(template[0], outputs, dirs_exist_ok=True)
    return template[1]


def test_levers_that_help_here_and_hurt_there_come_first_and_crashes_are_counted(two: list[Story]) -> None:
    found = {p.name: p.verdict for p in compare(two).levers}
    assert found["tp=2"] == "changed sign"
    assert found["tree_budget=8"] in ("alike", "differs")
    assert compare(two).levers[0].name == "tp=2"
    assert compare(two).signatures == (("nvls0001", "nvls_unsupported", (0, 1)),)


def test_conditions_that_differ_are_said_and_objectives_that_differ_are_refused(two: list[Story]) -> None:
    other = dataclasses.replace(two[1], identity={**two[1].identity, "workload": {"contexts": [9]}})
    assert any("workloads differ" in c for c in compare([two[0], other]).caveats)
    assert any("Not confirmed: one, two" in c for c in compare(two).caveats)
    with pytest.raises(UsageError, match="different things"):
        compare([two[0], dataclasses.replace(two[1], objective="tokens_per_s")])


def test_the_verb_writes_a_page_and_prints_the_tables(two: list[Story], make: Callable[..., Made],
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    made = make("study.name=one")
    settings = reporting(made.settings, compare=["one", "two"])
    assert report(settings, made.study) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 lever changed sign.")
    assert "tp=2" in (settings.outputs / "compare-one-two.html").read_text()
    there = dataclasses.replace(settings, out=f"{settings.outputs}/elsewhere/both.html")
    assert report(there, made.study) == 0
    assert capsys.readouterr().out.endswith("elsewhere/both.html\n")
    assert "tp=2" in (settings.outputs / "elsewhere" / "both.md").read_text()
    report(reporting(settings, format="json"), made.study)
    data = json.loads(capsys.readouterr().out)
    assert [s["study"] for s in data["studies"]] == ["one", "two"]
    assert data["levers"][0]["verdict"] == "changed sign"


def test_studies_of_other_spaces_are_read_from_their_trials(two: list[Story], make: Callable[..., Made]) -> None:
    other = make("study.name=three", "space.params.tp.choices=[1,2,4]")
    assert report(reporting(other.settings, compare=["one", "two"]), other.study) == 0
    assert "1 lever changed sign" in (other.settings.outputs / "compare-one-two.md").read_text()


def test_studies_of_the_same_name_are_told_apart(two: list[Story], make: Callable[..., Made],
                                                 tmp_path: pathlib.Path) -> None:
    made = make("study.name=one")
    shutil.copytree(made.settings.folder, tmp_path / "other host" / "one")
    names = ["one", str(tmp_path / "other host" / "one")]
    assert [s.study for s in load(reporting(made.settings, compare=names)).stories] == names


def test_one_study_or_an_unknown_one_is_refused(make: Callable[..., Made]) -> None:
    made = make()
    for names, said in ((["local"], "two or more"), (["local", "absent"], "no study.db")):
        with pytest.raises(UsageError, match=said):
            report(reporting(made.settings, compare=names), made.study)
