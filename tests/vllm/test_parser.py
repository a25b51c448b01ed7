"""What vLLM's own parser makes of our command lines: every parameter of the engine file, every pair of the spaces."""

from __future__ import annotations

import pytest
import yaml

from autotune.engine.command import build
from autotune.engine.host import lacking
from tests.sglang.support import (
    HERE,
    Job,
    arguments,
    assert_flags_found,
    environment,
    pairwise,
    parse,
    ruled,
    settings,
    small,
)

VERSION = "0.32.0"
SPACES = ("vllm_cpu_moe", "vllm_cpu_spec", "vllm_gpu")

# Flags that releases before this one had, or none.
GONE = ("--num-scheduler-steps", "--use-v2-block-manager", "--swap-space", "--cuda-graph-sizes", "--speculative-model",
        "--num-speculative-tokens", "--enable-such", "--no-such")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_vllm_parses_every_parameter_and_every_pair_of_choices() -> None:
    engine = settings("vllm_gpu").engine
    values = yaml.safe_load((HERE / "command_lines.yaml").read_text())["vllm values"]
    commands = [small(engine, VERSION, **{name: choice})[1] for name, spec in engine.params.items()
                for choice in spec.choices or [values[name]]]
    for space in SPACES:
        loaded = settings(space)
        allowed = ruled(loaded, VERSION)
        commands += [build(loaded.engine, allowed, server, port=30000, version=VERSION) for server in pairwise(allowed)]
    jobs: list[Job] = [(arguments(command), {}) for command in commands]
    *outcomes, wrong = parse("vllm", VERSION, [*jobs, (["--model", "m", "--no-such-flag"], {})])[0]
    assert [o for o in outcomes if o.error] == []
    assert wrong.error == "parse_worker.py: error: unrecognized arguments: --no-such-flag"


def test_what_vllm_has_is_found_in_its_source_and_what_it_lacks_is_not() -> None:
    options = set(parse("vllm", VERSION, [])[1])
    assert len(options) > 200
    for space in ("vllm_cpu_moe", "vllm_gpu"):
        assert_flags_found(space, "vllm", VERSION, options, set())
    engine = settings("vllm_gpu", f"engine.python={environment('vllm', VERSION)}").engine
    assert set(lacking(engine, GONE)) == set(GONE) - options
