"""Runs inside an environment that has SGLang or vLLM: parses command lines with the engine's own code, no GPU needed.

    python parse_worker.py sglang|vllm JOBS.json RESULTS.json

JOBS is a list of {"argv": [...], "env": {...}} (argv without the interpreter and module). Each result says how far it
came: parse (argparse refused), resolve (SGLang's own checks refused) or done, with the error and, of SGLang, the
resolved values. vLLM's command lines are only parsed.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import sys
from typing import Any

VALUES = ("attention_backend", "page_size", "max_running_requests", "speculative_algorithm",
          "speculative_num_draft_tokens", "speculative_eagle_topk", "speculative_num_steps", "ep_size", "tp_size",
          "dp_size", "attn_dp_size", "enable_dp_attention", "speculative_draft_attention_backend",
          "mem_fraction_static", "chunked_prefill_size", "enable_mixed_chunk", "moe_a2a_backend",
          "flashinfer_allreduce_fusion_backend", "enforce_disable_flashinfer_allreduce_fusion", "enable_nccl_nvls",
          "enable_symm_mem", "disable_overlap_schedule", "disable_radix_cache", "dtype", "model_path", "device",
          "cuda_graph_config")


def main(engine: str, jobs_file: str, results_file: str) -> None:
    if engine == "vllm":
        kind = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
        parser = importlib.import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser(kind())
    else:
        parser = argparse.ArgumentParser()
        importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    with open(jobs_file) as file:
        jobs = json.load(file)
    outside = dict(os.environ)
    results = []
    for job in jobs:
        os.environ.clear()
        os.environ.update({**outside, **job["env"]})
        results.append(attempt(parser if engine == "vllm" else None, job["argv"]))
    with open(results_file, "w") as file:
        json.dump({"results": results, "options": {
            option: sorted(map(str, action.choices or ())) for option, action in parser._option_string_actions.items()
            if option.startswith("--")}}, file)


def attempt(parser: argparse.ArgumentParser | None, argv: list[str]) -> dict[str, Any]:
    """Parse with `parser`, or parse and resolve as SGLang does."""
    said = io.StringIO()
    reached = "parse"
    try:
        with contextlib.redirect_stderr(said):
            if parser is not None:
                parser.parse_args(argv)
                return {"reached": "done", "error": ""}
            args = importlib.import_module("sglang.srt.server_args").prepare_server_args(list(argv))
            reached = "resolve"
            if hasattr(args, "resolve_once"):
                args.resolve_once()
            args.check_server_args()
    except SystemExit:
        return {"reached": reached, "error": said.getvalue().strip().splitlines()[-1]}
    except Exception as error:
        # 0.5.16 resolves while it constructs the arguments: argparse was satisfied then
        return {"reached": "resolve" if parser is None else "parse", "error": f"{type(error).__name__}: {error}"}
    return {"reached": "done", "error": "", "values": values(args), "environment": environment(args)}


def values(args: Any) -> dict[str, Any]:
    overrides = importlib.import_module("sglang.srt.arg_groups.overrides")
    view = overrides.resolved_view(args)
    found = {name: getattr(view, name, getattr(args, name, None)) for name in VALUES}
    config = found.pop("cuda_graph_config")
    for phase in ("decode", "prefill"):
        setting = getattr(config, phase, None)
        found[f"graph_{phase}"] = str(getattr(getattr(setting, "backend", None), "value",
                                              getattr(setting, "backend", None)))
        found[f"graph_max_bs_{phase}"] = getattr(setting, "max_bs", None)
    return {k: v if isinstance(v, str | int | float | bool | None) else str(v) for k, v in found.items()}


def environment(args: Any) -> dict[str, str]:
    """What the server would set in its environment for NCCL, computed by its own function."""
    engine = importlib.import_module("sglang.srt.entrypoints.engine")
    before = dict(os.environ)
    with contextlib.suppress(Exception):  # it also checks kernels that are not installed here, after NCCL's variables
        engine._set_envs_and_config(args)
    found = {k: v for k, v in os.environ.items() if k.startswith("NCCL_")}
    os.environ.clear()
    os.environ.update(before)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
