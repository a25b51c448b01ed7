"""SGLang's own parser and checks on every command line that the spaces can produce, in two releases, without a GPU.

One process per release parses them all. What neither parsing nor resolving can tell without a GPU or a launch is listed
in NEEDS_A_GPU and in docs/engines.md.
"""

from __future__ import annotations

import functools
import pathlib
import re
import tempfile
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from autotune.engine.command import Command, build
from autotune.engine.random_model import write_draft, write_model
from autotune.records import Value
from tests.sglang.support import (
    HERE,
    VARIANTS,
    VERSIONS,
    Job,
    Outcome,
    arguments,
    assert_flags_found,
    forbidden,
    fork_flags,
    pairwise,
    parse,
    reasons,
    ruled,
    settings,
    small,
)

SPACES = ("b300", "h200", "sglang_cpu")
DATA: Mapping[str, Any] = yaml.safe_load((HERE / "command_lines.yaml").read_text())
FORK_FLAGS = {"--speculative-ddtree-budget", "--speculative-ddtree-topk"}
WORDS = re.compile(
    r"^AssertionError: $|^ZeroDivisionError|page_size.*> 1|"
    "must match|draft-window-size must be|block-size to be positive|divisible by page_size|"
    "moe_dense_tp_size only|schedule_conservativeness must|MoE A2A is|cutedsl supports moe_a2a|supported with ep_size|"
    "Invalid quantization|invalid choice|supports only --moe-runner|only supported with --moe-runner|low-latency mode|"
    "requires attention DP|backend requires --moe-runner|low_latency dispatch")
"""What SGLang says of the refused ones, so that none is refused for something that this machine lacks."""
NEEDS_A_GPU = re.compile(r"only supported on Blackwell|requires Hopper|Please use a different (prefill )?backend")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@functools.cache
def models() -> dict[str, str]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="autotune-models-"))
    for shape in ("mla-moe-tiny", "dense-tiny", "moe-tiny", "dense-8b"):
        write_model(folder / shape, shape)
    for target in ("dense-tiny", "dense-8b"):
        write_draft(folder / f"{target}-draft", folder / target)
    return {path.name: str(path) for path in folder.iterdir()}


TARGETS = {"b300": ("mla-moe-tiny", "dense-tiny-draft"), "h200": ("dense-8b", "dense-8b-draft"),
           "sglang_cpu": ("moe-tiny", "dense-tiny-draft")}


def job(command: Command, *extra: str) -> Job:
    """Arguments with the models of this machine, and the environment."""
    places = {"T": models()["moe-tiny"], "D": models()["dense-tiny-draft"]}
    return [*(places.get(argument, argument) for argument in arguments(command)), *extra], dict(command.env)


def space_jobs(name: str, version: str) -> list[Job]:
    target, draft = (models()[model] for model in TARGETS[name])
    loaded = settings(name, f"space.model.target={target}", f"++space.model.draft={draft}")
    space = ruled(loaded, version)
    return [job(build(loaded.engine, space, server, port=30000, version=version)) for server in pairwise(space)]


def parameter_jobs(version: str) -> list[Job]:
    """Every parameter that conf/engine/sglang.yaml knows, one at a time, in a value that is right for it."""
    engine = settings("h200").engine
    typed: dict[str, Value] = {"true": True, "false": False}
    return [job(small(engine, version, **{**DATA["beside"].get(name, {}), name: value})[1])
            for name, spec in engine.params.items()
            for value in [typed.get(c, c) for c in spec.choices] or [DATA["values"][name]]]


def pairs_of(version: str) -> dict[str, tuple[dict[str, Value], dict[str, Value]]]:
    """(refused by SGLang, its nearest accepted neighbour or nothing): what our rules must say as well."""
    return {**DATA["pairs"]["both"], **DATA["pairs"][version]}


def traps(version: str) -> dict[str, Job]:
    """Command lines that show what SGLang does with the combinations that our rules and defaults are about."""
    engine = settings("h200").engine

    def line(*extra: str, **choices: Value) -> Job:
        return job(small(engine, version, **{"dtype": "auto", **choices})[1], *extra)

    plain, env = line()
    dflash, dflash_env = line(speculation="dflash")
    at = dflash.index("--max-running-requests")
    return {
        **{f"{name} ({side})": line(**choices) for name, both in pairs_of(version).items()
           for side, choices in zip(("refused", "accepted"), both, strict=True) if choices},
        **{name: line(*extra, **choices) for name, (choices, *extra) in DATA["lines"].items()},
        # Started from an environment that has NVLS on
        "nvls inherited": (plain, {"NCCL_NVLS_ENABLE": "1"}),
        "nvls unsaid": (plain, {"NCCL_NVLS_ENABLE": "1", **env}),
        "symmetric memory, nvls off": (line("--enable-symm-mem", nvls=False)[0], {"NCCL_NVLS_ENABLE": "0"}),
        "dflash 48": (dflash[:at] + dflash[at + 2:], dflash_env),
        "abbreviated": (["--model-path", models()["moe-tiny"], "--device", "cuda", "--pp", "1"], {}),
    }


