"""Traps of SGLang's command line, each seen in the exact command that a choice becomes.

What SGLang itself makes of these commands is in test_parser.py.
"""

import pytest

from autotune.engine.spec import EngineSpec
from autotune.records import Value
from tests.sglang.support import VERSIONS, arguments, flags, forbidden, ruled, settings, small

both = pytest.mark.parametrize("version", VERSIONS)


def stock() -> EngineSpec:
    return settings("h200").engine


def tree() -> EngineSpec:
    return settings("b300").engine


@both
def test_fusion_off_is_enforced_since_it_switches_itself_on(version: str) -> None:
    _, off = small(stock(), version, allreduce_fusion=False)
    _, on = small(stock(), version, allreduce_fusion=True)
    assert "--enforce-disable-flashinfer-allreduce-fusion" in off.argv
    assert flags(on.argv)["--flashinfer-allreduce-fusion-backend"] == "auto"
    assert "--enforce-disable-flashinfer-allreduce-fusion" not in on.argv
    assert "--enable-flashinfer-allreduce-fusion" not in [*on.argv, *off.argv]


@both
def test_nvls_off_is_said_in_the_environment_since_an_inherited_one_would_switch_it_on(version: str) -> None:
    _, off = small(stock(), version, nvls=False)
    _, on = small(stock(), version, nvls=True)
    _, unsaid = small(stock(), version, dtype="auto")
    assert (off.env["NCCL_NVLS_ENABLE"], unsaid.env["NCCL_NVLS_ENABLE"]) == ("0", "0")
    assert "--enable-nccl-nvls" not in off.argv
    assert on.env["NCCL_NVLS_ENABLE"] == "1" and "--enable-nccl-nvls" in on.argv


@both
def test_symmetric_memory_without_nvls_is_not_a_server_of_its_own(version: str) -> None:
    reason = forbidden(stock(), version, nvls=False, symm_mem=True)
    assert reason is not None and "nvls=true" in reason
    assert forbidden(stock(), version, nvls=True, symm_mem=True) is None
    _, alone = small(stock(), version, symm_mem=True)
    assert alone.env["NCCL_NVLS_ENABLE"] == "1"


@both
@pytest.mark.parametrize("backend", ["deepep", "mooncake", "megamoe"])
def test_an_all_to_all_backend_is_only_tried_with_the_ep_size_that_it_sets(version: str, backend: str) -> None:
    reason = forbidden(stock(), version, moe_a2a_backend=backend, parallel="tp8")
    assert reason is not None and "ep_size = tp_size" in reason
    assert forbidden(stock(), version, moe_a2a_backend=backend, parallel="ep8") is None
    assert forbidden(stock(), version, moe_a2a_backend="none", parallel="tp8") is None
    assert forbidden(stock(), version, moe_a2a_backend=backend, parallel="tp4_dp_attention") is None


@both
def test_only_deepep_has_a_mode_that_switches_graphs_off(version: str) -> None:
    eager: dict[str, Value] = {"deepep_mode": "normal", "cuda_graph": True}
    assert forbidden(stock(), version, moe_a2a_backend="deepep", **eager) is not None
    assert forbidden(stock(), version, moe_a2a_backend="none", **eager) is None


@both
def test_dflash_is_not_searched_over_a_topk_that_it_resets(version: str) -> None:
    reason = forbidden(stock(), version, speculation="dflash", eagle_topk=4)
    assert reason is not None and "topk" in reason
    assert forbidden(stock(), version, speculation="dflash", eagle_topk=1) is None
    assert forbidden(stock(), version, speculation="eagle3", eagle_topk=4, eagle_steps=3,
                     attention_backend="triton") is None


@both
@pytest.mark.parametrize("speculation", ["none", "ngram", "dflash"])
def test_running_requests_always_reach_the_largest_concurrency(version: str, speculation: str) -> None:
    _, command = small(stock(), version, concurrency=200, speculation=speculation)
    assert flags(command.argv)["--max-running-requests"] == "200"


@both
def test_decode_graphs_reach_the_largest_concurrency_unless_the_space_says_otherwise(version: str) -> None:
    _, command = small(stock(), version, concurrency=200, dtype="auto")
    assert flags(command.argv)["--cuda-graph-max-bs-decode"] == "200"
    _, chosen = small(stock(), version, concurrency=200, graph_max_bs=64)
    assert flags(chosen.argv)["--cuda-graph-max-bs-decode"] == "64"
    b300 = ruled(settings("b300"), version)
    reason = b300.forbidden({**b300.baseline, "graph_max_bs": 64, "concurrency": 128})
    assert reason is not None and "without a CUDA graph" in reason
    assert b300.forbidden({**b300.baseline, "graph_max_bs": 128, "concurrency": 128}) is None


