"""Settings: composed by Hydra, overlaid by the space, checked, and faults answered in one line."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pathlib
from typing import Any

import pytest

from autotune.cli.output import check_report
from autotune.config import compose
from autotune.config.compose import load, space_files
from autotune.config.settings import ExecutorSettings, Settings, identity
from autotune.engine.gpus import Gpu, Gpus
from autotune.engine.spec import EngineSpec
from autotune.executors import preflight
from autotune.loadgen.requests import PromptSet
from autotune.records import UsageError


@functools.cache
def loaded(*overrides: str) -> Settings:
    """Settings of the space `local`, composed once for each set of overrides."""
    return load(["+space=local", *overrides])


@functools.cache
def plain() -> dict[str, Any]:
    """The composed configuration of the space `local`."""
    return compose._compose(["+space=local"], space_files())[0]


def test_the_space_overlays_conf_and_the_command_line_overlays_both() -> None:
    assert loaded().workload.window_s == 3.0
    changed = loaded("workload.window_s=4.5", "engine.python=/opt/python")
    assert (changed.workload.window_s, changed.workload.warmup_s) == (4.5, 1.0)
    assert changed.engine.python == "/opt/python" and load(["space=local"]).engine.name == "ddtree"


@pytest.mark.parametrize("name", space_files())
def test_every_packaged_space_is_whole_and_another_engine_file_changes_the_identity_of_its_study(name: str) -> None:
    """Found by CI: choices `auto` and `true` of one parameter have no order, and no study of SGLang could begin."""
    settings = load([f"+space={name}"])
    assert settings.space.name == name
    assert settings.engine.params.keys() >= {p.name for p in settings.space.server_params}
    report = preflight.check(settings)
    engine = {**settings.composed["engine"], "env": {"ANOTHER": "1"}}
    other = dataclasses.replace(settings, composed={**settings.composed, "engine": engine})
    mine, theirs = (identity(made, report.version, report.gpus) for made in (settings, other))
    assert {key for key in mine if mine[key] != theirs[key]} == {"engine_file"}


def test_a_folder_of_ones_own_adds_spaces_and_engines(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "mine.yaml").write_text("name: mine\nengine: own\nparams: {a: {choices: [1]}}\nbaseline: {a: 1}\n")
    (tmp_path / "engine" / "own.yaml").write_text("name: own\ncommand: [prog]\nparams: {a: {flag: --a}}\n")
    assert load(["+space=mine"], [str(tmp_path)]).engine.command == ("prog",)
    monkeypatch.setenv(compose.SPACES_VARIABLE, str(tmp_path))
    assert "mine" in space_files()


@pytest.mark.parametrize(("setting", "key"), [
    ('storage: "postgresql://elsewhere.example/db"', "storage"), ("warm_start: [/home/me/cookies.db]", "warm_start")])
def test_a_space_does_not_say_which_database_is_written_to(tmp_path: pathlib.Path, setting: str, key: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: [local, _self_]\nname: mine\nstudy: {{{setting}}}\n")
    with pytest.raises(UsageError, match=f"the space names study.{key}, which only the command line may"):
        load(["+space=mine"], [str(tmp_path)])
    chosen = load(["+space=mine", "study.storage=sqlite:///my.db", "study.warm_start=[]"], [str(tmp_path)]).study
    assert (chosen.storage, chosen.warm_start) == ("sqlite:///my.db", [])


@pytest.mark.parametrize(("override", "message"), [
    ("executor=[[]]", "."), ("power=[1]", "."), ("workload=null", "string or a list"),
    ("engine=null", "string or a list"), ("engine=nope", "engine/nope"), ("x=[=", "."),
    ("out=/tmp/it's.sh", "cannot read .*needs quotes of its own"), ("out=~/a.sh", "cannot read .*quotes of its own"),
    ("+colour=1", "^unknown key colour; known: agreement"), ("workload.windw=1", "windw"),
    ("engine.colour=1", "engine ddtree: unknown key colour"),
    ("~power", "^power must be a mapping .it is missing"), ("~study.seed", "^study.seed must be .*it is missing"),
    ("space.params.tp.choices=[]", "choices is empty"), ("space.baseline.tp=7", "tp=7 is not a choice"),
    ("study.seed=" + "9" * 5000, "Exceeds the limit"),
    ("++engine.rules=[{tree_budget: 4, versions: new, because: x}]", "is not a version range")])
def test_bad_input_is_one_clear_line(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load(["+space=local", override])
    assert str(caught.value).isprintable() and len(str(caught.value)) < 700


@pytest.mark.parametrize(("override", "message"), [
    ("workload.window=1", "^workload: unknown key window .did you mean window_s.*; known: block_s"),
    ("study.confirm.finalist=1", "^study.confirm: unknown key finalist .did you mean finalists"),
    ("limits=3", "limits must be a mapping or null, not 3"),
    ("limits.tpot_p99_ms=fast", "^limits.tpot_p99_ms must be a number, not 'fast'"),
    ("limits.tpot_p99_ms=-1", "tpot_p99_ms.* must be a number above 0"),
    ("study.launches=abc", "^study.launches must be a whole number of at least 1 or null, not 'abc'"),
    ("study.launches=5.7", "^study.launches must be .*, not 5.7"), ("study.launches=0", "must be .* at least 1"),
    ("study.launches=true", "study.launches must be"), ("study.trials=0", "study.trials must be"),
    ("study.hours=0", "study.hours must be a number above 0"), ("study.hours=nan", "hours must be a finite number"),
    ("study.hours='nan'", "study.hours must be a number above 0"), ("study.min_gain=1", "min_gain must be a share"),
    ("study.storage_wait_s=-1", "storage_wait_s must be a number of at least 0"), ("study.isolate=-1", "study.isolate"),
    ("study.lost_after_s=1", "lost_after_s must be a time of 2 s or more"), ("study.seed=null", "study.seed must be"),
    ("study.confirm.alpha=0.5", "alpha must be a number above 0"), ("agreement.ratio=0", "ratio must be a number of"),
    ("study.confirm.launches=16", "study.confirm.launches=16 is a part of study.launches=16: leave at"),
    ("study.confirm.finalists=-1", "^study.confirm.finalists must be a whole number of at least 0, not -1"),
    ("study.strategy=magic", "must be one of autotune, tpe"), ("study.name=a/b", "plain folder name"),
    ("study.name=.a", "plain folder name"), ("study.name=''", "plain folder name"),
    ("study.warm_start=old", r"must be a list, not 'old': write study.warm_start=\[A,B\]"),
    ("report.compare=old", "report.compare must be a list"), ("report.format=xml", "format must be one of text"),
    ("study.name='a\x1b[31mb'", "without control characters"), ("study.name='a\u202eb'", "without control characters"),
    ("outputs='/tmp/a\x1b[31mb'", "without control characters"), ("out='a\u202eb'", "without control characters"),
    ("workload.window_s=-1", "^workload.window_s must be a number above 0, not -1"),
    ("workload.window_s=soon", "^workload.window_s must be"), ("workload.window_s=null", "window_s must be"),
    ("workload.contexts=[]", "at least one positive prompt length"), ("workload.contexts=[8,0]", r"contexts\[1\] must"),
    ("workload.retries=-1", "at least 0"), ("workload.min_requests=0", "at least 1"),
    ("workload.spread=1", "spread must be a share"), ("workload.precision=1", "precision must be a share"),
    ("workload.shared_prefix=1", "shared_prefix must be"), ("workload.rate_per_s=0", "rate_per_s must be a number"),
    ("workload.window_s=1e3", "window_s=1000 is above window_max_s"), ("workload.warmup_s=99", "above warmup_max_s"),
    ("workload.prompts=tokens:9-9", "^workload.prompts=tokens:9-9: write tokens:LOW-HIGH"),
    ("workload.min_errors=0", "at least 1"),
    ("workload.output_tokens=0", "at least 1"), ("workload.temperature=-1", "temperature must be"),
    ("workload.max_error_rate=2", "max_error_rate must be a share"), ("workload.ignore_eos=maybe", "true or false"),
    ("server.stage_limit_s=0", "server.stage_limit_s must be"), ("server.ready_poll_s=0", "ready_poll_s must be"),
    ("server.log_limit_mib=-1", "server.log_limit_mib"), ("server.gpu_free_s=inf", "must be a finite number"),
    ("executor.kind=slurm", "executor.kind must be one of local, ray"), ("executor.at_once=0", "at_once must be"),
    ("executor.cpus=0", "executor.cpus must be"), ("parallel.slots=0", "parallel.slots must be auto or a number"),
    ("device=tpu", "device must be one of auto, cpu, cuda"), ("trial=-1", "trial must be a whole number"),
    ("objective=speed", "objective=.speed. is not one of"), ("power.source=magic", "is not one of auto"),
    ("price_per_device_hour=2", "price_per_device_hour is for objective=cost"),
    ("engine.python=3", "the path of an interpreter"), ("engine.stop=5", "stop must be a mapping, not 5"),
    ("engine.stage_limits_s.load=soon", "stage_limits_s.load must be a number of seconds"),
    ("engine.stop.term_s=x", "stop.term_s must be a number of seconds"), ("engine.env=5", "env must be a mapping"),
    ("engine.vars=5", "vars must be a mapping"),
    ("engine.version.package='a b'", "version.package must be the name of a Python package"),
    ("engine.config_file='--config x'", "config_file must be a flag such as --config"),
    ("engine.config_file=true", "config_file must be a flag"), ("engine.version.use=banana", "use must be a version"),
    ("engine.version.use=''", "version.use must be a version such as"),
    ("engine.version.named_in=[a/../../b]", r"version.named_in\[0\] must be a file or folder below"),
    ("engine.request.api=foo", "request.api must be one of openai_completions, sglang_generate")])
def test_a_bad_value_is_one_clear_line(override: str, message: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    composed, given = copy.deepcopy(plain()), OverridesParser.create().parse_override(override)
    *parents, last = given.key_or_group.split(".")
    functools.reduce(lambda at, name: at[name], parents, composed)[last] = given.value()
    with pytest.raises(UsageError, match=message) as caught:
        compose._settings(composed, {given.key_or_group}, (), ()).ruled("1")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 700


def test_numbers_and_words_count_as_the_type_that_belongs_there() -> None:
    made = load(["+space=local", "study.name=2026", "study.launches='5'", "study.warm_start=[7]", "study.hours=2",
                 "workload.ignore_eos=off", "parallel.slots=2", "config=11"])
    assert (made.study.name, made.study.launches, made.study.warm_start, made.study.hours) == ("2026", 5, ["7"], 2.0)
    assert (made.workload.ignore_eos, made.parallel.count, made.config) == (False, 2, "11")


@pytest.mark.parametrize("word", ["on", "off", "Yes", "no"])
def test_words_that_yaml_reads_as_booleans_are_refused(tmp_path: pathlib.Path, word: str) -> None:
    params = f"params: {{tp: {{choices: [{word}]}}}}"
    (tmp_path / "t.yaml").write_text(f"name: t\nengine: ddtree\n{params}\nbaseline: {{tp: 1}}\n")
    with pytest.raises(UsageError, match=f"line 3: YAML reads {word} as a boolean"):
        load(["+space=t"], [str(tmp_path)])


@pytest.mark.parametrize("text", [
    "name: [unclosed", "a: b: c", "\t- x", "just text", "", "name: s\nengine: ddtree\nparams: &a\n  tp: *a\n",
    "name: s\nengine: ddtree\nparams: {tp: {choices: &a [1, *a]}}\nbaseline: {tp: 1}\n",
    "defaults: {a: 1}\nname: s\nengine: ddtree\nparams: {tp: {choices: [1]}}\nbaseline: {tp: 1}\n"])
def test_a_broken_space_file_is_one_clear_line(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load(["+space=t"], [str(tmp_path)])
    assert "\n" not in str(caught.value)


def test_each_measurement_of_a_server_sends_prompts_of_its_own_the_same_for_every_configuration() -> None:
    """Otherwise the second measurement of a server is answered from its prefix cache, and is of another load."""
    workload = loaded().workload

    def prompts(measurement: int, concurrency: int = 4) -> list[str]:
        spec = workload.load({"concurrency": concurrency}, measurement)
        made = PromptSet(spec.workload.prompt_source(), spec.context_tokens, 4.0)
        return [str(made.prompt(i)) for i in range(200)]

    assert not set(prompts(1)) & set(prompts(2)) and prompts(2) == prompts(2, 16)
    assert workload.load({}, 1).workload.seed != workload.load({}, 2).workload.seed


def test_a_choice_whose_command_cannot_be_made_is_refused_before_anything_starts() -> None:
    """Found by a user: the study ended in the middle, at the first launch of that choice, and again when resumed."""
    with pytest.raises(UsageError, match=r"draft_model.*\{model.draft\} is not known"):
        preflight.check(load(["+space=vllm_cpu_spec", "~space.model.draft"]))


def test_an_engine_without_a_package_has_no_version_and_the_embedded_one_has_ours() -> None:
    import autotune
    from autotune.engine.host import engine_version

    embedded = loaded().engine
    assert engine_version(embedded) == autotune.__version__
    assert engine_version(dataclasses.replace(embedded, package=None)) is None


def test_rules_of_an_engine_hold_in_the_versions_they_name() -> None:
    rules = "++engine.rules=[{tree_budget: 4, versions: '<0.5.23', because: came later}]"
    old, new = (loaded(rules, f"engine.version.use={version}").space for version in ("0.5.16", "0.5.23"))
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


def test_a_default_that_follows_the_load_is_compared_as_the_number_that_the_server_gets() -> None:
    rule = "++engine.rules=[{tree_budget: {above: unnamed}, because: too many}]"
    space = loaded(rule, "++engine.params.unnamed={flag: --unnamed, default: '{max_concurrency}'}").space
    most = space.largest("concurrency")
    budgets = [c for c in space.param("tree_budget").choices if isinstance(c, int)]
    assert most is not None and min(budgets) <= most < max(budgets)
    for budget in budgets:
        reason = space.forbidden({**space.baseline, "tree_budget": budget})
        assert reason == ("too many" if budget > most else None)


def test_a_parameter_whose_condition_is_not_fulfilled_has_the_default_of_the_engine_too() -> None:
    space = load(["+space=local", "++engine.rules=[{unnamed: {unlike: 'x*'}, tree_budget: 4, because: not with y}]",
                  "++engine.params.unnamed={choices: {x: {}, y: {}}, default: y}",
                  "+space.params.unnamed={choices: [x], when: {tree_budget: [0]}}", "+space.baseline.unnamed=x"]).space
    assert space.forbidden({"tree_budget": 4}) == "not with y"
    assert space.forbidden({"tree_budget": 0, "unnamed": "x"}) is None


def test_a_version_that_is_given_does_not_hide_that_the_engine_is_missing() -> None:
    report = preflight.check(load(["+space=h200", "engine.version.use=0.5.23"]))
    assert report.version == "0.5.23"
    assert any(problem.startswith("sglang is not installed in this Python") for problem in report.problems)


def test_the_command_line_is_shown_without_its_secrets_and_otherwise_whole() -> None:
    settings = load(["+space=local", "+engine.env.HF_TOKEN=canary1", "study.storage='postgresql://u:canary/2@h/db'",
                     "engine.args=[[--host,'{host}',--port,'{port}'],[--api-key,canary3]]", "study.launches=3"])
    shown = settings.shown_command("tune")
    assert "canary" not in shown and "canary3" in settings.redactor.values
    assert "+engine.env.HF_TOKEN=[redacted]" in shown and "study.launches=3" in shown
    assert "postgresql://[redacted]@h/db" in shown and "--api-key,[redacted]" in shown and "{port}" in shown
    assert settings.redactor.text("a canary1, a canary%2F2") == "a [redacted], a [redacted]"


def test_no_text_of_a_space_passes_for_a_line_of_check(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        'defaults: [local, _self_]\nname: mine\ndescribe: "good\\n\\ncommand of the baseline:\\n  echo harmless"\n'
        'params: {nvls: {choices: [false, "x\\nthe baseline can run here."]}}\n')
    settings = load(["+space=mine"], [str(tmp_path)])
    lines = check_report(preflight.check(settings), settings).splitlines()
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


def test_a_choice_that_is_no_number_of_gpus_is_refused_before_anything_starts() -> None:
    wrong = ["x", "0", "1.5", "true"]
    settings = loaded(f"space.params.tp.choices={[*wrong, 2]}", "space.baseline.tp=2")
    choices = preflight.check(settings).choices
    assert all(choices["tp", choice] for choice in wrong)


def test_a_model_that_the_baseline_does_not_use_only_keeps_the_choices_from_running_that_do(
        tmp_path: pathlib.Path) -> None:
    report = preflight.check(load(["+space=vllm_cpu_spec", f"space.model.target={tmp_path}", "device=cpu",
                                   f"space.model.draft={tmp_path}/none"]))
    assert not [p for p in report.problems if "model." in p]
    lacking = {value for (_, value), problems in report.choices.items() if "model.draft" in "".join(problems)}
    assert lacking == {"draft_model"}


def test_gpus_are_missing_even_when_the_space_does_not_say_that_it_needs_any() -> None:
    here = load(["+space=b300", "~space.needs"])
    away = dataclasses.replace(here, executor=ExecutorSettings("ray"))
    local, ray = preflight.check(here), preflight.check(away)
    assert any(problem.startswith("needs 8 GPUs, 0 visible") for problem in local.problems)
    assert any("needs 8 GPUs" in rule.because for rule in local.unavailable)
    assert not any("needs 8 GPUs" in rule.because for rule in ray.unavailable)  # Ray places them
    assert not any("GPUs, 0" in p for p in preflight.check(load(["+space=sglang_cpu", "device=cpu"])).problems)


@pytest.mark.parametrize(("visible", "alone", "together"), [(1, {"tp=2", "dp=2"}, set()), (2, set(), {"dp=2 tp=2"}),
                                                            (4, set(), set())])
def test_what_needs_more_gpus_than_are_visible_is_never_launched(visible: int, alone: set[str],
                                                                 together: set[str]) -> None:
    gpus = Gpus(tuple(Gpu(f"GPU-{i}", "H200", 141.0) for i in range(visible)))
    for device in ("auto", "cuda"):
        settings = load(["+space=local", f"device={device}"])
        choices = {f"{p.name}={value}" for p in settings.space.server_params for value in p.choices
                   if preflight.choice_problems(settings, {}, p.name, value, gpus, None)}
        assert choices == alone
        found = preflight.combination_problems(settings, gpus, None)
        assert {" ".join(f"{k}={v[0]}" for k, v in sorted(rule.when.items())) for rule in found} == together
        assert all(rule.because == f"needs 4 GPUs, {visible} visible" for rule in found)
    assert not preflight.combination_problems(load(["+space=local", "device=cpu"]), gpus, None)


def test_a_study_is_told_of_where_its_engine_is_another_or_none(tmp_path: pathlib.Path) -> None:
    """Found by a user: after an upgrade of the engine a finished study could not be exported any more."""
    from autotune.cli import verbs

    rules = "++engine.rules=[{tree_budget: 0, versions: '>=2', because: not any more}]"
    given = ["+space=local", rules, f"outputs={tmp_path}"]
    old = load([*given, "engine.version.use=1.9"])
    old.folder.mkdir(parents=True)
    study = verbs.open_study(old)
    assert study.attrs()["identity"]["engine_version"] == "1.9"
    with pytest.raises(UsageError, match="not any more"):
        load([*given, "engine.version.use=2.1"])
    new = load([*given, "engine.version.use=2.1"], installed=False)
    assert verbs.VERBS["report"].call(new, False) == 0 and (new.folder / "report.html").exists()
    (asked := tmp_path / "python").write_text(f"#!/bin/sh\ntouch {tmp_path}/was-asked\n")
    asked.chmod(0o755)
    other = load([*given, f"engine.python={asked}", "engine.version.package=x"], installed=False)
    assert verbs.VERBS["report"].call(other, False) == 0 and not (tmp_path / "was-asked").exists()


def test_a_file_of_prompts_that_cannot_be_used_is_said_before_anything_is_launched(tmp_path: pathlib.Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "\\ud800"}\n')
    with pytest.raises(UsageError, match="p.jsonl:1: "):
        preflight.check(load(["+space=local", f"workload.prompts={tmp_path}/p.jsonl"]))


def test_what_a_parameter_relieves_leaves_older_studies_open() -> None:
    settings = load(["+space=b300"])
    without = copy.deepcopy(settings.composed)
    named = [param for param in without["engine"]["params"].values() if isinstance(param, dict)
             and param.pop("relieves", None)]
    older = dataclasses.replace(settings, composed=without)
    assert named and identity(older, None, Gpus(())) == identity(settings, None, Gpus(()))
