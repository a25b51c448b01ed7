"""Space and engine files: one line for a file that cannot be used, and no way from a file to the rest of the host."""

from __future__ import annotations

import json
import pathlib
import time

import pytest

from autotune.__main__ import main
from autotune.config.compose import MOST_BYTES, load
from autotune.engine.host import engine_version
from autotune.engine.stages import found
from autotune.records import UsageError

SPACE = "name: mine\nengine: own\nparams: {a: {choices: [1]}}\nbaseline: {a: 1}\n"
ENGINE = "name: own\ncommand: [prog]\nparams: {a: {flag: --a}}\n"
EVIL = "${oc.env:HOME}"


def write(folder: pathlib.Path, space: str = SPACE, engine: str = ENGINE, base: str | None = None) -> list[str]:
    (folder / "engine").mkdir(exist_ok=True)
    (folder / "mine.yaml").write_text(space)
    (folder / "engine" / "own.yaml").write_text(engine)
    if base is not None:
        (folder / "base.yaml").write_text(base)
    return [str(folder)]


def refused(folder: list[str], *overrides: str) -> str:
    """The one line that a load ends with."""
    with pytest.raises(UsageError) as error:
        load(["+space=mine", *overrides], folder)
    assert str(error.value).isprintable() and len(str(error.value)) < 1000
    return str(error.value)


@pytest.mark.parametrize("line", [
    f"describe: {EVIL}", "describe: say '${oc.env:HOME,none}' to", "describe: ${ oc.decode:'1' }",
    "describe: \"${oc.env:${name}}\"", "describe: ${oc.create:{}}", "describe: ${${name}:x}", f"model: {{'{EVIL}': x}}",
    f"defaults: ['{EVIL}', _self_]", f"workload: {{prompts: '{EVIL}'}}"])
def test_a_resolver_is_refused_in_a_space_its_base_and_an_engine_file(line: str, tmp_path: pathlib.Path) -> None:
    for name, files in {"mine": {"space": SPACE + line}, "own": {"engine": ENGINE + line},
                        "base": {"space": "defaults: [base, _self_]\nname: mine\n", "base": SPACE + line}}.items():
        message = refused(write(tmp_path, **files))
        assert f"{name}.yaml: " in message and "asks for more than another key" in message