@functools.cache
def parsed(version: str) -> tuple[dict[str, Outcome], dict[str, list[Outcome]], dict[str, frozenset[str]]]:
    """(traps by name, outcomes by space or "parameters", choices of every option of the release), from one process.

    An option that takes any value has no choices.
    """
    groups = {name: space_jobs(name, version) for name in SPACES}
    groups["parameters"] = parameter_jobs(version)
    named = traps(version)
    groups["traps"] = list(named.values())
    jobs = []
    for argv, env in (job for group in groups.values() for job in group):
        kept, _ = fork_flags(argv, set(argv) - FORK_FLAGS)
        jobs.append((["DFLASH" if a == "DDTREE" else a for a in kept], env))
    outcomes, options = parse("sglang", version, jobs)
    split: dict[str, list[Outcome]] = {}
    for name, group in groups.items():
        split[name], outcomes = outcomes[:len(group)], outcomes[len(group):]
    return dict(zip(named, split.pop("traps"), strict=True)), split, options


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("name", [*SPACES, "parameters"])
def test_every_command_line_parses_and_resolves(name: str, version: str) -> None:
    outcomes = parsed(version)[1][name]
    refused = [o for o in outcomes if o.reached == "parse"]
    assert not refused, "\n".join(f"{o.error}\n  {o.line}" for o in refused[:5])
    failed = [o for o in outcomes if o.reached == "resolve" and not NEEDS_A_GPU.search(o.error)]
    assert not failed, "\n".join(f"{o.error}\n  {o.line}" for o in failed[:5])
    assert sum(o.reached == "done" for o in outcomes) > len(outcomes) / 3


def test_every_flag_is_spelled_in_full_in_both_releases(version: str) -> None:
    _, groups, options = parsed(version)
    words = {word for outcomes in groups.values() for o in outcomes for word in o.line.split()}
    assert {word for word in words if word.startswith("--")} <= set(options)


def test_flags_of_the_variants_are_the_forks_own(version: str) -> None:
    """A flag that only a fork has must be unknown to the release: otherwise it would silently mean something else."""
    options = set(parsed(version)[2])
    assert not FORK_FLAGS & options
    for variant in VARIANTS:
        engine = settings("h200", f"engine={variant}").engine
        choices = {name: value for name, value in (("tree_budget", 16), ("tree_topk", 4)) if name in engine.params}
        _, command = small(engine, version, **choices)
        _, unknown = fork_flags(arguments(command), options)
        assert unknown or command.env.keys() & {"SGLANG_DDTREE_MAX_TOPK", "SGLANG_DFLASH_MAX_NUM_NODES"}, variant
        assert all("tree" in flag for flag in unknown), unknown


@pytest.mark.parametrize(("space", "unknown"), [("h200", set()), ("b300", {"DDTREE"})])
def test_what_a_release_has_is_found_in_its_source_and_what_it_lacks_is_not(space: str, unknown: set[str],
                                                                            version: str) -> None:
    assert_flags_found(space, "sglang", version, set(parsed(version)[2]), unknown)


def test_choices_of_the_other_release_only_are_refused_and_those_of_both_are_not(version: str) -> None:
    """Whatever parameter takes them: such a launch would end at arg-parse."""
    engine = settings("h200").engine
    here, there = parsed(version)[2], parsed(next(v for v in VERSIONS if v != version))[2]
    apart = 0
    for name, spec in engine.params.items():
        for flag in (action.args[0] for action in spec.any_value if "{value}" in action.args):
            for choice in (here[flag] | there[flag]) if here[flag] and there[flag] else ():
                told = reasons(engine, version, **{name: choice})
                known = not any(re.match(r"0\.5\.(16 does not know|23 dropped) th", reason) for reason in told)
                assert known is (choice in here[flag]), f"{name}={choice}: {told or 'no rule'}"
                apart += not known
    assert apart >= (20 if version == "0.5.16" else 8)


def test_nvls_is_off_unless_chosen_whatever_the_caller_had_set(version: str) -> None:
    seen = parsed(version)[0]
    assert seen["nvls inherited"].nccl["NCCL_NVLS_ENABLE"] == "1"  # the trap
    assert seen["nvls unsaid"].nccl["NCCL_NVLS_ENABLE"] == "0"
    assert seen["nvls off"].nccl["NCCL_NVLS_ENABLE"] == "0"
    assert seen["nvls on"].nccl["NCCL_NVLS_ENABLE"] == "1"


