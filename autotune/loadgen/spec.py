"""Specification of a load: frozen settings of target, prompts, load and window, and the value of a failed load.

Settings have no defaults here: those live in conf/workload and conf/power.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import msgspec

from autotune.loadgen.wire_formats import WIRE_FORMATS
from autotune.records import UsageError

PROMPT_KINDS = ("builtin", "jsonl", "tokens")


class MetricNames(msgspec.Struct, frozen=True):
    """Names in a server's Prometheus text; None where it has no such metric.

    Acceptance length from counters is `accept_bonus` + the growth of `accept_tokens` over the growth of `accept_steps`:
    SGLang counts generated tokens per verify step (bonus 0), vLLM accepted draft tokens per draft (bonus 1).
    """

    running: str | None = None
    queued: str | None = None
    retracted: str | None = None
    accept_tokens: str | None = None
    accept_steps: str | None = None
    accept_bonus: float = 0.0


@dataclasses.dataclass(frozen=True)
class Target:
    """A live server at `base_url` (http://HOST:PORT); `api` is a key of `WIRE_FORMATS`.

    `continuous_usage` asks an OpenAI-compatible server for token counts in every event. `extra_body` is merged into
    every request.
    """

    base_url: str
    api: str
    model: str
    continuous_usage: bool
    metrics_path: str | None = None
    metrics: MetricNames = MetricNames()
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    api_key: str | None = None

    def __post_init__(self) -> None:
        if self.api not in WIRE_FORMATS:
            raise UsageError(f"api={self.api!r} is not one of {', '.join(WIRE_FORMATS)}")
        if not self.base_url.startswith("http://"):
            raise UsageError(f"base_url={self.base_url!r}: the load client speaks plain http:// only")


@dataclasses.dataclass(frozen=True)
class PromptSpec:
    """The source of prompts: `builtin` (text of Python's standard library), `jsonl` (the file `path`) or `tokens`.

    `tokens` are random ids in [`token_low`, `token_high`). `shared_prefix` is the share that all of them begin with.
    """

    kind: str
    path: pathlib.Path | None
    shared_prefix: float
    token_low: int
    token_high: int
    seed: int

    def __post_init__(self) -> None:
        if self.kind not in PROMPT_KINDS:
            raise UsageError(f"prompts={self.kind!r} is not one of {', '.join(PROMPT_KINDS)}")
        if (self.kind == "jsonl") != (self.path is not None):
            raise UsageError("prompts: a path and kind jsonl belong together")
        if not 0 <= self.shared_prefix < 1:
            raise UsageError(f"shared_prefix={self.shared_prefix} is not a share in [0, 1)")
        if self.kind == "tokens" and not 0 <= self.token_low < self.token_high:
            raise UsageError(f"token ids [{self.token_low}, {self.token_high}) are not a range")


@dataclasses.dataclass(frozen=True)
class LoadSpec:
    """A load: a closed loop of `concurrency` requests in flight, each finished one replaced at once.

    With `rate_per_s` an open loop: Poisson arrivals, at most `concurrency` connections. `context_tokens` None keeps
    each prompt's length. Output lengths are uniform in `output_tokens` * [1 - `output_spread`, 1 + `output_spread`].
    A request on a kept-alive connection that closes before any byte of the answer is sent again, `retries` times.
    """

    concurrency: int
    context_tokens: int | None
    output_tokens: int
    output_spread: float
    temperature: float
    ignore_eos: bool
    rate_per_s: float | None
    seed: int
    prompts: PromptSpec
    first_token_timeout_s: float
    token_timeout_s: float
    request_timeout_s: float
    retries: int

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.output_tokens < 1:
            raise UsageError("concurrency and output_tokens must be at least 1")
        if not 0 <= self.output_spread < 1:
            raise UsageError(f"output_spread={self.output_spread} is not a share in [0, 1)")
        if self.rate_per_s is not None and self.rate_per_s <= 0:
            raise UsageError(f"rate_per_s={self.rate_per_s} must be above 0 (or null for a closed loop)")
        if self.context_tokens is not None and self.context_tokens < 1:
            raise UsageError(f"context_tokens={self.context_tokens} must be at least 1")
        if self.prompts.kind == "tokens" and self.context_tokens is None:
            raise UsageError("prompts of random tokens need a context length")


@dataclasses.dataclass(frozen=True)
class LoadOrder:
    """A load for the client's process. `watch_all`: read every stream as it arrives (see `read_batching`)."""

    target: Target
    load: LoadSpec
    chars_per_token: float | None
    watch_all: bool = False

    def to_json(self) -> bytes:
        """The order as one line of JSON; a path is the hexadecimal of its bytes, which need not be UTF-8."""
        return msgspec.json.encode(self, enc_hook=lambda path: os.fsencode(path).hex())

    @classmethod
    def from_json(cls, line: bytes) -> LoadOrder:
        """Decode what `to_json` encoded. Raises msgspec.MsgspecError and UsageError for anything else."""
        return msgspec.json.decode(line, type=cls, dec_hook=lambda kind, value: kind(os.fsdecode(bytes.fromhex(value))))


@dataclasses.dataclass(frozen=True)
class WindowSettings:
    """Rules for a steady load and for the end of its window.

    Warm-up lasts `warmup_min_s`..`warmup_max_s` and ends when tokens/s and power of the last two stretches of
    `settle_s` / 2 differ by less than `drift` (a share) or their noise, and at least `concurrency` requests were
    answered. The window lasts `min_s`..`max_s` and ends when the half-width of the 95 % interval of tokens/J (tokens/s
    without a meter) is at most `precision` (a share), estimated on blocks of `block_s`. Fewer than `min_requests`
    answers, or a share of errors above `error_rate_limit`, are no valid measurement; with `error_count_min` errors the
    load fails at once.
    """

    warmup_min_s: float
    warmup_max_s: float
    settle_s: float
    drift: float
    min_s: float
    max_s: float
    block_s: float
    precision: float
    min_requests: int
    error_rate_limit: float
    error_count_min: int

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_min_s <= self.warmup_max_s or not 0 < self.min_s <= self.max_s:
            raise UsageError("window: needs 0 <= warmup_min_s <= warmup_max_s and 0 < min_s <= max_s")
        if self.block_s <= 0 or self.settle_s <= 0 or not 0 < self.precision < 1 or self.drift <= 0:
            raise UsageError("window: block_s, settle_s, drift and precision must be above 0 (precision below 1)")


@dataclasses.dataclass(frozen=True)
class LoadFailure:
    """A load on a started server that gave no measurement; with the server's log it becomes a Crash.

    `kind` is `server_died`, `no_answer` (to the very first request), `error_rate`, `hung` (every error was a timeout)
    or `gpu_lost`. `detail` is one line for a person; `excerpt` is the server's answer to a failed request.
    `host_fault`: no configuration can be measured until a person has acted.
    """

    kind: str
    detail: str
    requests: int
    errors: int
    error_kinds: Mapping[str, int]
    after_s: float
    excerpt: str = ""
    host_fault: bool = False
