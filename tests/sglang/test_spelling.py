"""An SGLang that lacks a fork's flags is found out before anything is launched; nothing of it is imported for that."""

from __future__ import annotations

import pathlib

import pytest

from autotune.config.compose import load
from autotune.config.settings import Settings
from autotune.engine.command import needed
from autotune.engine.host import lacking
from autotune.executors import preflight
from autotune.executors.local import LocalExecutor
from autotune.records import HostCannotRun, UsageError
from tests.sglang import support
from tests.space.configurations import servers

STOCK = '''speculative_algorithm: A[str] = None  # DFLASH
speculative_draft_model_path: A[str] = None
page_size = None
parser.add_argument("--model-path", "--host", "--port", "--device", "--enable-metrics")
OTHERS = ("--tp-size --ep-size --dp-size --attn-dp-size --enable-dp-attention --enable-dp-lm-head --enable-nccl-nvls "
    "--enable-symm-mem --flashinfer-allreduce-fusion-backend --enforce-disable-flashinfer-allreduce-fusion "
    "--attention-backend --cuda-graph-max-bs-decode --mem-fraction-static --max-running-requests --trust-remote-code")
'''
FORK = 'DDTREE\nspeculative_ddtree_budget: A[int] = None\nadd_argument("--speculative-ddtree-topk")\n'
NO_TREE = ("space.baseline.speculation=none", "~space.baseline.tree_budget", "~space.baseline.tree_topk")


def python_with(folder: pathlib.Path, source: str, name: str = "server_args.py") -> str:
    return support.python_with(folder, "sglang", "0.5.23", {f"srt/{name}": source})


def b300(python: str, *overrides: str) -> Settings:
    return load(["+space=b300", f"engine.python={python}", *overrides])


def test_a_release_without_trees_is_told_which_flags_it_lacks(tmp_path: pathlib.Path) -> None:
    loaded = b300(python_with(tmp_path, STOCK))
    report = preflight.check(loaded)
    said = [p for p in report.problems if "does not know" in p]
    assert said == ["the installed sglang 0.5.23 does not know DDTREE, --speculative-ddtree-budget, "
                    "--speculative-ddtree-topk: engine sglang_ddtree is for a build that does (install that, or choose "
                    "the engine file of yours)"]
    _, told = support.looked_up(loaded)
    assert "does not know DDTREE" in told["speculation", "ddtree"]
    assert told["tree_budget", 16] == "the installed sglang 0.5.23 does not know --speculative-ddtree-budget"
    assert told["speculation", "dflash"] == told["mem_fraction", 0.9] == told["parallel", "ep8"] == ""


def test_a_fork_that_has_them_is_believed_about_the_names_on_the_command_line(tmp_path: pathlib.Path) -> None:
    python = python_with(tmp_path, STOCK + FORK)
    baseline, choices = support.looked_up(b300(python))
    assert baseline == [] and set(choices.values()) == {""}
    named = b300(python, "engine.vars.ddtree_topk_flag=--my-topk")
    assert support.looked_up(named)[0] == ["the installed sglang 0.5.23 does not know --my-topk"]


def test_a_variable_that_only_a_fork_reads_counts_as_a_flag(tmp_path: pathlib.Path) -> None:
    """A release would ignore it without a word, and every topk would be measured as the same server."""
    pythons = (python_with(tmp_path / "without", STOCK + FORK),
               python_with(tmp_path / "with", STOCK + FORK + "SGLANG_DDTREE_MAX_TOPK = EnvInt(6)\n"))
    without, with_it = (support.looked_up(b300(python, "engine=sglang_ddtree_pr29907"))[1] for python in pythons)
    assert without["tree_topk", 4] == "the installed sglang 0.5.23 does not know SGLANG_DDTREE_MAX_TOPK"
    assert with_it["tree_topk", 4] == ""


@pytest.mark.parametrize("variant", support.VARIANTS)
def test_every_variant_needs_something_that_no_release_has(variant: str, tmp_path: pathlib.Path) -> None:
    settings = load(["+space=h200", f"engine={variant}", f"engine.python={python_with(tmp_path, STOCK)}"])
    engine = settings.engine
    wanted = [w for name in ("speculation", "tree_budget", "tree_topk") if name in engine.params
              for action in (engine.params[name].choices.get("ddtree") or engine.params[name].any_value)
              for w in needed(action, engine.vars)]
    assert any("tree" in word.lower() or "MAX_NUM_NODES" in word for word in lacking(engine, wanted)), wanted


def test_where_the_source_cannot_be_read_nothing_is_said_to_be_lacking(tmp_path: pathlib.Path) -> None:
    without_source = b300(python_with(tmp_path, "", name="other.py"))
    switched_off = b300(python_with(tmp_path / "b", STOCK), "engine.version.spelled_in=null")
    assert support.looked_up(without_source)[0] == support.looked_up(switched_off)[0] == []


@pytest.mark.parametrize("place", ["/", "../..", "srt/../../x", "."])
def test_nothing_outside_the_module_is_read(place: str) -> None:
    with pytest.raises(UsageError, match="below the module's own"):
        load(["+space=b300", f"engine.version.spelled_in=['{place}']"])


def test_a_choice_that_cannot_run_here_is_never_proposed_and_a_baseline_of_it_is_refused(
        tmp_path: pathlib.Path) -> None:
    python = python_with(tmp_path, STOCK)
    with pytest.raises(HostCannotRun, match="does not know DDTREE, --speculative-ddtree-budget"):
        LocalExecutor(b300(python)).preflight()
    settings = b300(python, *NO_TREE)
    report = preflight.check(settings)
    assert not any("does not know" in p for p in report.problems)
    assert any(server["speculation"] == "ddtree" for server in servers(settings.space))
    left = settings.without(report.unavailable).space
    assert {server["speculation"] for server in servers(left)} == {"none"}  # and no draft is there for dflash
    reason = left.forbidden({"speculation": "ddtree"})
    assert reason is not None and "does not know DDTREE" in reason
