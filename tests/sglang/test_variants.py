"""The public DDTree variants: one file each, with the flags that its source has."""

import pathlib

import pytest
import yaml

from autotune.config.compose import data_folder, load
from autotune.engine.command import build
from autotune.records import Value
from tests.sglang.support import HERE, VARIANTS, VERSIONS, flags, forbidden, ruled, settings, small
from tests.space.configurations import servers

NO_TOPK = ("~space.params.tree_topk", "~space.belief.tree_topk", "~space.baseline.tree_topk")


@pytest.mark.parametrize(("variant", "choices", "arguments", "env"), yaml.safe_load(
    (HERE / "variants.yaml").read_text()))
def test_a_variant_has_the_flags_of_its_source(variant: str, choices: dict[str, Value], arguments: str,
                                               env: dict[str, str]) -> None:
    sizes: dict[str, Value] = {"max_running_requests": 64, "graph_max_bs": 64}
    _, command = small(settings("h200", f"engine={variant}").engine, "0.5.16", **sizes, **choices)
    _, plain = small(settings("h200").engine, "0.5.16", **sizes)
    common = len(plain.argv) - 4
    own = " ".join(command.argv[common:])
    for flag in ("--max-running-requests 64", "--cuda-graph-max-bs-decode 64"):
        assert flag in own
        own = own.replace(flag, "")
    algorithm, _, rest = arguments.partition(" ")
    speculative = f"--speculative-algorithm {algorithm} --speculative-draft-model-path D {rest}" if algorithm else ""
    assert own.split() == speculative.split()
    assert {k: v for k, v in command.env.items() if k not in plain.env} == env


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_b300_space_runs_on_every_variant(variant: str) -> None:
    probe = settings("h200", f"engine={variant}").engine
    loaded = settings("b300", f"engine={variant}", *(() if "tree_topk" in probe.params else NO_TOPK))
    for version in VERSIONS:
        space = ruled(loaded, version)
        command = build(loaded.engine, space, space.split(space.baseline)[0], port=30000, version=version)
        assert command.gpus == 8 and flags(command.argv)["--tp-size"] == "8"
        trees = [server for server in servers(space) if server["speculation"] == "ddtree"]
        assert trees
        assert {server["attention_backend"] for server in trees} == {"triton"}
        assert not any("dp_attention" in str(server["parallel"]) for server in trees)


def refused(variant: str, **config: Value) -> bool:
    return forbidden(settings("h200", f"engine={variant}").engine, "0.5.16", **config) is not None


@pytest.mark.parametrize("block", [4, 8, 16, 24])
@pytest.mark.parametrize("budget", [3, 4, 7, 8, 15, 16, 19, 23, 24, 40])
def test_pr29907_needs_triton_above_its_block_whatever_budgets_and_blocks_a_space_has(block: int, budget: int) -> None:
    for param in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        tree: dict[str, Value] = {"tree_budget": budget, "draft_block": block}
        assert refused("sglang_ddtree_pr29907", **tree, **{param: "fa3"}) is (budget > block - 1)
        assert not refused("sglang_ddtree_pr29907", **tree, **{param: "triton"})
    assert refused("sglang_ddtree_pr29907", tree_budget=budget, attention_backend="fa3") is (budget > 15)


def test_limits_of_the_variants_hold_for_values_that_no_file_lists() -> None:
    for width in (1, 4, 8, 9, 13, 16, 32):
        assert refused("sglang_ddtree_pr31069", tree_budget=64, tree_topk=width) is (width not in (4, 8, 16))
        assert refused("sglang_ddtree_pr36196", tree_budget=0, tree_topk=width) is (width > 16)
        assert refused("sglang_ddtree", tree_budget=12, tree_topk=width) is (width > 12)
    assert refused("sglang_dflash_pr32053", verify_budget=11, draft_block=12, attention_backend="fa3")
    assert not refused("sglang_dflash_pr32053", verify_budget=12, draft_block=12, attention_backend="fa3")
    assert refused("sglang_ddtree", page_size=2) and refused("sglang", speculation="dflash", eagle_topk=17)
    assert refused("sglang", speculation="dflash", eagle_steps=9)


def test_adding_a_fork_is_one_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "mine.yaml").write_text((data_folder("search_spaces") / "b300.yaml").read_text()
                                        .replace("name: b300", "name: mine")
                                        .replace("engine: sglang_ddtree", "engine: sglang_mine"))
    (tmp_path / "engine/sglang_mine.yaml").write_text(
        "defaults: [sglang_ddtree, _self_]\nname: sglang_mine\nvars: {ddtree_topk_flag: --my-topk}\n"
        "rules: {ddtree_attention_dp: null}\n")
    loaded = load(["+space=mine"], [str(tmp_path)])
    space = ruled(loaded, "0.5.23")
    command = build(loaded.engine, space, space.split(space.baseline)[0], port=1, version="0.5.23")
    assert flags(command.argv)["--my-topk"] == "4"
    assert any(s["speculation"] == "ddtree" and s["parallel"] == "tp8_dp_attention" for s in servers(space))
