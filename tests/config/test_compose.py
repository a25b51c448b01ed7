"""Settings: composed by Hydra, overlaid by the space, checked, and faults answered in one line."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any

import pytest

from autotune.cli import check as checklist
from autotune.config import compose
from autotune.config import identity as origin
from autotune.config.compose import load, space_files
from autotune.engine.spec import EngineSpec
from autotune.executors import preflight
from autotune.loadgen.requests import PromptSet
from autotune.records import UsageError


def test_the_space_overlays_conf_and_the_command_line_overlays_both() -> None:
    assert load(["+space=local"]).workload.window_s == 3.0
    changed = load(["+space=local", "workload.window_s=4.5"])
    assert (changed.workload.window_s, changed.workload.warmup_s) == (4.5, 1.0)


def test_the_engine_comes_from_the_space_and_can_be_overridden() -> None:
    assert load(["+space=local", "engine.python=/opt/python"]).engine.python == "/opt/python"
    assert load(["space=local"]).engine.name == "ddtree"


def test_every_packaged_space_is_whole() -> None:
    for name in space_files():
        settings = load([f"+space={name}"])
        assert settings.space.name == name
        assert settings.engine.params.keys() >= {p.name for p in settings.space.server_params}


@pytest.mark.parametrize("name", space_files())
def test_a_study_of_every_packaged_space_has_an_identity_which_another_engine_file_changes(name: str) -> None:
    """Found by CI: choices `auto` and `true` of one parameter have no order, and no study of SGLang could begin."""
    settings = load([f"+space={name}"])
    report = preflight.check(settings)
    mine = origin.identity(settings, report.version, report.gpus)
    assert mine == origin.identity(load([f"+space={name}"]), report.version, report.gpus)
    other = origin.identity(load([f"+space={name}", "++engine.env.ANOTHER=1"]), report.version, report.gpus)
    assert {key for key in mine if mine[key] != other[key]} == {"engine_file"}


def test_a_folder_of_ones_own_adds_spaces_and_engines(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "mine.yaml").write_text("name: mine\nengine: own\nparams: {a: {choices: [1]}}\nbaseline: {a: 1}\n")
    (tmp_path / "engine" / "own.yaml").write_text("name: own\ncommand: [prog]\nparams: {a: {flag: --a}}\n")
    assert load(["+space=mine"], [str(tmp_path)]).engine.command == ("prog",)
    monkeypatch.setenv(compose.SPACES_VARIABLE, str(tmp_path))
    assert "mine" in space_files()


@pytest.mark.parametrize(("setting", "key"), [
    ('storage: "postgresql://elsewhere.example/db"', "storage"),
    ('storage: "sqlite:////home/me/cookies.db"', "storage"),
    ("warm_start: [/home/me/cookies.db]", "warm_start")])
def test_a_space_does_not_say_which_database_is_written_to(tmp_path: pathlib.Path, setting: str, key: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: [local, _self_]\nname: mine\nstudy: {{{setting}}}\n")
    with pytest.raises(UsageError, match=f"the space names study.{key}, which only the command line may"):
        load(["+space=mine"], [str(tmp_path)])
    chosen = load(["+space=mine", "study.storage=sqlite:///my.db", "study.warm_start=[]"], [str(tmp_path)]).study
    assert (chosen.storage, chosen.warm_start) == ("sqlite:///my.db", [])


@pytest.mark.parametrize(("overrides", "message"), [
    ([], "pass \\+space=NAME; spaces: .*local"),
    (["+spce=local"], "not spce"),
    (["+space=locl"], "there is no space 'locl'; spaces: .*local"),
    (["+space=local", "executor=[[]]"], "executor=.*takes the plain name of a file"),
    (["+space=local", "power=[1]"], "power=.*takes the plain name of a file"),
    (["+space=local", "study={}"], "study=.*takes the plain name of a file"),
    (["+space=local", "+colour=1"], "unknown key colour"),
    (["+space=local", "colour=1"], "colour"),
    (["+space=local", "workload.windw=1"], "windw"),
    (["+space=local", "workload.window_s=-1"], "window_s must be a number above 0"),
    (["+space=local", "workload.window_s=soon"], "window_s"),
    (["+space=local", "workload.contexts=[]"], "at least one positive prompt length"),
    (["+space=local", "study.launches=0"], "launches must be a whole number of at least 1"),
    (["+space=local", "study.strategy=magic"], "must be one of autotune"),
    (["+space=local", "study.name=a/b"], "plain folder name"),
    (["+space=local", "limits.tpot_p99_ms=fast"], "limits.tpot_p99_ms must be a number, not 'fast'"),
    (["+space=local", "limits.tpot_p99_ms=-1"], "tpot_p99_ms.* must be a number above 0"),
    (["+space=local", "engine=nope"], "engine/nope"),
    (["+space=local", "objective=speed"], "objective=.speed. is not one of"),
    (["+space=local", "space.params.tp.choices=[]"], "choices is empty"),
    (["+space=local", "space.baseline.tp=7"], "tp=7 is not a choice"),
    (["+space=local", "power.source=magic"], "is not one of auto"),
    (["+space=local", "engine.colour=1"], "unknown key colour"),
    (["+space=local", "x=[="], "."),
    (["+space=local", "out=/tmp/it's.sh"], "cannot read .*needs quotes of its own"),
    (["+space=local", "out=~/a.sh"], "cannot read .*needs quotes of its own"),
    (["+space=local", "study.warm_start=old"], r"must be a list, not 'old': write study.warm_start=\[A,B\]"),
    (["+space=local", "report.compare=old"], r"report.compare must be a list"),
])
def test_bad_input_is_one_clear_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load(overrides)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


@pytest.mark.parametrize("word", ["on", "off", "Yes", "no"])
def test_words_that_yaml_reads_as_booleans_are_refused(tmp_path: pathlib.Path, word: str) -> None:
    params = f"params: {{tp: {{choices: [{word}]}}}}"
    (tmp_path / "t.yaml").write_text(f"name: t\nengine: ddtree\n{params}\nbaseline: {{tp: 1}}\n")
    with pytest.raises(UsageError, match=f"line 3: YAML reads {word} as a boolean"):
        load(["+space=t"], [str(tmp_path)])


@pytest.mark.parametrize("text", ["name: [unclosed", "a: b: c", "\t- x", "just text", ""])
def test_a_broken_space_file_is_one_clear_line(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load(["+space=t"], [str(tmp_path)])
    assert "\n" not in str(caught.value)


def test_a_missing_folder_of_spaces_is_said() -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load(["+space=local"], ["/nonexistent"])


@pytest.mark.parametrize(("override", "message"), [
    ("workload=null", "string or a list"), ("engine=null", "string or a list"),
    ("~power", "power must be a mapping .it is missing"), ("~outputs", "outputs must be a text"),
    ("~limits", "limits must be a mapping"), ("limits=3", "limits must be a mapping"),
    ("study.hours=nan", "study.hours must be a finite number"), ("server.gpu_free_s=inf", "must be a finite number"),
])
def test_a_removed_section_or_a_number_that_is_none_is_one_line(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load(["+space=local", override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [
    "name: s\nengine: ddtree\nparams: &a\n  tp: *a\n",
    "name: s\nengine: ddtree\nparams: {tp: {choices: &a [1, *a]}}\nbaseline: {tp: 1}\n",
    "defaults: {a: 1}\nname: s\nengine: ddtree\nparams: {tp: {choices: [1]}}\nbaseline: {tp: 1}\n",
])
def test_a_space_that_refers_to_itself_is_one_line(text: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load(["+space=s"], [str(tmp_path)])
    assert "\n" not in str(caught.value)


def test_matrix_takes_the_number_of_a_trial() -> None:
    assert load(["+space=local", "config=11"]).config == "11"


@pytest.mark.parametrize(("override", "says"), [
    ("device=tpu", "device must be one of auto, cpu, cuda"), ("engine.python=3", "path of an interpreter"),
    ("server.stage_limit_s=0", "server.stage_limit_s must be a number above 0"), ("workload.retries=-1", "at least 0"),
    ("server.ready_poll_s=0", "must be a number above 0"), ("workload.min_requests=0", "at least 1"),
    ("server.log_limit_mib=-1", "must be a number above 0")])
def test_a_value_that_makes_no_sense_is_refused_by_name(override: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        load(["+space=local", override])


def test_each_measurement_of_a_server_sends_prompts_of_its_own_the_same_for_every_configuration() -> None:
    """Otherwise the second measurement of a server is answered from its prefix cache, and is of another load."""
    workload = load(["+space=local"]).workload

    def prompts(measurement: int, concurrency: int = 4) -> list[str]:
        spec = workload.load({"concurrency": concurrency}, measurement)
        made = PromptSet(spec.prompts, spec.context_tokens, 4.0)
        return [str(made.prompt(i)) for i in range(200)]

    assert not set(prompts(1)) & set(prompts(2)) and prompts(2) == prompts(2, 16)
    assert workload.load({}, 1).seed != workload.load({}, 2).seed


def test_a_choice_whose_command_cannot_be_made_is_refused_before_anything_starts() -> None:
    """Found by a user: the study ended in the middle, at the first launch of that choice, and again when resumed."""
    from autotune.executors import preflight

    with pytest.raises(UsageError, match=r"draft_model.*\{model.draft\} is not known"):
        preflight.check(load(["+space=vllm_cpu_spec", "~space.model.draft"]))


def test_an_engine_without_a_package_has_no_version_and_the_embedded_one_has_ours() -> None:
    import autotune
    from autotune.engine.host import engine_version

    embedded = load(["+space=local"]).engine
    assert engine_version(embedded) == autotune.__version__
    assert engine_version(dataclasses.replace(embedded, package=None)) is None


def test_a_baseline_that_the_engine_refuses_is_said_before_anything_is_launched() -> None:
    with pytest.raises(UsageError, match="the baseline is forbidden by a rule of engine ddtree .*: not with this one"):
        load(["+space=local", "++engine.rules=[{tree_budget: 0, because: not with this one}]"])


def test_rules_of_an_engine_hold_in_the_versions_they_name() -> None:
    rules = "++engine.rules=[{tree_budget: 4, versions: '<0.5.23', because: came later}]"
    old = load(["+space=local", rules, "engine.version.use=0.5.16"]).space
    new = load(["+space=local", rules, "engine.version.use=0.5.23"]).space
    config = {**old.baseline, "tree_budget": 4}
    assert (old.forbidden(config), new.forbidden(config)) == ("came later", None)
    assert old.digest == new.digest  # rules save launches; what was measured stays comparable


def test_a_rule_on_a_parameter_that_the_space_lacks_follows_the_default_of_the_engine() -> None:
    given = ["+space=local", "++engine.rules=[{unnamed: x, tree_budget: 4, because: not with x}]"]
    x, y = (load([*given, f"++engine.params.unnamed={{choices: {{x: {{}}, y: {{}}}}, default: {default}}}"]).space
            for default in "xy")
    config = {**x.baseline, "tree_budget": 4}
    assert (x.forbidden(config), y.forbidden(config)) == ("not with x", None)
    with pytest.raises(UsageError, match="baseline is forbidden by a rule of engine ddtree .*: never"):
        load([*given, "++engine.rules=[{unnamed: x, because: never}]",
              "++engine.params.unnamed={choices: {x: {}}, default: x}"])


@pytest.mark.parametrize(("condition", "holds"), [
    ("{above: 2}", True), ("{above: 3}", False), ("{at_least: 3}", True), ("{below: 3}", False), ("{at_most: 3}", True),
    ("{other_than: 3}", False), ("{no_multiple_of: 2}", True), ("{none_of: [3]}", False), ("{like: '3*'}", True),
    ("{unlike: '3*'}", False), ("{unlike: 'x*'}", True), ("{given: true}", True), ("{given: false}", False),
    ("[2, 3]", True), ("{below: tree_budget}", True), ("{above: tree_budget}", False)])
def test_a_condition_of_any_form_follows_the_default_of_a_parameter_that_the_space_lacks(condition: str,
                                                                                         holds: bool) -> None:
    space = load(["+space=local", f"++engine.rules=[{{unnamed: {condition}, tree_budget: 4, because: not with it}}]",
                  "++engine.params.unnamed={choices: {3: {}}, default: 3}"]).space
    assert space.forbidden({**space.baseline, "tree_budget": 4}) == ("not with it" if holds else None)


def test_a_default_that_follows_the_load_is_compared_as_the_number_that_the_server_gets() -> None:
    rule = "++engine.rules=[{tree_budget: {above: unnamed}, because: too many}]"
    given = ["+space=local", rule, "++engine.params.unnamed={flag: --unnamed, default: '{max_concurrency}'}"]
    loaded = load(given)
    most = loaded.space.largest("concurrency")
    budgets = [c for c in loaded.space.param("tree_budget").choices if isinstance(c, int)]
    assert most is not None and min(budgets) <= most < max(budgets)
    for budget in budgets:
        reason = loaded.space.forbidden({**loaded.space.baseline, "tree_budget": budget})
        assert reason == ("too many" if budget > most else None)


def test_a_parameter_whose_condition_is_not_fulfilled_has_the_default_of_the_engine_too() -> None:
    space = load(["+space=local", "++engine.rules=[{unnamed: {unlike: 'x*'}, tree_budget: 4, because: not with y}]",
                  "++engine.params.unnamed={choices: {x: {}, y: {}}, default: y}",
                  "+space.params.unnamed={choices: [x], when: {tree_budget: [0]}}", "+space.baseline.unnamed=x"]).space
    assert space.forbidden({"tree_budget": 4}) == "not with y"
    assert space.forbidden({"tree_budget": 0, "unnamed": "x"}) is None


@pytest.mark.parametrize("version", ["banana", "''"])
def test_a_version_that_cannot_be_compared_is_refused(version: str) -> None:
    with pytest.raises(UsageError, match="version.use must be a version such as"):
        load(["+space=local", f"engine.version.use={version}"])
    with pytest.raises(UsageError, match="is not a version range"):
        load(["+space=local", "++engine.rules=[{tree_budget: 4, versions: new, because: x}]"])


def test_a_version_that_is_given_does_not_hide_that_the_engine_is_missing() -> None:
    from autotune.executors import preflight

    report = preflight.check(load(["+space=h200", "engine.version.use=0.5.23"]))
    assert report.version == "0.5.23"
    assert any(problem.startswith("sglang is not installed in this Python") for problem in report.problems)


def test_the_command_line_is_shown_without_its_secrets_and_otherwise_whole() -> None:
    from autotune.config.identity import command_line

    settings = load(["+space=local", "+engine.env.HF_TOKEN=canary1", "study.storage='postgresql://u:canary/2@h/db'",
                     "engine.args=[[--host,'{host}',--port,'{port}'],[--api-key,canary3]]", "study.launches=3"])
    shown = command_line(settings, "tune")
    assert "canary" not in shown and "canary3" in settings.redactor.values
    assert "+engine.env.HF_TOKEN=[redacted]" in shown and "study.launches=3" in shown
    assert "postgresql://[redacted]@h/db" in shown and "--api-key,[redacted]" in shown and "{port}" in shown
    assert settings.redactor.text("a canary1, a canary%2F2") == "a [redacted], a [redacted]"


def test_no_text_of_a_space_passes_for_a_line_of_check(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        'defaults: [local, _self_]\nname: mine\ndescribe: "good\\n\\ncommand of the baseline:\\n  echo harmless"\n'
        'params: {nvls: {choices: [false, "x\\nthe baseline can run here."]}}\n')
    settings = load(["+space=mine"], [str(tmp_path)])
    lines = checklist.shown(preflight.check(settings), settings).splitlines()
    assert lines.count("command of the baseline:") == 1 and lines.count("the baseline can run here.") <= 1
    assert lines[0] == "space    mine: good command of the baseline: echo harmless"
    assert any(r"x\nthe baseline can run here." in line for line in lines)


def test_choices_for_a_flag_that_takes_a_secret_are_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "engine").mkdir()
    space = "name: mine\nengine: own\nparams: {a: {choices: [abcd]}}\nbaseline: {a: abcd}\n"
    (tmp_path / "mine.yaml").write_text(space)
    for how in ("{flag: --api-key}", "{env: {HF_TOKEN: '{value}'}}", "{args: ['--api-key={value}']}"):
        (tmp_path / "engine" / "own.yaml").write_text(f"name: own\ncommand: [prog]\nparams: {{a: {how}}}\n")
        with pytest.raises(UsageError, match=r"params\.a goes to a flag or variable that takes a secret"):
            load(["+space=mine"], [str(tmp_path)])


@pytest.mark.parametrize(("override", "said"), [
    ("engine.stage_limits_s.load=soon", "stage_limits_s.load must be a number of seconds"),
    ("engine.stop=5", "stop must be a mapping, not 5"),
    ("engine.stop.term_s=x", "stop.term_s must be a number of seconds"),
    ("engine.env=5", "env must be a mapping"), ("engine.vars=5", "vars must be a mapping"),
    ("engine.version.package='a b'", "version.package must be the name of a Python package"),
    ("engine.version.package=[5]", "version.package must be the name"),
    ("engine.config_file='--config x'", "config_file must be a flag such as --config"),
    ("engine.config_file=true", "config_file must be a flag"),
    ("engine.request.api=foo", "request.api must be one of openai_completions, sglang_generate")])
def test_a_wrong_value_in_an_engine_is_one_clear_line(override: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load(["+space=b300", override])


@pytest.mark.parametrize(("raw", "said"), [
    ({"params": ["a"]}, "params must be a mapping"),
    ({"params": {"x": {"choices": 1.5}}}, "x.choices must be a mapping"),
    ({"params": {"x": {"args": "--flag"}}}, "args must be a list of words, not '--flag'"),
    ({"params": {"x": {"args": [["a"]]}}}, r"args\[0\] must be a text, a number or true or false"),
    ({"params": {"x": {"flag": ["--a"]}}}, "flag must be a flag such as --name"),
    ({"params": {"x": {"switch": {"a": 1}}}}, "switch must be a flag such as --name"),
    ({"params": {"x": {"flag": "--x", "gpus": True}}}, "gpus must be a whole number"),
    ({"params": {"x": {"flag": "--x", "default": [1]}}}, "default must be a text, number or boolean"),
    ({"stages": 5}, "stages must be a list or a mapping"),
    ({"info": {"identity": "tp"}}, "info.identity must be a list"),
    ({"request": {"model": 5}}, "request.model must be a text"),
    ({"request": {"continuous_usage": 5}}, "request.continuous_usage must be true or false"),
    ({"metrics": {"accept_bonus": "x"}}, "metrics.accept_bonus must be a number"),
    ({"metrics": {"queued": ["x"]}}, "metrics.queued must be a text")])
def test_a_value_of_another_type_in_an_engine_file_is_one_clear_line(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=f"^e.yaml.*{said}"):
        EngineSpec.parse({"name": "e", "command": ["prog"], **raw}, "e.yaml")


@pytest.mark.parametrize("choice", ["x", "0", "1.5", "true", "9" * 5000])
def test_a_choice_that_is_no_number_of_gpus_is_refused_before_anything_starts(choice: str) -> None:
    settings = load(["+space=local", f"space.params.tp.choices=['{choice}',2]", "space.baseline.tp=2"])
    told = [c.problems for c in preflight.check(settings).choices if (c.param, c.value) == ("tp", choice)]
    assert told and told[0]


def test_a_model_that_the_baseline_does_not_use_only_keeps_the_choices_from_running_that_do(
        tmp_path: pathlib.Path) -> None:
    from autotune.executors import preflight

    report = preflight.check(load(["+space=vllm_cpu_spec", f"space.model.target={tmp_path}", "device=cpu",
                                   f"space.model.draft={tmp_path}/none"]))
    assert not [p for p in report.problems if "model." in p]
    assert {c.value for c in report.choices if any("model.draft" in p for p in c.problems)} == {"draft_model"}


def test_gpus_are_missing_even_when_the_space_does_not_say_that_it_needs_any() -> None:
    from autotune.executors import preflight

    report = preflight.check(load(["+space=b300", "~space.needs"]))
    assert any(problem.startswith("needs 8 GPUs, 0 visible") for problem in report.problems)
    assert not any("GPUs, 0" in p for p in preflight.check(load(["+space=sglang_cpu", "device=cpu"])).problems)


def test_choices_that_need_more_gpus_than_the_baseline_are_left_to_ray_which_places_them() -> None:
    from autotune.executors import preflight

    for executor, unavailable in (("local", True), ("ray", False)):
        report = preflight.check(load(["+space=b300", "~space.needs", f"executor={executor}"]))
        assert any("needs 8 GPUs" in rule.because for rule in report.unavailable) is unavailable


def test_a_study_is_told_of_where_its_engine_is_another_or_none(tmp_path: pathlib.Path) -> None:
    """Found by a user: after an upgrade of the engine a finished study could not be exported any more."""
    from autotune.cli import commands

    rules = "++engine.rules=[{tree_budget: 0, versions: '>=2', because: not any more}]"
    given = ["+space=local", rules, f"outputs={tmp_path}"]
    old = load([*given, "engine.version.use=1.9"])
    old.folder.mkdir(parents=True)
    study = commands.open_study(old)
    assert study.attrs()["identity"]["engine_version"] == "1.9"
    with pytest.raises(UsageError, match="not any more"):
        load([*given, "engine.version.use=2.1"])
    new = load([*given, "engine.version.use=2.1"], installed=False)
    assert commands.VERBS["report"].call(new, False) == 0 and (new.folder / "report.html").exists()
    (asked := tmp_path / "python").write_text(f"#!/bin/sh\ntouch {tmp_path}/was-asked\n")
    asked.chmod(0o755)
    other = load([*given, f"engine.python={asked}", "engine.version.package=x"], installed=False)
    assert commands.VERBS["report"].call(other, False) == 0 and not (tmp_path / "was-asked").exists()


@pytest.mark.parametrize("override", ["study.name='a\x1b[31mb'", "study.name='a\u202eb'", "study.name='a\x7f'",
                                      "study.name=''", "outputs='/tmp/a\x1b[31mb'", "+out='a\u202eb'"])
def test_a_name_that_would_do_something_to_a_terminal_is_refused(override: str) -> None:
    with pytest.raises(UsageError, match="without control characters") as error:
        load(["+space=local", override])
    assert str(error.value).isprintable()


def test_a_file_of_prompts_that_cannot_be_used_is_said_before_anything_is_launched(tmp_path: pathlib.Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "\\ud800"}\n')
    with pytest.raises(UsageError, match="p.jsonl:1: a lone surrogate"):
        preflight.check(load(["+space=local", f"workload.prompts={tmp_path}/p.jsonl"]))
