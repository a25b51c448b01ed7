"""YAML of strangers: what would blow up or read this machine's variables is refused with one line."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import time

import pytest

from autotune.config.compose import data_folder, load
from autotune.config.yaml_file import MOST_BYTES, MOST_NODES, check
from autotune.engine.host import engine_version
from autotune.engine.regexes import compiled, found
from autotune.records import UsageError

SPACE = "name: mine\nengine: own\nparams: {a: {choices: [1]}}\nbaseline: {a: 1}\n"
ENGINE = "name: own\ncommand: [prog]\nparams: {a: {flag: --a}}\n"
BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))


def write(folder: pathlib.Path, space: str = SPACE, engine: str = ENGINE) -> list[str]:
    (folder / "engine").mkdir(exist_ok=True)
    (folder / "mine.yaml").write_text(space)
    (folder / "engine" / "own.yaml").write_text(engine)
    return [str(folder)]


RESOLVERS = ["describe: ${oc.env:HOME}", "describe: say '${oc.env:HOME,none}' to", "describe: ${ oc.decode:'1' }",
             "describe: \"${oc.env:${name}}\"", "describe: ${oc.create:{}}", "describe: ${${name}:x}",
             "model: {'${oc.env:HOME}': x}",
             "defaults: ['${oc.env:HOME}', _self_]", "workload: {prompts: '${oc.env:HOME}'}"]


@pytest.mark.parametrize("line", RESOLVERS)
def test_a_resolver_in_a_space_is_refused_and_told_where(line: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=r"mine\.yaml, key (describe|model|defaults|workload)\b.*another key") as told:
        load(["+space=mine"], write(tmp_path, SPACE + line + "\n"))
    assert "\n" not in str(told.value)


def test_a_resolver_in_an_engine_file_or_in_what_a_space_is_based_on_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=r"own\.yaml, key env\.X.*another key"):
        load(["+space=mine"], write(tmp_path, engine=ENGINE + "env: {X: '${oc.env:HOME}'}\n"))
    folders = write(tmp_path, "defaults: [base, _self_]\nname: mine\n")
    (tmp_path / "base.yaml").write_text(SPACE + "describe: ${oc.env:HOME}\n")
    with pytest.raises(UsageError, match=r"base\.yaml, key describe"):
        load(["+space=mine"], folders)


def test_a_plain_interpolation_in_a_file_and_a_resolver_on_the_command_line_stay(
        tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PLACE", "/somewhere")
    folders = write(tmp_path, SPACE + "describe: of ${space.name} with ${space.engine}\n")
    made = load(["+space=mine", "+engine.env.PLACE=${oc.env:MY_PLACE}"], folders)
    assert made.space.describe == "of mine with own" and made.engine.env["PLACE"] == "/somewhere"


def test_a_plain_interpolation_cannot_pull_a_secret_into_a_space(tmp_path: pathlib.Path) -> None:
    folders = write(tmp_path, SPACE + "describe: ${engine.env.HF_TOKEN}\n")
    with pytest.raises(UsageError, match="describe holds a secret") as told:
        load(["+space=mine", "+engine.env.HF_TOKEN=canary"], folders)
    assert "canary" not in str(told.value)


@pytest.mark.parametrize(("space", "engine"), [(SPACE + BOMB, ENGINE), (SPACE, ENGINE + BOMB)])
def test_aliases_that_multiply_are_refused_unexpanded(space: str, engine: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=rf"yaml, line \d+: more than {MOST_NODES:,} values once its aliases"):
        load(["+space=mine"], write(tmp_path, space, engine))


def test_merged_mappings_that_multiply_are_refused_too(tmp_path: pathlib.Path) -> None:
    text = "m0: &m0 {a: 1}\n" + "".join(f"m{i}: &m{i} {{<<: [{','.join([f'*m{i - 1}'] * 9)}]}}\n" for i in range(1, 10))
    with pytest.raises(UsageError, match="more than"):
        load(["+space=mine"], write(tmp_path, SPACE + text))


@pytest.mark.parametrize(("text", "message"), [
    ("a: &a [*a]\n", "line 1: the anchor refers to itself"), ("[" * 5000 + "]" * 5000, "nest"),
    ("a: {b: 1,\n ~: 2}\n", "line 2: a key must have a name"),
    ("a: [1\n", "not valid YAML"), ("#" * (MOST_BYTES + 1), "larger than 4 MiB"),
    ("a: !!python/object/apply:os.system [x]\nb: ${oc.env:X}\n", "key b")])
def test_other_odd_files_are_one_line(text: str, message: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UsageError, match=message) as told:
        check(tmp_path / "x.yaml")
    assert "\n" not in str(told.value)


def test_aliases_in_reason_and_every_file_of_ours_pass(tmp_path: pathlib.Path) -> None:
    check(write_one(tmp_path, "a: &a {x: [1, 2]}\nb: [*a, *a, *a]\n"))
    files = [*data_folder("conf").rglob("*.yaml"), *data_folder("search_spaces").rglob("*.yaml")]
    assert len(files) > 20
    for file in files:
        check(file)


def test_the_command_ends_with_exit_code_2(tmp_path: pathlib.Path) -> None:
    write(tmp_path, SPACE + "describe: ${oc.env:HOME}\n")
    done = subprocess.run([sys.executable, "-m", "autotune", "check", "+space=mine", "--spaces", str(tmp_path)],
                          capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "mine.yaml, key describe" in done.stderr


def write_one(folder: pathlib.Path, text: str) -> pathlib.Path:
    (folder / "one.yaml").write_text(text)
    return folder / "one.yaml"


EVIL = "${oc.env:HOME}"


@pytest.fixture
def elsewhere(tmp_path: pathlib.Path) -> str:
    """A way from conf/'s groups to files of others that hold a resolver."""
    (tmp_path / "evil.yaml").write_text(f"describe: {EVIL}\n{ENGINE}")
    return "../" * 20 + str(tmp_path / "evil").lstrip("/")


