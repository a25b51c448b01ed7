"""A vLLM that lacks a flag, a variable or a way to speculate is found out before a launch, without importing it."""

from __future__ import annotations

import pathlib

import pytest

from autotune.config.compose import load
from autotune.records import Value
from tests.sglang import support

FLAGS = '''class EngineArgs:
    model: str = ""
    def add_cli_args(parser):
        parser.add_argument("--model", **kwargs["model"])
        group.add_argument("--max-num-seqs", "--max-num-batched-tokens", "--gpu-memory-utilization", "--dtype")
        group.add_argument("--max-model-len", "--load-format", "--kv-cache-dtype", "--enforce-eager")
        group.add_argument("--spec-method", "--spec-tokens", "--spec-model", "--attention-backend")
        if is_bool(field): kwargs["action"] = argparse.BooleanOptionalAction
        group.add_argument("--async-scheduling", **kwargs["async_scheduling"])
        note = spec["enable_dbo"]  # read, and no flag of this release
'''
SERVING = "class FrontendArgs:\n    host: str | None = None\n    port: int = 8000\n"
VARIABLES = "VLLM_ALLREDUCE_USE_SYMM_MEM: bool = True\n"
METHODS = 'SpeculativeMethod = Literal["ngram", "dflash"]\n    enable_expert_parallel: bool\n'


def python_with(folder: pathlib.Path, **files: str) -> str:
    return support.python_with(folder, "vllm", "0.32.0", {
        "engine/arg_utils.py": FLAGS, "entrypoints/launchers/cli_args.py": SERVING, "envs.py": VARIABLES,
        "config/speculative.py": METHODS, **files})


def looked_at(python: str, *overrides: str) -> tuple[list[str], dict[tuple[str, Value], str]]:
    return support.looked_up(load(["+space=vllm_gpu", f"engine.python={python}", *overrides]))


@pytest.mark.parametrize("files", [{}, {"engine/arg_utils.py": "", "entrypoints/launchers/cli_args.py": ""}],
                         ids=["known", "no source"])
def test_a_vllm_that_knows_every_flag_or_has_no_source_is_believed(files: dict[str, str],
                                                                   tmp_path: pathlib.Path) -> None:
    """--host is a field without a word of its own, and --no-async-scheduling the other half of a flag."""
    problems, choices = looked_at(python_with(tmp_path, **files))
    assert problems == [] and ("async_scheduling", False) in choices
    assert set(choices.values()) == {""}


def test_a_vllm_without_a_flag_is_told_so_for_the_baseline_and_for_each_choice(tmp_path: pathlib.Path) -> None:
    old = FLAGS.replace('"--attention-backend"', "").replace('"--spec-method", ', "")
    problems, choices = looked_at(python_with(tmp_path, **{"engine/arg_utils.py": old}))
    assert problems == ["the installed vllm 0.32.0 does not know --attention-backend"]
    assert choices["attention_backend", "FLASHINFER"] == problems[0]
    assert choices["speculation", "ngram"] == "the installed vllm 0.32.0 does not know --spec-method"
    assert choices["speculation", "none"] == "" == choices["draft_tokens", 4]


def test_a_word_that_is_read_somewhere_is_no_flag_and_neither_is_a_setting_of_another_file(
        tmp_path: pathlib.Path) -> None:
    python = python_with(tmp_path)
    _, choices = looked_at(python, "+space.params.dbo={choices: [false, true]}", "+space.baseline.dbo=false")
    assert choices["dbo", True] == "the installed vllm 0.32.0 does not know --enable-dbo"
    assert choices["dbo", False] == ""
    problems, choices = looked_at(python, "space.params.parallel.choices=[tp1,ep]")
    assert choices["parallel", "ep"] == "the installed vllm 0.32.0 does not know --enable-expert-parallel"


def test_the_other_half_of_a_flag_is_only_known_where_argparse_makes_it(tmp_path: pathlib.Path) -> None:
    plain = FLAGS.replace("argparse.BooleanOptionalAction", '"store_true"')
    _, choices = looked_at(python_with(tmp_path, **{"engine/arg_utils.py": plain}))
    assert choices["async_scheduling", True] == ""
    assert choices["async_scheduling", False] == "the installed vllm 0.32.0 does not know --no-async-scheduling"


@pytest.mark.parametrize(("name", "value", "unknown"), [
    ("symm_mem", "true", "VLLM_ALLREDUCE_USE_SYMM_MEM"), ("speculation", "dflash", "dflash"),
    ("speculation", "suffix", "suffix")])
def test_what_vllm_would_ignore_or_refuse_by_name_is_looked_up_too(name: str, value: str, unknown: str,
                                                                   tmp_path: pathlib.Path) -> None:
    base = [f"++space.params.{name}.choices=[none,ngram,{value}]"] \
        if name == "speculation" else [f"+space.params.{name}.choices=[true]", f"+space.baseline.{name}=true"]
    base += ["+space.model.draft=/models/draft"]
    chosen = True if value == "true" else value
    _, known = looked_at(python_with(tmp_path / "new", **{"config/speculative.py": METHODS + '"suffix"\n'}), *base)
    _, lacking = looked_at(python_with(tmp_path / "old", **{"envs.py": "\n", "config/speculative.py": "\n"}), *base)
    assert known[name, chosen] == ""
    assert lacking[name, chosen] == f"the installed vllm 0.32.0 does not know {unknown}"
