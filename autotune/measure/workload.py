"""conf/workload and an engine file, as the measurement package wants them: target, load and window."""

from __future__ import annotations

import dataclasses
import pathlib

from autotune.engine.spec import EngineSpec
from autotune.loadgen.spec import LoadSpec, MetricNames, PromptSpec, Target, WindowSettings
from autotune.records import Config, UsageError

TOKENS = "tokens:"
"""`workload.prompts=tokens:LOW-HIGH` asks for random token ids in [LOW, HIGH)."""
SEEDS_APART = 1_000_003
"""Between the seeds of one server's measurements, so that those of studies with neighbouring seeds stay apart."""


@dataclasses.dataclass(frozen=True)
class WorkloadSettings:
    """conf/workload: what is sent, and when a window starts and ends."""

    prompts: str | None
    contexts: list[int]
    output_tokens: int
    spread: float
    temperature: float
    ignore_eos: bool
    shared_prefix: float
    rate_per_s: float | None
    seed: int
    first_token_timeout_s: float
    token_timeout_s: float
    request_timeout_s: float
    retries: int
    warmup_s: float
    warmup_max_s: float
    settle_s: float
    drift: float
    window_s: float
    window_max_s: float
    block_s: float
    precision: float
    min_requests: int
    max_error_rate: float
    min_errors: int

    def __post_init__(self) -> None:
        if not self.contexts or min(self.contexts) <= 0:
            raise UsageError("workload.contexts must list at least one positive prompt length in tokens")
        for name in ("output_tokens", "window_s", "request_timeout_s", "token_timeout_s", "first_token_timeout_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"workload.{name} must be positive, not {getattr(self, name)}")
        for name, least in (("retries", 0), ("min_requests", 1), ("min_errors", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"workload.{name} must be at least {least}, not {getattr(self, name)}")
        if self.temperature < 0 or not 0 <= self.max_error_rate <= 1:
            raise UsageError("workload.temperature must not be negative, max_error_rate is a share between 0 and 1")
        self.load({"concurrency": 1})
        self.window()

    def load(self, load: Config, measurement: int = 0) -> LoadSpec:
        """The load of one load part: `concurrency`, and `context` when the space has it. Raises UsageError.

        `measurement` counts those of one server: each sends prompts of its own (the same for every configuration),
        since a server that remembers prompts would answer those of its second measurement from its prefix cache.
        """
        seed = self.seed + SEEDS_APART * measurement
        return LoadSpec(
            concurrency=int(load.get("concurrency", 1)), context_tokens=int(load.get("context", self.contexts[0])),
            output_tokens=int(load.get("output_tokens", self.output_tokens)), output_spread=self.spread,
            temperature=self.temperature, ignore_eos=self.ignore_eos, rate_per_s=self.rate_per_s, seed=seed,
            prompts=dataclasses.replace(self.prompt_source(), seed=seed),
            first_token_timeout_s=self.first_token_timeout_s, token_timeout_s=self.token_timeout_s,
            request_timeout_s=self.request_timeout_s, retries=self.retries)

    def window(self) -> WindowSettings:
        """When the load is steady, and how long it is measured. Raises UsageError."""
        return WindowSettings(
            warmup_min_s=self.warmup_s, warmup_max_s=self.warmup_max_s, settle_s=self.settle_s, drift=self.drift,
            min_s=self.window_s, max_s=self.window_max_s, block_s=self.block_s, precision=self.precision,
            min_requests=self.min_requests, error_rate_limit=self.max_error_rate, error_count_min=self.min_errors)

    def prompt_source(self) -> PromptSpec:
        """Built-in text, a JSONL file, or random token ids. Raises UsageError."""
        kind, path, low, high = "builtin", None, 0, 1
        if self.prompts is not None and self.prompts.startswith(TOKENS):
            kind = "tokens"
            bounds = self.prompts.removeprefix(TOKENS).split("-")
            if len(bounds) != 2 or not all(b.isdigit() for b in bounds):
                raise UsageError(f"workload.prompts={self.prompts}: write tokens:LOW-HIGH, such as tokens:1000-30000")
            low, high = int(bounds[0]), int(bounds[1])
        elif self.prompts is not None:
            kind, path = "jsonl", pathlib.Path(self.prompts)
        return PromptSpec(kind, path, self.shared_prefix, low, high, self.seed)


def target_of(engine: EngineSpec, url: str, model: str) -> Target:
    """How the load client talks to a live server of this engine."""
    names = engine.metrics
    metrics = MetricNames(running=names.running, queued=names.queued, retracted=names.retracted,
                          accept_tokens=names.accept_tokens, accept_steps=names.accept_steps,
                          accept_bonus=names.accept_bonus)
    api = "sglang" if engine.request.api == "sglang_generate" else "openai"
    return Target(url, api, engine.request.model or model, engine.request.continuous_usage, names.path, metrics)
