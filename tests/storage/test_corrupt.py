"""A corrupt study, edited by hand or by another tool: every reader says in one line what is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import random
import sqlite3
from collections.abc import Callable
from typing import Any

import optuna
import pytest

from autotune.cli.verbs import make_strategy, open_study
from autotune.export.launch_files import export
from autotune.records import AutotuneError, Crash, Measurement, UsageError
from autotune.report import compare
from autotune.report.dashboard import note, plots, study_note
from autotune.report.render import as_data, content_of, html, markdown, print_comparison, print_summary
from autotune.report.story import read
from autotune.storage.schema import REMEDY, read_pivots
from autotune.storage.trial import LaunchFacts, Result
from autotune.tuning import bug_reports, confirm, matrix
from autotune.tuning.worker import observation_of
from tests.report.studies import Made, baseline, reporting

ODD: list[Any] = [None, 5, 0.5, "x", [], {}, True, [1, "a"], {"a": 1}, {"a": None}, [[]], float("nan"), 10**400,
                  "\ud800", "\x1b[31m\n"]


def resume(made: Made) -> None:
    """Read everything that `tune` reads before its first launch."""
    study, strategy, space = open_study(made.settings), make_strategy(made.settings), made.settings.space
    study.lead()
    study.fail_stale_trials()
    for record in study.records():
        if record.state in ("COMPLETE", "PRUNED"):
            strategy.tell(observation_of(study, record))
    strategy.propose()
    if plan := study.attrs().get("confirmation_plan"):
        confirm.Plan.stored(space, plan)
    confirm.finalists(space, study.records())
    bug_reports.bugs(space, study.records())


def report(made: Made) -> str:
    """Write every output about a study; returns the terminal's."""
    study = open_study(made.settings, create=False)
    story, out = read(made.settings, study), io.StringIO()
    print_summary(story, out)
    for write in (html, markdown):
        write("report.jinja", **content_of(story))
    assert json.dumps(as_data(story), default=str) and study_note(story) and [plot.to_json() for plot in plots(story)]
    for record in study.records():
        note(record, "tok/J", {})
    return out.getvalue()


def ship(made: Made) -> None:
    """Compare, choose and export."""
    folder = str(made.settings.folder)
    found = compare.load(reporting(made.settings, compare=[folder, folder]))
    html("comparison.jinja", comparison=found, head=found.head())
    print_comparison(found, io.StringIO())
    study = open_study(made.settings, create=False)
    matrix.chosen("best", made.settings.space, study.records())
    export(made.settings, study)


def warm_start(made: Made) -> None:
    make_strategy(dataclasses.replace(
        made.settings, study=dataclasses.replace(made.settings.study, warm_start=[str(made.settings.folder)])))


READERS: list[Callable[[Made], Any]] = [resume, report, ship, warm_start]


