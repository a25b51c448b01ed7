"""Which parameters a crash points at by its own words, before any counting.

A server that dies while it captures graphs would not have died with graphs off, and a log often names the feature
that failed. This only makes some hypotheses about a cause likelier than others at the start; passes and further
crashes decide. Nothing here knows a particular space.
"""

from __future__ import annotations

import functools
import re

from autotune.records import Crash, Stage, Value
from autotune.space.space import Param

NAMED = 8.0
"""How much likelier a parameter is to be part of the cause when the crash names it, or its stage does."""

ABOUT: dict[Stage, frozenset[str]] = {
    Stage.DEVICE_INIT: frozenset({"device", "gpu", "visible", "parallel", "tp", "dp", "pp", "ep"}),
    Stage.NCCL_INIT: frozenset({"nccl", "nvls", "allreduce", "reduce", "a2a", "all2all", "comm", "p2p", "parallel",
                                "tp", "dp", "pp", "ep"}),
    Stage.LOAD: frozenset({"parallel", "tp", "dp", "pp", "ep", "quant", "quantization", "dtype", "weights", "load"}),
    Stage.KV_ALLOC: frozenset({"mem", "memory", "fraction", "kv", "cache", "context", "running", "batch"}),
    Stage.GRAPH_CAPTURE: frozenset({"graph", "graphs", "capture", "eager", "compile"}),
    Stage.WARMUP: frozenset({"backend", "attention", "kernel", "kernels", "compile", "moe"}),
    Stage.SERVING: frozenset({"concurrency", "context", "mem", "memory", "fraction", "kv", "batch", "running"}),
}
"""Words in the names of parameters that a stage is about."""

GENERIC = frozenset({"none", "auto", "true", "false", "default", "size", "enable", "disable", "max", "num", "error",
                     "the", "and", "for", "with"})


def weight(param: Param, choices: tuple[Value, ...], crash: Crash) -> float:
    """Factor on the prior of hypotheses in which `param` takes one of `choices`."""
    said = _words(f"{crash.category} {crash.signature} {crash.excerpt}"[:4000])
    about = bool(_words(param.name) & ABOUT.get(crash.stage, frozenset()))
    return NAMED if about or _own(param, choices) & said else 1.0


def named(param: Param, choices: tuple[Value, ...], text: str) -> bool:
    """Whether a text names the parameter, or one of these choices of it."""
    return bool(_own(param, choices) & _words(text))


def _own(param: Param, choices: tuple[Value, ...]) -> frozenset[str]:
    return (_words(param.name) | {w for c in choices if isinstance(c, str) for w in _words(c)}) - GENERIC


@functools.lru_cache(maxsize=4096)
def _words(text: str) -> frozenset[str]:
    return frozenset(w for w in re.split(r"[^a-z0-9]+", text.lower()) if len(w) > 1 and not w.isdigit())
