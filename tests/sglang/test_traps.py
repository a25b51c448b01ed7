"""Traps of the command lines of SGLang and vLLM: what a choice becomes (commands.yaml), what is refused (rules.yaml).

What SGLang itself makes of these commands is in test_parser.py.
"""

import pytest
import yaml

from autotune.engine.spec import EngineSpec
from autotune.records import Value
from tests.sglang.support import HERE, VERSIONS, arguments, flags, forbidden, ruled, settings, small

both = pytest.mark.parametrize("version", VERSIONS)

RULES: dict[str, list[tuple[dict[str, Value], str | None]]] = yaml.safe_load((HERE / "rules.yaml").read_text())
COMMANDS: dict[str, list[tuple[dict[str, Value], list[str], list[str]]]] = yaml.safe_load(
    (HERE / "commands.yaml").read_text())
on_every_engine = pytest.mark.parametrize(("space", "version"), [
    *((space, version) for space in ("h200", "b300") for version in VERSIONS),
    ("vllm_gpu", "0.32.0"), ("vllm_cpu_moe", "0.32.0")])


def stock() -> EngineSpec:
    return settings("h200").engine


@on_every_engine
def test_what_an_engine_refuses_or_ignores_is_not_launched_and_its_neighbour_is(space: str, version: str) -> None:
    engine, wrong = settings(space).engine, []
    for config, words in RULES[space]:
        reason = forbidden(engine, version, **config)
        if reason is not None if words is None else reason is None or words not in reason:
            wrong.append((config, words, reason))
    assert not wrong


@on_every_engine
def test_a_choice_becomes_these_words_of_its_command(space: str, version: str) -> None:
    engine, wrong = settings(space).engine, []
    for choices, present, absent in COMMANDS.get(space, ()):
        _, command = small(engine, version, **choices)
        text = f" {' '.join([*(f'{k}={v}' for k, v in command.env.items()), *command.argv])} "
        wrong += [(choices, word) for word in present if f" {word} " not in text]
        wrong += [(choices, word) for word in absent if f" {word} " in text]
    assert not wrong


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


def test_attention_dp_is_spelled_and_allowed_with_dflash_by_version() -> None:
    _, old = small(stock(), "0.5.16", parallel="tp8_dp_attention")
    _, new = small(stock(), "0.5.23", parallel="tp8_dp_attention")
    _, unknown = small(stock(), "0.6.0", parallel="tp8_dp_attention")
    assert flags(old.argv)["--dp-size"] == "8" and "--enable-dp-attention" in old.argv
    assert flags(new.argv)["--attn-dp-size"] == "8" and "--dp-size" not in new.argv
    assert "--enable-dp-attention" not in new.argv
    replicas = small(stock(), "0.5.23", parallel="tp4_dp2")[1]
    assert arguments(unknown) == arguments(new) and (old.gpus, new.gpus, replicas.gpus) == (8, 8, 8)
    for version, refused in (("0.5.16", True), ("0.5.23", False)):
        why = forbidden(stock(), version, speculation="dflash", parallel="tp8_dp_attention")
        assert (why is not None) is refused