def test_symmetric_memory_brings_nvls() -> None:
    """0.5.23 drops symmetric memory where there is no GPU, so only the older release shows it here."""
    assert parsed("0.5.16")[0]["symmetric memory, nvls off"].nccl["NCCL_NVLS_ENABLE"] == "1"


def test_an_all_to_all_backend_sets_ep_size(version: str) -> None:
    seen = parsed(version)[0]
    assert "--ep-size" not in seen["deepep"].line
    assert seen["deepep"].values == seen["deepep ep8"].values and seen["deepep"].values["ep_size"] == 8
    assert "MoE A2A" in seen["flashinfer a2a"].error and seen["flashinfer a2a"].reached == "resolve"
    assert seen["deepep normal"].values["graph_decode"] == "disabled" == seen["graphs off"].values["graph_decode"]


def test_dflash_resets_topk_and_steps(version: str) -> None:
    seen = parsed(version)[0]["dflash topk"]
    assert "--speculative-eagle-topk 4" in seen.line
    assert (seen.values["speculative_eagle_topk"], seen.values["speculative_num_steps"]) == (1, 1)


def test_running_requests_fall_to_48_under_speculation_unless_said(version: str) -> None:
    seen = parsed(version)[0]
    assert seen["dflash 48"].values["max_running_requests"] == 48  # the trap
    assert seen["dflash 200"].values["max_running_requests"] == 200
    for outcome in parsed(version)[1]["h200"]:
        if outcome.reached == "done":
            assert outcome.values["max_running_requests"] == 128
            assert outcome.values["graph_max_bs_decode"] == 128


def test_rules_say_what_sglang_does(version: str) -> None:
    """Each combination that our rules drop is refused by SGLang, or becomes the server that the rule names."""
    seen = parsed(version)[0]
    old = version == "0.5.16"
    refused = {"dflash flex": "not supported with Flex Attention",
               "ngram attention dp": "does not support dp attention",
               "ngram pages": "page_size(16) > 1 is unstable",
               "eagle pages": "speculative_eagle_topk > 1 with page_size", "eplb": "AssertionError"}
    for name, words in refused.items():
        assert seen[name].reached == "resolve" and words in seen[name].error, (name, seen[name])
    assert seen["ngram pages flashinfer"].reached == "done"
    assert seen["ngram mixed"].reached == "resolve" or seen["ngram mixed"].values["enable_mixed_chunk"] is False
    assert ("does not support dp attention" in seen["dflash attention dp"].error) is old
    assert (seen["dflash attention dp"].reached == "done") is not old
    assert (seen["dflash mixed"].values.get("enable_mixed_chunk") is True) is not old


def test_what_sglang_refuses_our_rules_refuse_and_not_its_neighbour(version: str) -> None:
    seen, engine = parsed(version)[0], settings("h200").engine
    wrong = []
    for name, (refused, accepted) in pairs_of(version).items():
        told = seen[f"{name} (refused)"]
        if forbidden(engine, version, **refused) is None or told.reached == "done" or not WORDS.search(told.error):
            wrong.append((name, forbidden(engine, version, **refused), told))
        if accepted and (forbidden(engine, version, **accepted) or seen[f"{name} (accepted)"].reached != "done"):
            wrong.append((name, forbidden(engine, version, **accepted), seen[f"{name} (accepted)"]))
    assert not wrong, "\n".join(f"{name}: {ours}; SGLang: {told.reached} {told.error}" for name, ours, told in wrong)


def test_attention_dp_is_understood_in_both_spellings(version: str) -> None:
    values = parsed(version)[0]["attention dp"].values
    assert values["tp_size"] == 8 and values["max_running_requests"] == 256
    assert (values["dp_size"] if version == "0.5.16" else values["attn_dp_size"]) == 8


def test_what_parsing_and_resolving_catch_and_what_they_cannot(version: str) -> None:
    seen = parsed(version)[0]
    assert seen["unknown flag"].reached == "parse" and "unrecognized arguments" in seen["unknown flag"].error
    assert seen["abbreviated"].reached == "parse" and "ambiguous option" in seen["abbreviated"].error
    assert "must be divisible by page_size" in seen["chunk not whole pages"].error
    for name in ("tp does not divide heads", "ep does not divide tp", "eagle without a draft", "all memory and more"):
        assert seen[name].reached == "done", f"{name} is caught now: docs/engines.md can say so"