@both
def test_a_graph_is_large_enough_for_what_one_scheduler_gets(version: str) -> None:
    """The largest captured batch counts requests of one scheduler: attention DP has one a rank, replicas one each."""
    b300 = ruled(settings("b300"), version)
    plain = {k: v for k, v in b300.baseline.items() if k not in ("tree_budget", "tree_topk")} | {"speculation": "none"}
    alike = "a rank never has more than 32 requests"
    for parallel, schedulers in (("tp8", 1), ("ep8", 1), ("tp4_dp2", 2), ("tp8_dp_attention", 8)):
        for largest in (64, 128, 256):
            config = {**plain, "parallel": parallel, "graph_max_bs": largest}
            if parallel == "tp8_dp_attention":
                del config["allreduce_fusion"]
            loads = {load: b300.forbidden({**config, "concurrency": load}) for load in (1, 8, 32, 64, 128, 256)}
            if parallel == "tp8_dp_attention" and largest != 256:
                assert all(because and alike in because for because in loads.values()), loads
            else:
                assert {load for load, because in loads.items() if because and "without a" in because} == {
                    load for load in loads if load / schedulers > largest}, (parallel, largest)
    small_graph = ruled(settings("b300", "space.params.graph_max_bs.choices=[8,16,256]",
                                 "~space.belief.graph_max_bs"), version)
    few = {**plain, "parallel": "tp8_dp_attention", "graph_max_bs": 16}
    assert small_graph.forbidden({**few, "concurrency": 128}) is None
    assert "eighth of the load" in str(small_graph.forbidden({**few, "concurrency": 256}))


@both
def test_steps_and_topk_of_eagle_go_together_and_load_balancing_with_what_spreads_experts(version: str) -> None:
    assert "without a topk" in str(forbidden(stock(), version, speculation="eagle3", eagle_steps=3))
    assert forbidden(stock(), version, speculation="eagle3", eagle_steps=3, eagle_topk=1, draft_tokens=4) is None
    dp: dict[str, Value] = {"parallel": "tp4_dp_attention", "eplb": True}
    assert "expert load balancing" in str(forbidden(stock(), version, **dp))
    assert "expert load balancing" in str(forbidden(stock(), version, moe_a2a_backend="none", **dp))
    assert forbidden(stock(), version, moe_a2a_backend="deepep", **dp) is None


@both
def test_trees_are_kept_from_pages_and_from_attention_without_a_tree_mask(version: str) -> None:
    for backend in ("trtllm_mha", "trtllm_mla", "cutedsl_mla", "flashmla"):
        assert forbidden(tree(), version, attention_backend=backend, tree_budget=8) is not None
        eagle: dict[str, Value] = {"speculation": "eagle3", "eagle_steps": 3, "attention_backend": backend}
        assert "tree mask" in str(forbidden(stock(), version, eagle_topk=4, **eagle))
        assert forbidden(stock(), version, eagle_topk=1, **eagle) is None
    assert forbidden(tree(), version, attention_backend="triton", page_size=1, tree_budget=8) is None
    assert forbidden(tree(), version, attention_backend="triton", page_size=16, tree_budget=8) is not None
    assert forbidden(stock(), version, speculation="ngram", page_size=16, attention_backend="triton") is not None
    assert forbidden(stock(), version, speculation="ngram", page_size=16, attention_backend="flashinfer") is None
    assert forbidden(stock(), version, speculation="none", page_size=16, attention_backend="triton") is None


@both
def test_a_failed_server_does_not_wait_for_a_core_dump(version: str) -> None:
    _, command = small(stock(), version, dtype="auto")
    assert command.env["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == "0"


def test_attention_dp_is_spelled_by_version() -> None:
    _, old = small(stock(), "0.5.16", parallel="tp8_dp_attention")
    _, new = small(stock(), "0.5.23", parallel="tp8_dp_attention")
    _, unknown = small(stock(), "0.6.0", parallel="tp8_dp_attention")
    assert flags(old.argv)["--dp-size"] == "8" and "--enable-dp-attention" in old.argv
    assert flags(new.argv)["--attn-dp-size"] == "8" and "--dp-size" not in new.argv
    assert "--enable-dp-attention" not in new.argv
    assert arguments(unknown) == arguments(new) and (old.gpus, new.gpus) == (8, 8)


def test_replicas_are_not_attention_dp() -> None:
    for version in VERSIONS:
        _, command = small(stock(), version, parallel="tp4_dp2")
        told = flags(command.argv)
        assert (told["--tp-size"], told["--dp-size"], command.gpus) == ("4", "2", 8)
        assert "--enable-dp-attention" not in told and "--attn-dp-size" not in told


def test_attention_dp_with_dflash_depends_on_the_version() -> None:
    assert forbidden(stock(), "0.5.16", speculation="dflash", parallel="tp8_dp_attention") is not None
    assert forbidden(stock(), "0.5.23", speculation="dflash", parallel="tp8_dp_attention") is None
    for version in VERSIONS:
        assert forbidden(tree(), version, parallel="tp8_dp_attention", tree_budget=8) is not None
        assert forbidden(tree(), version, parallel="tp8_dp_attention", speculation="none") is None


@both
def test_graphs_off_uses_the_names_that_both_versions_have(version: str) -> None:
    _, command = small(stock(), version, cuda_graph=False)
    assert {"--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"} <= set(command.argv)
    assert "--disable-cuda-graph" not in command.argv