def test_a_plain_interpolation_in_a_file_and_a_resolver_on_the_command_line_are_read(
        tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PLACE", "/somewhere")
    folders = write(tmp_path, SPACE + "describe: of ${space.name} with ${space.engine}\n")
    made = load(["+space=mine", "+engine.env.PLACE=${oc.env:MY_PLACE}"], folders)
    assert made.space.describe == "of mine with own" and made.engine.env["PLACE"] == "/somewhere"


def test_a_plain_interpolation_cannot_copy_a_secret_into_a_space(tmp_path: pathlib.Path) -> None:
    message = refused(write(tmp_path, SPACE + "describe: ${engine.env.HF_TOKEN}\n"), "+engine.env.HF_TOKEN=canary")
    assert "describe holds a secret" in message and "canary" not in message


@pytest.mark.parametrize(("text", "message"), [
    ("x: &a [*a]\n", "refers to itself"), ("x: " + "[" * 1500 + "]" * 1500, "nested too deeply"),
    ("x: {b: 1,\n ~: 2}\n", "cannot be read as YAML"), ("x: [1\n", "cannot be read as YAML"),
    ("name: twice\n", "duplicate key name"), ("#" * (MOST_BYTES + 1), "larger than 4 MiB"),
    ("x: !!python/object/apply:os.system [x]\n", "cannot be read as YAML"),
    (f"needs: {{gpus: {'9' * 5000}}}", "Exceeds the limit"), ("needs: {gpus: .inf}", "needs.gpus must be a number"),
    ("price: 1", "unknown key price"), ('describe: "\\ud800"', "surrogates not allowed"),
    ("defaults: 5", "defaults must be a list"), ("defaults: '${name}'", "defaults must be a list")])
def test_a_file_that_cannot_be_used_is_one_line(text: str, message: str, tmp_path: pathlib.Path) -> None:
    said = refused(write(tmp_path, SPACE + text))
    assert message in said and ("mine" in said)


def test_aliases_are_read_and_bases_of_bases_too(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path, "defaults: [middle, _self_]\nname: mine\n", base=SPACE.replace("{a: 1}", "&b {a: 1}"))
    (tmp_path / "middle.yaml").write_text("defaults: [base, _self_]\ndescribe: in the middle\n")
    settings = load(["+space=mine"], folder)
    assert (settings.space.name, settings.space.describe, settings.engine.name) == ("mine", "in the middle", "own")


@pytest.mark.parametrize("way", ["", "..", "../engine/sglang", "a/b", "sglang@power", "a b", "${name}", "/absolute"])
def test_a_file_names_no_file_of_another_folder(way: str, tmp_path: pathlib.Path) -> None:
    assert "must be the plain name of an engine file" in refused(write(tmp_path, SPACE.replace("own", f"'{way}'")))
    for entry in (way, {"/workload": way}, {"override /power": "none"}, 5):
        defaults = f"defaults: {json.dumps([entry, '_self_'])}\n"
        for name, files in {"mine": {"space": SPACE + defaults}, "own": {"engine": ENGINE + defaults}}.items():
            message = refused(write(tmp_path, **files))
            assert f"{name}.yaml: defaults: " in message and "is not the plain name of another" in message


@pytest.fixture
def interpreter(tmp_path: pathlib.Path) -> tuple[list[str], pathlib.Path, pathlib.Path]:
    """(a folder of spaces whose engine file names its own interpreter, that program, the file that it writes)."""
    program, ran = tmp_path / "evil.sh", tmp_path / "ran"
    program.write_text(f"#!/bin/sh\necho x >> {ran}\necho 9.9\necho 1\n")
    program.chmod(0o755)
    own = f"version: {{package: foo}}\npython: {program}\n"
    return write(tmp_path, engine=ENGINE.replace("[prog]", "['{python}', -m, foo]") + own), program, ran


def test_an_interpreter_that_a_file_names_is_not_run_to_look_at_a_space(
        interpreter: tuple[list[str], pathlib.Path, pathlib.Path], tmp_path: pathlib.Path,
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder, program, ran = interpreter
    monkeypatch.chdir(tmp_path)
    for verb, *more in (("check",), ("tune", "--cfg"), ("worker", "--cfg"), ("report",), ("export",)):
        assert main([verb, "+space=mine", "device=cpu", "--spaces", *folder, *more]) in (0, 2)
        out = capsys.readouterr().out
        assert verb != "check" or ("version not asked" in out and str(program) in out)
        assert not ran.exists(), verb


def test_an_interpreter_that_the_user_names_or_is_about_to_start_is_asked(
        interpreter: tuple[list[str], pathlib.Path, pathlib.Path]) -> None:
    folder, program, ran = interpreter
    settings = load(["+space=mine"], folder, installed=False)
    assert settings.engine.python_of_file and engine_version(settings.engine) is None and not ran.exists()
    assert engine_version(settings.asking().engine) == "9.9"
    given = load(["+space=mine", f"engine.python={program}"], folder)
    assert not given.engine.python_of_file and engine_version(given.engine) == "9.9"


@pytest.mark.parametrize("section", ["ready", "info", "metrics"])
@pytest.mark.parametrize("path", ["@127.0.0.2:9999/x", "x", ".example.com/x", "/a b", "/a\n", 5, "http://h/"])
def test_a_path_of_an_engine_file_leads_to_no_other_host(section: str, path: object, tmp_path: pathlib.Path) -> None:
    message = refused(write(tmp_path, engine=f"{ENGINE}{section}: {{path: {json.dumps(path)}}}\n"))
    assert f"{section}.path must be a path on the server such as /health" in message


@pytest.mark.parametrize("pattern", ["(", "a{2,1}", "(" * 5000 + ")" * 5000])
def test_a_bad_regular_expression_of_an_engine_file_is_one_line(pattern: str, tmp_path: pathlib.Path) -> None:
    for key, mark in (("ready", f"ready: {{log: {json.dumps(pattern)}}}"),
                      ("stages[0]", f"stages: [{{stage: load, log: {json.dumps(pattern)}}}]")):
        message = refused(write(tmp_path, engine=f"{ENGINE}{mark}\n"))
        assert f"own: {key}: " in message and "is not a regular expression" in message


def test_a_log_line_is_searched_at_its_beginning_and_for_a_limited_time() -> None:
    assert found("mark", "a mark " + "x" * 5000) and not found("mark", "x" * 5000 + "mark")
    began = time.process_time()
    assert not found("(a+)+$", "a" * 1000 + "b") and time.process_time() - began < 2
