"""The agreement gate: wrong output is caught, batching noise is not."""

from __future__ import annotations

import dataclasses
import pathlib
from contextlib import nullcontext

import pytest

from autotune.loadgen.wire_formats import Api
from autotune.loadgen.workload import Target
from autotune.measure.correctness import AgreementSettings, Gate, Output, collect, compare, poisson_tail, repeats
from autotune.records import UsageError
from autotune.utils.redact import HIDDEN, Redactor
from tests.fakes.stub import Stub
from tests.loadgen.harness import BUILTIN, OPENAI, SGLANG, target_of
from tests.utils.test_http import said, serving

SETTINGS = AgreementSettings(prompts=24, output_tokens=64, context_tokens=40, floor=0.002, ratio=2.0, alpha=0.001,
                             timeout_s=20.0, budget_s=60.0)
SMALL = AgreementSettings(1, 4, 8, 0.1, 2.0, 0.1, 2.0, 60.0)


def outputs(folder: pathlib.Path, *arguments: str, api: Api = OPENAI, runs: int = 1) -> list[list[Output]]:
    folder.mkdir(exist_ok=True)
    (folder / "stub.port").unlink(missing_ok=True)
    with Stub(folder, *arguments) as stub:
        return [collect(target_of(stub, api), SETTINGS, BUILTIN, concurrency) for concurrency in (1, 4, 8)[:runs]]


def test_the_same_server_agrees_with_itself_through_both_interfaces(tmp_path: pathlib.Path) -> None:
    for api in (OPENAI, SGLANG):
        runs = outputs(tmp_path, api=api, runs=3)
        verdict = compare(runs[0], runs[1:], SETTINGS)
        assert verdict.agreement == 1.0 and verdict.divergences == 0 and not verdict.wrong
        assert runs[0][0].tokens == 64
    assert compare(outputs(tmp_path, "--corrupt", "60")[0], runs[1:], SETTINGS).wrong  # rare corruption


def test_batching_noise_is_not_wrong_and_corruption_is(tmp_path: pathlib.Path) -> None:
    noise = ("--noise", "0.005")
    baselines = outputs(tmp_path / "b", *noise, runs=3)
    for i in range(3):
        noisy = compare(outputs(tmp_path / f"n{i}", *noise)[0], baselines, SETTINGS)
        assert noisy.divergences > 0 and not noisy.wrong
    corrupt = compare(outputs(tmp_path / "c", *noise, "--corrupt", "12")[0], baselines, SETTINGS)
    assert corrupt.reasons == ("diverges",) and corrupt.agreement is not None and corrupt.agreement < 0.3


def test_loops_and_silence_are_caught_without_a_baseline_and_excused_when_it_has_them(tmp_path: pathlib.Path) -> None:
    looping = outputs(tmp_path, "--loop")[0]
    assert compare(looping, [], SETTINGS).reasons == ("repeats",)
    assert not compare(looping, [looping, looping], SETTINGS).wrong
    silent = [Output("  ", 64)] * 24
    assert compare(silent, [], SETTINGS).reasons == ("empty",)
    fine = outputs(tmp_path)[0]
    assert not compare(fine, [], SETTINGS).wrong
    assert compare(looping, [fine, fine], SETTINGS).reasons == ("diverges", "repeats")


@pytest.mark.parametrize(("text", "loops"), [
    ("ab" * 40, True), ("x" * 40, True), ("a sound start, then " + "no no no " * 12, True), ("x" * 20, False),
    ("the quick brown fox jumps over the lazy dog and runs away from all of it", False), ("", False),
    ("once " * 6 + "upon a time there was a tree that drafted tokens for its target, and they were verified", False)])
def test_a_loop_is_half_of_the_text_repeated_at_least_four_times(text: str, loops: bool) -> None:
    assert repeats(text) is loops


@pytest.mark.parametrize(("texts", "agreement"), [(("abcd", "abcd"), 1.0), (("abcd", "abxx"), 0.5), (("", ""), 1.0),
                                                  (("ab", "abcd"), 0.5), (("", "a"), 0.0)])
def test_texts_agree_until_they_diverge(texts: tuple[str, str], agreement: float) -> None:
    assert compare([Output(texts[0], 4)], [[Output(texts[1], 4)]], SETTINGS).agreement == agreement


def test_the_tail_of_the_poisson_distribution_is_that_of_the_tables() -> None:
    assert poisson_tail(3, 1.0) == pytest.approx(0.0803, abs=1e-4)
    assert poisson_tail(0, 5.0) == 1.0 and poisson_tail(1, 0.0) == 0.0