def test_a_space_leads_to_no_file_elsewhere(tmp_path: pathlib.Path, elsewhere: str) -> None:
    for way in (elsewhere, str(tmp_path / "evil"), "..", "../engine/sglang", "a/b", "sglang@power", "a b", "",
                "${name}"):
        with pytest.raises(UsageError, match="must be the plain name of an engine file"):
            load(["+space=mine"], write(tmp_path, SPACE.replace("own", f"'{way}'")))
        for entry in (way, {"/workload": way}, {"override /power": "none"}, {way: "none"}, 5):
            defaults = f"defaults: {json.dumps([entry, '_self_'])}\n"
            with pytest.raises(UsageError, match=r"mine\.yaml: defaults: .* is not the plain name of another"):
                load(["+space=mine"], write(tmp_path, SPACE + defaults))
            with pytest.raises(UsageError, match=r"own\.yaml: defaults: .* is not the plain name of another"):
                load(["+space=mine"], write(tmp_path, engine=ENGINE + defaults))


def test_a_command_line_leads_to_no_file_elsewhere_either(tmp_path: pathlib.Path, elsewhere: str) -> None:
    folder = write(tmp_path)
    for override in (f"engine='{elsewhere}'", f"power={elsewhere}", f"workload=[{elsewhere}]", "+a/b=c",
                     f"+engine@power={elsewhere}"):
        with pytest.raises(UsageError, match="takes the plain name of a file in it"):
            load(["+space=mine", override], folder)
    with pytest.raises(UsageError, match="must be the plain name of an engine file"):
        load(["+space=mine", f"space.engine={elsewhere}"], folder)


@pytest.mark.parametrize("defaults", ["5", "x", "{a: b}", "true", "'${name}'"])
def test_defaults_that_are_no_list_are_one_line(defaults: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=r"mine\.yaml: defaults must be a list"):
        load(["+space=mine"], write(tmp_path, SPACE + f"defaults: {defaults}\n"))


def test_whatever_a_space_is_based_on_is_checked_too(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path, "defaults: [middle, _self_]\nname: mine\n")
    (tmp_path / "middle.yaml").write_text("defaults: [bottom, _self_]\ndescribe: in the middle\n")
    (tmp_path / "bottom.yaml").write_text(SPACE)
    settings = load(["+space=mine"], folder)
    assert (settings.space.name, settings.space.describe, settings.engine.name) == ("mine", "in the middle", "own")
    (tmp_path / "bottom.yaml").write_text(SPACE + f"describe: {EVIL}\n")
    with pytest.raises(UsageError, match=r"bottom\.yaml, key describe: "):
        load(["+space=mine"], folder)


@pytest.mark.parametrize(("line", "told"), [
    ("needs: {gpus: .inf}", "needs.gpus must be a number"),
    ("needs: {gpu_memory_gib: 1.0e+300}", "needs.gpu_memory_gib must be a number"),
    (f"needs: {{gpus: {'9' * 5000}}}", "line 5: a number of more than 40 digits"),
    (f"needs: {{gpus: 0x{'f' * 5000}}}", "line 5: a number of more than 40 digits"),
    ("price: 1", "unknown key price"), ('describe: "a\\0b"', "line 5: a text with a null character"),
    ('"a\\0b": 1', "line 5: a text with a null character")])
