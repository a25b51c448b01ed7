"""SGLang's command line, as far as search_spaces/b300.yaml uses it, and which configuration of the table it names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from autotune.records import Value


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a launch; ends the process with SGLang's usage message when one is unknown."""
    parser = argparse.ArgumentParser(prog="launch_server.py", allow_abbrev=False)
    add = parser.add_argument
    add("--model-path", required=True)
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--device", default="cuda")
    add("--enable-metrics", action="store_true")
    add("--trust-remote-code", action="store_true")
    add("--tp-size", type=int, default=1)
    add("--ep-size", type=int, default=1)
    add("--dp-size", type=int, default=1)
    add("--attn-dp-size", type=int, default=1)
    add("--enable-dp-lm-head", action="store_true")
    add("--enable-nccl-nvls", action="store_true")
    add("--enable-symm-mem", action="store_true")
    add("--flashinfer-allreduce-fusion-backend", choices=["auto", "trtllm", "mnnvl"])
    add("--enforce-disable-flashinfer-allreduce-fusion", action="store_true")
    add("--attention-backend")
    add("--mem-fraction-static", type=float)
    add("--cuda-graph-max-bs-decode", type=int)
    add("--max-running-requests", type=int)
    add("--speculative-algorithm", choices=["DDTREE", "DFLASH"])
    add("--speculative-draft-model-path")
    add("--speculative-ddtree-budget", type=int, default=8)
    add("--speculative-ddtree-topk", type=int, default=4)
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
    names = []
    for replica in range(args.dp_size):
        for rank in range(args.tp_size):
            name = f"TP{rank}" + (f" EP{rank}" if args.ep_size > 1 else "")
            names.append(f"DP{replica} {name}" if args.dp_size > 1 else name)
    return names
