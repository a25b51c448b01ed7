"""conf/workload and an engine file as the values that the load client takes: target, load and window."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated

from msgspec import Meta

from autotune.engine.spec import EngineSpec
from autotune.loadgen.spec import LoadSpec, PromptSpec, Target, WindowSettings
from autotune.records import Config, UsageError
from autotune.utils.validation import AtLeastOne, Count, NotNegative, Positive, Share

TOKENS = "tokens:"  # `workload.prompts=tokens:LOW-HIGH`: random token ids in [LOW, HIGH)
# Step between the seeds of one server's measurements: prompts of studies with neighbouring seeds stay different.
SEED_STEP = 1_000_003


@dataclasses.dataclass(frozen=True)
class WorkloadSettings:
    """conf/workload: the requests, and the start and end of a window."""

    prompts: str | None
    contexts: Annotated[list[AtLeastOne], Meta(
        min_length=1, description="a list of at least one positive prompt length in tokens")]
    output_tokens: AtLeastOne
    spread: float
    temperature: NotNegative
    ignore_eos: bool
    shared_prefix: float
    rate_per_s: float | None
    seed: int
    first_token_timeout_s: Positive
    token_timeout_s: Positive
    request_timeout_s: Positive
    retries: Count
    warmup_s: float
    warmup_max_s: float
    settle_s: float
    drift: float
    window_s: Positive
    window_max_s: float
    block_s: float
    precision: float
    min_requests: AtLeastOne
    max_error_rate: Share
    min_errors: AtLeastOne

    def __post_init__(self) -> None:
        self.load({"concurrency": 1})
        self.window()

    def load(self, load: Config, measurement: int = 0) -> LoadSpec:
        """The load of one load part: `concurrency`, and `context` if the space has it. Raises UsageError.

        measurement: number of the measurement on one server. Each sends prompts of its own (the same for every
        configuration); a server with a prefix cache would answer repeated prompts from it.
        """
        seed = self.seed + SEED_STEP * measurement
        return LoadSpec(
            concurrency=int(load.get("concurrency", 1)), context_tokens=int(load.get("context", self.contexts[0])),
            output_tokens=int(load.get("output_tokens", self.output_tokens)), output_spread=self.spread,
            temperature=self.temperature, ignore_eos=self.ignore_eos, rate_per_s=self.rate_per_s, seed=seed,
            prompts=dataclasses.replace(self.prompt_source(), seed=seed),
            first_token_timeout_s=self.first_token_timeout_s, token_timeout_s=self.token_timeout_s,
            request_timeout_s=self.request_timeout_s, retries=self.retries)

    def window(self) -> WindowSettings:
        """The criteria of a steady load, and the length of its window. Raises UsageError."""
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
    """The address and protocol of a live server of this engine, for the load client."""
    api = "sglang" if engine.request.api == "sglang_generate" else "openai"
    return Target(url, api, engine.request.model or model, engine.request.continuous_usage,
                  engine.metrics.path, engine.metrics)
