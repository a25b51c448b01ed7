"""The load of a measurement: conf/workload, and the values that the load client takes: target, prompts, load, order.

Defaults live in conf/workload.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Annotated

import msgspec
from msgspec import Meta

from autotune.loadgen.wire_formats import Api
from autotune.records import Config, UsageError
from autotune.utils.validation import AtLeastOne, Count, NotNegative, Positive, Share

TOKENS = "tokens:"  # `workload.prompts=tokens:LOW-HIGH`: random token ids in [LOW, HIGH)
# Step between the seeds of one server's measurements: prompts of studies with neighbouring seeds stay different.
SEED_STEP = 1_000_003
UrlPath = Annotated[str, Meta(pattern=r"^/[!-~]*\Z", description="a path on the server such as /health")]
Part = Annotated[float, Meta(ge=0, lt=1, description="a share of at least 0 and below 1")]


class Metrics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The URL path of a server's Prometheus text, and names in it; None where the server has no such metric.

    Acceptance length from counters is `accept_bonus` + the growth of `accept_tokens` over the growth of `accept_steps`:
    SGLang counts generated tokens per verify step (bonus 0), vLLM accepted draft tokens per draft (bonus 1).
    """

    path: UrlPath | None = None
    running: str | None = None
    queued: str | None = None
    retracted: str | None = None
    accept_tokens: str | None = None
    accept_steps: str | None = None
    accept_bonus: float = 0.0


@dataclasses.dataclass(frozen=True)
class Target:
    """A live server at `base_url` (http://HOST:PORT).

    `continuous_usage` asks an OpenAI-compatible server for token counts in every event.
    """

    base_url: str
    api: Api
    model: str
    continuous_usage: bool
    metrics: Metrics = Metrics()


@dataclasses.dataclass(frozen=True)
class PromptSpec:
    """The source of prompts: texts of the JSONL file `path`, random ids in [`tokens`[0], `tokens`[1]), or, without
    both, text of Python's standard library. `shared_prefix` is the share that all of them begin with."""

    seed: int
    path: pathlib.Path | None = None
    tokens: tuple[int, int] | None = None
    shared_prefix: float = 0.0


@dataclasses.dataclass(frozen=True)
class WorkloadSettings:
    """conf/workload: the requests, and the start and end of a window.

    With `rate_per_s` requests arrive at Poisson times. Output lengths are uniform in `output_tokens` * [1 - `spread`,
    1 + `spread`]. A request on a kept-alive connection that closes before any byte of the answer is sent again,
    `retries` times.

    Warm-up lasts `warmup_s`..`warmup_max_s` and ends when tokens/s and power of the last two stretches of `settle_s` /
    2 differ by less than `drift` (a share) or their noise, and at least `concurrency` requests were answered. The
    window lasts `window_s`..`window_max_s` and ends when the half-width of the 95 % interval of tokens/J (tokens/s
    without a meter) is at most `precision` (a share), estimated on blocks of `block_s`. Fewer than `min_requests`
    answers, or a share of errors above `max_error_rate`, are no valid measurement; with `min_errors` errors the load
    fails at once.
    """

    prompts: str | None
    contexts: Annotated[list[AtLeastOne], Meta(
        min_length=1, description="a list of at least one positive prompt length in tokens")]
    output_tokens: AtLeastOne
    spread: Part
    temperature: NotNegative
    ignore_eos: bool
    shared_prefix: Part
    rate_per_s: Positive | None
    seed: int
    first_token_timeout_s: Positive
    token_timeout_s: Positive
    request_timeout_s: Positive
    retries: Count
    warmup_s: NotNegative
    warmup_max_s: NotNegative
    settle_s: Positive
    drift: Positive
    window_s: Positive
    window_max_s: Positive
    block_s: Positive
    precision: Annotated[float, Meta(gt=0, lt=1, description="a share above 0 and below 1")]
    min_requests: AtLeastOne
    max_error_rate: Share
    min_errors: AtLeastOne

    def __post_init__(self) -> None:
        self.prompt_source()
        for least, most in (("warmup_s", "warmup_max_s"), ("window_s", "window_max_s")):
            if getattr(self, least) > getattr(self, most):
                raise UsageError(f"workload.{least}={getattr(self, least):g} is above {most}={getattr(self, most):g}")

    def load(self, load: Config, measurement: int = 0) -> LoadSpec:
        """The load of one load part: `concurrency`, and `context` and `output_tokens` if the space has them.

        measurement: number of the measurement on one server. Each sends prompts of its own (the same for every
        configuration); a server with a prefix cache would answer repeated prompts from it.
        """
        return LoadSpec(int(load.get("concurrency", 1)), dataclasses.replace(
            self, contexts=[int(load.get("context", self.contexts[0]))],
            output_tokens=int(load.get("output_tokens", self.output_tokens)),
            seed=self.seed + SEED_STEP * measurement))

    def prompt_source(self) -> PromptSpec:
        """Built-in text, a JSONL file, or random token ids. Raises UsageError."""
        path, tokens = None, None
        if self.prompts is not None and self.prompts.startswith(TOKENS):
            low, _, high = self.prompts.removeprefix(TOKENS).partition("-")
            if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
                raise UsageError(f"workload.prompts={self.prompts}: write tokens:LOW-HIGH, such as tokens:1000-30000")
            tokens = int(low), int(high)
        elif self.prompts is not None:
            path = pathlib.Path(self.prompts)
        return PromptSpec(self.seed, path, tokens, self.shared_prefix)


@dataclasses.dataclass(frozen=True)
class LoadSpec:
    """A load: a closed loop of `concurrency` requests in flight, each finished one replaced at once.

    With `workload.rate_per_s` an open loop of at most `concurrency` connections.
    """

    concurrency: int
    workload: WorkloadSettings

    @property
    def context_tokens(self) -> int:
        return self.workload.contexts[0]


@dataclasses.dataclass(frozen=True)
class LoadOrder:
    """A load for the client's process. `watch_all`: read every stream as it arrives (see `read_batching`)."""

    target: Target
    load: LoadSpec
    chars_per_token: float | None
    watch_all: bool = False

    def to_json(self) -> bytes:
        """The order as one line of ASCII JSON: a path in it need not be UTF-8."""
        return json.dumps(msgspec.to_builtins(self)).encode()

    @classmethod
    def from_json(cls, line: bytes) -> LoadOrder:
        """Decode what `to_json` encoded. Raises ValueError for anything else."""
        return msgspec.convert(json.loads(line), cls)
