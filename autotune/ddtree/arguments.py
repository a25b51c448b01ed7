"""The command line: flags, what they mean, and the checks that need no device."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

PACKAGED_MODEL = Path(__file__).with_name("packaged")


@dataclass(frozen=True)
class Arguments:
    """One server's settings, as given on the command line."""

    host: str
    port: int
    device: str
    dtype: str
    model: str
    context_length: int
    max_running_requests: int
    kv_cache_tokens: int
    max_verify_tokens: int
    tree_budget: int
    tree_topk: int
    draft_depth: int
    tp_size: int
    dp_size: int
    ep_size: int
    enable_allreduce_fusion: bool
    enable_nccl_nvls: bool
    corrupt_output: float
    threads: int
    seed: int
    log_level: str

    def slot_tokens(self, shape: Shape) -> int:
        """Cache rows of one slot: the context, and room for a tree or a draft block that is not yet accepted."""
        return -(-(self.context_length + max(self.tree_budget, shape.block) + 1) // 8) * 8

    def check(self, shape: Shape) -> None:
        """Raises ValueError for settings that no device could honour."""
        if self.draft_depth > shape.block - 1:
            raise ValueError(f"--draft-depth {self.draft_depth} is more than the draft can give: its block of "
                             f"{shape.block} predicts {shape.block - 1} positions")
        if self.tree_topk > shape.vocab_size:
            raise ValueError(f"--tree-topk {self.tree_topk} exceeds the vocabulary of {shape.vocab_size}")
        if self.context_length > shape.max_position:
            raise ValueError(f"--context-length {self.context_length} is greater than the model's max_position "
                             f"{shape.max_position}")
        if self.enable_allreduce_fusion and self.tp_size == 1:
            raise ValueError("--enable-allreduce-fusion needs --tp-size > 1: with one rank there is no all-reduce")


def _at_least(lowest: int) -> argparse._ActionType:
    def integer(text: str) -> int:
        value = int(text)
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{value} is less than {lowest}")
        return value

    return integer


def _rate(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def parse(argv: list[str] | None = None) -> Arguments:
    """Reads a command line; leaves with exit code 2 where it has an unknown flag or an impossible value."""
    parser = argparse.ArgumentParser(
        prog="python -m autotune.ddtree", formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False,
        description="A small reference server with DDTree speculative decoding and an OpenAI-style HTTP interface.")
    positive, natural = _at_least(1), _at_least(0)
    flag = parser.add_argument
    flag("--host", default="127.0.0.1", help="address to listen on")
    flag("--port", type=natural, default=30000, help="port to listen on")
    flag("--model", default=str(PACKAGED_MODEL), help="directory of config.json, tokenizer.json, model.safetensors")
    flag("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes CUDA where there is a GPU")
    flag("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights, activations and cache; with "
         "bfloat16, output may differ from plain decoding where two tokens are nearly equally likely")
    flag("--context-length", type=_at_least(32), default=2048, help="most tokens of one request, prompt and output")
    flag("--max-running-requests", type=positive, default=16, help="cache slots a replica; more requests wait")
    flag("--kv-cache-tokens", type=natural, default=0, help="the cache's limit in tokens, for one replica; 0: what "
         "80%% of the free memory holds")
    flag("--max-verify-tokens", type=positive, default=2048, help="size of the verify buffer: (tree nodes + 1) times "
         "running requests must fit")
    flag("--tree-budget", type=natural, default=8, help="draft nodes of each tree; 0: plain decoding without draft")
    flag("--tree-topk", type=positive, default=4, help="choices at each position; 1 makes the tree a chain")
    flag("--draft-depth", type=positive, default=7, help="positions used of those that the draft predicts")
    flag("--tp-size", type=positive, default=1, help="ranks that share one replica: heads and MLPs are sharded")
    flag("--dp-size", type=positive, default=1, help="replicas behind this one address")
    flag("--ep-size", type=positive, default=1, help="expert parallelism; the packaged model is dense")
    flag("--enable-allreduce-fusion", action="store_true", help="fold the residual addition into the all-reduce")
    flag("--enable-nccl-nvls", action="store_true", help="NVLink multicast in NCCL; needs several GPUs that have it")
    flag("--threads", type=positive, default=1, help="torch threads a rank on the CPU; its products are small, and "
         "idle threads spin, so more than one pays only on cores that nothing else wants")
    flag("--seed", type=natural, default=0, help="for sampled requests that bring no seed")
    flag("--corrupt-output", type=_rate, default=0.0, metavar="RATE", help="for tests only: silently accepts draft "
         "tokens without verification, at each tree node with this probability")
    flag("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="of the log on stderr")
    return Arguments(**vars(parser.parse_args(argv)))


@dataclass(frozen=True)
class Shape:
    """Sizes of one target and one draft; every length is in elements, every position in tokens."""

    vocab_size: int
    width: int  # of the residual stream
    heads: int
    hidden: int  # inner width of a target MLP
    layers: int
    taps: tuple[int, ...]  # the draft reads the residual stream after these target layers, counted from 1
    draft_layers: int
    draft_hidden: int
    block: int  # positions of one draft pass: the last token and block - 1 masks
    max_position: int
    rope_base: float
    eos: int

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @classmethod
    def load(cls, directory: Path) -> Shape:
        """Reads config.json. Raises OSError when it is not there, ValueError or TypeError when it is no shape."""
        fields = json.loads((directory / "config.json").read_text())
        return cls(**{**fields, "taps": tuple(fields["taps"])})

    def save(self, directory: Path) -> None:
        (directory / "config.json").write_text(json.dumps(asdict(self), indent=1) + "\n")