def test_values_that_no_program_takes_are_one_line(line: str, told: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=told) as error:
        load(["+space=mine"], write(tmp_path, SPACE + line + "\n"))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("choices", ["[1" + "0" * 30 + "]", "[.inf, 1]", "[.nan]"])
def test_choices_that_are_no_numbers_of_a_machine_are_one_line(choices: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="params.a: .* is not a text, number"):
        load(["+space=mine"], write(tmp_path, SPACE.replace("[1]", choices)))


@pytest.mark.parametrize("override", ["space.params.a.choices=[" + "9" * 4000 + "]", "study.seed=" + "9" * 5000,
                                      "study.name=" + "x" * 300, "space.name=" + "x" * 300,
                                      "price_per_device_hour=" + "9" * 400])
def test_a_command_line_of_such_values_is_one_line(override: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError) as error:
        load(["+space=mine", override], write(tmp_path))
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


def with_interpreter(tmp_path: pathlib.Path) -> tuple[list[str], pathlib.Path, pathlib.Path]:
    """(a folder of spaces whose engine file names its own interpreter, that program, what it writes when it runs)."""
    program, ran = tmp_path / "evil.sh", tmp_path / "ran"
    program.write_text(f"#!/bin/sh\necho x >> {ran}\necho 9.9\necho 1\n")
    program.chmod(0o755)
    own = f"version: {{package: foo}}\npython: {program}\n"
    return write(tmp_path, engine=ENGINE.replace("[prog]", "['{python}', -m, foo]") + own), program, ran


def test_an_interpreter_that_a_file_names_is_not_run_to_look_at_a_space(tmp_path: pathlib.Path) -> None:
    folder, program, ran = with_interpreter(tmp_path)
    for verb, *more in (("check",), ("tune", "--cfg"), ("worker", "--cfg"), ("report",), ("export",)):
        done = subprocess.run([sys.executable, "-m", "autotune", verb, "+space=mine", "device=cpu", "--spaces", *folder,
                               *more], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode in (0, 2) and "Traceback" not in done.stderr
        assert verb != "check" or ("version not asked" in done.stdout and str(program) in done.stdout)
        assert not ran.exists(), verb


def test_an_interpreter_that_the_user_names_or_is_about_to_start_is_asked(tmp_path: pathlib.Path) -> None:
    folder, program, ran = with_interpreter(tmp_path)
    settings = load(["+space=mine"], folder, installed=False)
    assert settings.engine.python_of_file and engine_version(settings.engine) is None and not ran.exists()
    assert engine_version(settings.asking().engine) == "9.9"
    given = load(["+space=mine", f"engine.python={program}"], folder)
    assert not given.engine.python_of_file and engine_version(given.engine) == "9.9"


@pytest.mark.parametrize("section", ["ready", "info", "metrics"])
@pytest.mark.parametrize("path", ["@127.0.0.2:9999/x", ":80/x", "x", ".example.com/x", "/a b", "/a\nb", 5, "http://h/"])
def test_a_path_of_an_engine_file_leads_to_no_other_host(section: str, path: object, tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path, engine=f"{ENGINE}{section}: {{path: {json.dumps(path)}}}\n")
    with pytest.raises(UsageError, match=rf"{section}\.path must be a path on the server such as /health"):
        load(["+space=mine"], folder)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(?:x*y?)*z", "(.*a){12}", "((ab)*c){2,}", "(a|b|ab)+c",
                                     "(?=(a+)+)b", "(x)?(?(1)(a+)+|b)", "(", "a{2,1}", "(" * 5000 + ")" * 5000])
def test_a_pattern_of_an_engine_file_that_could_take_for_ever_is_refused(pattern: str, tmp_path: pathlib.Path) -> None:
    for mark in (f"ready: {{log: {json.dumps(pattern)}}}", f"stages: [{{stage: load, log: {json.dumps(pattern)}}}]"):
        with pytest.raises(UsageError, match="within a repeat|not a regular expression"):
            load(["+space=mine"], write(tmp_path, engine=f"{ENGINE}{mark}\n"))


@pytest.mark.parametrize("pattern", ["Load (weight|model) begin", "(?i)capture .*graph", "a{3}b+c*", "(?>a+)+b",
                                     "(a++)*b", r"\d+ of \d+ ([a-z]+)?", "x(?:yz){4}"])
def test_ordinary_patterns_pass_and_a_line_is_looked_at_as_far_as_marks_stand(pattern: str) -> None:
    began = time.process_time()
    for line in ("a" * 1_000_000, "a1" * 500_000, " " * 1_000_000):
        found(compiled(pattern), line)
    assert time.process_time() - began < 5
    assert found(compiled("mark"), "a mark " + "x" * 5000) and not found(compiled("mark"), "x" * 5000 + "mark")
