"""The spaces of SGLang and vLLM: every choice becomes a command; the choices of b300 and h200."""

import itertools

import pytest

from autotune.engine.command import build
from tests.sglang.support import VERSIONS, flags, pairwise, ruled, settings
from tests.space.configurations import servers

VLLM = "0.32.0"
CASES = [*((name, version) for name in ("b300", "h200", "sglang_cpu") for version in VERSIONS),
         *((name, VLLM) for name in ("vllm_cpu_moe", "vllm_cpu_spec", "vllm_gpu"))]


@pytest.mark.parametrize(("name", "version"), CASES)
def test_every_choice_becomes_a_command_of_long_flags(name: str, version: str) -> None:
    loaded = settings(name)
    space = ruled(loaded, version)
    seen: set[tuple[str, object]] = set()
    for server in pairwise(space) if version == VLLM else servers(space):
        if not server.items() <= seen:
            seen |= set(server.items())
            command = build(loaded.engine, space, server, port=30000, version=version)
            assert all(flag.startswith("--") for flag in flags(command.argv[3:])), command.argv
            assert not any("{" in part for part in (*command.argv, *command.env.values()))
            assert version != VLLM or command.argv[1:3] == ("-m", "vllm.entrypoints.openai.api_server")
    assert seen == {(p.name, c) for p in space.server_params for c in p.choices}


@pytest.mark.parametrize(("name", "version"), CASES)
def test_every_baseline_is_allowed_and_every_parameter_has_a_use(name: str, version: str) -> None:
    space = ruled(settings(name), version)
    assert space.forbidden(space.baseline) is None
    assert set(space.baseline) == {p.name for p in space.params if space.active(p, space.baseline)}


def test_b300_is_about_eight_gpus_and_trees() -> None:
    loaded = settings("b300")
    space = ruled(loaded, "0.5.23")
    assert space.needs["gpus"] == 8 and {s["speculation"] for s in servers(space)} > {"ddtree"}
    for server in pairwise(space):
        assert build(loaded.engine, space, server, version="0.5.23").gpus == 8


def test_h200_never_turns_multicast_on() -> None:
    loaded = settings("h200")
    space = ruled(loaded, "0.5.16")
    assert not {"nvls", "symm_mem", "torch_symm_mem", "mscclpp", "parallel"} & {p.name for p in space.params}
    for server in servers(space):
        command = build(loaded.engine, space, server, port=1, version="0.5.16")
        assert command.env["NCCL_NVLS_ENABLE"] == "0" and command.gpus == 1
        assert not any("nvls" in part or "symm" in part for part in command.argv)


def test_pairs_of_choices_are_all_covered_by_few_configurations() -> None:
    space = ruled(settings("h200"), "0.5.16")
    picked = pairwise(space)
    assert len(picked) < 30
    found = list(servers(space))
    for a, b in itertools.combinations([p.name for p in space.server_params], 2):
        assert {(s.get(a), s.get(b)) for s in found} == {(s.get(a), s.get(b)) for s in picked}