def test_a_secret_that_a_server_echoes_is_neither_kept_nor_a_difference(tmp_path: pathlib.Path) -> None:
    gate = Gate(tmp_path / "agreement.json", dataclasses.replace(SETTINGS, prompts=2), BUILTIN)
    with Stub(tmp_path) as stub:
        secret = collect(target_of(stub), gate.settings, BUILTIN, 1)[0].text[20:40]
        for baseline in (True, False):
            verdict, problem = gate.check(target_of(stub), baseline, Redactor([secret]).text)
            assert verdict is not None and verdict.agreement == 1.0 and not problem
    kept = gate.file.read_text()
    assert HIDDEN in kept and secret not in kept


def test_outputs_that_were_asked_for_otherwise_are_refused_with_what_to_set_back(tmp_path: pathlib.Path) -> None:
    gate = Gate(tmp_path / "agreement.json", dataclasses.replace(SETTINGS, prompts=2), BUILTIN)
    gate._keep([[Output("a", 64), Output("b", 64)]] * 2)
    assert gate.references() == [[Output("a", 64), Output("b", 64)]] * 2
    for change, told in (({"prompts": 3}, "agreement.prompts=2"), ({"output_tokens": 8}, "agreement.output_tokens=64"),
                         ({"context_tokens": 10, "prompts": 1}, "agreement.prompts=2 agreement.context_tokens=40")):
        with pytest.raises(UsageError, match=f"were made with {told}: set that back"):
            dataclasses.replace(gate, settings=dataclasses.replace(gate.settings, **change)).references()
    with pytest.raises(UsageError, match="were made with workload.seed=1: set that back"):
        dataclasses.replace(gate, prompts=dataclasses.replace(BUILTIN, seed=2)).references()


@pytest.mark.parametrize(("text", "settings"), [
    ('[[["a", 64]]]', "agreement.prompts=1"), ('[[["a", 64], ["b", 64]], []]', "outputs of another number"),
    *[(text, "") for text in ("", "{", "5", "[5]", "[[5]]", "[]", "{}", '{"asked": 5, "runs": []}', "[" * 100_000)]])
def test_outputs_that_do_not_fit_are_refused_and_unreadable_ones_are_none(
        text: str, settings: str, tmp_path: pathlib.Path) -> None:
    gate = Gate(tmp_path / "agreement.json", dataclasses.replace(SETTINGS, prompts=2), BUILTIN)
    gate.file.write_text(text)
    with pytest.raises(UsageError, match=f"were made with {settings}: set that back") if settings else nullcontext():
        assert gate.references() == []


@pytest.mark.parametrize("body", [b"[1]", b'"x"', b"[" * 200_000, b'{"choices": ["x"]}', b'{"choices": {"a": 1}}',
                                  b'{"choices": [{"text": "a"}], "usage": [1]}',
                                  b'{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1e999}}',
                                  b'{"choices": [{"message": "x"}]}', b'{"error": {"message": "no"}}'])
def test_malformed_greedy_outputs_are_a_problem_of_one_line(tmp_path: pathlib.Path, body: bytes) -> None:
    gate = Gate(tmp_path / "agreement.json", SMALL, BUILTIN)
    with serving(said(body)) as url:
        verdict, problem = gate.check(Target(url, OPENAI, "m", False), False, str)
    assert verdict is None and problem.startswith("POST /v1/completions: ") and len(problem) <= 300


def test_an_output_without_end_is_kept_as_far_as_its_tokens_may_go(tmp_path: pathlib.Path) -> None:
    gate = Gate(tmp_path / "agreement.json", SMALL, BUILTIN)
    body = b'{"choices": [{"text": "%s"}], "usage": {"completion_tokens": 4}}' % (b"word " * 200_000)
    with serving(said(body), said(body), said(body)) as url:
        gate.check(Target(url, OPENAI, "m", False), True, str)
    assert len(gate.references()[0][0].text) == 4 * 256


def test_a_collection_out_of_time_keeps_two_outputs_and_what_both_have_is_compared(tmp_path: pathlib.Path) -> None:
    settings = dataclasses.replace(SETTINGS, prompts=6, budget_s=1e-6)
    told: list[tuple[int, int]] = []
    with Stub(tmp_path) as stub:
        gate = Gate(tmp_path / "outputs.json", settings, BUILTIN)
        verdict, problem = gate.check(target_of(stub), True, str, lambda done, of: told.append((done, of)))
        assert all(2 <= len(run) <= 6 for run in gate.references()) and not problem and verdict is not None
        whole, _ = dataclasses.replace(gate, settings=dataclasses.replace(settings, budget_s=60.0)).check(
            target_of(stub), False, str)
    assert verdict.agreement == 1.0 and whole is not None and whole.agreement == 1.0
    assert told[0][1] == 18 and len(told) < 18
