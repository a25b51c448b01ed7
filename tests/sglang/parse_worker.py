"""Runs inside an environment that has SGLang: parses and resolves command lines with SGLang's own code, no GPU needed.

    python parse_worker.py JOBS.json RESULTS.json

JOBS is a list of {"argv": [...], "env": {...}} (argv without the interpreter and module). Each result says how far it
came: parse (argparse refused), resolve (SGLang's own checks refused) or done, with the error and the resolved values.
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


def main(jobs_file: str, results_file: str) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    with open(jobs_file) as file:
        jobs = json.load(file)
    outside = dict(os.environ)
    results = []
    for job in jobs:
        os.environ.clear()
        os.environ.update({**outside, **job["env"]})
        results.append(attempt(job["argv"]))
    with open(results_file, "w") as file:
        json.dump({"options": sorted(parser._option_string_actions), "results": results, "choices": {
            option: sorted(map(str, action.choices))
            for option, action in parser._option_string_actions.items() if action.choices}}, file)


def attempt(argv: list[str]) -> dict[str, Any]:
    prepare_server_args = importlib.import_module("sglang.srt.server_args").prepare_server_args
    said = io.StringIO()
    reached = "parse"
    try:
        with contextlib.redirect_stderr(said):
            args = prepare_server_args(list(argv))
            reached = "resolve"
            if hasattr(args, "resolve_once"):
                args.resolve_once()
            args.check_server_args()
    except SystemExit:
        return {"reached": reached, "error": said.getvalue().strip().splitlines()[-1]}
    except Exception as error:
        # 0.5.16 resolves while it constructs the arguments: argparse was satisfied then
        return {"reached": "resolve", "error": f"{type(error).__name__}: {error}"}
    return {"reached": "done", "error": None, "values": values(args), "environment": environment(args)}


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
    main(sys.argv[1], sys.argv[2])