def sql(made: Made, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """Run a statement on the study's database; it must find a row."""
    with contextlib.closing(sqlite3.connect(made.settings.folder / "study.db")) as db, db:
        done = db.execute(statement, values)
        rows = done.fetchall()
        assert rows or done.rowcount > 0
    return rows


def edit(made: Made, kind: str, key: str, value: Any, number: int = 0) -> None:
    """Set an attribute of the study or a trial, or a path in a trial's attribute `outcome`; `...` removes it."""
    if kind == "outcome":
        ((stored,),) = sql(made, "select value_json from trial_user_attributes where key='outcome' and trial_id=?",
                           number + 1)
        whole = at = json.loads(stored)
        *parents, last = key.split(".")
        for name in parents:
            at = at.setdefault(name, {})
        at[last] = value
        if value is ...:
            del at[last]
        kind, key, value = "trial", "outcome", whole
    owner, of = ("trial_id", number + 1) if kind == "trial" else ("study_id", 1)
    sql(made, f"insert or replace into {kind}_user_attributes ({owner}, key, value_json) values (?, ?, ?)", of, key,
        json.dumps(None if value is ... else value))
    if value is ...:
        sql(made, f"delete from {kind}_user_attributes where key=? and {owner}=?", key, of)


@pytest.mark.parametrize(("kind", "key", "value", "problem"), [
    *(("outcome", *case) for case in (
        ("cost_s", "long", "cost_s must be a finite number, not 'long'"), ("cost_s", ..., "cost_s must be .*missing"),
        ("launch_s", float("inf"), "launch_s must be a finite number, not inf"),
        ("score.reasons", [5], r"score.reasons\[0\] must be a text, not 5"),
        ("score.ratios", {"ttft_p99_ms": "x"}, r"score.ratios.ttft_p99_ms must be a finite number, not 'x'"),
        ("launch.argv", {}, "launch.argv must be a list, not {}"),
        ("outcome.window_s", 0, "outcome.window_s must be a number above 0, not 0"),
        ("outcome.energy.source", "\ud800", "the value cannot be stored as JSON .*surrogates not allowed"))),
    ("trial", "outcome", ..., "trial 0: outcome is missing"),
    ("trial", "launch_id", 1.5, "trial 0: launch_id must be a whole number, not 1.5"),
    ("study", "identity", ..., "study local: identity is missing"),
    ("study", "identity", 5, "study local: identity must be a mapping, not 5"),
    ("study", "identity", {"space_digest": ["x"]}, "study local: identity.space_digest must be a text"),
    ("study", "unavailable", [{"when": 5, "because": "b"}], r"unavailable\[0\].when must be a mapping"),
    ("study", "confirmation", {"finalists": {"0": {"gain": 1}}}, r"finalists.0.verdict must be .*missing"),
    ("study", "provenance", {"gpu": 8}, "provenance.gpu must be a list, not 8"),
    *(("sql", change, None, "") for change in (
        "update trial_user_attributes set value_json='{not json'", "update trial_params set distribution_json='{}'",
        "update trial_values set value_type='INF_POS'", "update trials set number='x' where trial_id=2",
        "update study_user_attributes set value_json='5'", "update study_user_attributes set value_json='{'"))])
def test_a_corrupt_value_is_one_line_that_names_it(small: Made, kind: str, key: str, value: Any, problem: str) -> None:
    sql(small, key) if kind == "sql" else edit(small, kind, key, value)
    problem = f"trial 0: outcome: {problem}" if kind == "outcome" else problem
    for reader in (resume, report, ship):
        with pytest.raises(AutotuneError, match=f"corrupt.*{problem}.*{REMEDY}") as error:
            reader(small)
        assert error.value.exit_code == 1 and "\n" not in str(error.value)


def test_whatever_stands_in_a_study_every_reader_copes_or_says_one_line(small: Made) -> None:
    rng, whole = random.Random(11), (small.settings.folder / "study.db").read_bytes()
    keys = {"trial": ["owner", "launch_id", "confirm", "confirm_after", "outcome", "feasible"],
            "outcome": [*Result.__struct_fields__, *(f"score.{name}" for name in ("value", "ratios", "reasons")),
                        *(f"launch.{name}" for name in LaunchFacts.__struct_fields__), *(f"outcome.{name}" for name in (
                            "type", *Measurement.__struct_fields__, *Crash.__struct_fields__))],
            "study": [*small.study.attrs(), "confirmation", "confirmation_plan", "stop", "neighbours", "unavailable",
                      "barred", "warm_start"]}
    for _ in range(24):
        (small.settings.folder / "study.db").write_bytes(whole)
        kind = rng.choice(sorted(keys))
        edit(small, kind, rng.choice(keys[kind]), rng.choice(ODD))
        for reader in rng.sample(READERS, 3):
            try:
                reader(small)
            except AutotuneError as error:
                assert "\n" not in str(error)


def test_no_text_of_a_study_moves_the_cursor_of_a_terminal(small: Made) -> None:
    for number in (record.number for record in small.study.records() if record.measurement is not None):
        edit(small, "outcome", "outcome.energy.source", "\x1b]0;owned\x07", number)
    edit(small, "study", "stop", {"kind": "gain", "reason": "\x1b[2J"})
    assert "\x1b" not in report(small) and "owned" in report(small)


def test_trials_that_another_tool_only_asked_for_or_failed_change_nothing(small: Made) -> None:
    before = len(small.study.records())
    small.study.inner.enqueue_trial({"tp": 3, "x": 1})
    for state in (optuna.trial.TrialState.FAIL, optuna.trial.TrialState.RUNNING):  # the second is nobody's
        small.study.inner.add_trial(optuna.trial.create_trial(state=state))
    resume(small)
    report(small)
    assert [r.state for r in open_study(small.settings, create=False).records()[before:]] == ["WAITING", "FAIL", "FAIL"]


def test_a_choice_that_the_space_does_not_have_goes_to_no_command_line(small: Made) -> None:
    ((stored,),) = sql(small, "select distribution_json from trial_params where trial_id=1 and param_name='tp'")
    kind = json.loads(stored)
    kind["attributes"]["choices"] = ["--trust-remote-code", *kind["attributes"]["choices"][1:]]
    sql(small, "update trial_params set distribution_json=?, param_value=0 where trial_id=1 and param_name='tp'",
        json.dumps(kind))
    for reader in (resume, report, ship):
        with pytest.raises(AutotuneError, match="trial 0: .*tp='--trust-remote-code' is not a choice.*Restore"):
            reader(small)


@pytest.mark.parametrize("change", [
    "delete from trials where trial_id=3", "update trials set number=99 where trial_id=2"])
def test_a_study_from_which_a_trial_was_removed_does_not_go_on(small: Made, change: str) -> None:
    sql(small, change)
    with pytest.raises(AutotuneError, match=r"trial [12] is missing.*Restore a backup"):
        resume(small)
    report(small)


def test_a_plan_of_confirmation_is_of_choices_of_the_space(small: Made) -> None:
    with pytest.raises(AutotuneError, match="confirmation_plan.3: .* is not a choice .*Restore a backup"):
        confirm.Plan.stored(small.settings.space, {"configurations": {"3": {**baseline(small), "tp": 3}}})


def test_a_past_study_with_odd_attributes_is_named_before_anything_begins(small: Made) -> None:
    edit(small, "outcome", "cost_s", [])
    with pytest.raises(UsageError, match="study.warm_start: .*local: .*trial 0: outcome: cost_s must be a finite"):
        warm_start(small)


def test_torn_and_odd_lines_of_pivots_are_left_out(small: Made) -> None:
    pivot = {"action": "close", "region": {"nvls": [True]}, "reason": "faults", "trials": [0], "reopens_when": "serves",
             "after_launches": 1, "launches_saved": 4, "belief": 0.97}
    (small.settings.folder / "pivots.jsonl").write_text("\n".join([
        '{"action": "clo', json.dumps(pivot), "5", "[" * 100_000, '\udcff"reason', json.dumps(pivot),
        '{"action": "close", "region": {"nvls": [null]}}', '{"after_launches": 1e400}', '{"a']),
        errors="surrogateescape")
    assert read_pivots(small.settings.folder) == [pivot, pivot]
    report(small)


@pytest.mark.parametrize(("row", "problem"), [
    ('{"config": "b", "ctx": "x", "concurrency": 1}', r"is not a list of rows .*row \[1\]"),
    ('{"config": "b", "ctx": 1, "concurrency": 1, "watts": [1]}', r"row \[1\]"), ("{", "cannot be read")])
def test_a_corrupt_matrix_is_named(small: Made, row: str, problem: str) -> None:
    file = small.settings.folder / "matrix.json"
    file.write_text(f'[{{"config": "b", "ctx": 1, "concurrency": 1}}, {row}]')
    with pytest.raises(AutotuneError, match=f"{file} .*{problem}.*: delete it"):
        report(small)
