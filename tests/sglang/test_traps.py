"""Traps of SGLang's command line, each seen in the exact command that a choice becomes.

What SGLang itself makes of these commands is in test_parser.py.
"""

import pathlib

import pytest
import yaml

from autotune.engine.command import flags
from autotune.engine.spec import EngineSpec
from autotune.records import Value
from tests.sglang.support import VERSIONS, arguments, forbidden, ruled, settings, small

both = pytest.mark.parametrize("version", VERSIONS)


def stock() -> EngineSpec:
    return settings("h200").engine


RULES: dict[str, list[tuple[dict[str, Value], str | None]]] = yaml.safe_load(
    pathlib.Path(__file__).with_name("rules.yaml").read_text())


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
def test_symmetric_memory_alone_brings_nvls(version: str) -> None:
    _, alone = small(stock(), version, symm_mem=True)
    assert alone.env["NCCL_NVLS_ENABLE"] == "1"


@pytest.mark.parametrize(("space", "version"), [
    *((space, version) for space in ("h200", "b300") for version in VERSIONS),
    ("vllm_gpu", "0.32.0"), ("vllm_cpu_moe", "0.32.0")])
def test_what_an_engine_refuses_or_ignores_is_not_launched_and_its_neighbour_is(space: str, version: str) -> None:
    engine, wrong = settings(space).engine, []
    for config, words in RULES[space]:
        reason = forbidden(engine, version, **config)
        if reason is not None if words is None else reason is None or words not in reason:
            wrong.append((config, words, reason))
    assert not wrong


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


@both
def test_graphs_off_uses_the_names_that_both_versions_have(version: str) -> None:
    _, command = small(stock(), version, cuda_graph=False)
    assert {"--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"} <= set(command.argv)
    assert "--disable-cuda-graph" not in command.argv
