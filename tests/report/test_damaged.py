"""A study's database that somebody edited, or another tool wrote to: every reader says in one line what is wrong."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import sqlite3
from collections.abc import Callable
from typing import Any

import optuna
import pytest

from autotune.cli.commands import make_strategy, open_study
from autotune.export.launch_files import export
from autotune.records import AutotuneError, UsageError
from autotune.report import compare
from autotune.report.dashboard import note, plots, study_note
from autotune.report.render import content_of, html, markdown
from autotune.report.story import read
from autotune.report.terminal import as_data, print_comparison, print_summary
from autotune.tuning import bug_reports, confirm, matrix
from autotune.tuning.worker import observation_of
from tests.report.studies import Made, baseline

ODD: list[Any] = [None, 5, 0.5, "x", [], {}, True, [1, "a"], {"a": 1}, {"a": None}, [[]], float("nan"), 10**400,
                  "\ud800", "\x1b[31m\n"]


def resume(made: Made) -> None:
    """What `tune` reads before it launches anything."""
    study, strategy, space = open_study(made.settings), make_strategy(made.settings), made.settings.space
    study.lead()
    study.fail_stale_trials()
    for record in study.records():
        if record.state in ("COMPLETE", "PRUNED"):
            strategy.tell(observation_of(study, record))
    strategy.propose()
    for key, config in ((study.attrs().get("confirmation_plan") or {}).get("configurations") or {}).items():
        confirm.planned(space, key, config)
    confirm.finalists(space, study.records(), 3)
    bug_reports.bugs(space, study.records())


def report(made: Made) -> str:
    """What is told of a study anywhere; returns what goes to the terminal."""
    study = open_study(made.settings, create=False)
    story, out = read(made.settings, study), io.StringIO()
    print_summary(story, out)
    for write in (html, markdown):
        write("report.jinja", **content_of(story))
    assert json.dumps(as_data(story), default=str) and study_note(story) and [plot.to_json() for plot in plots(story)]
    for record in study.records():
        note(record, "tok/J", {})
    return out.getvalue()


def side_by_side(made: Made) -> None:
    folder = str(made.settings.folder)
    found = compare.load(dataclasses.replace(
        made.settings, report=dataclasses.replace(made.settings.report, compare=[folder, folder])))
    html("comparison.jinja", comparison=found, head=found.head())
    print_comparison(found, io.StringIO())


def export_it(made: Made) -> None:
    export(made.settings, open_study(made.settings, create=False))


def best(made: Made) -> None:
    matrix.chosen("best", made.settings.space, open_study(made.settings, create=False).records())


def begin_with_it(made: Made) -> None:
    make_strategy(dataclasses.replace(
        made.settings, study=dataclasses.replace(made.settings.study, warm_start=[str(made.settings.folder)])))


READERS: list[Callable[[Made], Any]] = [resume, report, side_by_side, export_it, best, begin_with_it]


def edit(made: Made, kind: str, key: str, value: Any, number: int = 0) -> None:
    """Sets an attribute of the study or of one of its trials; `...` removes it."""
    owner, of = ("trial_id", number + 1) if kind == "trial" else ("study_id", 1)
    table = f"{kind}_user_attributes"
    with sqlite3.connect(made.settings.folder / "study.db") as db:
        db.execute(f"delete from {table} where key=? and {owner}=?", (key, of))
        if value is not ...:
            db.execute(f"insert into {table} ({owner}, key, value_json) values (?, ?, ?)", (of, key, json.dumps(value)))


@pytest.mark.parametrize(("kind", "key", "value", "said"), [
    ("trial", "cost_s", "long", "trial 0: cost_s: a finite number belongs there, not long"),
    ("trial", "cost_s", ..., "trial 0 has no cost_s, as if another program"),
    ("trial", "launch_s", float("inf"), "trial 0: launch_s: a finite number"),
    ("trial", "invalid_reasons", [5], r"trial 0: invalid_reasons\[0\]: a text belongs there, not 5"),
    ("trial", "limit_ratios", {"ttft_p99_ms": "x"}, "trial 0: limit_ratios.ttft_p99_ms: a finite number"),
    ("trial", "server_argv", {}, "trial 0: server_argv: a list belongs there"),
    ("trial", "launch_id", 1.5, "trial 0: launch_id: a whole number"),
    ("trial", "crash_signature", "s", "trial 0 has no crash_category"),
    ("study", "identity", ..., "does not say under which conditions it was made"),
    ("study", "identity", 5, "study local: identity: a mapping belongs there, not 5"),
    ("study", "identity", {"space_digest": ["x"]}, "identity.space_digest: a text"),
    ("study", "barred", [{"when": 5, "because": "b"}], r"barred\[0\].when: a mapping"),
    ("study", "confirmation", {"finalists": {"0": {"gain": 1}}}, "finalists.0.verdict is missing"),
    ("study", "provenance", {"gpu": 8}, "provenance.gpu: a list belongs there, not 8"),
    ("study", "stop", [], "study local: stop: a mapping")])
@pytest.mark.parametrize("reader", [resume, report, export_it])
def test_an_attribute_of_another_type_is_one_line_that_names_it(
        small: Made, reader: Callable[[Made], Any], kind: str, key: str, value: Any, said: str) -> None:
    edit(small, kind, key, value)
    with pytest.raises(AutotuneError, match=f"{said}.*damaged: bring back a copy of it") as error:
        reader(small)
    assert error.value.exit_code == 1 and "\n" not in str(error.value)


def test_whatever_stands_in_a_study_every_reader_copes_or_says_one_line(rich: Made) -> None:
    rng, whole = random.Random(11), (rich.settings.folder / "study.db").read_bytes()
    keys = {"trial": [*rich.study.record(0).attrs, "confirm", "neighbours", "same_as"],
            "study": [*rich.study.attrs(), "confirmation_plan", "neighbours", "barred", "warm_start"]}
    for _ in range(16):
        (rich.settings.folder / "study.db").write_bytes(whole)
        kind = rng.choice(["trial", "study"])
        edit(rich, kind, rng.choice(keys[kind]), rng.choice([*ODD, ...]))
        for reader in READERS:
            try:
                reader(rich)
            except AutotuneError as error:
                assert "\n" not in str(error)


def test_no_text_of_a_study_moves_the_cursor_of_a_terminal(small: Made) -> None:
    for number in range(5):
        edit(small, "trial", "energy_source", "\x1b]0;owned\x07", number)
    edit(small, "study", "stop", {"kind": "gain", "reason": "\x1b[2J"})
    assert "\x1b" not in report(small) and "owned" in report(small)


def test_what_a_reader_finds_without_conditions_it_leaves_so(small: Made) -> None:
    edit(small, "study", "identity", ...)
    with pytest.raises(AutotuneError):
        open_study(small.settings, create=False)
    assert "identity" not in small.study.inner.user_attrs


def test_trials_that_another_tool_only_asked_for_or_failed_change_nothing(small: Made) -> None:
    before = len(small.study.records())
    small.study.inner.enqueue_trial({"tp": 3, "x": 1})
    for state in (optuna.trial.TrialState.FAIL, optuna.trial.TrialState.RUNNING):  # the second is nobody's
        small.study.inner.add_trial(optuna.trial.create_trial(state=state))
    resume(small)
    report(small)
    assert [r.state for r in open_study(small.settings, create=False).records()[before:]] == ["WAITING", "FAIL", "FAIL"]


def test_a_choice_that_the_space_does_not_have_goes_to_no_command_line(small: Made) -> None:
    with sqlite3.connect(small.settings.folder / "study.db") as db:
        (told,) = db.execute("select distribution_json from trial_params where trial_id=1 and param_name='tp'"
                             ).fetchone()
        kind = json.loads(told)
        kind["attributes"]["choices"] = ["--trust-remote-code", *kind["attributes"]["choices"][1:]]
        db.execute("update trial_params set distribution_json=?, param_value=0 where trial_id=1 and param_name='tp'",
                   (json.dumps(kind),))
    for reader in (resume, report, export_it, best):
        with pytest.raises(AutotuneError, match="trial 0: .*tp='--trust-remote-code' is not a choice.*damaged"):
            reader(small)


@pytest.mark.parametrize("change", [
    "delete from trials where trial_id=3", "update trials set number=99 where trial_id=2"])
def test_a_study_from_which_a_trial_was_removed_does_not_go_on(small: Made, change: str) -> None:
    with sqlite3.connect(small.settings.folder / "study.db") as db:
        assert db.execute(change).rowcount == 1
    with pytest.raises(AutotuneError, match=r"trial [12] is missing.*damaged: bring back a copy"):
        resume(small)
    report(small)


@pytest.mark.parametrize(("value", "error"), [
    (1e299, 0.1), (1e-299, 0.1), (2.0, 1e299), (-1e299, 1e-299), (0.0, 800.0)])
def test_figures_of_any_size_are_told(small: Made, value: float, error: float) -> None:
    with sqlite3.connect(small.settings.folder / "study.db") as db:
        db.execute("update trial_values set value=? where trial_id in (2, 4)", (value,))
    for number in (0, 1, 3):
        edit(small, "trial", "relative_error", error, number)
        edit(small, "trial", "tokens_per_s", value, number)
    for reader in READERS:
        try:
            reader(small)
        except AutotuneError as told:
            assert "\n" not in str(told)


def test_a_plan_of_confirmation_is_of_choices_of_the_space(small: Made) -> None:
    with pytest.raises(AutotuneError, match="confirmation_plan.3: .* is not a choice .*damaged"):
        confirm.planned(small.settings.space, "3", {**baseline(small), "tp": 3})


def test_a_past_study_with_odd_attributes_is_named_before_anything_begins(small: Made) -> None:
    edit(small, "trial", "cost_s", [])
    with pytest.raises(UsageError, match="study.warm_start: .*local: .*trial 0: cost_s: a finite number"):
        begin_with_it(small)


@pytest.mark.parametrize("line", [
    '{"action": "close", "region": 5}', '{"action": "close", "region": {"nvls": [null]}}', '{"trials": "x"}',
    '{"belief": "high", "action": "close", "region": {}}', '{"action": [], "region": {}}', '{"after_launches": 1e400}'])
def test_a_pivot_that_is_none_is_left_out(small: Made, line: str) -> None:
    (small.settings.folder / "pivots.jsonl").write_text(line + "\n")
    report(small)


@pytest.mark.parametrize("row", [
    {"config": "b", "ctx": "x", "concurrency": 1}, {"config": "b", "ctx": 1}, {"config": 5, "ctx": 1, "concurrency": 1},
    {"config": "b", "ctx": 1, "concurrency": 1, "watts": [1]}])
def test_a_row_of_the_matrix_that_is_none_is_named(small: Made, row: dict[str, Any]) -> None:
    rows = [{"config": "b", "ctx": 1, "concurrency": 1}, row]
    (small.settings.folder / "matrix.json").write_text(json.dumps(rows))
    with pytest.raises(AutotuneError, match=r"not a list of rows .*row \[1\].*delete it"):
        report(small)
