"""SGLang's command line, as far as search_spaces/b300.yaml uses it, and which configuration of the table it names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from autotune.records import Value

DEFAULTS: Mapping[str, str | int | bool] = {
    "host": "127.0.0.1", "port": 30000, "device": "cuda", "enable-metrics": False, "trust-remote-code": False,
    "tp-size": 1, "ep-size": 1, "dp-size": 1, "attn-dp-size": 1, "enable-dp-lm-head": False, "enable-nccl-nvls": False,
    "enable-symm-mem": False, "enforce-disable-flashinfer-allreduce-fusion": False, "speculative-ddtree-budget": 8,
    "speculative-ddtree-topk": 4}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a launch; ends the process with SGLang's usage message when one is unknown."""
    parser = argparse.ArgumentParser(prog="launch_server.py", allow_abbrev=False)
    parser.add_argument("--model-path", required=True)
    for name, default in DEFAULTS.items():
        if isinstance(default, bool):
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", default=default, type=type(default))
    for name in ("attention-backend", "speculative-draft-model-path"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--cuda-graph-max-bs-decode", type=int)
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--flashinfer-allreduce-fusion-backend", choices=["auto", "trtllm", "mnnvl"])
    parser.add_argument("--speculative-algorithm", choices=["DDTREE", "DFLASH"])
    return parser.parse_args(argv)


def server_part(args: argparse.Namespace) -> dict[str, Value]:
    """The server part of a configuration, by the names of the table."""
    if args.dp_size > 1:
        parallel = f"tp{args.tp_size}_dp{args.dp_size}"
    elif args.attn_dp_size > 1:
        parallel = f"tp{args.tp_size}_dp_attention"
    else:
        parallel = f"{'ep' if args.ep_size > 1 else 'tp'}{args.tp_size}"
    return {"parallel": parallel, "nvls": args.enable_nccl_nvls or args.enable_symm_mem,
            "allreduce_fusion": args.flashinfer_allreduce_fusion_backend is not None,
            "tree_budget": args.speculative_ddtree_budget, "tree_topk": args.speculative_ddtree_topk}


def ranks(args: argparse.Namespace) -> list[str]:
    """The names that a server's ranks have in its log."""
    expert = [f" EP{rank}" if args.ep_size > 1 else "" for rank in range(args.tp_size)]
    return [f"DP{replica} " * (args.dp_size > 1) + f"TP{rank}{expert[rank]}"
            for replica in range(args.dp_size) for rank in range(args.tp_size)]
